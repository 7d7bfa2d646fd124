"""Publication: complete segments become immutable and can be found by other requests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from hkv._arguments import check_array, check_type
from hkv._cache import PROBE, WAYS, Cache, bumped, form_bits, openings_of, rows_of
from hkv._evict import set_life, unlist
from hkv._identity import Need, block_keys, opening_slots
from hkv._layout import DEVICE_FORMS, FORMS, Form
from hkv._lease import Lease, advance, check_fits, check_lease
from hkv._lifecycle import Life, move
from hkv._lookup import by_key, index_base
from hkv._pages import push_pages
from hkv._query import check_batch, find
from hkv._retain import Retention, worth
from hkv._rules import Kind
from hkv._slots import add, put, swap, take
from hkv._verify import payload_digest
from hkv._view import stamps_hold


def publish(
    cache: Cache,
    lease: Lease,
    tokens: jax.Array,
    length: jax.Array,
    *,
    prompt: jax.Array | None = None,
    retention: Retention | None = None,
    partial: bool = False,
) -> tuple[Cache, Lease, jax.Array]:
    """Lists the complete segments that requests have written, and gives back what they restored.

    Donates `cache`. A segment that is stored already in full stays the one that is listed. Rows
    that a recovery restored go to the shared segments they belong to, where nobody else reads
    these at the moment.

    Args:
        cache: the cache.
        lease: the requests.
        tokens: `i32[Q, T]` their token ids, T = S * B of the lease: those that ran.
        length: `i32[Q]` settled tokens: those whose step the device has finished; at most those
            of the lease.
        prompt: `i32[Q]` tokens of each that were its prompt; where one ended is worth keeping.
        retention: which boundaries keep their windows and tails longest under pressure; by
            default the ends of prompts and answers and the places where prompts part.
        partial: the answer ends here: list the last, partly filled segment as well. It is immutable
            then, so the request can go on only by being admitted again.

    Returns:
        The cache, the lease with the new versions, and `i32[Q]` how many segments were listed; -1
        where nothing was done, as the lease does not hold or `length` is not 0 to its length.

    Raises:
        TypeError, ValueError: as `query`.
    """
    check_fits(cache, lease)
    check_batch(cache.layout, tokens, length)
    B = cache.layout.segment_tokens
    if tokens.shape != (lease.rows.shape[0], lease.rows.shape[1] * B):
        raise ValueError(
            f"`tokens` has shape {tokens.shape}; the lease is for "
            f"{(lease.rows.shape[0], lease.rows.shape[1] * B)}"
        )
    if prompt is not None:
        check_array("prompt", prompt, jnp.int32, tokens.shape[0])
    if retention is not None:
        check_type("retention", retention, Retention)
    return _publish(cache, lease, tokens, length, prompt, retention, partial)


@functools.partial(jax.jit, donate_argnames=("cache",), static_argnames=("partial",))
def _publish(cache: Cache, lease: Lease, tokens, length, prompt, retention, partial: bool):
    prompt = jnp.zeros_like(length) if prompt is None else prompt
    every = jnp.int32(0) if retention is None else retention.every
    ok = check_lease(cache, lease) & stamps_hold(cache, lease, lease.length)
    ok &= (length >= 0) & (length <= lease.length)

    def one(c: Cache, x):
        lease, tokens, length, prompt, ok = x
        length = jnp.where(ok, length, 0)
        return _publish_one(c, lease, tokens, length, prompt, every, ok, partial)

    cache, (lease, n) = jax.lax.scan(one, cache, (lease, tokens, length, prompt, ok))
    cache, lease = advance(cache, lease, ok)
    return cache, lease, jnp.where(ok, n, -1)


def _publish_one(cache: Cache, lease: Lease, tokens, length, prompt, every, ok, partial: bool):
    """For one request: all arguments without the axis Q."""
    lay, need = cache.layout, lease.need
    B, N, S = lay.segment_tokens, lay.segments, lease.rows.shape[0]
    column = jnp.arange(S, dtype=jnp.int32)
    begin = column * B
    n = jnp.clip(length - begin, 0, B)  # settled tokens of each segment

    # What is stored already, history complete, stays the listed one.
    found = find(cache, tokens, length, need, all_but_one=False)
    good = jnp.all((found.reason == 0) | ~lay.closed[None], axis=1) & (found.rows < N)
    shared = jnp.where(column < found.whole, B, jnp.where(column == found.whole, found.partial, 0))
    stored = good & (shared >= n) & (n > 0)
    rows = lease.rows
    # Whole segments that a branch shares with the request it left are listed by the first to come.
    writing = (take(cache.table.length, rows, 1) == 0) & (lease.own | (n == B))
    ready = (n == B) | ((n > 0) & partial)
    padding = jnp.arange(B, dtype=jnp.int32)[None] >= n[:, None]
    legal = jnp.all((tokens.reshape(S, B) >= 0) | padding, axis=1)
    # Along one chain: parents before children, and none below a segment that is superseded.
    same = (rows == found.rows) | (stored & writing)
    stored &= jnp.concatenate([jnp.ones(1, bool), jnp.cumprod(same)[:-1] > 0])
    fresh = writing & ready & ~stored & legal
    fresh &= jnp.cumprod(fresh | same) > 0
    canon = jnp.where(stored & writing, found.rows, rows)
    parent = jnp.concatenate([jnp.full(1, N, jnp.int32), canon[:-1]])

    after, before = block_keys(tokens.reshape(S, B), need.identity, need.start, need.media)
    held = _held(lay, lease, need.start + begin, begin, n)
    # What is computed from a segment is at best what that segment was.
    worst = jnp.max(take(cache.table.provenance, rows, 0))
    provenance = put(cache.table.provenance, jnp.where(fresh, rows, N), jnp.full(S, worst))
    cache = dataclasses.replace(
        cache, table=dataclasses.replace(cache.table, provenance=provenance)
    )
    cache = describe_rows(cache, rows, fresh, parent, n, begin, after, before, held, need)
    bad = (found.reason != 0) & (found.rows == rows)[:, None]
    cache, lease, given = _give_back(cache, lease, ok, need, bad)
    # A window that has slid on leaves nothing behind; it says so where that ends no other's lease.
    alone = take(cache.table.pins, rows, 0) == 1
    none = [jnp.all(take(p, rows, 0) == 0, axis=1) for p in cache.table.pages]
    bare = jnp.stack(none, axis=1) & ~lay.closed[None] & alone[:, None]  # [S, G]
    there = jnp.stack([jnp.any(~bare[:, lay.forms == f], axis=1) for f in Form], axis=1)
    cache = _set_digests(cache, rows, lease.pages, (fresh[:, None] & ~bare) | given)
    device = jnp.asarray([f in DEVICE_FORMS for f in Form])
    for to, forms in ((Life.READY, there & device[None]), (Life.EMPTY, ~there & device[None])):
        cache, _ = set_life(cache, rows, forms, to, fresh)
    cache = dataclasses.replace(
        cache,
        tokens=put(cache.tokens, jnp.where(fresh, rows, N), tokens.reshape(S, B)),
        clock=cache.clock + 1,
    )
    # What stands under the same key but fails its checks, or hangs on another parent, would hide
    # the new segment: it is superseded.
    old = jax.vmap(lambda key: by_key(cache, key, need.epoch))(after)
    cache = unlist(cache, old, fresh & (n == B) & (old < N) & (old != rows))
    cache = list_rows(cache, rows, fresh, n)
    at = jnp.where(fresh & (parent < N), parent, N)
    children = add(cache.table.children, at, jnp.ones(S, jnp.int32))
    cache = dataclasses.replace(cache, table=dataclasses.replace(cache.table, children=children))
    end = length if partial else jnp.int32(0)
    cache = _value(cache, jnp.where(ok, canon, N), rows, fresh, end, prompt, every)
    version = jnp.where(fresh, take(cache.table.version, rows, 0), lease.version)
    lease = dataclasses.replace(lease, version=version, own=lease.own & ~(fresh & (n < B)))
    return cache, (lease, jnp.sum(fresh, dtype=jnp.int32))


def _value(cache: Cache, canon, rows, fresh, end, prompt, every) -> Cache:
    """What the windows of each segment are worth, and that its whole chain was used now."""
    t, N = cache.table, cache.layout.segments
    canon = jnp.where(take(t.length, canon, 0) > 0, canon, N)
    new = jnp.maximum(worth(cache, canon, end, prompt, every), take(t.worth, canon, 0))
    old = take(t.used, canon, 0)
    touched = (jnp.arange(FORMS) == Form.COMPRESSED)[None] | (fresh & (rows == canon))[:, None]
    table = dataclasses.replace(
        t,
        worth=put(t.worth, canon, new),
        used=put(t.used, canon, jnp.where(touched, cache.clock, old)),
    )
    return dataclasses.replace(cache, table=table)


def _held(lay, lease: Lease, start, begin, n) -> jax.Array:
    """`i32[S, G, 2]`: positions whose rows a request has, of `n` tokens of each segment."""
    held = []
    for g, spec in enumerate(lay.groups):
        u = spec.rule.unit
        if spec.rule.prefix_closed:
            held.append(jnp.stack([start, start + n // u * u], -1))
            continue
        if spec.rule.kind is Kind.STATE:  # no snapshot is written yet, so none is claimed
            held.append(jnp.stack([start, start], -1))
            continue
        any_kept = lease.have[g, 1] > lease.have[g, 0]
        first = jnp.where(any_kept, lease.have[g, 0], lease.write[g, 0])
        held.append(jnp.stack([start + jnp.clip(first - begin, 0, n), start + n], -1))
    return jnp.stack(held, 1)


def describe_rows(cache, rows, fresh, parent, n, begin, after, before, held, need) -> Cache:
    """Writes down what each fresh segment is and what it holds.

    Args:
        cache: the cache.
        rows: `i32[S]` along one prefix.
        fresh: `bool[S]` which of them.
        parent: `i32[S]` rows.
        n: `i32[S]` tokens.
        begin: `i32[S]` where each begins, from the start of the request.
        after: `u32[S, 2]` keys, and before: those of the prefix before each.
        held: `i32[S, G, 2]` positions.
        need: of the request.
    """
    lay, t, N = cache.layout, cache.table, cache.layout.segments
    S, G = rows.shape[0], len(lay.groups)
    at = jnp.where(fresh, rows, N)
    start = need.start + begin

    def all_rows(x):
        return jnp.broadcast_to(x[None], (S, *x.shape))

    table = dataclasses.replace(
        t,
        key=put(t.key, at, after),
        before=put(t.before, at, before),
        parent=put(t.parent, at, parent),
        parent_born=put(t.parent_born, at, take(t.born, parent, 0)),
        start=put(t.start, at, start),
        length=put(t.length, at, n),
        identity=put(t.identity, at, all_rows(need.identity)),
        media=put(t.media, at, need.media),
        epoch=put(t.epoch, at, all_rows(need.epoch)),
        indexer_version=put(t.indexer_version, at, all_rows(need.indexer_version)),
        used=put(t.used, at, jnp.broadcast_to(cache.clock, (S, FORMS))),
        abi=put(t.abi, at, all_rows(need.abi)),
        codes=put(t.codes, at, all_rows(need.codes)),
        held=put(t.held, at, held),
        digest=put(t.digest, at, jnp.zeros((S, G, 2), jnp.uint32)),
    )
    return dataclasses.replace(cache, table=table)


def _set_digests(cache: Cache, rows, pages, mask) -> Cache:
    """Digests where `mask` `bool[S, G]`, one segment after the other: only those cost anything."""
    S = rows.shape[0]
    wanted = jnp.any(mask, axis=1)
    first, end = _extent(wanted)
    segs = rows_of(cache.table, rows)

    def body(i, digests):
        seg = jax.tree.map(lambda a: a[i], segs)
        d = payload_digest(cache, tuple(p.reshape(S, -1)[i] for p in pages), seg)
        return digests.at[i].set(jnp.where(mask[i][:, None], d, seg.digest))

    digests = jax.lax.fori_loop(first, end, body, segs.digest)
    at = jnp.where(wanted, rows, cache.layout.segments)
    digest = put(cache.table.digest, at, digests)
    return dataclasses.replace(cache, table=dataclasses.replace(cache.table, digest=digest))


def _extent(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`i32[]` twice: the first True of `bool[S]` and one past the last; both 0 without one."""
    S = mask.shape[0]
    last = S - jnp.argmax(mask[::-1]).astype(jnp.int32)
    return jnp.argmax(mask).astype(jnp.int32), jnp.where(jnp.any(mask), last, 0)


def list_rows(cache: Cache, rows, fresh, n) -> Cache:
    """Enters segments into the two indexes."""
    lay, N = cache.layout, cache.layout.segments
    seg = rows_of(cache.table, jnp.where(fresh, rows, N))
    base = jax.vmap(lambda key: index_base(cache, key))(seg.key)
    slots = base[:, None] + jnp.arange(PROBE, dtype=jnp.int32)[None]
    size = cache.index.shape[0]

    def body(state):
        index, left, _ = state
        empty = index[slots] == N
        slot = base + jnp.argmax(empty, axis=1).astype(jnp.int32)
        can = left & jnp.any(empty, axis=1)
        index = put(index, jnp.where(can, slot, size), rows)  # of several, one wins
        won = can & (index[slot] == rows)
        return index, left & ~won, jnp.any(won)

    whole = fresh & (n == lay.segment_tokens)
    index, _, _ = jax.lax.while_loop(
        lambda s: jnp.any(s[1]) & s[2], body, (cache.index, whole, jnp.bool_(True))
    )
    mine = (index[slots] == rows[:, None]) & whole[:, None]
    tags = put(
        cache.tags,
        jnp.where(mine, slots, size).reshape(-1),
        jnp.broadcast_to(seg.key[:, 1:], mine.shape).reshape(-1),
    )
    lengths = openings_of(lay)
    buckets = jax.vmap(lambda k, x: opening_slots(cache, k, x, lengths))(
        seg.before, take(cache.tokens, rows, 0)
    )

    def open_one(i, openings):  # one after the other: two may have one bucket
        at = jnp.where(fresh[i] & (n[i] >= np.array(lengths)), buckets[i], openings.shape[0])
        old = take(openings, at, N)[:, : WAYS - 1]
        mine = jnp.broadcast_to(rows[i], (len(lengths), 1))
        return put(openings, at, jnp.concatenate([mine, old], axis=1))

    first, end = _extent(fresh)
    openings = jax.lax.fori_loop(first, end, open_one, cache.openings)
    return dataclasses.replace(cache, index=index, tags=tags, openings=openings)


def _give_back(cache: Cache, lease: Lease, ok, need: Need, bad):
    """Private pages with restored rows become the shared segment's, where no one reads its own.

    They never replace good rows by fewer; `bad` `bool[S, G]` says which groups failed a check.

    Returns:
        The cache, the lease, and `bool[S, G]`: what was given.
    """
    lay, N = cache.layout, cache.layout.segments
    B, t = lay.segment_tokens, cache.table
    rows = lease.rows
    S = rows.shape[0]
    begin = (jnp.arange(S, dtype=jnp.int32) * B)[:, None, None]
    seg = rows_of(t, rows)
    spans = jnp.clip(lease.have[None] - begin, 0, B)  # [S, G, 2]
    whole = (spans[..., :1] == 0) & (spans[..., 1:] == B)
    spans = jnp.where(lay.closed[None, :, None] & ~whole, 0, spans)
    indexed = jnp.asarray([g.form is Form.INDEXER for g in lay.groups])
    right = (seg.length == B) & (seg.epoch == need.epoch) & ok
    bare = jnp.stack([jnp.all(p == 0, axis=1) for p in seg.pages], axis=1)
    had = seg.held - seg.start[:, None, None]
    more = (spans[..., 0] <= had[..., 0]) & (spans[..., 1] >= had[..., 1])
    unread = bare | ((seg.pins == 1)[:, None] & (bad | more))
    give = lease.private.T & right[:, None] & unread & (spans[..., 0] < spans[..., 1])
    give &= ~indexed[None] | (seg.indexer_version == need.indexer_version)[:, None]
    life = seg.life
    give &= ((life != Life.WRITING) & (life != Life.LOADING))[:, lay.forms]
    pools, pages = list(cache.pools), list(t.pages)
    for g, spec in enumerate(lay.groups):
        pool, n = pools[g], lay.segment_pages(spec)
        at = jnp.where(give[:, g], rows, N)
        each = jnp.repeat(give[:, g], n)
        mine = lease.pages[g]
        old, pages[g] = swap(pages[g], rows, at, mine.reshape(S, n))
        pool = push_pages(pool, old.reshape(-1), each, N)
        kept = jnp.where(each & (mine > 0), mine, pool.owner.shape[0])  # trim may have taken some
        owner = put(pool.owner, kept, jnp.repeat(rows, n))
        pools[g] = dataclasses.replace(pool, owner=owner)
    changed = jnp.any(give, axis=1)
    at = jnp.where(changed, rows, N)
    forms = jnp.stack([jnp.any(give[:, list(lay.form_groups(f))], axis=1) for f in Form], axis=1)
    # Of a form that was invalidated nothing is kept but what was made again.
    stale = forms & (seg.life == Life.STALE)
    fresh = stale | (forms & ((life == Life.EMPTY) | (life == Life.ON_DISK)))
    for to in (Life.EMPTY, Life.WRITING, Life.READY):
        life = move(life, fresh, to)
    group_form = lay.forms
    old_held = jnp.where(
        stale[:, group_form, None], jnp.broadcast_to(seg.start[:, None, None], seg.held.shape),
        seg.held,
    )  # fmt: skip
    held = seg.start[:, None, None] + spans
    recoded = give & (seg.abi != need.abi[None])  # a copy means what the old kernels meant
    replaced = jnp.any(give & ~bare, axis=1)
    version = jnp.where(
        replaced, bumped(seg.version, readable=False), bumped(seg.version, readable=True)
    )
    table = dataclasses.replace(
        t,
        pages=tuple(pages),
        held=put(t.held, at, jnp.where(give[..., None], held, old_held)),
        digest=put(t.digest, at, jnp.where(stale[:, group_form, None], jnp.uint32(0), seg.digest)),
        written=put(t.written, at, jnp.where(give, lease.written.T, seg.written)),
        abi=put(t.abi, at, jnp.where(give, need.abi[None], seg.abi)),
        copied=put(t.copied, at, jnp.where(recoded[..., None], 0, seg.copied)),
        codes=put(t.codes, at, jnp.where(give[..., None], need.codes[None], seg.codes)),
        life=put(t.life, at, life),
        form=put(t.form, at, form_bits(life)),
        version=put(t.version, at, version),
    )
    lease = dataclasses.replace(
        lease,
        private=lease.private & ~give.T,
        version=jnp.where(changed, version, lease.version),
    )
    return dataclasses.replace(cache, table=table, pools=tuple(pools)), lease, give
