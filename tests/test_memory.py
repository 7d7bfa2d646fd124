"""Every update works in place: pools are donated, aliased, and never copied on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import hkv
from hkv import (
    _admit,
    _evict,
    _lease,
    _publish,
    _query,
    _recover,
    _reindex,
    _room,
    _trim,
    _verify,
)
from hkv.testing import aliasing

Q = 2
# Room for the rows and pages that one batch handles, 1.4 MiB at most here (2.5 MiB in bfloat16
# with rows of the same bytes). The smallest pool has 16 MiB, the largest 64.
SCRATCH = 4 * 2**20
UPDATES = (
    "admit", "lease", "fork", "release", "trim", "step", "recover", "publish", "evict", "drop",
    "invalidate", "update_indexer",
)  # fmt: skip


def programs(dtype, row):
    """The jitted function behind each operation, with abstract arguments; no pool is allocated."""
    lay = tiny.layout(dtype=dtype, row=row)
    cache = hkv.abstract(lay)
    tokens, length = hkv.pad_batch(lay, [np.arange(40), np.arange(9)])
    need = hkv.need(cache, requests=Q, codes=np.ones((len(lay.groups), 1), np.uint32))
    found = jax.eval_shape(_query._query, cache, tokens, length, need)
    plan = jax.eval_shape(lambda a: hkv.route(a, hkv.costs()), found)
    weights, count = jnp.float32(1), jnp.zeros(Q, jnp.int32)
    _, lease, _ = jax.eval_shape(_admit._admit, cache, plan, count)
    entries = {"index": jax.ShapeDtypeStruct((1, Q, 4, row), jnp.dtype(dtype))}
    marks, pages = jnp.zeros(lay.segments, bool), jnp.zeros(len(lay.groups), jnp.int32)
    return lay, {
        "admit": (_admit._admit, cache, plan, count),
        "lease": (_admit._lease, cache, plan),
        "fork": (_admit._fork, cache, lease, count),
        "release": (_lease._release, cache, lease),
        "trim": (_trim._trim, cache, lease),
        "step": (tiny.step, weights, cache, lease, tokens, count),
        "recover": (
            _recover._recover, tiny.replay, weights, cache, lease, plan, tokens, tiny.CHUNK,
        ),
        "publish": (_publish._publish, cache, lease, tokens, length, None, None, True),
        "evict": (_room._evict, cache, pages),
        "drop": (_evict._drop, cache, count, jnp.zeros(len(hkv.Form), bool)),
        "invalidate": (_evict._invalidate, cache, marks),
        "update_indexer": (_reindex._update, cache, count, entries, jnp.uint32(1)),
        "query": (_query._query, cache, tokens, length, need),
        "verify_payload": (_verify._verify_payload, cache, count),
    }  # fmt: skip


@pytest.fixture(scope="module")
def float32():
    return programs("float32", 1024)


@pytest.fixture(scope="module")
def bfloat16():
    return programs("bfloat16", 2048)


def check_update(layout, program):
    memory = aliasing(*program)
    assert memory.alias >= sum(hkv.nbytes(layout).values())
    assert memory.temp < SCRATCH


def check_reading(program):
    memory = aliasing(*program)
    assert memory.alias == 0
    assert memory.temp < SCRATCH


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_takes_the_place_of_the_whole_cache(float32, name):
    check_update(float32[0], float32[1][name])


@pytest.mark.parametrize("name", ["query", "verify_payload"])
def test_reading_copies_no_pool(float32, name):
    check_reading(float32[1][name])


# On a CPU, XLA of jax 0.10.2 writes bfloat16 through float32: every scatter makes a copy of the
# pool in twice the bytes, and nothing written in JAX avoids it. Later versions do not.
half = pytest.mark.skipif(
    jax.default_backend() == "cpu" and jax.__version_info__ < (0, 12),
    reason="XLA for CPUs widens a whole bfloat16 pool to write into it",
)


@half
@pytest.mark.parametrize("name", UPDATES)
def test_an_update_in_bfloat16_takes_the_place_of_the_whole_cache(bfloat16, name):
    check_update(bfloat16[0], bfloat16[1][name])


@half
@pytest.mark.parametrize("name", ["query", "verify_payload"])
def test_reading_copies_no_bfloat16_pool(bfloat16, name):
    check_reading(bfloat16[1][name])


def test_real_updates_leave_every_pool_where_it_is_and_take_the_old_cache():
    lay = tiny.layout()
    cache = hkv.init(lay)
    tokens, length = hkv.pad_batch(lay, [np.arange(40), np.arange(40)])
    need = hkv.need(cache, requests=Q)
    plan = hkv.route(hkv.query(cache, tokens, length, need), hkv.costs())
    total, rows = jnp.full(Q, 40, jnp.int32), jnp.arange(Q, dtype=jnp.int32)
    entries = {"index": jnp.ones((1, Q, 4, 1024), jnp.float32)}
    at = [p.data.unsafe_buffer_pointer() for p in cache.pools]
    lease = weights = jnp.float32(1)

    def advance(cache, lease):
        for _ in range(40 // tiny.CHUNK):
            cache, lease, *_ = tiny.step(weights, cache, lease, tokens, jnp.full(Q, 8, jnp.int32))
        return cache, lease

    for update in (
        lambda c, x: hkv.admit(c, plan, total)[:2],
        lambda c, x: hkv.recover(
            tiny.replay, weights, c, x, plan, tokens, chunk=tiny.CHUNK
        )[:2],
        advance,
        lambda c, x: (hkv.fork(c, x, total)[0], x),
        lambda c, x: hkv.publish(c, x, tokens, length, partial=True)[:2],
        hkv.trim,
        lambda c, x: (hkv.release(c, x), x),
        lambda c, x: (hkv.update_indexer(c, rows, entries, jnp.uint32(1))[0], x),
        lambda c, x: (hkv.drop(c, rows, jnp.ones(len(hkv.Form), bool))[0], x),
        lambda c, x: (hkv.invalidate(c, jnp.ones(lay.segments, bool))[0], x),
        lambda c, x: (hkv.evict(c, jnp.zeros(len(lay.groups), jnp.int32)), x),
    ):  # fmt: skip
        old = cache
        cache, lease = update(old, lease)
        assert [p.data.unsafe_buffer_pointer() for p in cache.pools] == at
        assert all(a.is_deleted() for a in jax.tree.leaves(old))
