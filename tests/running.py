"""A small host loop over the library for tests: prefill, decode, publish, resume."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np

import hkv
from hkv._route import signed
from hkv.nn import bind


def programs(options=None, model_options=None):
    """The library's functions; with `options` each in a jit of its own with compiler options."""
    names = "query route admit publish release occupancy drop invalidate update_indexer recover"
    if options is None:
        return types.SimpleNamespace(**{n: getattr(hkv, n) for n in names.split()})
    static = {"publish": ("partial",), "recover": ("run", "chunk")}

    def wrapped(name):
        changes = name not in ("query", "route", "occupancy")
        return jax.jit(
            getattr(hkv, name), static_argnames=static.get(name),
            compiler_options=model_options if name == "recover" else options,
            donate_argnames=("cache",) if changes else None,
        )  # fmt: skip

    return types.SimpleNamespace(**{n: wrapped(n) for n in names.split()})


class Runner:
    """One model on one cache; every step is one of a few jitted programs of static shape.

    `options` are compiler options of the library's programs and `model_options` of those that run
    the model, for tests in which compiling takes longer than running.
    """

    def __init__(
        self,
        model,
        groups,
        *,
        segment,
        segments,
        bucket,
        chunk,
        requests=1,
        options=None,
        model_options=None,
        **layout,
    ):
        self.lib = programs(options, model_options)
        self.layout = hkv.Layout(
            groups=groups, segment_tokens=segment, segments=segments, buckets=(bucket,), **layout
        )
        self.weights, build = bind(model)
        self.chunk, self.requests = chunk, requests
        self.cache = hkv.init(self.layout)
        self.need = hkv.need(self.cache, requests=requests)

        def forward(weights, tokens, view):
            return build(weights)(tokens, view)

        def replay(weights, tokens, view):
            return build(weights)(tokens, view)[1]

        self.replay = replay

        @functools.partial(jax.jit, donate_argnames=("cache",), compiler_options=model_options)
        def step(weights, cache, lease, tokens, count):
            T = tokens.shape[1]
            spot = lease.length[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None]
            piece = jnp.take_along_axis(tokens, jnp.minimum(spot, T - 1), axis=1)
            logits, view = forward(weights, piece, hkv.view(cache, lease, count))
            cache, lease, ok = hkv.append(view, after=logits)
            return cache, lease, logits, ok

        self.step = step

    def pad(self, prompts):
        return hkv.pad_batch(self.layout, prompts)

    def query(self, prompts, need=None):
        tokens, length = self.pad(prompts)
        return self.lib.query(self.cache, tokens, length, need or self.need)

    def admit(self, plan, total):
        self.cache, lease, answer = self.lib.admit(self.cache, plan, jnp.asarray(total, jnp.int32))
        return lease, answer

    def cold_plan(self, prompts, need=None):
        """A plan that reuses nothing, whatever is stored."""
        plan = self.lib.route(self.query(prompts, need), hkv.costs())
        gone = {n: jnp.zeros_like(getattr(plan, n)) for n in
                ("version", "mark", "resume", "fill", "fill_start", "replay", "have")}  # fmt: skip
        return signed(dataclasses.replace(
            plan, **gone, rows=jnp.full_like(plan.rows, self.layout.segments),
            fill_groups=jnp.zeros_like(plan.fill_groups),
            replay_groups=jnp.zeros_like(plan.replay_groups),
            prefill=plan.prefill.at[:, 0].set(0),
        ))  # fmt: skip

    def recover(self, lease, plan, prompts):
        tokens, _ = self.pad(prompts)
        self.cache, lease, why = self.lib.recover(
            self.replay, self.weights, self.cache, lease, plan, tokens, chunk=self.chunk
        )
        return lease, why

    def run(self, lease, prompts, until=None):
        """Runs each request on to `until` (its prompt's length); logits by position [Q, T, V]."""
        tokens, length = self.pad(prompts)
        until = np.asarray(length if until is None else until)
        out = None
        while True:
            at = np.asarray(lease.length)
            count = np.clip(until - at, 0, self.chunk).astype(np.int32)
            if not count.any():
                return lease, out
            self.cache, lease, logits, ok = self.step(
                self.weights, self.cache, lease, tokens, jnp.asarray(count)
            )
            assert np.asarray(ok)[count > 0].all()
            logits = np.asarray(logits)
            if out is None:
                out = np.full((len(until), tokens.shape[1], logits.shape[-1]), np.nan, np.float32)
            for q in range(len(until)):
                out[q, at[q] : at[q] + count[q]] = logits[q, : count[q]]

    def store(self, prompts, need=None, partial=True, release=True):
        """A cold run of whole prompts, published and released; returns the logits."""
        lease, answer = self.admit(self.cold_plan(prompts, need), [len(p) for p in prompts])
        assert (np.asarray(answer.verdict) == hkv.Verdict.ADMIT).all(), answer
        lease, logits = self.run(lease, prompts)
        tokens, length = self.pad(prompts)
        self.cache, lease, _ = self.lib.publish(self.cache, lease, tokens, length, partial=partial)
        if release:
            self.cache = self.lib.release(self.cache, lease)
        return logits

    def check(self):
        """free + live + pinned = capacity, null pages zero, owners consistent."""
        o = {k: np.asarray(v) for k, v in self.lib.occupancy(self.cache).items()}
        assert (o["free"] + o["live"] + o["pinned"] == o["capacity"]).all(), o
        for pool in self.cache.pools:
            assert not np.asarray(pool.data[:, 0]).any()
            free = np.asarray(pool.free)[: int(pool.n_free)]
            assert len(set(free.tolist())) == len(free) and 0 not in free
        return o
