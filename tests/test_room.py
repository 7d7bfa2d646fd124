"""Whom eviction takes, against one that takes them one at a time in plain Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import planted
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import Store, group

import hkv
from hkv import Form, Life, Worth, _room, history, tail, window
from hkv.testing import invariants

B, N = 4, 24
LAYOUT = planted.layout(
    group("c", history(2), rows_per_page=1), group("w", window(4), (1,)),
    group("t", tail(4), (0, 1)), B=B, S=6, segments=N,
)  # fmt: skip
GROUPS = [0, 1, 2]


@pytest.fixture(scope="module", params=[512, 3], ids=["at once", "three at a time"])
def make_room(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_room, "VICTIMS", request.param)
        make = jax.jit(lambda *a: _room.make_room(*a, jnp.uint32(0)))
        make(Store(LAYOUT).cache(), jnp.int32(0), jnp.zeros(3, jnp.int32))
        yield make


def scene(r):
    """Chains that branch, of random age, some pinned, some without windows, one stale."""
    store = Store(LAYOUT)
    for i in range(r.randint(1, 5)):
        rows = sorted(store.prefix)
        parent = r.choice([None, *rows]) if rows else None
        depth = 0 if parent is None else len(store.prefix[parent][2])
        n = min(r.randint(1, 4), 6 - depth, N - len(rows))
        if n:
            store.chain([100 * i + j for j in range(n * B)], parent)
    t, rows = store.table, sorted(store.prefix)
    ages = r.sample(range(1, 500), len(rows) * 5)
    t["used"][rows] = np.array(ages, np.uint32).reshape(-1, 5)
    t["worth"][rows] = [r.randint(0, 2) for _ in rows]
    for row in rows:
        up = t["parent"][row]
        if up < N:
            t["children"][up] += 1
    for row in rows:
        if r.random() < 0.2:
            while row < N:  # a lease holds the whole prefix
                t["pins"][row] += 1
                row = t["parent"][row]
        elif r.random() < 0.25:
            g = r.choice((1, 2))
            t["pages"][g][row] = 0
            t["held"][row, g] = t["start"][row]
            t["life"][row, LAYOUT.groups[g].form] = Life.EMPTY
        elif r.random() < 0.15:
            t["life"][row, [0, 1, 2]] = np.where(t["life"][row, :3] == Life.READY, Life.STALE,
                                                 t["life"][row, :3])  # fmt: skip
    t["form"] = sum((t["life"][:, f] == Life.READY).astype(np.uint8) << f for f in range(4))
    return store


def one_at_a_time(store, cache, rows, pages, order, clock):
    """What each row holds afterwards: pages per group, None for a row that was freed."""
    t = jax.tree.map(np.array, store.table)
    limit, weight = np.asarray(cache.caps.limit)[0], np.asarray(cache.caps.weight)
    held = {r: [int((t["pages"][g][r] > 0).sum()) for g in GROUPS] for r in store.prefix}
    free = np.array([int(p.n_free) for p in cache.pools])
    total = np.array([g.pages - 1 for g in LAYOUT.groups])
    free_rows, more = N - len(held), weight @ pages

    def lacking():
        over = np.where(more > 0, weight @ (total - free) + more - limit, 0)
        return pages - free, over, rows - free_rows

    def score(r, f, rank):
        return (3 if (t["life"][r] == Life.STALE).any() else rank, clock - int(t["used"][r, f]))

    while True:
        short, over, few = lacking()
        if not ((short > 0).any() or (over > 0).any() or few > 0):
            return held
        idle = [r for r in held if not t["pins"][r]]
        for f in order:
            g = next(i for i in GROUPS if LAYOUT.groups[i].form is f)
            able = [r for r in idle if t["life"][r, f] in (Life.READY, Life.STALE)]
            if able and (short[g] > 0 or (over[weight[:, g] > 0] > 0).any()):
                r = max(able, key=lambda r: score(r, f, 2 - int(t["worth"][r])))
                free[g] += held[r][g]
                held[r][g], t["life"][r, f] = 0, Life.EMPTY
                break
        else:
            leaves = [r for r in idle if not t["children"][r]]
            if not leaves:
                return held
            r = max(leaves, key=lambda r: score(r, Form.COMPRESSED, 0))
            free += held.pop(r)
            free_rows += 1
            if t["parent"][r] < N:
                t["children"][t["parent"][r]] -= 1


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_eviction_takes_whom_one_at_a_time_takes(make_room, r):
    store = scene(r)
    cache = dataclasses.replace(store.cache(), clock=jnp.uint32(500))
    cap = {f: r.choice((LAYOUT.groups[g].pages - 1, r.randint(0, 12)))
           for g, f in ((0, Form.COMPRESSED), (1, Form.WINDOW), (2, Form.TAIL))}  # fmt: skip
    size = {("c", "w"): r.choice((10**6, r.randint(0, 3000)))}
    cache = hkv.set_caps(cache, cap, bytes=size)
    used = np.array([g.pages - 1 for g in LAYOUT.groups]) - [int(p.n_free) for p in cache.pools]
    pages = np.array([r.choice((0, r.randint(0, 6))) for _ in GROUPS]).astype(np.int32)
    pages += np.where(pages > 0, np.array([int(p.n_free) for p in cache.pools]) * r.randint(0, 1),
                      0).astype(np.int32)  # fmt: skip
    rows = r.choice((0, N - len(store.prefix) + r.randint(0, 5)))
    order = [f for f in _room._cheapest_first(LAYOUT)]
    want = one_at_a_time(store, cache, rows, pages, order, 500)
    new = make_room(cache, jnp.int32(rows), jnp.asarray(pages))
    t = jax.device_get(new.table)
    got = {
        r: [int((t.pages[g][r] > 0).sum()) for g in GROUPS]
        for r in store.prefix if t.length[r] > 0
    }  # fmt: skip
    assert got == want
    assert (used >= 0).all()


def test_windows_that_keep_no_boundary_alive_go_first_and_prompt_ends_last(make_room):
    store = Store(LAYOUT)
    rows = store.chain(range(6 * B))
    store.table["worth"][rows] = [Worth.END, Worth.NONE, Worth.BOUNDARY, Worth.NONE,
                                  Worth.BOUNDARY, Worth.END]  # fmt: skip
    store.table["used"][rows] = np.arange(6)[:, None]
    store.table["children"][rows[:-1]] = 1
    cache = dataclasses.replace(store.cache(), clock=jnp.uint32(9))
    total = LAYOUT.groups[1].pages - 1
    for n, kept in ((1, [0, 2, 3, 4, 5]), (3, [0, 4, 5]), (5, [5])):
        pages = jnp.asarray([0, total - 6 + n, 0], jnp.int32)
        t = make_room(cache, jnp.int32(0), pages).table
        assert [i for i, r in enumerate(rows) if int(t.pages[1][r, 0])] == kept
        assert (np.asarray(t.pages[0])[rows] > 0).all()  # history stays


def test_what_is_cheaper_to_replay_per_byte_goes_first():
    # Open rows of one token in two layers against rows of three before it in one.
    assert _room._cheapest_first(LAYOUT) == (Form.TAIL, Form.WINDOW)


def test_an_empty_cache_gives_what_it_has():
    cache = hkv.evict(hkv.init(LAYOUT), jnp.full(3, 99, jnp.int32))
    invariants(cache, [])
