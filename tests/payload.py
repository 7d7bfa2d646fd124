"""Known rows in place of a model: every row says which tokens, layer and tenant it stands for.

A row is (hash of all tokens through its last one, position of that token, tag of group, layer
and, in the INDEXER form, indexer version). A row read at the wrong place, or left by somebody
else, is seen at once.
"""

import dataclasses
import functools
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import hkv
from hkv import Form

ROW = (3,)
# Where this is set, what is queried is a copy of the state on another device than the pools'.
APART = os.environ.get("HKV_APART") == "1"


def _quick():
    """Compiler options: compiling takes longer than running here."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    more = {**options, "xla_cpu_use_fusion_emitters": False}  # newer releases lack it
    try:
        jax.jit(lambda x: x + 1, compiler_options=more)(np.int32(0))
    except jax.errors.JaxRuntimeError:
        return options
    return more


QUICK = _quick()


def _library():
    """The library's verbs, each in a quickly compiled program of its own."""

    def wrapped(name, static=()):
        reads = name in ("query", "route", "verify_payload")
        return jax.jit(
            getattr(hkv, name), static_argnames=static, compiler_options=QUICK,
            donate_argnames=None if reads else ("cache",),
        )  # fmt: skip

    names = "query route admit lease fork trim release drop evict invalidate update_indexer"
    verbs = {n: wrapped(n) for n in [*names.split(), "verify_payload"]}
    verbs["publish"] = wrapped("publish", ("partial",))
    verbs["recover"] = wrapped("recover", ("run", "chunk"))
    return types.SimpleNamespace(**verbs)


lib = _library()


def group(name, form, rule, layers=(0,), rows_per_page=0, pages=0):
    return hkv.Group(name, form, rule, layers, ROW, "float32", (), rows_per_page, pages)


def hashes(tokens, seed="", length=None):
    """`f32[T]`: a 24-bit hash of each prefix, exact in float32; 0 past the tokens."""
    out = np.zeros(length or len(tokens), np.float32)
    h = sum((i + 1) * c for i, c in enumerate(seed.encode(), 7)) & 0xFFFFFF
    for i, t in enumerate(tokens):
        h = (h * 1000003 + 97 * (int(t) + 1)) & 0xFFFFFFFF
        h = (h ^ (h >> 13)) & 0xFFFFFFFF
        out[i] = h & 0xFFFFFF
    return out


def tag(g, spec, layer, version):
    return 100.0 * (g + 1) + layer + (10000.0 * version if spec.form is Form.INDEXER else 0.0)


def expected(layout, g, layer, tokens, seed="", version=0):
    """`f32[n, 3]`: all whole rows that `tokens` have in one layer of group number `g`."""
    spec = layout.groups[g]
    u = spec.rule.unit
    close = np.arange(len(tokens) // u) * u + u - 1
    h = hashes(tokens, seed)
    out = np.empty((len(close), 3), np.float32)
    out[:, 0], out[:, 1], out[:, 2] = h[close], close, tag(g, spec, layer, version)
    return out


def _run(layout, chunk, params, tokens, view):
    """The model: writes what belongs at the positions of this chunk. `tokens` are not needed."""
    code, version = params
    T = code.shape[1]
    for g, spec in enumerate(layout.groups):
        if spec.rule.kind is hkv.Kind.STATE:
            continue  # cannot be written yet
        u = spec.rule.unit
        first = view.position // u
        index = first[:, None] + jnp.arange(chunk // u + 1, dtype=jnp.int32)[None]
        close = (index + 1) * u - 1
        h = jnp.take_along_axis(code, jnp.clip(close, 0, T - 1), axis=1)
        for layer in spec.layers:
            word = tag(g, spec, layer, 0) + (
                10000.0 * version if spec.form is Form.INDEXER else jnp.zeros_like(version)
            )
            rows = jnp.stack(
                [h, close.astype(jnp.float32), jnp.broadcast_to(word[:, None], h.shape)], -1
            )
            view = view.write(spec.name, layer, rows)
    return view


@functools.cache
def programs(layout, chunk):
    """run, step and peek of a layout, so that all tests of it share what is compiled."""
    run = functools.partial(_run, layout, chunk)

    @functools.partial(jax.jit, donate_argnames=("cache",), compiler_options=QUICK)
    def step(params, cache, lease, count, position):
        return hkv.append(run(params, None, hkv.view(cache, lease, count, position)))

    @functools.partial(jax.jit, compiler_options=QUICK)
    def peek(cache, lease):
        v = hkv.view(cache, lease, jnp.zeros_like(lease.length))
        out = {}
        for spec in layout.groups:
            if spec.rule.kind is hkv.Kind.STATE:
                continue
            n = v.length // spec.rule.unit
            Q = lease.length.shape[0]
            index = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None], (Q, n))
            new = jnp.full((Q, 1, *ROW), -1.0)
            for layer in spec.layers:
                out[spec.name, layer] = v.read(spec.name, layer, index, new)
        return out, v.ok

    return run, step, peek


class Payload:
    """A cache of known rows and the verbs of a request, on the host."""

    def __init__(self, layout, *, chunk=8, requests=2):
        self.layout, self.chunk, self.Q = layout, chunk, requests
        self.run, self._step, self._peek = programs(layout, chunk)
        sharding = None
        if layout.shards > 1:  # a channel of every row to each device, the table to all of them
            mesh = jax.make_mesh((layout.shards,), ("x",), devices=jax.devices()[: layout.shards])
            sharding = NamedSharding(mesh, PartitionSpec(None, None, None, "x"))
        self.cache = hkv.init(layout, sharding)
        self.codes = hkv.byte_codes(self.cache)

    def need(self, salts="", epoch=0, version=0, **kw):
        return hkv.need(
            self.cache, requests=self.Q, salt=salts, epoch=epoch, indexer_version=version,
            codes=self.codes, **kw,
        )  # fmt: skip

    def pad(self, prompts):
        prompts = [*prompts, *[[]] * (self.Q - len(prompts))]
        tokens = np.zeros((self.Q, self.layout.buckets[-1]), np.int32)
        for q, p in enumerate(prompts):
            tokens[q, : len(p)] = p
        return jnp.asarray(tokens), jnp.asarray(np.array([len(p) for p in prompts], np.int32))

    def params(self, prompts, seeds=None, version=0):
        """Hashes of the prompts; `seeds` tells tenants apart in the payload."""
        prompts = [*prompts, *[[]] * (self.Q - len(prompts))]
        seeds = [*(seeds or []), *[""] * (self.Q - len(seeds or []))]
        T = self.layout.buckets[-1]
        code = np.stack([hashes(p, s, T) for p, s in zip(prompts, seeds, strict=True)])
        return jnp.asarray(code), jnp.full(self.Q, float(version), jnp.float32)

    def query(self, prompts, need=None):
        args = (self.cache, *self.pad(prompts), need or self.need())
        if not APART:
            return lib.query(*args)
        answer = lib.query(*jax.device_put(args, jax.devices()[-1]))
        return jax.device_put(answer, self.cache.clock.sharding)

    def plan(self, prompts, need=None, costs=None):
        return lib.route(self.query(prompts, need), costs or hkv.costs())

    def admit(self, plan, total):
        total = [*total, *[-1] * (self.Q - len(total))]  # -1 is refused and holds nothing
        total = jnp.asarray(np.array(total, np.int32))
        self.cache, lease, answer = lib.admit(self.cache, plan, total)
        return lease, answer

    def recover(self, lease, plan, prompts, seeds=None, version=0):
        tokens, _ = self.pad(prompts)
        self.cache, lease, why = lib.recover(
            self.run, self.params(prompts, seeds, version), self.cache, lease, plan, tokens,
            chunk=self.chunk,
        )  # fmt: skip
        return lease, np.asarray(why)

    def step(self, lease, count, params, position=None):
        count = jnp.asarray(np.array([*count, *[0] * (self.Q - len(count))], np.int32))
        if position is None:
            position = lease.length
        else:
            position = jnp.asarray(np.array([*position, *[0] * (self.Q - len(position))], np.int32))
        self.cache, lease, ok = self._step(params, self.cache, lease, count, position)
        return lease, np.asarray(ok)

    def advance(self, lease, prompts, until=None, seeds=None, version=0):
        """Runs on to `until` (the prompts' lengths), a chunk at a time."""
        until = np.array([len(p) for p in prompts] if until is None else until)
        params = self.params(prompts, seeds, version)
        while True:
            count = np.clip(until - np.asarray(lease.length)[: len(until)], 0, self.chunk)
            if not count.any():
                return lease
            lease, ok = self.step(lease, count, params)
            assert ok[: len(until)][count > 0].all()

    def publish(self, lease, prompts, length=None, partial=True):
        tokens, full = self.pad(prompts)
        full = jnp.minimum(full, lease.length)
        if length is not None:
            length = [*length, *[0] * (self.Q - len(length))]
            full = jnp.asarray(np.array(length, np.int32))
        self.cache, lease, n = lib.publish(self.cache, lease, tokens, full, partial=partial)
        return lease, np.asarray(n)

    def release(self, lease):
        self.cache = lib.release(self.cache, lease)

    def start(self, prompts, total=None, need=None, seeds=None, version=0, costs=None):
        """Query to recover, with everything read checked; the lease stands at the resume."""
        plan = self.plan(prompts, need, costs)
        lease, answer = self.admit(plan, total or [len(p) for p in prompts])
        assert (np.asarray(answer.verdict)[: len(prompts)] == hkv.Verdict.ADMIT).all(), answer
        lease, why = self.recover(lease, plan, prompts, seeds, version)
        assert (why[: len(prompts)] == 0).all(), why
        self.check_rows(lease, prompts, seeds, version)
        return lease

    def store(self, prompts, need=None, seeds=None, version=0, partial=True):
        """Prompts run, published and released."""
        lease = self.start(prompts, None, need, seeds, version)
        lease = self.advance(lease, prompts, None, seeds, version)
        self.check_rows(lease, prompts, seeds, version)
        lease, _ = self.publish(lease, prompts, partial=partial)
        self.release(lease)

    def boundary(self, prompts, need=None):
        """The furthest usable position of each prompt."""
        return np.asarray(self.query(prompts, need).boundary)[: len(prompts)].tolist()

    def rows(self, lease):
        """Per group and layer: rows `[Q, n, 3]` and which are valid, as attention would read."""
        out, ok = self._peek(self.cache, lease)
        return jax.device_get(out), np.asarray(ok)

    def check_rows(self, lease, prompts, seeds=None, version=0):
        """All that a request must read at its position is there, and all that is valid is right."""
        out, ok = self.rows(lease)
        length = np.asarray(lease.length)
        seeds = [*(seeds or []), *[""] * (self.Q - len(seeds or []))]
        for q, prompt in enumerate(prompts):
            assert ok[q], q
            for g, spec in enumerate(self.layout.groups):
                if spec.rule.kind is hkv.Kind.STATE:
                    continue
                lo, hi = (int(x) for x in hkv.required(spec.rule, jnp.int32(length[q])))
                for layer in spec.layers:
                    rows, valid = out[spec.name, layer]
                    assert valid[q, lo:hi].all(), (q, spec.name, lo, hi, valid[q])
                    right = expected(self.layout, g, layer, prompt, seeds[q], version)
                    at = np.flatnonzero(valid[q])
                    assert at.size == 0 or at[-1] < len(right), (q, spec.name, at)
                    np.testing.assert_array_equal(rows[q, at], right[at], str((q, spec.name)))


def poisoned(cache, value=np.nan):
    """The cache with every free page and every row that no segment or lease holds set to NaN."""
    c = jax.device_get(cache)
    pools = []
    for g, pool in enumerate(cache.pools):
        spec = cache.layout.groups[g]
        live = np.zeros(pool.data.shape[1:3], bool)
        live[0] = True  # the null page has its own test
        unit, R = spec.rule.unit, spec.rows_per_page
        for row in np.flatnonzero(c.table.length > 0):
            lo, hi = c.table.held[row, g] - c.table.start[row]
            for n in range(lo // unit, hi // unit):
                live[c.table.pages[g][row, n // R], n % R] = True
        mask = jnp.asarray(live).reshape(1, *live.shape, *[1] * (pool.data.ndim - 3))
        data = jnp.where(mask, pool.data, jnp.asarray(value, pool.data.dtype))
        pools.append(dataclasses.replace(pool, data=data))
    return dataclasses.replace(cache, pools=tuple(pools))
