"""A model that costs nothing: rows are sums of small whole numbers, so equal means bit for bit.

Token t at position p has the raw row (t % 7 + 1) * (p % 5 + 1) * (1 + channel). An entry of the
history folds the raw rows of its own four tokens and of the four before; indexer keys likewise.
The output at p adds up everything that attention at p may see, each row weighed by its place.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import hkv

RATIO, WINDOW, CHUNK = 4, 6, 8


def groups(*, row=4, dtype="float32", layers=2):
    one, all_layers = (0,), tuple(range(layers))
    form = hkv.Form
    group = functools.partial(hkv.Group, row=(row,), dtype=dtype)
    return (
        group("history", form.COMPRESSED, hkv.history(RATIO), all_layers),
        group("window", form.WINDOW, hkv.window(WINDOW), all_layers),
        group("tail", form.TAIL, hkv.tail(RATIO, overlap=True), all_layers),
        group("index", form.INDEXER, hkv.indexer(RATIO), one),
    )


def layout(*, pages=(2049, 257, 257, 1025), row=1024, dtype="float32", **rest):
    """Pools of 64, 32, 32 and 16 MiB in pages of 16 to 128 KiB: a copy of one cannot be missed."""
    plain = groups(row=row, dtype=dtype)
    sized = [dataclasses.replace(g, pages=p) for g, p in zip(plain, pages, strict=True)]
    rest = {"segment_tokens": 16, "segments": 28, "buckets": (32, 64), "leases": 12, **rest}
    return hkv.Layout(groups=tuple(sized), **rest)


def forward(weights, tokens, view):
    """Output `[Q, T]` of a chunk, and the view with its rows."""
    Q, T = tokens.shape
    cache = view.cache
    at = view.position[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
    out = jnp.zeros((Q, T), jnp.float32)
    first = view.position // RATIO
    for g in cache.layout.groups:
        channel = np.arange(1.0, g.row[0] + 1, dtype=np.float32)[None, None]
        raw = ((tokens % 7 + 1) * (at % 5 + 1)).astype(jnp.float32)[..., None] * channel * weights
        for layer in g.layers:
            if g.rule.unit == 1:
                view = view.write(g.name, layer, raw * (1.0 + layer))
            if g.rule.kind is hkv.Kind.WINDOW:
                index = at[..., None] - np.arange(WINDOW, dtype=np.int32)[None, None]
                rows, ok = _read(view, g.name, layer, index.reshape(Q, -1), raw * (1.0 + layer))
                rows = jnp.sum(jnp.where(ok[..., None], rows, 0.0), -1).reshape(Q, T, WINDOW)
                place = np.arange(1.0, WINDOW + 1, dtype=np.float32)[None, None]
                out += jnp.sum(rows * place, -1)
            if g.rule.prefix_closed:
                # Entry e folds the raw rows of the tokens [4 (e - 1), 4 (e + 1)).
                E = T // RATIO + 1
                e = first[:, None] + jnp.arange(E, dtype=jnp.int32)[None]
                token = np.arange(-RATIO, RATIO, dtype=np.int32)[None, None] + e[..., None] * RATIO
                new = raw * (1.0 + layer)
                rows, ok = _read(view, "tail", layer, token.reshape(Q, -1), new)
                rows = jnp.where(ok[..., None], rows, 0.0).reshape(Q, E, 2 * RATIO, -1)
                entry = jnp.sum(rows, axis=2) % 97.0
                view = view.write(g.name, layer, entry)
                seen = np.arange(view.length // RATIO, dtype=np.int32)[None]
                index = jnp.broadcast_to(seen, (Q, seen.shape[1]))
                rows, ok = view.read(g.name, layer, index, entry)
                rows = jnp.sum(jnp.where(ok[..., None], rows, 0.0), -1)
                rows = rows * (1.0 + seen % 3).astype(np.float32)
                visible = (seen[None] + 1) * RATIO <= at[..., None] + 1
                out += jnp.sum(jnp.where(visible, rows[:, None], 0.0), -1)
    return out, view


def dense(tokens, *, row, layers=2):
    """The same output for one whole sequence, in numpy and without any cache: the oracle."""
    n = len(tokens)
    at, out = np.arange(n), np.zeros(n)
    for layer in range(layers):
        raw = ((tokens % 7 + 1) * (at % 5 + 1))[:, None] * np.arange(1.0, row + 1) * (1 + layer)
        entries = [
            np.sum(raw[max(0, (e - 1) * RATIO) : (e + 1) * RATIO], axis=0) % 97
            for e in range(n // RATIO)
        ]
        for p in range(n):
            for back in range(min(WINDOW, p + 1)):
                out[p] += raw[p - back].sum() * (back + 1)
            for e in range((p + 1) // RATIO):  # history everywhere, indexer keys in layer 0
                out[p] += entries[e].sum() * (1 + e % 3) * (2 if layer == 0 else 1)
    return out


def _read(view, group, layer, index, new):
    rows, ok = view.read(group, layer, jnp.maximum(index, 0), new)
    return rows, ok & (index >= 0)


def replay(weights, tokens, view):
    return forward(weights, tokens, view)[1]


@functools.partial(jax.jit, donate_argnames=("cache",))
def step(weights, cache, lease, tokens, count):
    """The next chunk of each request: cache, lease, outputs `[Q, CHUNK]`, who was served."""
    spot = lease.length[:, None] + jnp.arange(CHUNK, dtype=jnp.int32)[None]
    piece = jnp.take_along_axis(tokens, jnp.minimum(spot, tokens.shape[1] - 1), axis=1)
    out, view = forward(weights, piece, hkv.view(cache, lease, count))
    cache, lease, ok = hkv.append(view, after=out)
    return cache, lease, out, ok
