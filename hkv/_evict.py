"""Giving memory back: dropping forms, freeing segments, the least recently used first.

History goes leaf first and takes the whole segment along; the other forms go alone. What a lease
holds never goes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from hkv._arguments import check_array, check_type
from hkv._cache import PROBE, WAYS, Cache, bumped, form_bits, openings_of, rows_of
from hkv._identity import opening_slots
from hkv._layout import DEVICE_FORMS, FORMS, Form
from hkv._lifecycle import Life, legal
from hkv._lookup import index_base
from hkv._pages import push_pages, push_rows, used_pages
from hkv._slots import add, put, take


def set_life(cache: Cache, rows: jax.Array, forms: jax.Array, life: Life, mask: jax.Array):
    """Moves forms of segments to a state, if that is a listed transition.

    Args:
        cache: the cache.
        rows: `i32[K]`, without repeats.
        forms: `bool[F]`.
        life: the new state.
        mask: `bool[K]` which rows.

    Returns:
        The cache, and `bool[K, F]`: what moved. Versions rise where anything did.
    """
    t, N = cache.table, cache.layout.segments
    old = take(t.life, rows, 0)
    moved = legal(old, jnp.uint8(life)) & forms[None] & mask[:, None] & (rows < N)[:, None]
    new = jnp.where(moved, jnp.uint8(life), old)
    any_moved = jnp.any(moved, -1)
    at = jnp.where(any_moved, rows, N)
    table = dataclasses.replace(
        t,
        life=put(t.life, at, new),
        form=put(t.form, at, form_bits(new)),
        version=put(t.version, at, bumped(take(t.version, at, 0), readable=life is Life.READY)),
    )
    return dataclasses.replace(cache, table=table), moved


def _drop_pages(cache: Cache, rows: jax.Array, gone: jax.Array) -> Cache:
    """Frees the pages of the forms of each row that `gone` `bool[K, F]` names."""
    t, N = cache.table, cache.layout.segments
    pools, pages, held, digest = list(cache.pools), list(t.pages), t.held, t.digest
    for g, group in enumerate(cache.layout.groups):
        mask = gone[:, group.form]
        at = jnp.where(mask, rows, N)
        mine = take(pages[g], rows, 0)
        flat = jnp.broadcast_to(mask[:, None], mine.shape).reshape(-1)
        pools[g] = push_pages(pools[g], mine.reshape(-1), flat, N)
        pages[g] = put(pages[g], at, jnp.zeros_like(mine))
        start = take(t.start, rows, 0)
        held = held.at[at, g].set(
            jnp.stack([start, start], -1), mode="drop", wrap_negative_indices=False
        )
        digest = digest.at[at, g].set(
            jnp.zeros((rows.shape[0], 2), jnp.uint32), mode="drop", wrap_negative_indices=False
        )
    table = dataclasses.replace(t, pages=tuple(pages), held=held, digest=digest)
    return dataclasses.replace(cache, table=table, pools=tuple(pools))


def drop_forms(cache: Cache, rows: jax.Array, forms: jax.Array, mask: jax.Array):
    """Drops forms of unpinned segments and keeps the rest; `bool[K]` says where it was done."""
    free = mask & (take(cache.table.pins, rows, 1) == 0)
    cache, moved = set_life(cache, rows, forms, Life.EMPTY, free)
    return _drop_pages(cache, rows, moved), jnp.any(moved, -1)


def unlist(cache: Cache, rows: jax.Array, mask: jax.Array) -> Cache:
    """Takes segments `i32[K]` out of both indexes, so that no query proposes them."""
    lay, N = cache.layout, cache.layout.segments

    def places(row):
        """Index slots and places among the openings where one segment may stand."""
        seg = rows_of(cache.table, row)
        slots = index_base(cache, seg.key) + jnp.arange(PROBE, dtype=jnp.int32)
        buckets = opening_slots(cache, seg.before, take(cache.tokens, row, 0), openings_of(lay))
        ways = jnp.arange(WAYS, dtype=jnp.int32)[None]
        return slots, (buckets[:, None] * WAYS + ways).reshape(-1)

    slots, ways = jax.vmap(places)(rows)

    def clear(a, at):
        mine = (take(a, at, N) == rows[:, None]) & mask[:, None]
        at = jnp.where(mine, at, a.shape[0]).reshape(-1)
        return put(a, at, jnp.full(at.shape, N, a.dtype))

    openings = clear(cache.openings.reshape(-1), ways).reshape(cache.openings.shape)
    return dataclasses.replace(cache, index=clear(cache.index, slots), openings=openings)


def free_segments(cache: Cache, rows: jax.Array, mask: jax.Array) -> Cache:
    """Frees whole unpinned segments `i32[K]` (no repeats): forms, pages, index entries, row."""
    N = cache.layout.segments
    mask = mask & (rows < N) & (take(cache.table.pins, rows, 1) == 0)
    cache = unlist(cache, rows, mask)
    seg = rows_of(cache.table, rows)
    parent = rows_of(cache.table, seg.parent)
    linked = mask & (seg.parent < N) & (parent.born == seg.parent_born)
    at = jnp.where(mask, rows, N)
    cache = _drop_pages(cache, rows, jnp.broadcast_to(mask[:, None], (*mask.shape, FORMS)))
    t = cache.table
    table = dataclasses.replace(
        t,
        children=add(
            t.children, jnp.where(linked, seg.parent, N), jnp.full(rows.shape, -1, jnp.int32)
        ),
        life=put(t.life, at, jnp.zeros_like(seg.life)),
        form=put(t.form, at, jnp.zeros_like(seg.form)),
        version=put(t.version, at, bumped(seg.version, readable=False)),
        length=put(t.length, at, jnp.zeros_like(seg.length)),
    )
    return push_rows(dataclasses.replace(cache, table=table), rows, mask)


def make_room(cache: Cache, rows: jax.Array, pages: jax.Array, forms: jax.Array) -> Cache:
    """Evicts until so much can be had, or nothing more can go.

    Args:
        cache: the cache.
        rows: `i32[]` segment rows that must be free.
        pages: `i32[G]` pages that must be free.
        forms: `i32[F]` pages that each form must have left under its cap.
    """
    lay, N = cache.layout, cache.layout.segments
    group_form = lay.forms
    alone = [f for f in DEVICE_FORMS if not any(
        lay.groups[g].rule.prefix_closed for g in lay.form_groups(f))]  # fmt: skip

    def short(c: Cache):
        used = used_pages(c)
        capacity = jnp.asarray([g.pages - 1 for g in lay.groups], jnp.int32)
        by_form = jnp.zeros(FORMS, jnp.int32).at[group_form].add(used)
        tight = jnp.zeros(FORMS, bool).at[group_form].max(capacity - used < pages)
        tight |= by_form + forms > c.caps
        return tight & (forms > 0), c.n_free_rows < rows

    def victims(c: Cache):
        """The least recently used row per form, whole segments in the last place."""
        t, (tight, few) = c.table, short(c)
        idle = (t.pins == 0) & (t.length > 0)
        stale = jnp.any(t.life == Life.STALE, -1)
        out, kind = jnp.full((), N, jnp.int32), jnp.full((), FORMS, jnp.int32)
        for f in alone:
            can = idle & ((t.life[:, f] == Life.READY) | (t.life[:, f] == Life.STALE))
            r = _oldest(t.used[:, f], can, stale)
            take_it = tight[f] & (r < N) & (out == N)
            out, kind = jnp.where(take_it, r, out), jnp.where(take_it, f, kind)
        leaf = idle & (t.children == 0)
        r = _oldest(t.used[:, Form.COMPRESSED], leaf, stale)
        whole = few | jnp.any(tight)
        out = jnp.where((out == N) & whole, r, out)
        return out, kind

    def body(state):
        c, _, _ = state
        row, kind = victims(c)
        at = row[None]
        some = kind < FORMS
        c, _ = drop_forms(c, at, jnp.arange(FORMS) == kind, some[None])
        c = free_segments(c, at, ~some[None])
        return c, row, kind

    def go_on(state):
        c, row, _ = state
        tight, few = short(c)
        return (jnp.any(tight) | few) & (row < N)

    start = (cache, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))
    return jax.lax.while_loop(go_on, body, start)[0]


def _oldest(used: jax.Array, can: jax.Array, first: jax.Array) -> jax.Array:
    """Row with the smallest clock among `can`, those in `first` before all; N for none."""
    N = used.shape[0]
    top = jnp.uint32(0xFFFFFFFF)
    age = jnp.where(can, jnp.where(first, 0, jnp.minimum(used, top - 1) + 1), top)
    row = jnp.argmin(age).astype(jnp.int32)
    return jnp.where(can[row], row, N)


def evict(cache: Cache, pages: jax.Array) -> Cache:
    """Evicts the least recently used until each group has that many free pages, or none can go.

    Donates `cache`.

    Args:
        cache: the cache.
        pages: `i32[G]` pages that should be free.
    """
    check_type("cache", cache, Cache)
    check_array("pages", pages, jnp.int32, len(cache.layout.groups))
    return _evict(cache, pages)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _evict(cache: Cache, pages: jax.Array) -> Cache:
    forms = jnp.zeros(FORMS, jnp.int32).at[cache.layout.forms].add(pages)
    return make_room(cache, jnp.int32(0), pages, forms)


def drop(cache: Cache, rows: jax.Array, forms: jax.Array) -> tuple[Cache, jax.Array]:
    """Drops chosen forms of chosen segments; those that a lease holds keep them.

    Donates `cache`.

    Args:
        cache: the cache.
        rows: `i32[K]` segments; N is skipped, and so are repeats.
        forms: `bool[F]`.

    Returns:
        The cache, and `bool[K]` where something was dropped.
    """
    check_type("cache", cache, Cache)
    check_array("rows", rows, jnp.int32, None)
    check_array("forms", forms, bool, FORMS)
    return _drop(cache, rows, forms)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _drop(cache: Cache, rows: jax.Array, forms: jax.Array):
    N = cache.layout.segments
    turn = jnp.arange(rows.shape[0], dtype=jnp.int32)
    first = (
        jnp.full(N, rows.shape[0], jnp.int32)
        .at[rows]
        .min(turn, mode="drop", wrap_negative_indices=False)
    )
    return drop_forms(cache, rows, forms, take(first, rows, -1) == turn)  # each row once


def invalidate(cache: Cache, rows: jax.Array) -> tuple[Cache, jax.Array]:
    """Marks segments STALE in all their device forms, pinned or not: no query returns them again.

    Donates `cache`. Running leases on them fail their next check; memory returns by eviction,
    stale segments first.

    Args:
        cache: the cache.
        rows: `bool[N]` which segments.

    Returns:
        The cache, and `i32[]` how many changed.
    """
    check_type("cache", cache, Cache)
    check_array("rows", rows, bool, cache.layout.segments)
    return _invalidate(cache, rows)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _invalidate(cache: Cache, rows: jax.Array) -> tuple[Cache, jax.Array]:
    every = jnp.arange(cache.layout.segments, dtype=jnp.int32)
    forms = jnp.asarray([f in DEVICE_FORMS for f in Form])
    cache, moved = set_life(cache, every, forms, Life.STALE, rows)
    return cache, jnp.sum(jnp.any(moved, -1), dtype=jnp.int32)
