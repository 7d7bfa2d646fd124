# ruff: noqa: E501, one bad call per line
"""Bad arguments to every public function: a clear error, before anything changes or is donated."""

import dataclasses
import inspect
import math
import re
import types

import jax
import jax.numpy as jnp
import mutations
import numpy as np
import planted
import pytest
from planted import Asked, group, layout
from test_levels import LEVELS, PROMPT, B, S, question, stored

import hkv
from hkv import Form
from hkv._rules import Kind, Rule

T = B * S
G = len(LEVELS.groups)
OTHER = layout(group("x", hkv.history(1)), B=B, S=S, segments=9, leases=2)
FORMS = np.ones(5, bool)
SHORT = dataclasses.replace(LEVELS, buckets=(B, T))


def zeros(shapes):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def i32(*values):
    return np.array(values, np.int32)


def _answers(lay, need):
    """An availability and a plan of this layout, from shapes alone."""
    Q = need.start.shape[0]
    args = (jnp.zeros((Q, T), jnp.int32), jnp.zeros(Q, jnp.int32))
    a = zeros(jax.eval_shape(hkv.query, planted.empty(lay), *args, need))
    return a, zeros(jax.eval_shape(hkv.route, a, hkv.costs()))


def _twice(tree):
    return jax.tree.map(lambda x: jnp.concatenate([x, x]), tree)


def _need(cache, requests=1, **more):
    return hkv.need(cache, requests=requests, **more)


@pytest.fixture(scope="module")
def k():
    """Good arguments of every kind, and the same of another layout and for two requests."""
    store, rows = stored()
    cache = store.cache()
    need = store.need([Asked()])
    other = planted.empty(OTHER)
    a, plan = _answers(LEVELS, need)
    _, oplan = _answers(OTHER, _need(other))
    lease = mutations._lease_of(store, rows, cache)
    olease = dataclasses.replace(lease, pages=lease.pages[:1], written=lease.written[:, :1])
    tokens = np.zeros((1, T), np.int32)
    tokens[0, : len(PROMPT)] = PROMPT
    return types.SimpleNamespace(
        cache=cache, need=need, a=a, plan=plan, lease=lease, tokens=tokens, length=i32(9),
        other=other, oneed=_need(other), oplan=oplan, olease=olease, plan2=_twice(plan),
        lease2=_twice(lease), need2=_need(cache, 2), seg=cache.segment(rows[1]),
        ask=question(store, rows), view=hkv.view(cache, lease, jnp.asarray(i32(1))),
        run=lambda params, tokens, view: view,
    )  # fmt: skip


def _group(**more):
    return dataclasses.replace(group("g", hkv.history(4)), **more)


def _layout(*groups, **more):
    return layout(*(groups or (_group(),)), **{"B": B, "S": S, "segments": 8, **more})


NAN = math.nan
KEYS = jnp.zeros((1, 1, 2, 1), jnp.float32)  # [L, K, rows of a segment, 1]
NEW = jnp.zeros((1, 2, 1), jnp.float32)  # [Q, E, 1]
# (function, what is wrong, error, name in backticks, call)
# fmt: off
BAD = [
    # Describe.
    *((f, bad, (TypeError, ValueError), name, lambda k, f=f, bad=bad: getattr(hkv, f)(bad))
      for f, name in (("history", "m"), ("window", "W"), ("chunk", "C"), ("tail", "m"), ("indexer", "m"))
      for bad in (0, -1, 1.5, True, 2**31, "4")),
    *(("Rule", what, error, name, lambda k, args=args: Rule(*args)) for what, error, name, args in (
        ("kind", TypeError, "kind", ("window", 3)),
        ("size", ValueError, "size", (Kind.WINDOW, 0)),
        ("state of 2", ValueError, "size", (Kind.STATE, 2)),
        ("window that overlaps", ValueError, "overlap", (Kind.WINDOW, 3, True)),
        ("text", TypeError, "overlap", (Kind.TAIL, 3, "no")),
      )),
    ("tail", "text", TypeError, "overlap", lambda k: hkv.tail(4, overlap="no")),
    *(("required", what, error, "p", lambda k, p=p: hkv.required(hkv.window(3), p)) for what, error, p in (
        ("negative", ValueError, -1), ("negative in an array", ValueError, i32(3, -1)),
        ("far", ValueError, np.array([2**31])), ("list", TypeError, [3]), ("bool", TypeError, True),
      )),
    ("replay_start", "negative", ValueError, "end",
     lambda k: hkv.replay_start(LEVELS.layers, i32(-1)[0], jnp.zeros(3, jnp.int32), jnp.zeros((3, 2), jnp.int32))),
    ("replay_start", "list", TypeError, "lost",
     lambda k: hkv.replay_start(LEVELS.layers, jnp.int32(3), [0, 0, 0], jnp.zeros((3, 2), jnp.int32))),
    ("required", "no rule", TypeError, "rule", lambda k: hkv.required("history", i32(3))),
    ("required", "floats", TypeError, "p", lambda k: hkv.required(hkv.window(3), np.float32(3))),
    ("replay_start", "one bound", ValueError, "have",
     lambda k: hkv.replay_start(LEVELS.layers, jnp.int32(3), jnp.zeros(3, jnp.int32), jnp.zeros((3, 1), jnp.int32))),
    ("replay_start", "too few groups", ValueError, "lost",
     lambda k: hkv.replay_start(LEVELS.layers, jnp.int32(3), jnp.zeros(2, jnp.int32), jnp.zeros((3, 2), jnp.int32))),
    ("Layout", "no groups", ValueError, "groups", lambda k: hkv.Layout((), B, 8, (T,))),
    ("Layout", "no group", TypeError, "groups", lambda k: hkv.Layout(("kv",), B, 8, (T,))),
    ("Layout", "a group alone", TypeError, "groups", lambda k: hkv.Layout(_group(), B, 8, (T,))),
    ("Layout", "two of a name", ValueError, "groups", lambda k: _layout(_group(), _group())),
    ("Layout", "no tokens", ValueError, "segment_tokens", lambda k: _layout(B=0, buckets=(8,))),
    ("Layout", "float tokens", TypeError, "segment_tokens", lambda k: _layout(B=8.0, buckets=(8,))),
    ("Layout", "ratio", ValueError, "segment_tokens", lambda k: _layout(_group(rule=hkv.history(3)))),
    ("Layout", "no segments", ValueError, "segments", lambda k: _layout(segments=0)),
    ("Layout", "many segments", ValueError, "segments", lambda k: _layout(segments=2**31)),
    ("Layout", "many tenants", ValueError, "tenants", lambda k: _layout(tenants=2**28)),
    ("Layout", "far bucket", ValueError, "buckets", lambda k: _layout(buckets=(2**31,))),
    ("Layout", "few segments", ValueError, "segments", lambda k: _layout(segments=2)),
    ("Layout", "no leases", ValueError, "leases", lambda k: _layout(leases=0)),
    ("Layout", "no shards", ValueError, "shards", lambda k: _layout(shards=0)),
    ("Layout", "a number of buckets", TypeError, "buckets", lambda k: _layout(buckets=T)),
    ("Layout", "no buckets", ValueError, "buckets", lambda k: _layout(buckets=())),
    ("Layout", "falling buckets", ValueError, "buckets", lambda k: _layout(buckets=(T, B))),
    ("Layout", "odd bucket", ValueError, "buckets", lambda k: _layout(buckets=(B + 1,))),
    ("Layout", "text buckets", (TypeError, ValueError), "buckets", lambda k: _layout(buckets=("8",))),
    ("Group", "no form", ValueError, "form", lambda k: _layout(_group(form=0))),
    ("Group", "disk", ValueError, "form", lambda k: _layout(_group(form=Form.DISK))),
    ("Group", "no rule", TypeError, "rule", lambda k: _layout(_group(rule="history"))),
    ("Group", "rule of another form", ValueError, "rule", lambda k: _layout(_group(rule=hkv.window(3)))),
    ("Group", "no layers", ValueError, "layers", lambda k: _layout(_group(layers=()))),
    ("Group", "one layer", TypeError, "layers", lambda k: _layout(_group(layers=1))),
    ("Group", "text layers", (TypeError, ValueError), "layers", lambda k: _layout(_group(layers=("1", "2")))),
    ("Group", "negative layer", ValueError, "layers", lambda k: _layout(_group(layers=(-1, 0)))),
    ("Group", "falling layers", ValueError, "layers", lambda k: _layout(_group(layers=(1, 0)))),
    ("Group", "empty row", ValueError, "row", lambda k: _layout(_group(row=(4, 0)))),
    ("Group", "float row", (TypeError, ValueError), "row", lambda k: _layout(_group(row=(1.5,)))),
    ("Group", "row of a number", TypeError, "row", lambda k: _layout(_group(row=4))),
    ("Group", "no dtype", ValueError, "dtype", lambda k: _layout(_group(dtype="float31"))),
    ("Group", "dtype None", ValueError, "dtype", lambda k: _layout(_group(dtype=None))),
    *(("Group", f"dtype {dtype}", ValueError, "dtype", lambda k, dtype=dtype: _layout(_group(dtype=dtype)))
      for dtype in ("int4", "uint2", "float4_e2m1fn", "bool", "complex64", "object", "U3", "datetime64[s]")),
    ("Group", "name", TypeError, "name", lambda k: _layout(_group(name=3))),
    ("Group", "abi twice", ValueError, "abi", lambda k: _layout(_group(abi=(("a", 1), ("a", 2))))),
    ("Group", "abi of an array", (TypeError, ValueError), "abi", lambda k: _layout(_group(abi=(("a", np.zeros(2)),)))),
    ("Group", "abi not pairs", (TypeError, ValueError), "abi", lambda k: _layout(_group(abi=("a", "bcd")))),
    ("Group", "rows of a page", ValueError, "rows_per_page", lambda k: _layout(_group(rows_per_page=3))),
    ("Group", "negative rows", ValueError, "rows_per_page", lambda k: _layout(_group(rows_per_page=-1))),
    ("Group", "float rows", (TypeError, ValueError), "rows_per_page", lambda k: _layout(_group(rows_per_page=1.0))),
    ("Group", "few pages", ValueError, "pages", lambda k: _layout(_group(pages=3))),
    ("Group", "negative pages", ValueError, "pages", lambda k: _layout(_group(pages=-2))),
    ("Group", "float pages", (TypeError, ValueError), "pages", lambda k: _layout(_group(pages=9.0))),
    ("Layout.group", "unknown", ValueError, "name", lambda k: LEVELS.group("kv")),
    ("Layout.with_abi", "unknown", ValueError, "name", lambda k: LEVELS.with_abi("kv", a=1)),
    ("Layout.bucket", "long", ValueError, "tokens", lambda k: LEVELS.bucket(T + 1)),
    ("Layout.bucket", "negative", ValueError, "tokens", lambda k: LEVELS.bucket(-1)),
    # Create.
    *((f, "no layout", TypeError, "layout", lambda k, f=f: getattr(hkv, f)("layout"))
      for f in ("init", "abstract", "nbytes")),
    ("init", "no sharding", TypeError, "sharding", lambda k: hkv.init(LEVELS, jax.devices()[0])),
    ("init", "devices", ValueError, "sharding", lambda k: hkv.init(dataclasses.replace(LEVELS, shards=2))),
    ("init", "devices given", ValueError, "sharding",
     lambda k: hkv.init(dataclasses.replace(LEVELS, shards=2), _sharding())),
    ("init", "float64 switched off", ValueError, "dtype", lambda k: hkv.init(_layout(_group(dtype="float64")))),
    ("Cache.segment", "no such row", IndexError, "i", lambda k: k.cache.segment(8)),
    ("Cache.segment", "negative", IndexError, "i", lambda k: k.cache.segment(-1)),
    ("Cache.segment", "text", TypeError, "i", lambda k: k.cache.segment("1")),
    ("describe", "no cache", TypeError, "cache", lambda k: hkv.describe(None, [1], k.need)),
    ("describe", "long", ValueError, "tokens", lambda k: hkv.describe(k.cache, [1] * (T + 1), k.need)),
    ("describe", "negative id", ValueError, "prompts", lambda k: hkv.describe(k.cache, [-1], k.need)),
    ("describe", "floats", TypeError, "prompts", lambda k: hkv.describe(k.cache, [1.5], k.need)),
    ("describe", "two requests", ValueError, "need", lambda k: hkv.describe(k.cache, [1], k.need2)),
    ("describe", "another layout", ValueError, "need", lambda k: hkv.describe(k.cache, [1], k.oneed)),
    # Query.
    ("need", "no cache", TypeError, "cache", lambda k: hkv.need(LEVELS)),
    ("need", "no requests", ValueError, "requests", lambda k: hkv.need(k.cache, requests=0)),
    ("need", "float requests", (TypeError, ValueError), "requests", lambda k: hkv.need(k.cache, requests=1.5)),
    ("need", "salt", TypeError, "salt", lambda k: hkv.need(k.cache, salt=3)),
    ("need", "bytes salt", TypeError, "salt", lambda k: hkv.need(k.cache, salt=b"a")),
    ("need", "salts", ValueError, "salt", lambda k: hkv.need(k.cache, requests=2, salt=["a"])),
    ("need", "adapter", TypeError, "adapter", lambda k: hkv.need(k.cache, adapter="a")),
    ("need", "model", TypeError, "model", lambda k: hkv.need(k.cache, model="a")),
    ("need", "start", ValueError, "start", lambda k: hkv.need(k.cache, start=-1)),
    ("need", "float start", TypeError, "start", lambda k: hkv.need(k.cache, start=1.5)),
    ("need", "far start", ValueError, "start", lambda k: hkv.need(k.cache, start=2**31 - T)),
    ("need", "epoch", ValueError, "epoch", lambda k: hkv.need(k.cache, epoch=-1)),
    ("need", "float epoch", TypeError, "epoch", lambda k: hkv.need(k.cache, epoch=1.5)),
    ("need", "big epoch", ValueError, "epoch", lambda k: hkv.need(k.cache, epoch=2**32)),
    ("need", "indexer", ValueError, "indexer_version", lambda k: hkv.need(k.cache, indexer_version=-1)),
    ("need", "provenance", ValueError, "provenance", lambda k: hkv.need(k.cache, provenance=3)),
    ("need", "media rank", ValueError, "media", lambda k: hkv.need(k.cache, media=np.zeros((S, 4), np.uint32))),
    ("need", "media dtype", TypeError, "media", lambda k: hkv.need(k.cache, media=np.zeros((1, S, 4)))),
    ("need", "media width", ValueError, "media", lambda k: hkv.need(k.cache, media=np.zeros((1, 7, 4), np.uint32))),
    ("need", "bucket", ValueError, "bucket", lambda k: hkv.need(k.cache, bucket=2 * B)),
    ("need", "abi", ValueError, "abi", lambda k: hkv.need(k.cache, abi=OTHER.abi)),
    ("need", "float bucket", TypeError, "bucket", lambda k: hkv.need(k.cache, bucket=float(T))),
    ("need", "float abi", TypeError, "abi", lambda k: hkv.need(k.cache, abi=LEVELS.abi.astype(float))),
    ("need", "negative abi", ValueError, "abi", lambda k: hkv.need(k.cache, abi=-LEVELS.abi.astype(np.int64))),
    ("need", "wide codes", ValueError, "codes", lambda k: hkv.need(k.cache, codes=hkv.byte_codes(k.cache).astype(np.int64) + 2**32)),
    ("need", "no codes", ValueError, "codes", lambda k: hkv.need(k.cache, codes=np.zeros((G, 1), np.uint32))),
    ("need", "codes", ValueError, "codes", lambda k: hkv.need(k.cache, codes=np.zeros((1, 1), np.uint32))),
    ("byte_codes", "no cache", TypeError, "cache", lambda k: hkv.byte_codes(LEVELS)),
    ("digest128", "text", TypeError, "fields", lambda k: hkv.digest128(b"a", "b")),
    ("media_digests", "no layout", TypeError, "layout", lambda k: hkv.media_digests(k.cache, 3, [])),
    ("media_digests", "pair", TypeError, "items", lambda k: hkv.media_digests(LEVELS, 3, [(0, 1)])),
    ("media_digests", "long", ValueError, "tokens", lambda k: hkv.media_digests(LEVELS, T + 1, [])),
    ("media_digests", "negative", ValueError, "items", lambda k: hkv.media_digests(LEVELS, 3, [(-1, 2, b"x")])),
    ("media_digests", "empty", ValueError, "items", lambda k: hkv.media_digests(LEVELS, 3, [(0, 0, b"x")])),
    ("media_digests", "after the prompt", ValueError, "items", lambda k: hkv.media_digests(LEVELS, 3, [(3, 1, b"x")])),
    ("media_digests", "text", TypeError, "items", lambda k: hkv.media_digests(LEVELS, 3, [(0, 1, "x")])),
    ("pad_batch", "no layout", TypeError, "layout", lambda k: hkv.pad_batch(k.cache, [[1]])),
    ("pad_batch", "no prompts", ValueError, "prompts", lambda k: hkv.pad_batch(LEVELS, [])),
    ("pad_batch", "long", ValueError, "tokens", lambda k: hkv.pad_batch(LEVELS, [[1] * (T + 1)])),
    ("pad_batch", "one prompt", ValueError, "prompts", lambda k: hkv.pad_batch(LEVELS, [1, 2])),
    ("pad_batch", "a table", ValueError, "prompts", lambda k: hkv.pad_batch(LEVELS, [[[1, 2]]])),
    ("pad_batch", "floats", TypeError, "prompts", lambda k: hkv.pad_batch(LEVELS, [[1.0]])),
    ("pad_batch", "text", TypeError, "prompts", lambda k: hkv.pad_batch(LEVELS, [["a"]])),
    ("pad_batch", "negative", ValueError, "prompts", lambda k: hkv.pad_batch(LEVELS, [[-1]])),
    ("pad_batch", "no vocabulary", ValueError, "vocabulary", lambda k: hkv.pad_batch(LEVELS, [[0]], 0)),
    ("pad_batch", "float vocabulary", TypeError, "vocabulary", lambda k: hkv.pad_batch(LEVELS, [[0]], 7.0)),
    ("pad_batch", "number", TypeError, "prompts", lambda k: hkv.pad_batch(LEVELS, 3)),
    ("pad_batch", "ragged", ValueError, "prompts", lambda k: hkv.pad_batch(LEVELS, [[[1], [1, 2]]])),
    ("pad_batch", "bytes", TypeError, "prompts", lambda k: hkv.pad_batch(LEVELS, b"abc")),
    ("pad_batch", "vocabulary", ValueError, "prompts", lambda k: hkv.pad_batch(LEVELS, [[7]], 7)),
    ("pad_batch", "beyond int32", ValueError, "prompts", lambda k: hkv.pad_batch(LEVELS, [[2**31]])),
    ("query", "no cache", TypeError, "cache", lambda k: hkv.query(LEVELS, k.tokens, k.length, k.need)),
    ("query", "list", TypeError, "tokens", lambda k: hkv.query(k.cache, k.tokens.tolist(), k.length, k.need)),
    ("query", "int64", TypeError, "tokens", lambda k: hkv.query(k.cache, k.tokens.astype(np.int64), k.length, k.need)),
    ("query", "rank", TypeError, "tokens", lambda k: hkv.query(k.cache, k.tokens[0], k.length, k.need)),
    ("query", "bucket", ValueError, "tokens", lambda k: hkv.query(k.cache, k.tokens[:, :B], k.length, k.need)),
    ("query", "negative id", ValueError, "tokens", lambda k: hkv.query(k.cache, k.tokens - 99, k.length, k.need)),
    ("query", "float length", TypeError, "length", lambda k: hkv.query(k.cache, k.tokens, np.ones(1), k.need)),
    ("query", "lengths", ValueError, "length", lambda k: hkv.query(k.cache, k.tokens, i32(1, 2), k.need)),
    ("query", "negative length", ValueError, "length", lambda k: hkv.query(k.cache, k.tokens, i32(-1), k.need)),
    ("query", "long", ValueError, "length", lambda k: hkv.query(k.cache, k.tokens, i32(T + 1), k.need)),
    ("query", "no need", TypeError, "need", lambda k: hkv.query(k.cache, k.tokens, k.length, None)),
    ("query", "need of two", ValueError, "need", lambda k: hkv.query(k.cache, k.tokens, k.length, k.need2)),
    ("query", "need of another", ValueError, "need", lambda k: hkv.query(k.cache, k.tokens, k.length, k.oneed)),
    ("check_block", "no cache", TypeError, "cache", lambda k: hkv.check_block(LEVELS, k.seg, k.ask)),
    ("check_block", "no segment", TypeError, "seg", lambda k: hkv.check_block(k.cache, 1, k.ask)),
    ("check_block", "no ask", TypeError, "ask", lambda k: hkv.check_block(k.cache, k.seg, k.need)),
    ("check_abi", "no layout", TypeError, "layout", lambda k: hkv.check_abi(k.cache, k.seg, k.need.request(0))),
    ("check_abi", "no segment", TypeError, "seg", lambda k: hkv.check_abi(LEVELS, 1, k.need.request(0))),
    ("check_abi", "no need", TypeError, "need", lambda k: hkv.check_abi(LEVELS, k.seg, k.ask)),
    ("check_abi", "batch", ValueError, "need", lambda k: hkv.check_abi(LEVELS, k.seg, k.need)),
    ("check_bytes", "no layout", TypeError, "layout", lambda k: hkv.check_bytes(k.cache, k.seg, k.need.request(0))),
    ("check_bytes", "no segment", TypeError, "seg", lambda k: hkv.check_bytes(LEVELS, 1, k.need.request(0))),
    ("check_bytes", "no need", TypeError, "need", lambda k: hkv.check_bytes(LEVELS, k.seg, k.ask)),
    ("check_groups", "numbers", TypeError, "ok", lambda k: hkv.check_groups(jnp.ones((2, 3)))),
    ("check_groups", "rank", TypeError, "ok", lambda k: hkv.check_groups(jnp.ones(3, bool))),
    ("verify_payload", "no cache", TypeError, "cache", lambda k: hkv.verify_payload(LEVELS, i32(1))),
    ("verify_payload", "list", TypeError, "rows", lambda k: hkv.verify_payload(k.cache, [1])),
    ("verify_payload", "floats", TypeError, "rows", lambda k: hkv.verify_payload(k.cache, np.ones(1))),
    ("explain", "no answer", TypeError, "availability", lambda k: hkv.explain(k.plan)),
    # Route.
    *(("costs", f"{name} {bad}", error, name, lambda k, name=name, bad=bad: hkv.costs(**{name: bad}))
      for name in ("prefill", "replay", "recover")
      for bad, error in ((NAN, ValueError), (-1.0, ValueError), ("1", TypeError), (None, TypeError))),
    ("costs", "infinite", ValueError, "prefill", lambda k: hkv.costs(prefill=math.inf)),
    ("route", "no answer", TypeError, "availability", lambda k: hkv.route(k.plan, hkv.costs())),
    ("route", "no costs", TypeError, "costs", lambda k: hkv.route(k.a, 1.0)),
    # Lease and admit.
    ("admit", "no cache", TypeError, "cache", lambda k: hkv.admit(LEVELS, k.plan, i32(3))),
    ("admit", "no plan", TypeError, "plan", lambda k: hkv.admit(k.cache, k.a, i32(3))),
    ("admit", "another layout", ValueError, "plan", lambda k: hkv.admit(k.cache, k.oplan, i32(3))),
    ("admit", "list", TypeError, "total", lambda k: hkv.admit(k.cache, k.plan, [3])),
    ("admit", "totals", ValueError, "total", lambda k: hkv.admit(k.cache, k.plan, i32(3, 4))),
    ("admit", "int64", TypeError, "total", lambda k: hkv.admit(k.cache, k.plan, np.ones(1, np.int64))),
    ("lease", "no cache", TypeError, "cache", lambda k: hkv.lease(LEVELS, k.plan)),
    ("lease", "no plan", TypeError, "plan", lambda k: hkv.lease(k.cache, k.a)),
    ("lease", "another layout", ValueError, "plan", lambda k: hkv.lease(k.cache, k.oplan)),
    ("fork", "no cache", TypeError, "cache", lambda k: hkv.fork(LEVELS, k.lease, i32(3))),
    ("fork", "no lease", TypeError, "lease", lambda k: hkv.fork(k.cache, k.plan, i32(3))),
    ("fork", "another layout", ValueError, "lease", lambda k: hkv.fork(k.cache, k.olease, i32(3))),
    ("fork", "totals", ValueError, "total", lambda k: hkv.fork(k.cache, k.lease, i32(3, 4))),
    ("check_lease", "no cache", TypeError, "cache", lambda k: hkv.check_lease(LEVELS, k.lease)),
    ("check_lease", "no lease", TypeError, "lease", lambda k: hkv.check_lease(k.cache, k.plan)),
    ("set_caps", "no cache", TypeError, "cache", lambda k: hkv.set_caps(LEVELS, {})),
    ("set_caps", "a number", TypeError, "pages", lambda k: hkv.set_caps(k.cache, 3)),
    ("set_caps", "disk", ValueError, "pages", lambda k: hkv.set_caps(k.cache, {Form.DISK: 1})),
    ("set_caps", "unknown form", ValueError, "pages", lambda k: hkv.set_caps(k.cache, {"W": 1})),
    ("set_caps", "negative", ValueError, "pages", lambda k: hkv.set_caps(k.cache, {Form.WINDOW: -1})),
    ("set_caps", "bytes of nothing", ValueError, "bytes", lambda k: hkv.set_caps(k.cache, bytes={(): 1})),
    ("set_caps", "pages of several", ValueError, "pages", lambda k: hkv.set_caps(k.cache, {("c", "w"): 1})),
    ("set_caps", "no place", ValueError, "tenant", lambda k: hkv.set_caps(k.cache, {}, tenant="a")),
    ("transition", "no cache", TypeError, "cache", lambda k: hkv.transition(LEVELS, i32(1), FORMS, hkv.Life.STALE)),
    ("transition", "rows", TypeError, "rows", lambda k: hkv.transition(k.cache, [1], FORMS, hkv.Life.STALE)),
    ("transition", "forms", ValueError, "forms", lambda k: hkv.transition(k.cache, i32(1), FORMS[:2], hkv.Life.STALE)),
    ("transition", "life", TypeError, "life", lambda k: hkv.transition(k.cache, i32(1), FORMS, 3)),
    ("retention", "negative", ValueError, "every", lambda k: hkv.retention(-1)),
    ("retention", "float", TypeError, "every", lambda k: hkv.retention(1.5)),
    ("publish", "prompt", TypeError, "prompt", lambda k: hkv.publish(k.cache, k.lease, k.tokens, k.length, prompt=3)),
    ("publish", "retention", TypeError, "retention", lambda k: hkv.publish(k.cache, k.lease, k.tokens, k.length, retention=3)),
    *((f, "no cache", TypeError, "cache", lambda k, f=f: getattr(hkv, f)(LEVELS, k.lease)) for f in ("release", "trim")),
    *((f, "no lease", TypeError, "lease", lambda k, f=f: getattr(hkv, f)(k.cache, k.plan)) for f in ("release", "trim")),
    *((f, "another layout", ValueError, "lease", lambda k, f=f: getattr(hkv, f)(k.cache, k.olease)) for f in ("release", "trim")),
    # Read, write, recover.
    *(("recover", what, error, name, lambda k, more=more: hkv.recover(**{**dict(
        run=k.run, params=(), cache=k.cache, lease=k.lease, plan=k.plan, tokens=k.tokens,
        chunk=4), **more(k)}))
      for what, error, name, more in (
        ("no cache", TypeError, "cache", lambda k: {"cache": LEVELS}),
        ("no lease", TypeError, "lease", lambda k: {"lease": k.plan}),
        ("lease of two", ValueError, "plan", lambda k: {"lease": k.lease2, "tokens": np.zeros((2, T), np.int32)}),
        ("lease of another", ValueError, "lease", lambda k: {"lease": k.olease}),
        ("no plan", TypeError, "plan", lambda k: {"plan": k.a}),
        ("plan of another", ValueError, "plan", lambda k: {"plan": k.oplan}),
        ("plan of two", ValueError, "plan", lambda k: {"plan": k.plan2}),
        ("tokens", TypeError, "tokens", lambda k: {"tokens": k.tokens.astype(np.int64)}),
        ("requests", ValueError, "tokens", lambda k: {"tokens": np.zeros((2, T), np.int32)}),
        ("width", ValueError, "tokens", lambda k: {"tokens": k.tokens[:, :B]}),
        ("run", TypeError, "run", lambda k: {"run": None}),
        ("no chunk", ValueError, "chunk", lambda k: {"chunk": 0}),
        ("float chunk", ValueError, "chunk", lambda k: {"chunk": 2.0}),
      )),
    ("verify_lease", "no cache", TypeError, "cache", lambda k: hkv.verify_lease(LEVELS, k.lease)),
    ("verify_lease", "no lease", TypeError, "lease", lambda k: hkv.verify_lease(k.cache, k.plan)),
    ("verify_lease", "another layout", ValueError, "lease", lambda k: hkv.verify_lease(k.cache, k.olease)),
    ("view", "no cache", TypeError, "cache", lambda k: hkv.view(LEVELS, k.lease, i32(1))),
    ("view", "no lease", TypeError, "lease", lambda k: hkv.view(k.cache, k.plan, i32(1))),
    ("view", "another layout", ValueError, "lease", lambda k: hkv.view(k.cache, k.olease, i32(1))),
    ("view", "number", TypeError, "count", lambda k: hkv.view(k.cache, k.lease, 1)),
    ("view", "counts", ValueError, "count", lambda k: hkv.view(k.cache, k.lease, i32(1, 1))),
    ("view", "position", TypeError, "position", lambda k: hkv.view(k.cache, k.lease, i32(1), np.zeros(1))),
    ("View.read", "group", ValueError, "name", lambda k: k.view.read("kv", 0, jnp.zeros((1, 2), jnp.int32), NEW)),
    ("View.read", "layer", ValueError, "layer", lambda k: k.view.read("c", 1, jnp.zeros((1, 2), jnp.int32), NEW)),
    ("View.read", "index", TypeError, "index", lambda k: k.view.read("c", 0, jnp.zeros((1, 2)), NEW)),
    ("View.read", "indices", ValueError, "index", lambda k: k.view.read("c", 0, jnp.zeros((2, 2), jnp.int32), NEW)),
    ("View.read", "new", ValueError, "new", lambda k: k.view.read("c", 0, jnp.zeros((1, 2), jnp.int32), NEW[..., None])),
    ("View.write", "group", ValueError, "name", lambda k: k.view.write("kv", 0, NEW)),
    ("View.write", "layer", ValueError, "layer", lambda k: k.view.write("c", 1, NEW)),
    ("View.write", "row", ValueError, "new", lambda k: k.view.write("c", 0, NEW[..., None])),
    ("View.write", "requests", ValueError, "new", lambda k: k.view.write("c", 0, jnp.zeros((2, 2, 1)))),
    ("append", "no view", TypeError, "done", lambda k: hkv.append(k.cache)),
    ("append", "missing group", ValueError, "c", lambda k: hkv.append(k.view)),
    ("append", "missing layer", ValueError, "pair", lambda k: _append_half()),
    # Publish and give memory back.
    *(("publish", what, error, name, lambda k, more=more: hkv.publish(**{**dict(
        cache=k.cache, lease=k.lease, tokens=k.tokens, length=k.length), **more(k)}))
      for what, error, name, more in (
        ("no cache", TypeError, "cache", lambda k: {"cache": LEVELS}),
        ("no lease", TypeError, "lease", lambda k: {"lease": k.plan}),
        ("lease of another", ValueError, "lease", lambda k: {"lease": k.olease}),
        ("lease of two", ValueError, "tokens", lambda k: {"lease": k.lease2}),
        ("tokens", TypeError, "tokens", lambda k: {"tokens": k.tokens.astype(np.uint32)}),
        ("width", ValueError, "tokens", lambda k: {"tokens": k.tokens[:, :-1]}),
        ("negative id", ValueError, "tokens", lambda k: {"tokens": k.tokens - 99}),
        ("length", TypeError, "length", lambda k: {"length": [3]}),
        ("negative", ValueError, "length", lambda k: {"length": i32(-1)}),
        ("long", ValueError, "length", lambda k: {"length": i32(T + 1)}),
      )),
    ("drop", "no cache", TypeError, "cache", lambda k: hkv.drop(LEVELS, i32(1), np.ones(5, bool))),
    ("drop", "list", TypeError, "rows", lambda k: hkv.drop(k.cache, [1], np.ones(5, bool))),
    ("drop", "form", TypeError, "forms", lambda k: hkv.drop(k.cache, i32(1), Form.WINDOW)),
    ("drop", "forms", ValueError, "forms", lambda k: hkv.drop(k.cache, i32(1), np.ones(4, bool))),
    ("evict", "no cache", TypeError, "cache", lambda k: hkv.evict(LEVELS, i32(1, 1, 1))),
    ("evict", "number", TypeError, "pages", lambda k: hkv.evict(k.cache, 3)),
    ("evict", "negative", ValueError, "pages", lambda k: hkv.evict(k.cache, i32(1, -1, 1))),
    ("evict", "groups", ValueError, "pages", lambda k: hkv.evict(k.cache, i32(1, 1))),
    ("invalidate", "no cache", TypeError, "cache", lambda k: hkv.invalidate(LEVELS, np.ones(8, bool))),
    ("invalidate", "numbers", TypeError, "rows", lambda k: hkv.invalidate(k.cache, i32(1))),
    ("invalidate", "rows", ValueError, "rows", lambda k: hkv.invalidate(k.cache, np.ones(7, bool))),
    ("occupancy", "no cache", TypeError, "cache", lambda k: hkv.occupancy(LEVELS)),
    ("update_indexer", "no cache", TypeError, "cache", lambda k: hkv.update_indexer(LEVELS, i32(1), {"keys": KEYS}, np.uint32(1))),
    ("update_indexer", "no groups", (TypeError, ValueError), "entries", lambda k: hkv.update_indexer(k.cache, i32(1), KEYS, np.uint32(1))),
    ("update_indexer", "no group", ValueError, "entries", lambda k: hkv.update_indexer(k.cache, i32(1), {}, np.uint32(1))),
    ("update_indexer", "another group", ValueError, "entries", lambda k: hkv.update_indexer(k.cache, i32(1), {"keys": KEYS, "c": KEYS}, np.uint32(1))),
    ("update_indexer", "no form", ValueError, "entries", lambda k: hkv.update_indexer(k.other, i32(1), {}, np.uint32(1))),
    ("update_indexer", "dtype", TypeError, "entries", lambda k: hkv.update_indexer(k.cache, i32(1), {"keys": KEYS.astype(jnp.bfloat16)}, np.uint32(1))),
    ("update_indexer", "rows of", ValueError, "entries", lambda k: hkv.update_indexer(k.cache, i32(1, 2), {"keys": KEYS}, np.uint32(1))),
    ("update_indexer", "rows", TypeError, "rows", lambda k: hkv.update_indexer(k.cache, [1], {"keys": KEYS}, np.uint32(1))),
    ("update_indexer", "version", TypeError, "indexer_version", lambda k: hkv.update_indexer(k.cache, i32(1), {"keys": KEYS}, 1)),
    # Copies.
    ("offload", "no cache", TypeError, "cache", lambda k: hkv.offload(LEVELS, i32(1), np.ones((1, 5), bool))),
    ("offload", "no form", ValueError, "layout", lambda k: hkv.offload(k.other, i32(1), np.ones((1, 5), bool))),
    ("offload", "list", TypeError, "rows", lambda k: hkv.offload(k.cache, [1], np.ones((1, 5), bool))),
    ("offload", "forms", ValueError, "forms", lambda k: hkv.offload(k.cache, i32(1), np.ones((2, 5), bool))),
    ("offloaded", "no copies", TypeError, "copies", lambda k: hkv.offloaded(k.cache, k.lease, np.ones((1, 5), bool), np.uint8(3), True)),
    ("adopt", "numbers", TypeError, "copied", lambda k: hkv.adopt(k.cache, k.need, k.tokens, np.zeros((S, G, 2)), np.zeros(S, np.uint8), np.zeros(S, np.uint8))),
    ("adopt", "no need", TypeError, "need", lambda k: hkv.adopt(k.cache, k.plan, k.tokens, np.zeros((S, G, 2), np.int32), np.zeros(S, np.uint8), np.zeros(S, np.uint8))),
    ("begin_load", "no plan", TypeError, "plan", lambda k: hkv.begin_load(k.cache, k.a)),
    ("begin_load", "another layout", ValueError, "layout", lambda k: hkv.begin_load(k.other, k.oplan)),
    ("begin_load", "two", ValueError, "plan", lambda k: hkv.begin_load(k.cache, k.plan2)),
    ("load", "no loading", TypeError, "loading", lambda k: hkv.load(k.cache, k.plan, i32(1), (), np.zeros((1, G, 2), np.uint32))),
    ("end_load", "no loading", TypeError, "loading", lambda k: hkv.end_load(k.cache, k.plan)),
]
# fmt: on


def _sharding():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "x")
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _append_half():
    """One of two layers written."""
    lay = layout(group("pair", hkv.history(1), (0, 1)), B=B, S=S, segments=8, leases=2)
    store = planted.Store(lay)
    rows, cache = store.chain(PROMPT), store.cache()
    view = hkv.view(cache, mutations._lease_of(store, rows, cache), jnp.asarray(i32(1)))
    hkv.append(view.write("pair", 0, jnp.zeros((1, 2, 1))))


def _unharmed(tree):
    leaves = jax.tree.leaves(tree)
    assert not any(x.is_deleted() for x in leaves)
    return [np.asarray(x) for x in leaves]


@pytest.mark.parametrize(
    ("error", "name", "call"),
    [pytest.param(*x[2:], id=f"{x[0]}: {x[1]}") for x in BAD],
)
def test_a_bad_argument_is_refused_before_anything_changes(k, error, name, call):
    before = [np.array(x) for x in _unharmed((k.cache, k.lease))]
    with pytest.raises(error) as got:
        call(k)
    text = str(got.value)
    assert re.search(rf"`{name}\b", text), text
    assert len(text) > len(name) + 12, text  # the value that was got, and what to give
    for x, y in zip(before, _unharmed((k.cache, k.lease)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_cache_that_was_donated_is_named(k):
    cache = jax.tree.map(jnp.copy, k.cache)
    hkv.evict(cache, jnp.zeros(G, jnp.int32))
    for call in (
        lambda: hkv.query(cache, k.tokens, k.length, k.need),
        lambda: hkv.admit(cache, k.plan, k.length),
        lambda: hkv.check_lease(cache, k.lease),
        lambda: hkv.need(cache),
        lambda: hkv.view(cache, k.lease, k.length),
    ):
        with pytest.raises(ValueError, match="`cache` was donated"):
            call()


def test_every_public_function_is_tried():
    functions = {
        n for n, f in vars(hkv).items()
        if callable(f) and not inspect.isclass(f) and not n.startswith("_")
    }  # fmt: skip
    tried = {x[0] for x in BAD}
    nothing_to_refuse = {"state"}
    assert functions - nothing_to_refuse <= tried
