"""A lease: the pages a batch of requests may read and write, with what was verified about them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from hkv._arguments import check_type
from hkv._cache import Cache, check_cache, same_generation
from hkv._evict import free_segments
from hkv._identity import Need
from hkv._pages import push_pages
from hkv._slots import add, put, take

FOREVER = 2**31 - 1  # end of a write range that has none


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Q running requests of up to S segments. Positions count from the start of the request.

    The newest one counts: `recover`, `append`, `publish` and `trim` return the next, and the one
    before no longer holds. Of each group, rows in `write` are what the present run makes, in place
    of what pages may hold there; other rows exist where they lie in `have`.
    """

    slot: jax.Array  # i32[Q], lease slot; M where the request holds none
    serial: jax.Array  # u32[Q, 3], clock when it was taken, digest of the plan, changes since
    rows: jax.Array  # i32[Q, S], segments; N past the end
    version: jax.Array  # u32[Q, S], their versions when verified
    own: jax.Array  # bool[Q, S], segments that this request may write
    pages: tuple[jax.Array, ...]  # per group i32[Q, S * pages per segment]
    written: jax.Array  # u32[Q, G, S], second word of the pages' stamps
    private: jax.Array  # bool[Q, G, S], pages that are the lease's, beside a shared segment's
    length: jax.Array  # i32[Q], tokens whose rows are complete
    total: jax.Array  # i32[Q], tokens that were reserved
    have: jax.Array  # i32[Q, G, 2], positions held
    write: jax.Array  # i32[Q, G, 2], positions that a run writes
    need: Need  # what the request was verified under, and is published under


def check_fits(cache: Cache, lease: Lease) -> None:
    """Refuses what is no lease, or one of another layout."""
    check_cache(cache)
    check_type("lease", lease, Lease)
    Q, S = lease.rows.shape
    want = [(Q, S * cache.layout.segment_pages(g)) for g in cache.layout.groups]
    if [p.shape for p in lease.pages] != want:
        raise ValueError(
            f"`lease` has block tables {[p.shape for p in lease.pages]}, this cache's are {want}; "
            "give a lease of this cache"
        )


def held_by(cache: Cache, lease: Lease) -> jax.Array:
    """`bool[...]`: the lease was taken in this cache and not released; with or without Q."""
    same = jnp.all((take(cache.serials, lease.slot, 0) == lease.serial)[..., :2], axis=-1)
    return same & (lease.serial[..., 0] > 0)


def advance(cache: Cache, lease: Lease, ok: jax.Array) -> tuple[Cache, Lease]:
    """The next of leases that changed, where `ok` `bool[Q]`; those before no longer hold."""
    serial = lease.serial.at[:, 2].add(ok.astype(jnp.uint32))
    slot = jnp.where(ok, lease.slot, cache.layout.leases)
    cache = dataclasses.replace(cache, serials=put(cache.serials, slot, serial))
    return cache, dataclasses.replace(lease, serial=serial)


def check_lease(cache: Cache, lease: Lease) -> jax.Array:
    """`bool[Q]`: the lease is the newest of one still held, of what the cache has stored for it,
    and its segments are of the generation it verified.

    This is the state pointer; the data pointer (page stamps) is checked where pages are read.
    """
    check_fits(cache, lease)
    newest = take(cache.serials, lease.slot, 0)[:, 2] == lease.serial[:, 2]
    held = held_by(cache, lease) & newest & (lease.length <= take(cache.reached, lease.slot, 0))
    now = take(cache.table.version, lease.rows, 0)
    same = same_generation(now, lease.version) | (lease.rows >= cache.layout.segments)
    return held & jnp.all(same, axis=-1)


def release(cache: Cache, lease: Lease) -> Cache:
    """Gives leases back: pins, private pages, and segments that were never published.

    Donates `cache`. Releasing twice does nothing the second time.
    """
    check_fits(cache, lease)
    return _release(cache, lease)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _release(cache: Cache, lease: Lease) -> Cache:
    def one(c: Cache, x: Lease):
        N, M = c.layout.segments, c.layout.leases
        held = held_by(c, x)
        mine = held & (x.rows < N)
        at = jnp.where(mine, x.rows, N)
        pins = add(c.table.pins, at, jnp.full(at.shape, -1, jnp.int32))
        c = dataclasses.replace(
            c,
            table=dataclasses.replace(c.table, pins=pins),
            serials=put(c.serials, jnp.where(held, x.slot, M), jnp.zeros(3, jnp.uint32)),
            clock=c.clock + 1,
        )
        unlisted = mine & (take(c.table.length, at, 1) == 0) & (take(pins, at, 1) == 0)
        c = free_segments(c, at, unlisted, listed=False)
        pools = []
        for g, pool in enumerate(c.pools):
            per = x.pages[g].shape[0] // at.shape[0]
            mask = jnp.repeat(x.private[g] & held, per)
            # A page counts as this lease's only while its owner says so.
            mask &= take(pool.owner, x.pages[g], N) == N + 1 + x.slot
            pools.append(push_pages(pool, x.pages[g], mask, N))
        return dataclasses.replace(c, pools=tuple(pools)), None

    return jax.lax.scan(one, cache, lease)[0]
