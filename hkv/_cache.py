"""The cache as immutable pytrees of arrays, one row per token segment.

Letters: N segments, B tokens per segment, G groups, F forms, P pages, R rows per page, L layers,
M leases. Nothing here decides anything; see the query, admission and write modules.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from hkv._arguments import check_type
from hkv._layout import DEVICE_FORMS, FORMS, Layout
from hkv._lifecycle import Life
from hkv._slots import take

PROBE = 16  # index slots looked at for one key
WAYS = 4  # segments remembered per opening of a segment's tokens
_pytree = jax.tree_util.register_dataclass


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """What is known of each segment. With the leading N dropped, of one segment."""

    version: jax.Array  # u32[N], bumped on every transition, never reset; see `bumped`
    form: jax.Array  # u8[N], bit f set where form f is READY on the device
    life: jax.Array  # u8[N, F], lifecycle state per form
    key: jax.Array  # u32[N, 2], of the prefix through this segment; proposes, proves nothing
    before: jax.Array  # u32[N, 2], key of the prefix before it
    parent: jax.Array  # i32[N], row of the segment before; N at the start of a prefix
    parent_born: jax.Array  # u32[N], the parent's `born`, so a reused row is not a parent
    born: jax.Array  # u32[N], `version` when this segment took the row
    start: jax.Array  # i32[N], absolute position of the first token
    length: jax.Array  # i32[N], tokens; under B only in the last segment of a sequence
    identity: jax.Array  # u32[N, 4], digest of salt, adapter and model
    media: jax.Array  # u32[N, 4], digest of the images and such inside; 0 for none
    epoch: jax.Array  # u32[N], version of the weights that made the payload
    indexer_version: jax.Array  # u32[N]
    provenance: jax.Array  # u8[N]
    tenant: jax.Array  # u32[N], digest of the salt
    worth: jax.Array  # u8[N], `Worth` of the boundaries that its windows and tails keep alive
    used: jax.Array  # u32[N, F], clock of the last use per form
    pins: jax.Array  # i32[N], leases that hold the segment
    children: jax.Array  # i32[N], stored segments whose parent this is
    place: jax.Array  # u8[N], where the DISK form lies
    pages: tuple[jax.Array, ...]  # per group i32[N, pages per segment]; 0 for none
    abi: jax.Array  # u32[N, G]
    codes: jax.Array  # u32[N, G, shards], byte layout per shard; 0 where a shard lacks its part
    held: jax.Array  # i32[N, G, 2], positions [lo, hi) whose rows are complete
    digest: jax.Array  # u32[N, G, 2], of the held rows; 0 for none
    copied: jax.Array  # i32[N, G, 2], positions [lo, hi) whose rows the DISK form has
    written: jax.Array  # u32[N, G], second word of the stamps of the group's pages


Segment = Table  # one row of the table is the same pytree without N


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """The pages of one group. Page 0 is the null page: zero, never handed out."""

    data: jax.Array  # [L, P, R, *row]
    stamp: jax.Array  # u32[P, 2], (segment row, written), set by the scatter of the payload
    owner: jax.Array  # i32[P], segment row; N where free; N + 1 + m where lease slot m holds it
    free: jax.Array  # i32[P], stack of free page ids
    n_free: jax.Array  # i32[]


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Caps:
    """Limits on what may be occupied. K caps, named by `cap_names`; T tenants."""

    weight: jax.Array  # i32[K, G], what a page of each group counts
    limit: jax.Array  # i32[1 + T, K], for everybody together, then for each tenant
    tenant: jax.Array  # u32[T], whose limits; 0 for nobody's


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """The whole state. Functions take it first and return the new one first."""

    table: Table
    tokens: jax.Array  # i32[N, B], written once per segment
    index: jax.Array  # i32[H + PROBE], rows by key; N where empty
    tags: jax.Array  # u32[H + PROBE], second key word of the row in `index`
    openings: jax.Array  # i32[H2, WAYS], rows by parent and first tokens, newest first
    pools: tuple[Pool, ...]
    free_rows: jax.Array  # i32[N], stack of free segment rows
    n_free_rows: jax.Array  # i32[]
    serials: jax.Array  # u32[M, 3], serial of the lease in each slot; 0 where free
    reached: jax.Array  # i32[M], tokens that the request in each slot has stored
    tenants: jax.Array  # u32[M], tenant of the lease in each slot
    caps: Caps  # changeable
    clock: jax.Array  # u32[], counts operations
    layout: Layout = jax.tree.static()

    def segment(self, i: int) -> Segment:
        """Segment row `i` as a small pytree of its own.

        Raises:
            IndexError: no such row.
        """
        if isinstance(i, bool) or not isinstance(i, int | np.integer):
            raise TypeError(f"`i` is {i!r}; give the number of a row")
        if not 0 <= i < self.layout.segments:
            raise IndexError(f"`i` is {i}; rows are 0 to {self.layout.segments - 1}")
        return _row_of(self.table, jax.device_put(np.int32(i)))

    def __repr__(self) -> str:
        if not isinstance(self.clock, jax.Array) or isinstance(self.clock, jax.core.Tracer):
            return f"Cache(layout={self.layout!r})"
        n = self.layout.segments
        size = sum(nbytes(self.layout).values()) / 2**20
        text = [
            f"Cache: {n - int(self.n_free_rows)} of {n} segments of "
            f"{self.layout.segment_tokens} tokens, {size:.1f} MiB"
        ]
        for g, p in zip(self.layout.groups, self.pools, strict=True):
            text.append(
                f"  {g.name}: {g.form.name} {g.rule}, {len(g.layers)} layers, "
                f"{g.pages - 1 - int(p.n_free)} of {g.pages - 1} pages of {g.page_bytes:,} bytes, "
                f"ABI {g.fingerprint():08x}"
            )
        return "\n".join(text)


def check_cache(cache: Cache) -> None:
    """Refuses what is no cache, and one that a donation has used up.

    Raises:
        TypeError: another type.
        ValueError: its arrays are gone.
    """
    check_type("cache", cache, Cache)
    arrays = [a for a in jax.tree.leaves(cache) if isinstance(a, jax.Array)]
    if any(not isinstance(a, jax.core.Tracer) and a.is_deleted() for a in arrays):
        raise ValueError(
            "`cache` was donated to a function that changed it; go on with the one it returned"
        )


def cap_names(layout: Layout) -> list[tuple[str, str]]:
    """What each of the K caps limits, and in which unit."""
    forms = [f.name for f in DEVICE_FORMS]
    return [
        *((f, "pages") for f in forms), *((g.name, "pages") for g in layout.groups),
        *((f, "bytes") for f in forms), ("shared", "bytes"),
    ]  # fmt: skip


def cap_unit(layout: Layout) -> int:
    """Bytes per unit of the caps in bytes: the finest in which the pools fit 30 bits."""
    unit = math.gcd(*(g.page_bytes for g in layout.groups))
    total = sum(g.page_bytes * g.pages for g in layout.groups)
    return unit * max(1, 2 ** math.ceil(math.log2(total / unit / 2**30)))


def cap_weights(layout: Layout) -> np.ndarray:
    """`i32[K, G]`: what a page of each group counts against each cap."""
    forms = np.array([[g.form == f for g in layout.groups] for f in DEVICE_FORMS])
    unit = cap_unit(layout)
    size = np.array([-(-g.page_bytes // unit) for g in layout.groups])
    every = np.ones((1, len(layout.groups)), bool)
    rows = [forms, np.eye(len(layout.groups)), forms * size, every * size]
    return np.concatenate(rows).astype(np.int32)


def index_slots(layout: Layout) -> int:
    """H, the slots of the hash index: a power of two of at least four per segment."""
    return 1 << math.ceil(math.log2(4 * layout.segments))


def openings_of(layout: Layout) -> tuple[int, ...]:
    """Lengths of the openings by which a partly shared segment is found: powers of four."""
    n, out = 1, []
    while n <= layout.segment_tokens:
        out.append(n)
        n *= 4
    return tuple(out)


def _make(layout: Layout) -> Cache:
    N, G, B = layout.segments, len(layout.groups), layout.segment_tokens
    H = index_slots(layout)

    def zeros(dtype, *shape):
        return jnp.zeros(shape, dtype)

    u32, i32, u8 = jnp.uint32, jnp.int32, jnp.uint8
    table = Table(
        version=zeros(u32, N), form=zeros(u8, N), life=zeros(u8, N, FORMS), key=zeros(u32, N, 2),
        before=zeros(u32, N, 2),
        parent=jnp.full(N, N, i32), parent_born=zeros(u32, N), born=zeros(u32, N),
        start=zeros(i32, N), length=zeros(i32, N), identity=zeros(u32, N, 4),
        media=zeros(u32, N, 4), epoch=zeros(u32, N), indexer_version=zeros(u32, N),
        provenance=zeros(u8, N), tenant=zeros(u32, N), worth=zeros(u8, N),
        used=zeros(u32, N, FORMS), pins=zeros(i32, N),
        children=zeros(i32, N), place=zeros(u8, N),
        pages=tuple(zeros(i32, N, layout.segment_pages(g)) for g in layout.groups),
        abi=zeros(u32, N, G), codes=zeros(u32, N, G, layout.shards), held=zeros(i32, N, G, 2),
        digest=zeros(u32, N, G, 2), copied=zeros(i32, N, G, 2), written=zeros(u32, N, G),
    )  # fmt: skip
    pools = tuple(
        Pool(
            data=jnp.zeros((len(g.layers), g.pages, g.rows_per_page, *g.row), g.dtype),
            stamp=jnp.full((g.pages, 2), N, u32),
            owner=jnp.full(g.pages, N, i32),
            free=g.pages - 1 - jnp.arange(g.pages, dtype=i32),
            n_free=jnp.asarray(g.pages - 1, i32),
        )
        for g in layout.groups
    )
    weight, T = cap_weights(layout), layout.tenants
    most = weight @ np.array([g.pages - 1 for g in layout.groups], np.int32)
    caps = Caps(
        weight=jnp.asarray(weight), limit=jnp.asarray(np.repeat(most[None], 1 + T, axis=0)),
        tenant=zeros(u32, T),
    )  # fmt: skip
    return Cache(
        table=table, tokens=zeros(i32, N, B), index=jnp.full(H + PROBE, N, i32),
        tags=zeros(u32, H + PROBE), openings=jnp.full((H, WAYS), N, i32), pools=pools,
        free_rows=N - 1 - jnp.arange(N, dtype=i32), n_free_rows=jnp.asarray(N, i32),
        serials=zeros(u32, layout.leases, 3), reached=zeros(i32, layout.leases),
        tenants=zeros(u32, layout.leases), caps=caps, clock=jnp.asarray(0, u32),
        layout=layout,
    )  # fmt: skip


def abstract(layout: Layout) -> Cache:
    """The cache of `layout` as shapes and dtypes; nothing is allocated."""
    check_type("layout", layout, Layout)
    return jax.eval_shape(lambda: _make(layout))


def nbytes(layout: Layout) -> dict[str, int]:
    """Device bytes per group, and of everything else under `"table"`."""
    check_type("layout", layout, Layout)
    c = abstract(layout)

    def size(tree):
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))

    out = {g.name: size(p) for g, p in zip(layout.groups, c.pools, strict=True)}
    out["table"] = size(c) - sum(out.values())
    return out


def init(layout: Layout, sharding: jax.sharding.NamedSharding | None = None) -> Cache:
    """An empty cache.

    Args:
        layout: the static description.
        sharding: how the pools' data (`[L, P, R, *row]`) is spread; the rest is replicated on
            the same mesh. Without one, everything lies on the default device.

    Raises:
        TypeError: no layout, or another kind of sharding.
        ValueError: a sharding over another number of devices than `layout.shards`, or one that
            does not divide a pool, or a dtype that JAX has switched off.
    """
    check_type("layout", layout, Layout)
    if sharding is not None:
        check_type("sharding", sharding, jax.sharding.NamedSharding)
    for g in layout.groups:
        if jax.dtypes.canonicalize_dtype(g.dtype) != g.dtype:
            raise ValueError(
                f"`dtype` of group {g.name!r} is {g.dtype}, which JAX has switched off; "
                "enable x64 or use 32 bits"
            )
    devices = 1 if sharding is None else len(sharding.device_set)
    if devices != layout.shards:
        raise ValueError(
            f"`sharding` covers {devices} devices but the layout says `shards`={layout.shards}; "
            "make them equal"
        )
    if sharding is None:
        return jax.jit(_make, static_argnums=0)(layout)
    for g, pool in zip(layout.groups, abstract(layout).pools, strict=True):
        try:
            sharding.shard_shape(pool.data.shape)
        except (ValueError, IndexError) as error:
            raise ValueError(f"`sharding` does not divide group {g.name!r}: {error}") from None
    whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    out = jax.tree.map(lambda _: whole, abstract(layout))
    pools = tuple(dataclasses.replace(p, data=sharding) for p in out.pools)
    out = dataclasses.replace(out, pools=pools)
    return jax.jit(_make, static_argnums=0, out_shardings=out)(layout)


def bumped(version: jax.Array, *, readable: bool) -> jax.Array:
    """`u32[...]`: the version after a transition.

    The upper 24 bits are the generation: who read the segment before may go on only within one.
    A transition that leaves every payload readable where it was, such as publication, stays in it.
    """
    return version + 1 if readable else (version | jnp.uint32(0xFF)) + 1


def same_generation(a: jax.Array, b: jax.Array) -> jax.Array:
    """`bool[...]`: whether what was readable at version `a` is so at `b`."""
    return (a >> 8) == (b >> 8)


def rows_of(table: Table, rows: jax.Array) -> Segment:
    """The segments at `rows` (`i32[...]`); a row of N reads as an EMPTY segment of length 0."""
    return jax.tree.map(lambda a: take(a, rows, 0), table)


_row_of = jax.jit(rows_of)


def form_bits(life: jax.Array) -> jax.Array:
    """`u8[...]` form bits of `life` `u8[..., F]`: which device forms are READY."""
    bits = [(life[..., f] == Life.READY).astype(jnp.uint8) << f for f in DEVICE_FORMS]
    return functools.reduce(jnp.bitwise_or, bits)
