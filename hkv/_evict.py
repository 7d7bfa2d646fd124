"""Giving memory back: dropping forms, freeing segments, marking them stale.

What a lease holds is never dropped. Whom to evict is decided elsewhere.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from hkv._arguments import check_array
from hkv._cache import PROBE, WAYS, Cache, bumped, check_cache, form_bits, openings_of, rows_of
from hkv._identity import opening_slots
from hkv._layout import FORMS
from hkv._lifecycle import Life, move, spoils
from hkv._lookup import index_base
from hkv._pages import push_pages, push_rows
from hkv._slots import add, first_of, put, swap, take


def set_life(cache: Cache, rows: jax.Array, forms: jax.Array, life, mask: jax.Array):
    """Moves forms of segments to a state, if that is a listed transition.

    Args:
        cache: the cache.
        rows: `i32[K]`, without repeats.
        forms: `bool[F]`, or `bool[K, F]` for each row its own.
        life: the new state, a `Life` or `u8[]`.
        mask: `bool[K]` which rows.

    Returns:
        The cache, and `bool[K, F]`: what moved. Versions rise where anything did.
    """
    t, N = cache.table, cache.layout.segments
    old = take(t.life, rows, 0)
    mask = mask & (rows >= 0) & (rows < N)
    new = move(old, jnp.broadcast_to(forms, old.shape) & mask[:, None], life)
    moved = new != old
    at = jnp.where(jnp.any(moved, -1), rows, N)
    version, spoilt = take(t.version, at, 0), jnp.any(moved & spoils(old, new), -1)
    keep, end = bumped(version, readable=True), bumped(version, readable=False)
    table = dataclasses.replace(
        t,
        life=put(t.life, at, new),
        form=put(t.form, at, form_bits(new)),
        version=put(t.version, at, jnp.where(spoilt, end, keep)),
    )
    return dataclasses.replace(cache, table=table), moved


def _drop_pages(cache: Cache, rows: jax.Array, gone: jax.Array) -> Cache:
    """Frees the pages of the forms of each row that `gone` `bool[K, F]` names."""
    t, lay, N = cache.table, cache.layout, cache.layout.segments
    pools, pages = list(cache.pools), list(t.pages)
    gone = gone[:, lay.forms]  # [K, G]
    at = jnp.where(gone, rows[:, None], N)
    for g in range(len(lay.groups)):
        mine, pages[g] = swap(pages[g], rows, at[:, g], jnp.int32(0))
        flat = jnp.broadcast_to(gone[:, g, None], mine.shape).reshape(-1)
        pools[g] = push_pages(pools[g], mine.reshape(-1), flat, N)
    where = (at, np.arange(len(lay.groups))[None])
    start = jnp.broadcast_to(take(t.start, rows, 0)[:, None, None], (*at.shape, 2))
    held = t.held.at[where].set(start, mode="drop", wrap_negative_indices=False)
    digest = t.digest.at[where].set(jnp.uint32(0), mode="drop", wrap_negative_indices=False)
    table = dataclasses.replace(t, pages=tuple(pages), held=held, digest=digest)
    return dataclasses.replace(cache, table=table, pools=tuple(pools))


def idle(cache: Cache) -> jax.Array:
    """`bool[N]`: published segments that nobody holds, and into which nothing is being loaded."""
    t = cache.table
    return (t.pins == 0) & (t.length > 0) & ~jnp.any(t.life == Life.LOADING, axis=1)


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


def free_segments(cache: Cache, rows: jax.Array, mask: jax.Array, *, listed: bool = True) -> Cache:
    """Frees whole unpinned segments `i32[K]` (no repeats): forms, pages, index entries, row.

    With `listed` False of segments that were never published: they are in no index.
    """
    N = cache.layout.segments
    mask = mask & (rows < N) & (take(cache.table.pins, rows, 1) == 0)
    cache = unlist(cache, rows, mask) if listed else cache
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
        life=put(t.life, at, move(seg.life, jnp.ones_like(seg.life, bool), Life.EMPTY)),
        form=put(t.form, at, jnp.zeros_like(seg.form)),
        version=put(t.version, at, bumped(seg.version, readable=False)),
        length=put(t.length, at, jnp.zeros_like(seg.length)),
    )
    return push_rows(dataclasses.replace(cache, table=table), rows, mask)


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
    check_cache(cache)
    check_array("rows", rows, jnp.int32, None)
    check_array("forms", forms, bool, FORMS)
    return _drop(cache, rows, forms)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _drop(cache: Cache, rows: jax.Array, forms: jax.Array):
    return drop_forms(cache, rows, forms, first_of(rows, cache.layout.segments))


def invalidate(cache: Cache, rows: jax.Array) -> tuple[Cache, jax.Array]:
    """Marks segments STALE in all their forms, pinned or not: no query returns them again.

    Donates `cache`. Running leases on them fail their next check; memory returns by eviction,
    stale segments first.

    Args:
        cache: the cache.
        rows: `bool[N]` which segments.

    Returns:
        The cache, and `i32[]` how many changed.
    """
    check_cache(cache)
    check_array("rows", rows, bool, cache.layout.segments)
    return _invalidate(cache, rows)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _invalidate(cache: Cache, rows: jax.Array) -> tuple[Cache, jax.Array]:
    every = jnp.arange(cache.layout.segments, dtype=jnp.int32)
    cache, moved = set_life(cache, every, jnp.ones(FORMS, bool), Life.STALE, rows)
    return cache, jnp.sum(jnp.any(moved, -1), dtype=jnp.int32)
