"""A small float64 model with every kind of cache, in numpy: the oracle for what a rule requires.

`dense` is the truth: it walks token by token, straight from the definitions, and keeps no cache.
`run` computes part of a sequence from whatever cached rows it is given, for many cases at once.
A row that is not there is NaN, and NaN is all that stands in for it.
"""

import dataclasses

import numpy as np

from hkv import _rules

WIDTH, HEADS, HEAD, KEY_HEADS, KEY, VOCAB = 8, 2, 4, 2, 4, 11
CSA = 4  # ratio of C and K


def _rms(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def _rope(x, pos):
    """Rotates pairs of the last axis of `x` by angles that grow with `pos`."""
    half = x.shape[-1] // 2
    angle = np.asarray(pos, float)[..., None] * 0.7 / 10.0 ** np.arange(half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


@dataclasses.dataclass(frozen=True)
class Compressor:
    """Folds `ratio` raw rows (with `overlap` also the `ratio` before) into one entry, per channel.

    A raw row is `[kv or gate, half, width]`. With overlap half 0 serves the next entry and the
    last half the token's own; the position bias is added when an entry is folded.
    """

    ratio: int
    overlap: bool
    project: np.ndarray  # [WIDTH, 2 * halves * width]
    bias: np.ndarray  # [ratio, halves, width]

    @classmethod
    def random(cls, rng, ratio, overlap, width):
        halves = 1 + overlap
        project = rng.normal(size=(WIDTH, 2 * halves * width)) / WIDTH**0.5
        return cls(ratio, overlap, project, rng.normal(size=(ratio, halves, width)))

    def raw(self, x):
        return x @ self.project

    def split(self, raw):
        return raw.reshape(*raw.shape[:-1], 2, 1 + self.overlap, self.bias.shape[-1])

    def entry(self, raw, e):
        """Entry `e` from the raw rows `[T, ...]` of one sequence, by its definition."""
        rows, m = self.split(raw), self.ratio
        kv, gate = [], []
        for j in range(m * e, m * e + m):
            kv.append(rows[j, 0, -1])
            gate.append(rows[j, 1, -1] + self.bias[j % m, -1])
        for j in range(m * (e - 1), m * e) if self.overlap and e else ():
            kv.append(rows[j, 0, 0])
            gate.append(rows[j, 1, 0] + self.bias[j % m, 0])
        w = np.exp(np.array(gate) - np.max(gate, 0))
        return _rope(_rms((w * np.array(kv)).sum(0) / w.sum(0)), m * e)

    def entries(self, raw, skip):
        """All whole entries from raw rows `[cases, T, ...]`.

        With `skip` absent raw rows are left out of the fold, else they spoil the entry.
        """
        cases, m, n = raw.shape[0], self.ratio, raw.shape[1] // self.ratio
        rows = self.split(raw[:, : n * m].reshape(cases, n, m, -1))
        kv, gate = rows[..., 0, :, :], rows[..., 1, :, :] + self.bias
        if self.overlap:
            old_kv = np.pad(kv[:, :-1, :, 0], ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :n]
            old_gate = np.full_like(old_kv, -np.inf)
            old_gate[:, 1:] = gate[:, :-1, :, 0]
            kv = np.concatenate([old_kv, kv[..., -1, :]], 2)
            gate = np.concatenate([old_gate, gate[..., -1, :]], 2)
        else:
            kv, gate = kv[..., 0, :], gate[..., 0, :]
        if skip:
            gone = np.isnan(kv)
            kv, gate = np.where(gone, 0.0, kv), np.where(gone, -np.inf, gate)
        top = gate.max(2, keepdims=True)
        w = np.exp(gate - np.where(top == -np.inf, 0.0, top))
        total = w.sum(2)
        total[total == 0] = np.nan
        return _rope(_rms((w * kv).sum(2) / total), m * np.arange(n))


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer. `kind` is a letter: S sliding window, F full, N chunked attention; with a window:
    C compressed with overlap, K the same through a top-k indexer, H compressed without overlap.
    """

    kind: str
    span: int  # window or chunk in tokens
    topk: int
    weights: dict
    main: Compressor | None
    index: Compressor | None

    @property
    def rules(self):
        """The layer's cached objects by name, with their rules."""
        match self.kind:
            case "F":
                return {"kv": _rules.history(1)}
            case "N":
                return {"kv": _rules.chunk(self.span)}
        rules = {"kv": _rules.window(self.span)}
        if self.main:
            m, overlap = self.main.ratio, self.main.overlap
            rules |= {"entry": _rules.history(m), "raw": _rules.tail(m, overlap)}
        if self.index:
            rules |= {"key": _rules.indexer(m), "key_raw": _rules.tail(m, True)}
        return rules

    def sees(self, t, j):
        """Whether the token at `t` attends to the uncompressed row of `j`."""
        if self.kind == "F":
            return j <= t
        if self.kind == "N":
            return (j <= t) & (j // self.span == t // self.span)
        return (j <= t) & (t - j < self.span)

    def mlp(self, h):
        return h + np.tanh(_rms(h) @ self.weights["up"]) @ self.weights["down"]


class Model:
    """Layers named from the bottom up, for example `Model("SSKH", W=4, H=16)`.

    Args:
        kinds: one letter a layer.
        W: window in tokens, or one for each layer.
        H: ratio of H layers.
        N: chunk of N layers in tokens.
        topk: entries that an indexer picks.
        seed: of the random weights.
    """

    def __init__(self, kinds, W=4, H=8, N=8, topk=3, seed=0):
        rng = np.random.default_rng([seed, *kinds.encode()])

        def normal(*shape):
            return rng.normal(size=shape) / shape[0] ** 0.5

        spans = (W,) * len(kinds) if isinstance(W, int) else W
        self.layers = []
        for kind, span in zip(kinds, spans, strict=True):
            weights = {
                "q": normal(WIDTH, HEADS * HEAD),
                "kv": normal(WIDTH, HEAD),
                "sink": rng.normal(size=HEADS),
                "out": normal(HEADS * HEAD, WIDTH),
                "up": normal(WIDTH, 2 * WIDTH),
                "down": normal(2 * WIDTH, WIDTH),
                "key_q": normal(WIDTH, KEY_HEADS * KEY),
                "key_w": normal(WIDTH, KEY_HEADS),
            }
            overlap = kind in "CK"
            main = index = None
            if kind in "CKH":
                main = Compressor.random(rng, CSA if overlap else H, overlap, HEAD)
            if kind == "K":
                index = Compressor.random(rng, CSA, True, KEY)
            span = N if kind == "N" else span
            self.layers.append(Layer(kind, span, topk, weights, main, index))
        self.embed = rng.normal(size=(VOCAB, WIDTH))
        self.unembed = normal(WIDTH, VOCAB)
        self.groups = [  # (layer, object, rule) by group number: one group per layer and object
            (i, name, rule)
            for i, layer in enumerate(self.layers)
            for name, rule in layer.rules.items()
        ]
        self.numbers = {(i, name): g for g, (i, name, _) in enumerate(self.groups)}

    @property
    def rules(self):
        return [rule for _, _, rule in self.groups]

    @property
    def layout(self):
        """For each layer its groups as (group number, rule)."""
        return tuple(
            tuple((self.numbers[i, name], rule) for name, rule in layer.rules.items())
            for i, layer in enumerate(self.layers)
        )

    def tokens(self, n, seed=0):
        return np.random.default_rng(seed).integers(0, VOCAB, n)


def dense(model, tokens):
    """The forward pass without any cache.

    Returns:
        logits `[T, VOCAB]`, and for each group all rows that the sequence has, `[rows, width]`.
    """
    T = len(tokens)
    h = model.embed[tokens]
    truth = []
    for layer in model.layers:
        x, w = _rms(h), layer.weights
        kv = np.array([_rope(x[j] @ w["kv"], j) for j in range(T)])
        rows = {"kv": kv}
        if layer.main:
            m = layer.main.ratio
            rows["raw"] = layer.main.raw(x)
            rows["entry"] = _stack([layer.main.entry(rows["raw"], e) for e in range(T // m)], HEAD)
        if layer.index:
            rows["key_raw"] = layer.index.raw(x)
            keys = [layer.index.entry(rows["key_raw"], e) for e in range(T // m)]
            rows["key"] = _stack(keys, KEY)
        out = []
        for t in range(T):
            seen = [kv[j] for j in range(T) if layer.sees(t, j)]
            if layer.main:
                picked = range((t + 1) // m)
                if layer.index:
                    q = _rope((x[t] @ w["key_q"]).reshape(KEY_HEADS, KEY), t)
                    gain = x[t] @ w["key_w"]
                    score = [gain @ np.maximum(q @ rows["key"][e], 0) for e in picked]
                    picked = sorted(picked, key=lambda e: (-score[e], e))[: layer.topk]
                seen += [rows["entry"][e] for e in picked]
            seen = np.array(seen)
            heads = []
            for head in range(HEADS):
                q = _rope((x[t] @ w["q"]).reshape(HEADS, HEAD)[head], t)
                a = np.exp(seen @ q)
                heads.append((a @ seen) / (a.sum() + np.exp(w["sink"][head])))
            out.append(np.concatenate(heads) @ w["out"])
        truth += [rows[name] for name in layer.rules]
        h = layer.mlp(h + np.array(out))
    return _rms(h) @ model.unembed, truth


def _stack(rows, width):
    return np.array(rows).reshape(len(rows), width)


def run(model, tokens, start, truth, held, skip=False):
    """The forward pass over `[start, T)` only, reading cached rows where there are any.

    A row comes from `truth` where it is held, else it is made if its (last) token is computed and
    all that it is made from is there, else it is NaN.

    Args:
        tokens: `[T]`.
        start: `[cases]`: nothing before it is computed.
        truth: for each group its rows `[rows, width]`.
        held: for each group `bool[cases, rows]`.
        skip: absent rows are selected away; else reading one spoils the token that reads it.

    Returns:
        logits `[cases, T, VOCAB]`, NaN before the start; for each group `[cases, rows, width]`.
    """
    T, t = len(tokens), np.arange(len(tokens))
    begun = t >= np.asarray(start)[:, None]
    h = np.where(begun[..., None], model.embed[tokens], np.nan)
    made = []
    for i, layer in enumerate(model.layers):
        x, w, rows = _rms(h), layer.weights, {}

        def keep(name, value, i=i, rows=rows):
            g = model.numbers[i, name]
            rows[name] = np.where(held[g][..., None], truth[g], value)
            return rows[name]

        seen = keep("kv", _rope(x @ w["kv"], t))
        sees = np.broadcast_to(layer.sees(t[:, None], t), (len(h), T, T))
        spoilt = np.zeros((len(h), T), bool)
        if layer.main:
            last = layer.main.ratio * (1 + np.arange(T // layer.main.ratio)) - 1
            late = (last < np.asarray(start)[:, None])[..., None]  # closed before the start
            raw = keep("raw", layer.main.raw(x))
            entry = keep("entry", np.where(late, np.nan, layer.main.entries(raw, skip)))
            closed = np.arange(T // layer.main.ratio) < ((t + 1) // layer.main.ratio)[:, None]
            closed = np.broadcast_to(closed, (len(h), *closed.shape))
            if layer.index:
                raw = keep("key_raw", layer.index.raw(x))
                key = keep("key", np.where(late, np.nan, layer.index.entries(raw, skip)))
                closed, spoilt = _top(layer, x, t, key, closed, skip)
            seen = np.concatenate([seen, entry], 1)
            sees = np.concatenate([sees, closed], 2)
        gone = np.isnan(seen).any(-1)
        if skip:
            sees = sees & ~gone[:, None]
        else:
            spoilt = spoilt | (sees & gone[:, None]).any(-1)
        seen = np.where(gone[..., None], 0.0, seen)
        q = _rope((x @ w["q"]).reshape(-1, T, HEADS, HEAD), t[:, None])
        n = seen.shape[1]
        score = q.reshape(-1, T * HEADS, HEAD) @ seen.swapaxes(1, 2)
        a = np.where(sees[:, :, None], np.exp(score).reshape(-1, T, HEADS, n), 0.0)
        total = a.sum(-1) + np.exp(w["sink"])
        out = (a.reshape(-1, T * HEADS, n) @ seen).reshape(-1, T, HEADS, HEAD)
        out = (out / total[..., None]).reshape(-1, T, HEADS * HEAD) @ w["out"]
        lost = spoilt | ~begun
        h = layer.mlp(h + np.where(lost[..., None], np.nan, out))
        made += [rows[name] for name in layer.rules]
    return _rms(h) @ model.unembed, made


def _top(layer, x, t, key, closed, skip):
    """The entries that the indexer picks, and the tokens for which it read an absent key."""
    gone = np.isnan(key).any(-1)
    spoilt = (closed & gone[:, None]).any(-1) & (not skip)
    closed = closed & ~gone[:, None]
    q = _rope((x @ layer.weights["key_q"]).reshape(*x.shape[:2], KEY_HEADS, KEY), t[:, None])
    key = np.where(gone[..., None], 0.0, key)
    hit = np.maximum(np.einsum("cthd,ced->cthe", q, key), 0)
    score = np.einsum("cth,cthe->cte", x @ layer.weights["key_w"], hit)
    order = np.argsort(np.where(closed, -score, np.inf), axis=-1, kind="stable")
    picked = np.zeros_like(closed)
    np.put_along_axis(picked, order[..., : layer.topk], True, -1)
    return picked & closed, spoilt
