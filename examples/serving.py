"""What the examples share: a layout, a model as functions, and availability as lines of text.

`Server` shows how the library's functions follow each other for a batch of prompts that begin
together; `hkv.serving` is for requests that come and go.
"""

import contextlib
import copy
import functools
import math
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import hkv
from hkv.models.deepseek_v4 import groups
from hkv.nn import bind


def layout_of(model, tokens: int, requests: int) -> hkv.Layout:
    """A cache for a batch of DeepSeek-V4 requests of up to so many tokens, and as much again."""
    B = math.lcm(64, model.config.csa_ratio, model.config.hca_ratio)
    S = -(-tokens // (4 * B)) * 4
    return hkv.Layout(
        groups(model.config), segment_tokens=B, segments=2 * S * requests, buckets=(S * B,)
    )


def functions(model):
    """A model's arrays, and what runs it: `forward` for serving, `replay` for recoveries."""
    weights, build = bind(model)

    def forward(weights, tokens, view):
        return build(weights)(tokens, view)

    def replay(weights, tokens, view):
        return build(weights)(tokens, view)[1]

    return weights, forward, replay


class Start(NamedTuple):
    """A batch of prompts in front of their next tokens."""

    availability: hkv.Availability
    plan: hkv.Plan
    lease: hkv.Lease
    logits: list  # per request `[n, V]` of the tokens that were run; None for nobody


class Server:
    """One model on one cache, for a batch of Q requests.

    Args:
        model: a model called as `model(tokens, view)`.
        layout: what it keeps.
        requests: Q.
        identity: keywords of `hkv.need`: salt, model, epoch ...
    """

    def __init__(self, model, layout: hkv.Layout, requests: int, **identity):
        self.layout, self.requests = layout, requests
        self.chunk = chunk = layout.segment_tokens  # tokens per step of a prefill
        self.weights, forward, self._replay = functions(model)
        self.costs = hkv.costs()
        self.empty(**identity)

        @functools.partial(jax.jit, donate_argnames=("cache",))
        def prefill(weights, cache, lease, tokens, length):
            count = jnp.clip(length - lease.length, 0, chunk)
            spot = lease.length[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None]
            piece = jnp.take_along_axis(tokens, jnp.minimum(spot, tokens.shape[1] - 1), axis=1)
            logits, view = forward(weights, piece, hkv.view(cache, lease, count))
            cache, lease, ok = hkv.append(view, after=logits)
            return cache, lease, logits, ok | (count == 0)

        self._prefill = prefill

    def empty(self, **identity) -> None:
        """Starts over with an empty cache, and says whose prefixes it will hold."""
        self.cache = hkv.init(self.layout)
        self.need = hkv.need(self.cache, requests=self.requests, **identity)

    def another(self, **identity) -> "Server":
        """A server with the same programs and a cache of its own."""
        other = copy.copy(self)
        other.empty(**identity)
        return other

    def start(self, prompts, total) -> Start:
        """Takes a batch of prompts to their next tokens, reusing all that can be reused.

        Args:
            prompts: Q sequences of token ids; an empty one for nobody.
            total: tokens that each request may reach, its answer included.

        Raises:
            RuntimeError: no room, or pages that changed meanwhile.
        """
        tokens, length = hkv.pad_batch(self.layout, prompts)
        availability = hkv.query(self.cache, tokens, length, self.need)
        plan = hkv.route(availability, self.costs)
        self.cache, lease, admission = hkv.admit(self.cache, plan, jnp.asarray(total, jnp.int32))
        if (np.asarray(admission.verdict) != hkv.Verdict.ADMIT).any():
            raise RuntimeError(f"not admitted:\n{admission}")
        self.cache, lease, why = hkv.recover(
            self._replay, self.weights, self.cache, lease, plan, tokens, chunk=self.chunk
        )
        if np.asarray(why).any():
            raise RuntimeError(f"not recovered: {[hkv.Reason(int(w)).sentence for w in why]}")
        at, end = np.asarray(lease.length), np.asarray(length)
        logits: list[list[np.ndarray]] = [[] for _ in at]
        while (at < end).any():
            self.cache, lease, out, ok = self._prefill(
                self.weights, self.cache, lease, tokens, length
            )
            if not np.asarray(ok).all():
                raise RuntimeError("a page changed under a running request; query it again")
            out = np.asarray(out)
            for q, n in enumerate(np.minimum(end - at, self.chunk)):
                if n > 0:
                    logits[q].append(out[q, :n])
            at = np.minimum(at + self.chunk, end)
        joined = [np.concatenate(x) if x else None for x in logits]
        return Start(availability, plan, lease, joined)

    def finish(self, lease, texts=None) -> None:
        """Lets go of the requests; what they hold of `texts` is published before."""
        if texts is not None:
            tokens, length = hkv.pad_batch(self.layout, texts)
            self.cache, lease, _ = hkv.publish(self.cache, lease, tokens, length, partial=True)
        self.cache = hkv.release(self.cache, lease)


def table(availability: hkv.Availability, q: int) -> list[str]:
    """The five forms of every segment of request `q`; segments that are alike share a line."""
    a = jax.device_get(availability)
    B, length = a.layout.segment_tokens, int(a.length[q])
    lines = [("tokens", *(f.name for f in hkv.Form), "reason")]
    for begin in range(0, length, B):
        status, reason = a.status[q, begin // B], a.reason[q, begin // B]
        cells = ["-" if s == 0 else hkv.Status(int(s)).name for s in status]
        why = dict.fromkeys(hkv.Reason(int(r)).name for r in reason if r)
        line = (*cells, ", ".join(why))
        first = begin
        if lines[-1][1:] == line:
            first = int(lines.pop()[0].split("-")[0])
        lines.append((f"{first}-{min(begin + B, length) - 1}", *line))
    wide = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(x, wide, strict=True)).rstrip() for x in lines]


def spent(plan: hkv.Plan, q: int) -> dict[str, int]:
    """Tokens of request `q`: reused as they are, replayed, refilled, and run as new."""
    p = jax.device_get(plan)
    ran = np.zeros(p.prefill[q, 1], bool)
    fill = (p.fill_start[q], p.fill[q, 1]) if p.fill[q, 1] > p.fill[q, 0] else (0, 0)
    ran[slice(*fill)] = True
    ran[slice(*p.replay[q])] = True
    ran[p.resume[q] :] = True
    return {
        "reused": int((~ran).sum()), "replayed": int(p.replay[q, 1] - p.replay[q, 0]),
        "refilled": int(fill[1] - fill[0]), "prefilled": int(p.prefill[q, 1] - p.prefill[q, 0]),
    }  # fmt: skip


@contextlib.contextmanager
def progress(what: str):
    """Says on stderr what takes long, and how long it took."""
    begin = time.perf_counter()
    print(f"{what} ...", end=" ", file=sys.stderr, flush=True)
    yield
    print(f"{time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
