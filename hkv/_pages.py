"""Handing out and taking back pages and segment rows. Stacks of ids; every page has one owner."""

import dataclasses

import jax
import jax.numpy as jnp

from hkv._cache import Cache, Pool, check_cache
from hkv._slots import put, take


def pop_pages(pool: Pool, want: jax.Array, owner: jax.Array) -> tuple[Pool, jax.Array]:
    """Hands out a page for each True of `want`; the caller has checked that enough are free.

    Args:
        pool: one group's pool.
        want: `bool[K]`.
        owner: `i32[K]` new owner of each page.

    Returns:
        The pool and `i32[K]` page ids, 0 where none was wanted.
    """
    P = pool.owner.shape[0]
    rank = jnp.cumsum(want.astype(jnp.int32)) - 1
    page = jnp.where(want, take(pool.free, pool.n_free - 1 - rank, 0), 0)
    pool = dataclasses.replace(
        pool,
        owner=put(pool.owner, jnp.where(want, page, P), owner),
        n_free=pool.n_free - jnp.sum(want, dtype=jnp.int32),
    )
    return pool, page


def push_pages(pool: Pool, pages: jax.Array, mask: jax.Array, free_owner: int) -> Pool:
    """Takes pages back. The null page and pages that are free already are left alone.

    Args:
        pool: one group's pool.
        pages: `i32[K]`, without repeats among the nonzero ones.
        mask: `bool[K]` which of them.
        free_owner: the owner number that means free (N).
    """
    P = pool.owner.shape[0]
    mask = mask & (pages > 0) & (take(pool.owner, pages, free_owner) != free_owner)
    rank = jnp.cumsum(mask.astype(jnp.int32)) - 1
    return dataclasses.replace(
        pool,
        free=put(pool.free, jnp.where(mask, pool.n_free + rank, P), pages),
        owner=put(
            pool.owner, jnp.where(mask, pages, P), jnp.full(pages.shape, free_owner, jnp.int32)
        ),
        n_free=pool.n_free + jnp.sum(mask, dtype=jnp.int32),
    )


def pop_rows(cache: Cache, want: jax.Array) -> tuple[Cache, jax.Array]:
    """Hands out a segment row for each True of `want` `bool[K]`; N where none was wanted."""
    N = cache.layout.segments
    rank = jnp.cumsum(want.astype(jnp.int32)) - 1
    row = jnp.where(want, take(cache.free_rows, cache.n_free_rows - 1 - rank, N), N)
    n = cache.n_free_rows - jnp.sum(want, dtype=jnp.int32)
    return dataclasses.replace(cache, n_free_rows=n), row


def push_rows(cache: Cache, rows: jax.Array, mask: jax.Array) -> Cache:
    """Takes segment rows back; the caller has emptied them."""
    N = cache.layout.segments
    mask = mask & (rows < N)
    rank = jnp.cumsum(mask.astype(jnp.int32)) - 1
    return dataclasses.replace(
        cache,
        free_rows=put(cache.free_rows, jnp.where(mask, cache.n_free_rows + rank, N), rows),
        n_free_rows=cache.n_free_rows + jnp.sum(mask, dtype=jnp.int32),
    )


def used_pages(cache: Cache) -> jax.Array:
    """`i32[G]`: pages that are not free, null page not counted."""
    return jnp.stack([p.owner.shape[0] - 1 - p.n_free for p in cache.pools]).astype(jnp.int32)


def occupancy(cache: Cache) -> dict[str, jax.Array]:
    """Pages per group: `free`, `live` (of a stored segment nobody holds), `pinned`, `capacity`.

    Counted from the owners, so that their sum being the capacity says something.

    Returns:
        `i32[G]` each.
    """
    check_cache(cache)
    return _occupancy(cache)


@jax.jit
def _occupancy(cache: Cache) -> dict[str, jax.Array]:
    N = cache.layout.segments
    out: dict[str, list[jax.Array]] = {"free": [], "live": [], "pinned": [], "capacity": []}
    for pool in cache.pools:
        owner = pool.owner[1:]
        held = (take(cache.table.pins, owner, 0) > 0) | (owner > N)
        out["free"].append(pool.n_free)
        out["live"].append(jnp.sum((owner < N) & ~held, dtype=jnp.int32))
        out["pinned"].append(jnp.sum((owner != N) & held, dtype=jnp.int32))
        out["capacity"].append(jnp.asarray(owner.shape[0], jnp.int32))
    return {k: jnp.stack(v) for k, v in out.items()}
