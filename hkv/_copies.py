"""Copies of segments outside of device memory: taking them, listing them, loading them back.

Nothing here touches a disk. Whoever does so moves the payload between `offload` and `offloaded`,
and between `begin_load` and `load`; in between the state says that it is under way.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from hkv._admit import Admission, Blocker, Verdict
from hkv._arguments import check_array, check_type
from hkv._cache import Cache, Segment, bumped, check_cache, rows_of, same_generation
from hkv._caps import charged, usage, weighed
from hkv._evict import _drop_pages, set_life, unlist
from hkv._identity import Need, block_keys, segment_mark
from hkv._layout import DEVICE_FORMS, FORMS, Form, Layout
from hkv._lifecycle import Life
from hkv._lookup import by_key
from hkv._pages import pop_pages, pop_rows
from hkv._publish import describe_rows, list_rows
from hkv._query import check_batch, check_need, find
from hkv._room import make_room
from hkv._route import Plan
from hkv._slots import add, first_of, put, take
from hkv._verify import payload_digest

_pytree = jax.tree_util.register_dataclass


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """Forms of K segments on their way out of device memory."""

    rows: jax.Array  # i32[K]
    forms: jax.Array  # bool[K, F], what is being copied
    segments: Segment  # [K], as they were
    payload: tuple[jax.Array, ...]  # per group [K, L, pages, R, *row]; zero where nothing is held


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """Forms of the S segments of one plan on their way into device memory."""

    rows: jax.Array  # i32[S]
    born: jax.Array  # u32[S], the segments that stood there
    forms: jax.Array  # bool[S, F], what is being loaded
    need: Need  # of one request, as the plan was made for


def _check_disk(layout: Layout) -> None:
    if not layout.disk:
        raise ValueError("`layout` has no DISK form; make it with disk=True")


def offload(cache: Cache, rows: jax.Array, forms: jax.Array) -> tuple[Cache, Copies]:
    """Takes a copy of READY forms of whole segments, to be stored; they become OFFLOADING.

    Donates `cache`. The pages go on serving leases. Rows whose payload no longer has its digest are
    left alone.

    Args:
        cache: the cache.
        rows: `i32[K]` segments; N is skipped, and so are repeats.
        forms: `bool[K, F]` which forms of each.

    Returns:
        The cache and the copies, which `offloaded` takes once they are stored, or are not.
    """
    check_cache(cache)
    _check_disk(cache.layout)
    check_array("rows", rows, jnp.int32, None)
    check_array("forms", forms, bool, rows.shape[0], FORMS)
    return _offload(cache, rows, forms)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _offload(cache: Cache, rows: jax.Array, forms: jax.Array):
    lay, N, B = cache.layout, cache.layout.segments, cache.layout.segment_tokens
    old = rows_of(cache.table, rows)
    whole = first_of(rows, N) & (old.length == B)
    right = jax.lax.map(lambda s: jnp.all(payload_digest(cache, s.pages, s) == s.digest, -1), old)
    right = jnp.stack([jnp.all(right[:, lay.forms == f], axis=1) for f in Form], axis=1)
    device = np.array([f in DEVICE_FORMS and lay.has(f) for f in Form])
    ready = forms & right & (old.life == Life.READY) & device[None]
    cache, moved = set_life(cache, rows, ready, Life.OFFLOADING, whole)
    some = jnp.any(moved, axis=1)
    disk = np.arange(FORMS) == Form.DISK
    cache, _ = set_life(cache, rows, disk[None] & (old.life == Life.STALE), Life.EMPTY, some)
    cache, first = set_life(cache, rows, disk, Life.WRITING, some)
    at = jnp.where(first[:, Form.DISK], rows, N)
    none = jnp.zeros_like(old.copied)
    table = dataclasses.replace(cache.table, copied=put(cache.table.copied, at, none))
    cache = dataclasses.replace(cache, table=table)
    copies = Copies(
        rows=rows, forms=moved, segments=rows_of(cache.table, rows),
        payload=tuple(_rows_held(cache, g, old, moved) for g in range(len(lay.groups))),
    )  # fmt: skip
    return cache, copies


def _rows_held(cache: Cache, g: int, seg: Segment, forms: jax.Array) -> jax.Array:
    """`[K, L, pages, R, *row]`: the rows that K segments hold in group `g`, others zero."""
    spec, data = cache.layout.groups[g], cache.pools[g].data
    pages = jnp.moveaxis(jnp.take(data, seg.pages[g], axis=1, mode="fill", fill_value=0), 1, 0)
    K, _, n, R = pages.shape[:4]
    lo, hi = ((seg.held[:, g, i] - seg.start)[:, None, None] for i in (0, 1))
    first = np.arange(n * R, dtype=np.int32).reshape(1, n, R) * spec.rule.unit
    there = (lo <= first) & (first < hi) & forms[:, spec.form][:, None, None]
    there = there.reshape(K, 1, n, R, *(1,) * len(spec.row))
    return jnp.where(there, pages, jnp.zeros((), data.dtype))


def offloaded(
    cache: Cache, copies: Copies, stored: jax.Array, place: jax.Array, keep: bool
) -> Cache:
    """Says what became of copies: stored segments get a DISK form that can be fetched.

    Donates `cache`. A segment that is no longer what was copied is left alone.

    Args:
        cache: the cache.
        copies: from `offload`.
        stored: `bool[K, F]` forms that were stored and will be found again.
        place: `u8[]`, the `Place`.
        keep: whether the pages stay; otherwise they go back where no lease holds them.
    """
    check_cache(cache)
    check_type("copies", copies, Copies)
    check_array("stored", stored, bool, copies.rows.shape[0], FORMS)
    check_array("place", place, jnp.uint8)
    return _offloaded(cache, copies, stored, place, keep)


@functools.partial(jax.jit, donate_argnames=("cache",), static_argnames=("keep",))
def _offloaded(cache: Cache, copies: Copies, stored, place, keep: bool) -> Cache:
    lay, N, rows = cache.layout, cache.layout.segments, copies.rows
    seg = rows_of(cache.table, rows)
    same = (seg.born == copies.segments.born) & (seg.length == copies.segments.length)
    same &= jnp.any(copies.forms, axis=1)
    # What was made anew in between, for other kernels or another indexer, is not what was copied.
    was = copies.segments
    kept = jnp.all(seg.digest == was.digest, axis=-1) & (seg.abi == was.abi)
    indexed = (lay.forms == Form.INDEXER)[None]
    kept &= ~indexed | (seg.indexer_version == was.indexer_version)[:, None]
    kept = jnp.stack([jnp.all(kept[:, lay.forms == f], axis=1) for f in Form], axis=1)
    done = copies.forms & stored & same[:, None] & kept & (seg.life == Life.OFFLOADING)
    goes = done & (seg.pins == 0)[:, None] & (not keep)
    cache, gone = set_life(cache, rows, goes, Life.ON_DISK, same)
    cache = _drop_pages(cache, rows, gone)
    cache, _ = set_life(cache, rows, copies.forms & ~goes, Life.READY, same)
    some = jnp.any(done, axis=1)
    disk = np.arange(FORMS) == Form.DISK
    writing = (seg.life == Life.WRITING) & disk[None]
    cache, _ = set_life(cache, rows, writing, Life.ON_DISK, same & some)
    cache, _ = set_life(cache, rows, writing, Life.EMPTY, same & ~some)
    copied = jnp.where(done[:, lay.forms, None], copies.segments.held, seg.copied)
    at = jnp.where(some, rows, N)
    table = dataclasses.replace(
        cache.table,
        copied=put(cache.table.copied, at, copied),
        place=put(cache.table.place, at, jnp.broadcast_to(place, at.shape)),
    )
    return dataclasses.replace(cache, table=table)


def adopt(
    cache: Cache, need: Need, tokens: jax.Array, copied: jax.Array, place: jax.Array,
    provenance: jax.Array,
) -> tuple[Cache, jax.Array]:  # fmt: skip
    """Enters copies that lie outside of device memory, so that a query answers for them too.

    Donates `cache`. Segments of the prefix that are not in the table get a row without pages; those
    that are get their DISK form. Rows are made room for as for a request. What is behind the first
    segment of which there is neither is left out.

    Args:
        cache: the cache.
        need: of one request: Q is 1.
        tokens: `i32[1, T]` of the prefix.
        copied: `i32[S, G, 2]` tokens `[lo, hi)` of each whole segment whose rows there are copies
            of; empty for none.
        place: `u8[S]`, where each lies.
        provenance: `u8[S]` of each.

    Returns:
        The cache, and `i32[]` how many segments of the prefix are in the table now.

    Raises:
        TypeError, ValueError: as `query`.
    """
    check_cache(cache)
    lay = cache.layout
    _check_disk(lay)
    check_batch(lay, tokens, jnp.zeros(tokens.shape[0], jnp.int32))
    check_need(cache, need, tokens)
    if tokens.shape[0] != 1:
        raise ValueError(f"`tokens` holds {tokens.shape[0]} requests; give one")
    S = tokens.shape[1] // lay.segment_tokens
    check_array("copied", copied, jnp.int32, S, len(lay.groups), 2)
    check_array("place", place, jnp.uint8, S)
    check_array("provenance", provenance, jnp.uint8, S)
    return _adopt(cache, need.request(0), tokens[0], copied, place, provenance)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _adopt(cache: Cache, need: Need, tokens, copied, place, provenance):
    lay, N, B = cache.layout, cache.layout.segments, cache.layout.segment_tokens
    G, S = len(lay.groups), tokens.shape[0] // B
    column = jnp.arange(S, dtype=jnp.int32)
    lo, hi = copied[..., 0], copied[..., 1]
    fits = (lo >= 0) & (lo < hi) & (hi <= B)
    there = jnp.any(fits, axis=1) & jnp.all(tokens.reshape(S, B) >= 0, axis=1)
    found = find(cache, tokens, jnp.int32(S * B), need, all_but_one=False)
    t = cache.table
    same = take(t.epoch, found.rows, 0) == need.epoch
    if lay.has(Form.INDEXER):
        same &= take(t.indexer_version, found.rows, 0) == need.indexer_version
    known = jnp.cumprod((column < found.whole) & same) > 0
    new = (jnp.cumprod(known | there) > 0) & ~known
    hold = jnp.where(known, found.rows, N)
    one = jnp.ones(S, jnp.int32)
    cache = dataclasses.replace(
        cache, table=dataclasses.replace(t, pins=add(t.pins, hold, one)), clock=cache.clock + 1
    )
    want = jnp.sum(new, dtype=jnp.int32)
    cache = make_room(cache, want, jnp.zeros(G, jnp.int32), need.tenant)
    new &= jnp.cumsum(new) <= cache.n_free_rows
    cache, fresh = pop_rows(cache, new)
    rows = jnp.where(new, fresh, hold)
    parent = jnp.concatenate([jnp.full(1, N, jnp.int32), rows[:-1]])

    begin = need.start + column * B
    nothing = jnp.broadcast_to(begin[:, None, None], (S, G, 2))
    at = jnp.where(new, rows, N)
    old = rows_of(cache.table, at)
    version = bumped(old.version, readable=False)
    zeros = jnp.zeros(S, jnp.int32)
    table = dataclasses.replace(
        cache.table,
        version=put(cache.table.version, at, version), born=put(cache.table.born, at, version),
        children=put(cache.table.children, at, zeros), pins=put(cache.table.pins, at, zeros),
        tenant=put(cache.table.tenant, at, jnp.broadcast_to(need.tenant, (S,))),
        worth=put(cache.table.worth, at, jnp.zeros(S, jnp.uint8)),
        provenance=put(cache.table.provenance, at, provenance),
    )  # fmt: skip
    cache = dataclasses.replace(cache, table=table)
    after, before = block_keys(tokens.reshape(S, B), need.identity, need.start, need.media)
    n = jnp.full(S, B, jnp.int32)
    cache = describe_rows(cache, rows, new, parent, n, begin, after, before, nothing, need)
    # What stands under the same key and is of other weights would hide it.
    other = jax.vmap(lambda key: by_key(cache, key, need.epoch))(after)
    cache = unlist(cache, other, new & (other < N))
    ids = put(cache.tokens, at, tokens.reshape(S, B))
    cache = list_rows(dataclasses.replace(cache, tokens=ids), rows, new, n)

    forms = jnp.stack([jnp.any(fits[:, lay.forms == f], axis=1) for f in Form], axis=1)
    for life in (Life.LOADING, Life.ON_DISK):  # which is where they are
        cache, _ = set_life(cache, rows, forms, life, new)
    disk = np.arange(FORMS) == Form.DISK
    cache, first = set_life(cache, rows, disk, Life.WRITING, there)
    cache, _ = set_life(cache, rows, first, Life.ON_DISK, there)
    t = cache.table
    mine = take(t.life, rows, 0)[:, Form.DISK] == Life.ON_DISK
    had = jnp.where(first[:, Form.DISK][:, None, None], 0, take(t.copied, rows, 0))
    right = fits & (take(t.abi, rows, 0) == need.abi[None])
    lacks = right & (had[..., 0] >= had[..., 1])
    had = jnp.where(lacks[..., None], copied + begin[:, None, None], had)
    at = jnp.where(mine & there, rows, N)
    up = jnp.where(new & (parent < N), parent, N)
    table = dataclasses.replace(
        t,
        copied=put(t.copied, at, had),
        place=put(t.place, jnp.where(first[:, Form.DISK], rows, N), place),
        children=add(t.children, up, one),
        pins=add(t.pins, hold, -one),
    )
    cache = dataclasses.replace(cache, table=table)
    return cache, jnp.sum(known | new, dtype=jnp.int32)


def begin_load(cache: Cache, plan: Plan) -> tuple[Cache, Loading, Admission]:
    """Reserves the pages of what a plan wants fetched; its segments stay until `end_load`.

    Donates `cache`.

    Args:
        cache: the cache.
        plan: of one request: Q is 1.

    Returns:
        The cache; what is to be loaded, nothing where the verdict is not ADMIT; the verdict.
    """
    check_cache(cache)
    _check_disk(cache.layout)
    check_type("plan", plan, Plan)
    if plan.layout != cache.layout:
        raise ValueError("`plan` was made for another layout; route a query of this cache")
    if plan.resume.shape != (1,):
        raise ValueError(f"`plan` is of {plan.resume.shape[0]} requests; give one")
    return _begin_load(cache, plan)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _begin_load(cache: Cache, plan: Plan):
    lay, N = cache.layout, cache.layout.segments
    rows, need = plan.rows[0], plan.need.request(0)
    S, G = rows.shape[0], len(lay.groups)
    seg = rows_of(cache.table, rows)
    used = rows < N
    same = same_generation(seg.version, plan.version[0])
    same &= jax.vmap(segment_mark)(seg) == plan.mark[0]
    off = (seg.life == Life.EMPTY) | (seg.life == Life.ON_DISK)
    forms = plan.fetch[0] & used[:, None]
    fresh = jnp.all((same & jnp.all(~forms | off, axis=1)) | ~used)
    groups = forms[:, lay.forms] & (seg.copied[..., 0] < seg.copied[..., 1])  # [S, G]
    per = jnp.asarray([lay.segment_pages(g) for g in lay.groups], jnp.int32)
    pages = per * jnp.sum(groups, axis=0, dtype=jnp.int32)

    # The caps and the room, as for a request.
    whose = charged(cache, need.tenant)[:, None]
    cap_need = jnp.where(whose, weighed(cache, pages)[None], 0)
    capacity = jnp.asarray([g.pages - 1 for g in lay.groups], jnp.int32)
    never = jnp.any(pages > capacity) | jnp.any((cap_need > cache.caps.limit) & (cap_need > 0))
    before, cap_used = cache, usage(cache)
    fits = fresh & ~never
    hold = jnp.where(used & fits, rows, N)
    one = jnp.ones(S, jnp.int32)
    t = cache.table
    cache = dataclasses.replace(
        cache, table=dataclasses.replace(t, pins=add(t.pins, hold, one)), clock=cache.clock + 1
    )
    cache = make_room(cache, jnp.int32(0), jnp.where(fits, pages, 0), need.tenant)
    capped = jnp.any((usage(cache) + cap_need > cache.caps.limit) & (cap_need > 0))
    short = jnp.any(pages > jnp.stack([p.n_free for p in cache.pools]))
    got = fits & ~short & ~capped
    blocker = jnp.where(capped, jnp.uint8(Blocker.CAP), jnp.uint8(Blocker.NONE))
    blocker = jnp.where(short | never, jnp.uint8(Blocker.PAGES), blocker)
    blocker = jnp.where(fresh, blocker, jnp.uint8(Blocker.CHANGED))
    verdict = jnp.where(never & fresh, jnp.uint8(Verdict.REFUSE), jnp.uint8(Verdict.WAIT))
    zero = jnp.int32(0)
    answer = Admission(
        verdict=jnp.where(got, jnp.uint8(Verdict.ADMIT), verdict), blocker=blocker, need=pages,
        free=jnp.stack([p.n_free for p in before.pools]), evictable=jnp.zeros(G, jnp.int32),
        need_rows=zero, free_rows=before.n_free_rows, evictable_rows=zero, cap_need=cap_need,
        cap_used=cap_used, cap=cache.caps.limit, layout=lay,
    )  # fmt: skip

    forms, groups = forms & got, groups & got
    keep = jnp.any(forms, axis=1)
    t = cache.table
    cache = dataclasses.replace(cache, table=dataclasses.replace(t, pins=add(t.pins, hold, -one)))
    cache, _ = set_life(cache, rows, forms, Life.LOADING, keep)
    pools, ids = [], []
    for g in range(G):
        want = jnp.repeat(groups[:, g], lay.segment_pages(lay.groups[g]))
        owner = jnp.repeat(rows, lay.segment_pages(lay.groups[g]))
        pool, mine = pop_pages(cache.pools[g], want, owner)
        pools.append(pool)
        at = jnp.where(groups[:, g], rows, N)
        ids.append(put(cache.table.pages[g], at, mine.reshape(S, -1)))
    t = cache.table
    written = jnp.where(groups, cache.clock, take(t.written, rows, 0))
    at = jnp.where(keep, rows, N)
    table = dataclasses.replace(t, pages=tuple(ids), written=put(t.written, at, written))
    cache = dataclasses.replace(cache, table=table, pools=tuple(pools))
    loading = Loading(
        rows=jnp.where(keep, rows, N), born=jnp.where(keep, seg.born, 0), forms=forms, need=need
    )
    return cache, loading, jax.tree.map(lambda a: a[None], answer)


def load(
    cache: Cache, loading: Loading, which: jax.Array, payload: tuple[jax.Array, ...],
    digest: jax.Array,
) -> tuple[Cache, jax.Array]:  # fmt: skip
    """Writes what was read into the reserved pages; what has its digest there becomes READY.

    Donates `cache`. A form of which anything differs is dropped, and the DISK form marked STALE.

    Args:
        cache: the cache.
        loading: from `begin_load`.
        which: `i32[K]` columns of it; S for none.
        payload: per group `[K, L, pages, R, *row]`; what is not being loaded may hold anything.
        digest: `u32[K, G, 2]` as they were when the segments were published.

    Returns:
        The cache, and `bool[K]` where all was right.
    """
    check_cache(cache)
    check_type("loading", loading, Loading)
    lay = cache.layout
    check_array("which", which, jnp.int32, None)
    K = which.shape[0]
    check_array("digest", digest, jnp.uint32, K, len(lay.groups), 2)
    for g, a in zip(lay.groups, payload, strict=True):
        shape = (len(g.layers), lay.segment_pages(g), g.rows_per_page, *g.row)
        check_array(f"payload of {g.name}", a, jnp.dtype(g.dtype), K, *shape)
    return _load(cache, loading, which, payload, digest)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _load(cache: Cache, loading: Loading, which, payload, digest):
    lay, N = cache.layout, cache.layout.segments
    rows = take(loading.rows, which, N)
    seg = rows_of(cache.table, rows)
    forms = take(loading.forms, which, False) & (seg.life == Life.LOADING)
    forms &= (seg.born == take(loading.born, which, 0))[:, None]
    groups = forms[:, lay.forms] & (seg.copied[..., 0] < seg.copied[..., 1])
    pools = []
    for g, pool in enumerate(cache.pools):
        P, n = pool.owner.shape[0], seg.pages[g].shape[1]
        ids = jnp.where(groups[:, g, None] & (seg.pages[g] > 0), seg.pages[g], P).reshape(-1)
        flat = jnp.moveaxis(payload[g], 0, 1)  # [L, K, n, R, *row]
        flat = flat.reshape(flat.shape[0], -1, *flat.shape[3:])
        data = pool.data.at[:, ids].set(flat, mode="drop", wrap_negative_indices=False)
        words = jnp.stack([rows.astype(jnp.uint32), seg.written[:, g]], axis=-1)
        stamp = put(pool.stamp, ids, jnp.repeat(words, n, axis=0))
        pools.append(dataclasses.replace(pool, data=data, stamp=stamp))
    cache = dataclasses.replace(cache, pools=tuple(pools))
    there = dataclasses.replace(seg, held=seg.copied)
    now = jax.lax.map(lambda s: payload_digest(cache, s.pages, s), there)
    right = jnp.all(now == digest, axis=-1) | ~groups  # [K, G]
    fine = jnp.stack([jnp.all(right[:, lay.forms == f], axis=1) for f in Form], axis=1)
    good, bad = forms & fine, forms & ~fine
    cache, _ = set_life(cache, rows, good, Life.READY, rows < N)
    cache, gone = set_life(cache, rows, bad, Life.EMPTY, rows < N)
    cache = _drop_pages(cache, rows, gone)
    wrong = jnp.any(bad, axis=1)
    disk = np.arange(FORMS) == Form.DISK
    cache, _ = set_life(cache, rows, disk, Life.STALE, wrong)
    t, done = cache.table, groups & good[:, lay.forms]
    at = jnp.where(jnp.any(done, axis=1), rows, N)
    need, now = loading.need, rows_of(t, rows)
    table = dataclasses.replace(
        t,
        held=put(t.held, at, jnp.where(done[..., None], seg.copied, now.held)),
        digest=put(t.digest, at, jnp.where(done[..., None], digest, now.digest)),
        codes=put(t.codes, at, jnp.where(done[..., None], need.codes[None], now.codes)),
        used=put(t.used, at, jnp.where(good, cache.clock, now.used)),
    )
    return dataclasses.replace(cache, table=table), jnp.any(forms, axis=1) & ~wrong


def end_load(cache: Cache, loading: Loading) -> Cache:
    """Ends a load: what was not loaded is outside of device memory again.

    Donates `cache`. Ending it twice does nothing the second time.
    """
    check_cache(cache)
    check_type("loading", loading, Loading)
    return _end_load(cache, loading)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _end_load(cache: Cache, loading: Loading) -> Cache:
    N, rows = cache.layout.segments, loading.rows
    seg = rows_of(cache.table, rows)
    mine = (rows < N) & (seg.born == loading.born)
    left = loading.forms & (seg.life == Life.LOADING)
    kept = (seg.life[:, Form.DISK] == Life.ON_DISK)[:, None]
    cache, back = set_life(cache, rows, left & kept, Life.ON_DISK, mine)
    cache, gone = set_life(cache, rows, left & ~kept, Life.EMPTY, mine)
    return _drop_pages(cache, rows, back | gone)
