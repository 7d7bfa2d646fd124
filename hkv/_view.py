"""Reading and writing a chunk of tokens through leased pages, validated in the same program."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from hkv._arguments import check_array, check_type
from hkv._cache import Cache
from hkv._lease import Lease, check_fits, check_lease
from hkv._lease import advance as next_lease
from hkv._rules import Kind, required
from hkv._slots import put, take
from pallas_kernels import gather_rows, scatter_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A batch of requests in front of one chunk of tokens each. Made by `view`, ended by `append`.

    Rows written are kept aside until `append` stores all layers of a group in one scatter, so
    that the pools are read as they were and updated in place.
    """

    cache: Cache
    lease: Lease
    position: jax.Array  # i32[Q], of the chunk's first token, from the start of the request
    count: jax.Array  # i32[Q], tokens of the chunk that are real
    ok: (
        jax.Array
    )  # bool[Q], lease and stamps hold; a request that fails reads zeros, writes nothing
    pending: dict[str, dict[int, jax.Array]]  # per group and layer, new rows [Q, E, *row]

    @property
    def length(self) -> int:
        """Bound on the tokens of any request."""
        return self.lease.rows.shape[1] * self.cache.layout.segment_tokens

    def read(self, group: str, layer: int, index: jax.Array, new: jax.Array):
        """Rows of one layer, from this chunk or from pages.

        Args:
            group: name of the group.
            layer: model layer number.
            index: `i32[Q, K]` row numbers from the start of the request, 0 or more.
            new: `[Q, E, *row]`; `new[q, i]` is row `position[q] // unit + i`, of this chunk.

        Returns:
            `[Q, K, *row]` rows in the dtype of `new`, zeros where not valid, and `bool[Q, K]`.
        """
        g = self._group(group, layer, new)
        spec, pool = self.cache.layout.groups[g], self.cache.pools[g]
        check_array("index", index, jnp.int32, self.position.shape[0], None)
        u = spec.rule.unit
        close = (index + 1) * u - 1
        wlo, whi, hlo, hhi = self._spans(g)
        writes = (wlo <= close) & (close < whi)
        here, end = self.position[:, None], (self.position + self.count)[:, None]
        first = here // u
        fresh = writes & (close >= here) & (close < end) & (index < first + new.shape[1])
        stored = jnp.where(writes, close < here, (index * u >= hlo) & (close < hhi))
        ok = self.ok[:, None]
        rows, valid = gather_rows(
            pool.data, pool.stamp, spec.layers.index(layer), self.lease.pages[g], index,
            _expect(self.lease, g), stored & ok & (index >= 0),
        )  # fmt: skip
        spot = jnp.clip(index - first, 0, new.shape[1] - 1)
        tail = (1,) * (new.ndim - 2)
        made = jnp.take_along_axis(new, spot.reshape(*spot.shape, *tail), axis=1)
        made = made.astype(pool.data.dtype)  # what a later read of the page would give
        fresh = (fresh & ok & (index >= 0)).reshape(*index.shape, *tail)
        rows = jnp.where(fresh, made, rows).astype(new.dtype)
        return rows, valid | fresh.reshape(index.shape)

    def write(self, group: str, layer: int, new: jax.Array) -> "View":
        """A view that also stores `new` (`[Q, E, *row]`, placed as in `read`)."""
        self._group(group, layer, new)
        mine = {**self.pending.get(group, {}), layer: new}
        return dataclasses.replace(self, pending={**self.pending, group: mine})

    def _group(self, group: str, layer: int, new) -> int:
        """The number of a group, once the arguments of `read` and `write` fit it."""
        lay = self.cache.layout
        g = lay.group(group)
        spec = lay.groups[g]
        if layer not in spec.layers:
            raise ValueError(f"`layer` is {layer}; group {group!r} has layers {spec.layers}")
        if spec.rule.kind is Kind.STATE:
            raise ValueError(
                f"`group` is {group!r}: recurrent states cannot be read or written yet"
            )
        if new.shape[0] != self.position.shape[0] or new.shape[2:] != spec.row:
            raise ValueError(
                f"`new` has shape {new.shape}; give [{self.position.shape[0]}, E, "
                f"{', '.join(map(str, spec.row))}] for group {group!r}"
            )
        return g

    def _spans(self, g: int):
        w, h = self.lease.write[:, g], self.lease.have[:, g]
        return w[:, :1], w[:, 1:], h[:, :1], h[:, 1:]


def _expect(lease: Lease, g: int) -> jax.Array:
    """`u32[Q, C, 2]`: the stamp that each page in the block table must carry."""
    Q, S = lease.rows.shape
    per = lease.pages[g].shape[1] // S
    words = jnp.stack([lease.rows.astype(jnp.uint32), lease.written[:, g]], -1)
    return jnp.repeat(words, per, axis=1)


def stamps_hold(cache: Cache, lease: Lease, position: jax.Array) -> jax.Array:
    """`bool[Q]`: every page that a chunk at `position` may read still carries its stamp."""
    ok = jnp.ones(position.shape, bool)
    for g, spec in enumerate(cache.layout.groups):
        if spec.rule.kind is Kind.STATE:
            continue
        u, tokens = spec.rule.unit, spec.rows_per_page * spec.rule.unit
        pages = lease.pages[g]
        lo = jnp.arange(pages.shape[1], dtype=jnp.int32)[None] * tokens
        hi = lo + tokens
        wlo, whi = (lease.write[:, g, i, None] // u * u for i in (0, 1))
        hlo, hhi = (lease.have[:, g, i, None] // u * u for i in (0, 1))
        done = jnp.minimum(whi, position[:, None] // u * u)
        made = (lo < done) & (hi > wlo) & (wlo < done)
        kept = (lo < hhi) & (hi > hlo) & (hlo < hhi) & ~((lo >= wlo) & (hi <= whi))
        stamp = take(cache.pools[g].stamp, pages, 0)
        right = jnp.all(stamp == _expect(lease, g), -1) & (pages > 0)
        ok &= jnp.all(right | ~(made | kept), axis=-1)
    return ok


def covers(cache: Cache, lease: Lease, position: jax.Array) -> jax.Array:
    """`bool[Q]`: what the lease holds or wrote covers what a resume at `position` requires."""
    ok = jnp.ones(position.shape, bool)
    for g, spec in enumerate(cache.layout.groups):
        if spec.rule.kind is Kind.STATE:
            continue
        lo, hi = (x * spec.rule.unit for x in required(spec.rule, position))
        kept, end, made = lease.have[:, g, 0], lease.have[:, g, 1], lease.write[:, g, 0]
        first = jnp.where((kept < end) & (end >= made), kept, made)
        ok &= (lo >= hi) | (first <= lo) | ((kept <= lo) & (end >= hi))
    return ok


def has_pages(cache: Cache, lease: Lease, begin: jax.Array, end: jax.Array) -> jax.Array:
    """`bool[Q]`: there are pages for tokens `[begin, end)`; see `ahead` in `Layout`."""
    ok = jnp.ones(begin.shape, bool)
    for spec, pages in zip(cache.layout.groups, lease.pages, strict=True):
        tokens = spec.rows_per_page * spec.rule.unit
        lo = jnp.arange(pages.shape[1], dtype=jnp.int32)[None] * tokens
        ok &= jnp.all((pages > 0) | (lo >= end[:, None]) | (lo + tokens <= begin[:, None]), axis=-1)
    return ok


def view(cache: Cache, lease: Lease, count: jax.Array, position: jax.Array | None = None) -> View:
    """The cache in front of the next chunk, with the lease and every page stamp checked here.

    Call it in the jitted program that reads. A request whose segment changed version, whose page
    was rewritten, whose plan was not recovered, or whose chunk would leave a gap, end past `total`,
    or reach further ahead of the last `trim` than the layout says, reads zeros, writes nothing, and
    is False in `ok`: route it again.

    Args:
        cache: the cache as it is now.
        lease: what the requests hold.
        count: `i32[Q]` tokens of the chunk that are real; never more than the model runs.
        position: `i32[Q]` where the chunk starts; by default where each request stands.
    """
    check_fits(cache, lease)
    Q = lease.length.shape[0]
    check_array("count", count, jnp.int32, Q)
    position = lease.length if position is None else position
    check_array("position", position, jnp.int32, Q)
    made = view_of_replay(cache, lease, count, position)
    ok = made.ok & covers(cache, lease, position)
    if cache.layout.ahead:
        ok &= has_pages(cache, lease, position, position + count)
    return dataclasses.replace(made, ok=ok)


def view_of_replay(cache: Cache, lease: Lease, count: jax.Array, position: jax.Array) -> View:
    """A view for a run that makes what is missing, and so cannot have it yet."""
    ok = check_lease(cache, lease) & stamps_hold(cache, lease, position)
    ok &= (position >= 0) & (position <= lease.length)  # no gaps
    ok &= (count >= 0) & (count <= lease.total - position)
    return View(cache=cache, lease=lease, position=position, count=count, ok=ok, pending={})


def _when_read(done: View, after: Any) -> View:
    """A view whose pools and `ok` XLA knows only once rows to write and `after` are computed.

    On one device the order is also a dependency of data, because XLA for a CPU drops barriers
    before it decides what to copy (jaxlib 0.10.2). Over shards that would be a collective.
    """
    if done.cache.layout.shards > 1:
        return jax.lax.optimization_barrier((done, after))[0]
    never = done.lease.slot < 0  # which XLA cannot know
    ok = done.ok
    for x in jax.tree.leaves((done.pending, after)):
        ok &= ~(never & jnp.any(x != 0))
    return dataclasses.replace(done, ok=ok)


def append(
    done: View, advance: bool = True, *, after: Any = None
) -> tuple[Cache, Lease, jax.Array]:
    """Stores the rows that a model wrote, with their page stamps, one scatter per group.

    In place where the caller's outermost jit donates the cache and `after` holds what else was
    computed from rows that were read: XLA copies a whole pool if it may read it after the write.
    Only pages that the lease may write are written; requests that are not ok are left as they
    were.

    Args:
        done: the view as the model returned it.
        advance: whether the lease's length moves on; a replay leaves it.
        after: the model's outputs, any pytree of arrays; they are computed before anything is
            written.

    Returns:
        The cache, the lease, and `bool[Q]`: which requests were served.
    """
    check_type("done", done, View)
    done = _when_read(done, after)
    cache, lease = done.cache, done.lease
    lay = cache.layout
    for spec in lay.groups:
        if spec.rule.kind is not Kind.STATE and spec.name not in done.pending:
            raise ValueError(f"`{spec.name}` was not written; write rows of every group of `done`")
    pools, ok = list(cache.pools), done.ok
    # Rows that were published, or that a branch reads as well, stay as they are.
    own = lease.own & (take(cache.table.length, lease.rows, 1) == 0)
    own &= take(cache.table.pins, lease.rows, 0) == 1
    if advance:
        # New tokens, also after a step back, replace nothing but what this request wrote.
        begin = jnp.arange(own.shape[1], dtype=jnp.int32)[None] * lay.segment_tokens
        lo, hi = done.position[:, None], (done.position + done.count)[:, None]
        theirs = (begin < hi) & (begin + lay.segment_tokens > lo) & ~own
        idle = (done.count <= 0) & (done.position >= lease.length)
        ok &= idle | ~(jnp.any(theirs, 1) | jnp.any(lo < lease.write[..., 0], 1))
    for name, layers in done.pending.items():  # a chunk narrower than `count` says is not stored
        u = lay.groups[lay.group(name)].rule.unit
        closing = (done.position + done.count) // u - done.position // u
        ok &= jnp.stack([closing <= x.shape[1] for x in layers.values()]).all(0)
    for name, layers in done.pending.items():
        g = lay.group(name)
        spec, pool = lay.groups[g], cache.pools[g]
        if set(layers) != set(spec.layers):
            raise ValueError(
                f"`{name}` was written for layers {sorted(layers)}; its layers are {spec.layers}"
            )
        u = spec.rule.unit
        rows = jnp.stack([layers[i] for i in spec.layers]).astype(pool.data.dtype)
        here = done.position[:, None]
        index = here // u + jnp.arange(rows.shape[2], dtype=jnp.int32)[None]
        close = (index + 1) * u - 1
        wlo, whi, _, _ = done._spans(g)
        keep = (wlo <= close) & (close < whi) & (close >= here)
        keep &= (close < here + done.count[:, None]) & ok[:, None]
        column = index * u // lay.segment_tokens
        mine = own | lease.private[:, g]
        keep &= jnp.take_along_axis(mine, jnp.minimum(column, mine.shape[1] - 1), axis=1)
        data, stamp = scatter_rows(
            pool.data, pool.stamp, lease.pages[g], index, rows, _expect(lease, g), keep
        )
        pools[g] = dataclasses.replace(pool, data=data, stamp=stamp)
    if advance:
        moved = jnp.where(ok, done.position + done.count, lease.length)
        lease = dataclasses.replace(lease, length=moved)
        more = ok & (done.count > 0)
        slot = jnp.where(more, lease.slot, lay.leases)
        cache = dataclasses.replace(cache, reached=put(cache.reached, slot, moved))
        cache, lease = next_lease(cache, lease, more)
    return dataclasses.replace(cache, pools=tuple(pools)), lease, ok
