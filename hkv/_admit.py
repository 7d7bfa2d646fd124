"""Admission: reserve everything a request can need at once, or say why not, with numbers.

The same code hands out leases: for running requests (`admit`), for readers alone (`lease`), and
for a branch of a running request (`fork`).
"""

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np

from hkv._arguments import check_array, check_type
from hkv._cache import (
    Cache,
    bumped,
    cap_names,
    cap_unit,
    check_cache,
    form_bits,
    rows_of,
    same_generation,
)
from hkv._caps import charged, usage, weighed
from hkv._evict import idle
from hkv._identity import Need, segment_mark
from hkv._layout import DEVICE_FORMS, FORMS, Form, Layout
from hkv._lease import FOREVER, Lease, check_fits, check_lease
from hkv._lifecycle import Life, move
from hkv._pages import pop_pages, pop_rows
from hkv._retain import Worth
from hkv._room import make_room
from hkv._route import Plan
from hkv._rules import Kind, required
from hkv._slots import add, put, take
from hkv._view import covers, stamps_hold
from pallas_kernels import copy_pages


class Verdict(enum.IntEnum):
    """What became of a request for admission."""

    ADMIT = 0
    WAIT = 1
    REFUSE = 2


class Blocker(enum.IntEnum):
    """What stands in the way."""

    NONE = 0
    LENGTH = 1  # longer than the bucket of the plan, or shorter than what it resumes from
    ROWS = 2  # segment rows
    PAGES = 3  # pages of a group
    CAP = 4  # a cap of a form, group or tenant, or a shared budget
    LEASES = 5  # lease slots
    CHANGED = 6  # the plan's segments changed since the query: query again
    PRIVATE = 7  # a fork of a request whose recovered pages are not published yet
    RECOVER = 8  # there is something to recover first: for `lease`, admit the plan instead
    FETCH = 9  # the plan has something to fetch first: load it, then query again


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """The verdict as data. Numbers count pages over the layers of a group."""

    verdict: jax.Array  # u8[Q], `Verdict`
    blocker: jax.Array  # u8[Q], `Blocker`
    need: jax.Array  # i32[Q, G], pages the request reserves
    free: jax.Array  # i32[Q, G], pages that were free
    evictable: jax.Array  # i32[Q, G], pages that eviction could have freed; 0 if none need go
    need_rows: jax.Array  # i32[Q], segment rows
    free_rows: jax.Array  # i32[Q]
    evictable_rows: jax.Array  # i32[Q], likewise
    cap_need: jax.Array  # i32[Q, 1 + T, K], what the request counts against each cap
    cap_used: jax.Array  # i32[Q, 1 + T, K]
    cap: jax.Array  # i32[Q, 1 + T, K]
    layout: Layout = jax.tree.static()

    def __repr__(self) -> str:
        if isinstance(self.verdict, jax.core.Tracer) or not hasattr(self.verdict, "shape"):
            return "Admission(traced)"
        a, names = jax.device_get(self), cap_names(self.layout)
        out = []
        for q, v in enumerate(a.verdict):
            why = "" if v == Verdict.ADMIT else f" ({Blocker(int(a.blocker[q])).name})"
            out.append(
                f"request {q}: {Verdict(int(v)).name}{why}: needs {a.need[q].tolist()} pages per "
                f"group, free {a.free[q].tolist()}, evictable {a.evictable[q].tolist()}; "
                f"{a.need_rows[q]} rows, free {a.free_rows[q]}, evictable {a.evictable_rows[q]}"
            )
            for t, k in np.argwhere(a.cap_used[q] + a.cap_need[q] > a.cap[q]):
                what, unit = names[k]
                size = cap_unit(self.layout) if unit == "bytes" else 1
                used, more, cap = (
                    int(x[q, t, k]) * size for x in (a.cap_used, a.cap_need, a.cap)
                )  # fmt: skip
                whose = f" of tenant {t}" if t else ""
                out.append(f"  cap of {what}{whose}: {used:,} used and {more:,} more of {cap:,} "
                           f"{unit}")  # fmt: skip
        return "\n".join(out)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """What a request resumes from. The fields of a plan that reserve anything, for one request."""

    rows: jax.Array
    version: jax.Array
    mark: jax.Array
    resume: jax.Array
    fill: jax.Array
    fill_start: jax.Array
    fill_groups: jax.Array
    replay: jax.Array
    replay_groups: jax.Array
    have: jax.Array
    need: Need
    word: jax.Array
    ok: jax.Array  # bool


def admit(cache: Cache, plan: Plan, total: jax.Array) -> tuple[Cache, Lease, Admission]:
    """Reserves pages for whole requests, pins what they reuse, copies the partly shared segment.

    Donates `cache`. Requests are served in order; one that does not fit leaves nothing behind.
    Unpinned segments are evicted, least recently used first, if that makes the request fit.

    Args:
        cache: the cache.
        plan: from `route`. If a segment changed since the query the answer is WAIT, CHANGED; if
            something is to be fetched first it is WAIT, FETCH.
        total: `i32[Q]` tokens the request may reach, growth and lookahead included.

    Returns:
        The cache; the lease (`slot` M where not admitted); and the verdict with its numbers.

    Raises:
        TypeError, ValueError: a plan of another layout, or `total` of another dtype or shape.
    """
    _check(cache, plan)
    check_array("total", total, jnp.int32, plan.resume.shape[0])
    return _admit(cache, plan, total)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _admit(cache: Cache, plan: Plan, total: jax.Array):
    ok = ~jnp.any(plan.fetch, axis=(1, 2))
    cache, out, answer = _reserve_all(cache, _source(plan, ok), total, True)
    return cache, out, _blocked(answer, ~ok, Blocker.FETCH)


def _blocked(answer: Admission, where: jax.Array, why: Blocker) -> Admission:
    blocker = jnp.where(where, jnp.uint8(why), answer.blocker)
    return dataclasses.replace(answer, blocker=blocker)


def _check(cache: Cache, plan: Plan) -> None:
    check_cache(cache)
    check_type("plan", plan, Plan)
    if plan.layout != cache.layout:
        raise ValueError("`plan` was made for another layout; route a query of this cache")


def lease(cache: Cache, plan: Plan) -> tuple[Cache, Lease, Admission]:
    """Pins what a plan reuses, for reading only: nothing is reserved, nothing can be appended.

    Donates `cache`. A plan with something to recover is answered WAIT, RECOVER.

    Returns:
        As `admit`.
    """
    _check(cache, plan)
    return _lease(cache, plan)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _lease(cache: Cache, plan: Plan):
    none = dataclasses.replace(
        plan,
        fill=jnp.zeros_like(plan.fill), fill_start=jnp.zeros_like(plan.fill_start),
        replay=jnp.stack([plan.resume, plan.resume], -1),
    )  # fmt: skip
    ok = (plan.replay[:, 0] >= plan.replay[:, 1]) & (plan.fill[:, 0] >= plan.fill[:, 1])
    fetch = jnp.any(plan.fetch, axis=(1, 2))
    cache, out, answer = _reserve_all(cache, _source(none, ok & ~fetch), plan.resume, False)
    return cache, out, _blocked(_blocked(answer, ~ok, Blocker.RECOVER), fetch, Blocker.FETCH)


def fork(cache: Cache, lease: Lease, total: jax.Array) -> tuple[Cache, Lease, Admission]:
    """Branches running requests: whole segments are shared, the partial last one is copied.

    Donates `cache`. Both branches go on writing, each into pages of its own.

    Args:
        cache: the cache.
        lease: the requests to branch; it stays valid.
        total: `i32[Q]` tokens each branch may reach.

    Returns:
        The cache, the leases of the branches, and the verdicts as `admit` gives them.
    """
    check_fits(cache, lease)
    check_array("total", total, jnp.int32, lease.rows.shape[0])
    return _fork(cache, lease, total)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _fork(cache: Cache, lease: Lease, total: jax.Array):
    used = jnp.any(lease.private, axis=(1, 2))
    right = check_lease(cache, lease) & stamps_hold(cache, lease, lease.length)
    whole = covers(cache, lease, lease.length)
    ok = right & whole & ~used
    zero = jnp.zeros_like(lease.length)
    have = lease.have
    # Rows appended since the lease was taken are held as well.
    grown = jnp.where(have[..., 1] > 0, jnp.maximum(have[..., 1], lease.length[:, None]), 0)
    lo = jnp.minimum(have[..., 0], grown)
    span = jnp.stack([zero, zero], -1)
    G = len(cache.layout.groups)
    source = _Source(
        rows=lease.rows, version=lease.version,
        mark=jax.vmap(jax.vmap(segment_mark))(rows_of(cache.table, lease.rows)),
        resume=lease.length, fill=span, fill_start=zero,
        fill_groups=jnp.zeros((*zero.shape, G), bool),
        replay=jnp.stack([lease.length, lease.length], -1),
        replay_groups=jnp.zeros((*zero.shape, G), bool),
        have=jnp.stack([lo, jnp.broadcast_to(lease.length[:, None], lo.shape)], -1),
        need=lease.need, word=lease.serial[:, 1], ok=ok,
    )  # fmt: skip
    cache, out, answer = _reserve_all(cache, source, total, True)
    held = answer.verdict != Verdict.ADMIT
    answer = _blocked(answer, held & right & ~whole, Blocker.RECOVER)
    return cache, out, _blocked(answer, held & used, Blocker.PRIVATE)


def _source(plan: Plan, ok: jax.Array) -> _Source:
    names = [f.name for f in dataclasses.fields(_Source) if f.name != "ok"]
    return _Source(ok=ok, **{n: getattr(plan, n) for n in names})


def _reserve_all(cache: Cache, source: _Source, total: jax.Array, grow: bool):
    def one(c: Cache, x):
        c, lease, answer = _reserve(c, x[0], x[1], grow)
        return c, (lease, answer)

    cache, (lease, answer) = jax.lax.scan(one, cache, (source, total))
    return cache, lease, answer


def _held(cache: Cache, rows: jax.Array) -> jax.Array:
    """`i32[G]`: pages of the segments `bool[N]`."""
    each = [jnp.sum((p > 0) & rows[:, None], dtype=jnp.int32) for p in cache.table.pages]
    return jnp.stack(each)


def _overlaps(lo, hi, span) -> jax.Array:
    return (lo < span[1]) & (hi > span[0]) & (span[0] < span[1])


def _private(cache: Cache, x: _Source, shared: jax.Array) -> jax.Array:
    """`bool[G, S]`: shared segments beside which the request needs pages of its own.

    A run that restores rows writes every window row that it makes on the way, not only the lost.
    """
    lay, B = cache.layout, cache.layout.segment_tokens
    lo = jnp.arange(shared.shape[0], dtype=jnp.int32) * B
    fill_run = jnp.stack([x.fill_start, x.fill[1]])
    out = []
    for g, spec in enumerate(lay.groups):
        kept = x.have[g, 0]  # rows from here on are there already
        fill_end = jnp.minimum(fill_run[1], kept)
        filled = _overlaps(lo, lo + B, (fill_run[0], fill_end)) & (x.fill[0] < x.fill[1])
        replayed = _overlaps(lo, lo + B, (x.replay[0], kept))
        if spec.rule.prefix_closed:
            mine = _overlaps(lo, lo + B, x.fill) & x.fill_groups[g]
        elif spec.rule.kind in (Kind.WINDOW, Kind.CHUNK):
            mine = filled | replayed
        else:
            mine = filled | (replayed & x.replay_groups[g])
        out.append(mine & shared)
    return jnp.stack(out)


def _reserve(cache: Cache, x: _Source, total: jax.Array, grow: bool):
    lay, t = cache.layout, cache.table
    B, N, M, G = lay.segment_tokens, lay.segments, lay.leases, len(lay.groups)
    S = x.rows.shape[0]
    column = jnp.arange(S, dtype=jnp.int32)
    last = x.resume // B
    reused = column * B < x.resume  # every segment that is read, the partial one included
    shared = column < last if grow else reused
    ends = -(-total // B)
    new = (column >= last) & (column < ends) & grow
    private = _private(cache, x, shared)

    # How much is needed, and how much there is.
    per = jnp.asarray([lay.segment_pages(g) for g in lay.groups], jnp.int32)
    whose = charged(cache, x.need.tenant)[:, None]

    def charge(pages):
        """`i32[1 + T, K]`: pages `i32[G]` of this request against the caps that it counts for."""
        return jnp.where(whose, weighed(cache, pages)[None], 0)

    need_rows = jnp.sum(new, dtype=jnp.int32)
    ring = jnp.asarray([lay.reserved(g.form, S) for g in lay.groups], jnp.int32)
    need = per * (jnp.minimum(need_rows, ring) + jnp.sum(private, axis=1, dtype=jnp.int32))
    free = jnp.stack([p.n_free for p in cache.pools])
    mine = jnp.stack(
        [jnp.sum(jnp.where(reused[:, None], take(a, x.rows, 0), 0) > 0, dtype=jnp.int32)
         for a in t.pages]
    )  # fmt: skip
    capacity = jnp.asarray([g.pages - 1 for g in lay.groups], jnp.int32)
    cap_need, cap_used, cap = charge(need), usage(cache), cache.caps.limit

    def could_go():
        """What eviction could free: pages, units of the caps, rows. Looks at the whole table."""
        kept = jnp.where(reused, x.rows, N)
        loose = put(idle(cache), kept, jnp.zeros(S, bool))
        pages = _held(cache, loose)
        theirs = _held(cache, loose & (t.tenant == x.need.tenant)) if lay.tenants else pages
        units = jnp.where(jnp.arange(1 + lay.tenants)[:, None] > 0, charge(theirs),
                          weighed(cache, pages)[None])  # fmt: skip
        return pages, units, jnp.sum(loose, dtype=jnp.int32)

    short = jnp.any(need > free) | (need_rows > cache.n_free_rows)
    short |= jnp.any((cap_used + cap_need > cap) & (cap_need > 0))
    nothing = (jnp.zeros_like(free), jnp.zeros_like(cap_used), jnp.int32(0))
    loose, cap_loose, idle_rows = jax.lax.cond(short, could_go, lambda: nothing)

    # The verdict; later lines outrank earlier ones.
    blocker = jnp.uint8(Blocker.NONE)
    never = jnp.bool_(False)

    def block(bad, why, for_ever):
        nonlocal blocker, never
        blocker = jnp.where(bad, jnp.uint8(why), blocker)
        never = jnp.where(bad, for_ever, never)

    block(jnp.any((cap_used - cap_loose + cap_need > cap) & (cap_need > 0)), Blocker.CAP, False)
    block(jnp.any(need > free + loose), Blocker.PAGES, False)
    block(need_rows > cache.n_free_rows + idle_rows, Blocker.ROWS, False)
    block(~jnp.any(cache.serials[:, 0] == 0), Blocker.LEASES, False)
    fresh = (x.rows < N) & same_generation(take(t.version, x.rows, 0), x.version)
    fresh &= jax.vmap(segment_mark)(rows_of(t, x.rows)) == x.mark
    block(~jnp.all(fresh | ~reused) | ~x.ok, Blocker.CHANGED, False)
    block(jnp.any((cap_need + charge(mine) > cap) & (cap_need > 0)), Blocker.CAP, True)
    block(jnp.any(need + mine > capacity), Blocker.PAGES, True)
    block(need_rows + jnp.sum(reused, dtype=jnp.int32) > N, Blocker.ROWS, True)
    block((total > S * B) | (total < x.resume) | (total < 0), Blocker.LENGTH, True)
    fits = blocker == Blocker.NONE

    # Pin what is read, then make room, then look again: eviction goes leaf first.
    hold = jnp.where(reused & fits, x.rows, N)
    one = jnp.ones(S, jnp.int32)
    cache = dataclasses.replace(
        cache, table=dataclasses.replace(t, pins=add(t.pins, hold, one)), clock=cache.clock + 1
    )
    n_free_rows = cache.n_free_rows
    room = make_room(cache, jnp.where(fits, need_rows, 0), jnp.where(fits, need, 0), x.need.tenant)
    now_free = jnp.stack([p.n_free for p in room.pools])
    got = fits & jnp.all(need <= now_free) & (need_rows <= room.n_free_rows)
    capped = jnp.any((usage(room) + cap_need > cap) & (cap_need > 0))
    why = jnp.where(need_rows > room.n_free_rows, jnp.uint8(Blocker.ROWS), jnp.uint8(Blocker.CAP))
    why = jnp.where(jnp.any(need > now_free), jnp.uint8(Blocker.PAGES), why)
    got &= ~capped
    blocker = jnp.where(fits & ~got, why, blocker)
    keep = jnp.where(reused & got & (shared | (not grow)), x.rows, N)
    pins = add(add(room.table.pins, hold, -one), keep, one)
    cache = dataclasses.replace(room, table=dataclasses.replace(room.table, pins=pins))
    verdict = jnp.where(
        got, jnp.uint8(Verdict.ADMIT),
        jnp.where(never, jnp.uint8(Verdict.REFUSE), jnp.uint8(Verdict.WAIT)),
    )  # fmt: skip
    answer = Admission(
        verdict=verdict, blocker=blocker, need=need, free=free, evictable=loose,
        need_rows=need_rows, free_rows=n_free_rows, evictable_rows=idle_rows, cap_need=cap_need,
        cap_used=cap_used, cap=cap, layout=lay,
    )  # fmt: skip

    # Take it: a slot, rows, pages.
    new, private, shared = new & got, private & got, shared & got
    slot = jnp.where(got, jnp.argmin(cache.serials[:, 0] != 0).astype(jnp.int32), M)
    serial = cache.clock
    name = jnp.stack([serial, x.word, jnp.uint32(0)])
    resume = jnp.where(got, x.resume, 0)
    cache = dataclasses.replace(
        cache,
        serials=put(cache.serials, slot, name),
        reached=put(cache.reached, slot, resume),
        tenants=put(cache.tenants, slot, x.need.tenant),
    )
    cache, fresh_rows = pop_rows(cache, new)
    cache = _open_rows(cache, fresh_rows, new, x.need.tenant)
    rows = jnp.where(new, fresh_rows, jnp.where(shared, x.rows, N))
    pools, pages, table_pages = [], [], list(cache.table.pages)
    written, words = [], take(cache.table.written, x.rows, 0)
    source = jnp.where(got & (x.resume % B > 0) & grow, x.rows[jnp.minimum(last, S - 1)], N)
    for g, spec in enumerate(lay.groups):
        n = lay.segment_pages(spec)
        mine_too = (new & (column < last + ring[g])) | private[g]
        owner = jnp.where(new, fresh_rows, N + 1 + slot)
        pool, ids = pop_pages(cache.pools[g], jnp.repeat(mine_too, n), jnp.repeat(owner, n))
        ids = ids.reshape(S, n)
        table_pages[g] = put(table_pages[g], jnp.where(new, fresh_rows, N), ids)
        stored = take(table_pages[g], x.rows, 0)
        word = jnp.where(new | private[g], serial, jnp.where(shared, words[:, g], 0))
        # Rows that go along: the partly shared segment, and the segment where kept rows begin.
        at = jnp.minimum(last, S - 1)
        kept = jnp.clip(x.have[g, 0] // B, 0, S - 1)
        inside = private[g, kept] & (kept != last) & (not spec.rule.prefix_closed)
        from_rows = jnp.stack([source, jnp.where(inside, x.rows[kept], N)])
        to = jnp.stack([ids[at], ids[kept]])
        stamp = jnp.stack([rows[at], rows[kept]]).astype(jnp.uint32)
        data, stamps = copy_pages(
            pool.data, pool.stamp, take(table_pages[g], from_rows, 0).reshape(-1),
            jnp.where((from_rows < N)[:, None], to, 0).reshape(-1),
            jnp.repeat(jnp.stack([stamp, jnp.full(2, serial, jnp.uint32)], -1), n, axis=0),
            src_expect=jnp.repeat(
                jnp.stack(
                    [from_rows.astype(jnp.uint32), words[jnp.stack([at, kept]), g]], -1
                ), n, axis=0,
            ),
        )  # fmt: skip
        pools.append(dataclasses.replace(pool, data=data, stamp=stamps))
        pages.append(
            jnp.where(mine_too[:, None], ids, jnp.where(shared[:, None], stored, 0)).reshape(-1)
        )
        written.append(word)
    words = jnp.stack(written)
    t = cache.table
    at = jnp.where(new, fresh_rows, N)
    touched = jnp.where(shared, x.rows, N)
    table = dataclasses.replace(
        t,
        pages=tuple(table_pages),
        written=put(t.written, at, words.T),
        used=put(t.used, touched, jnp.where(_reads(lay, S, x.resume), cache.clock,
                                            take(t.used, touched, 0))),
        # Prompts part inside the copied segment: what is resumable there is worth keeping.
        worth=put(t.worth, source[None], jnp.uint8([Worth.END])),
        pins=add(t.pins, at, one),
        # A copied segment is at best what its source was.
        provenance=put(t.provenance, jnp.where(source < N, rows[jnp.minimum(last, S - 1)], N),
                       take(t.provenance, source, 0)),
    )  # fmt: skip
    cache = dataclasses.replace(cache, table=table, pools=tuple(pools))
    out = Lease(
        slot=slot, serial=jnp.where(got, name, jnp.uint32(0)), rows=rows,
        version=take(cache.table.version, rows, 0), own=new, pages=tuple(pages), written=words,
        private=private, length=resume, total=jnp.where(got, total, 0),
        have=jnp.where(got, x.have, 0),
        write=jnp.broadcast_to(jnp.stack([resume, jnp.int32(FOREVER)]), (G, 2)),
        need=x.need,
    )  # fmt: skip
    return cache, out, answer


def _reads(lay: Layout, S: int, resume: jax.Array) -> jax.Array:
    """`bool[S, F]`: which forms of each segment a resume reads."""
    begin = jnp.arange(S, dtype=jnp.int32) * lay.segment_tokens
    out = [jnp.zeros(S, bool)] * FORMS
    for g in lay.groups:
        lo, hi = (at * g.rule.unit for at in required(g.rule, resume))
        out[g.form] |= (begin < hi) & (begin + lay.segment_tokens > lo)
    return jnp.stack(out, axis=1)


def _open_rows(cache: Cache, rows: jax.Array, mask: jax.Array, tenant: jax.Array) -> Cache:
    """Starts segments in fresh rows: a new version, WRITING in every form of the layout."""
    lay, t, N = cache.layout, cache.table, cache.layout.segments
    at = jnp.where(mask, rows, N)
    kept = jnp.asarray([f in DEVICE_FORMS and bool(lay.form_groups(f)) for f in Form])
    K, G = rows.shape[0], len(lay.groups)
    old = rows_of(t, at)
    life = move(old.life, jnp.broadcast_to(kept, (K, FORMS)), Life.WRITING)
    table = dataclasses.replace(
        t,
        version=put(t.version, at, bumped(old.version, readable=False)),
        born=put(t.born, at, bumped(old.version, readable=False)),
        life=put(t.life, at, life),
        form=put(t.form, at, form_bits(life)),
        length=put(t.length, at, jnp.zeros(K, jnp.int32)),
        parent=put(t.parent, at, jnp.full(K, N, jnp.int32)),
        provenance=put(t.provenance, at, jnp.zeros(K, jnp.uint8)),
        tenant=put(t.tenant, at, jnp.broadcast_to(tenant, (K,))),
        worth=put(t.worth, at, jnp.zeros(K, jnp.uint8)),
        children=put(t.children, at, jnp.zeros(K, jnp.int32)),
        pins=put(t.pins, at, jnp.zeros(K, jnp.int32)),
        held=put(t.held, at, jnp.zeros((K, G, 2), jnp.int32)),
        digest=put(t.digest, at, jnp.zeros((K, G, 2), jnp.uint32)),
    )
    return dataclasses.replace(cache, table=table)
