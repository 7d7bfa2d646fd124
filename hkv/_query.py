"""`query`: one jitted function from a batch of prompts to their availability.

Candidates, then the four levels on them, then the boundaries of each group and their
intersection. Positions here count from the start of the request.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from hkv import _verify
from hkv._arguments import check_int, check_type, token_ids
from hkv._availability import Availability, Place, Reason, Status
from hkv._boundary import boundaries, enough, fetched, of_kind, run_inside, runs_at, spans_of
from hkv._cache import Cache, check_cache, rows_of
from hkv._identity import Need, asked, block_keys, segment_mark
from hkv._layout import Form, Layout
from hkv._lifecycle import Life
from hkv._lookup import by_key, by_opening, leading_equal
from hkv._rules import Kind, replay_start
from hkv._slots import take


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """The chain of stored segments that one prompt runs along. S segments, G groups."""

    rows: jax.Array  # i32[S], N for none
    reason: jax.Array  # u8[S, G], first failure of levels 1, 2 and 4
    held: jax.Array  # i32[S, G, 2], positions held, from the start of the request
    copied: jax.Array  # i32[S, G, 2], positions that can be fetched, likewise
    whole: jax.Array  # i32[], segments that match whole; the next one may match in part
    partial: jax.Array  # i32[], tokens that the next one shares


def query(cache: Cache, tokens: jax.Array, length: jax.Array, need: Need) -> Availability:
    """What a batch of prompts can reuse, verified now, in one jitted program.

    Args:
        cache: the cache; nothing in it changes.
        tokens: `i32[Q, T]`, T one of the layout's length buckets; padding may hold anything.
        length: `i32[Q]` prompt lengths, 0 to T.
        need: what stored segments must equal; see `need`.

    Returns:
        The availability vector over the five forms with its reasons, and the boundaries.

    Raises:
        TypeError: another dtype or a rank other than stated.
        ValueError: T is no bucket, the sizes of the arguments disagree, or NumPy arrays hold a
            token or length out of range. Of arrays on the device that is not known here: a
            length out of range is answered with the reason LENGTH, a bad token matches nothing.
    """
    check_cache(cache)
    lay = cache.layout
    check_batch(lay, tokens, length)
    check_need(cache, need, tokens)
    return _query(cache, tokens, length, need)


def check_need(cache: Cache, need: Need, tokens: jax.Array) -> None:
    """Refuses what is no need, or one of another batch or of another layout."""
    check_type("need", need, Need)
    lay = cache.layout
    if need.codes.shape[1:] != (len(lay.groups), lay.shards):
        raise ValueError("`need` was made for another layout; make it from this cache")
    S = tokens.shape[1] // lay.segment_tokens
    if need.media.shape[:2] != (tokens.shape[0], S) or need.identity.shape[0] != tokens.shape[0]:
        raise ValueError(
            f"`need` is for {need.identity.shape[0]} requests of {need.media.shape[1]} segments, "
            f"`tokens` for {tokens.shape[0]} of {S}; give need(requests=..., bucket=...)"
        )


def check_batch(layout: Layout, tokens: jax.Array, length: jax.Array) -> None:
    """Refuses a batch whose types or shapes are not those of a length bucket."""
    for name, a, rank in (("tokens", tokens, 2), ("length", length, 1)):
        if getattr(a, "dtype", None) != jnp.int32 or a.ndim != rank:
            got = f"{getattr(a, 'dtype', type(a).__name__)}{list(getattr(a, 'shape', []))}"
            raise TypeError(f"`{name}` is {got}; give an int32 array of rank {rank}")
    if tokens.shape[1] not in layout.buckets:
        raise ValueError(
            f"`tokens` is {tokens.shape[1]} wide; pad it to one of the buckets {layout.buckets}"
        )
    if length.shape[0] != tokens.shape[0]:
        raise ValueError(f"`length` has {length.shape[0]} requests, `tokens` {tokens.shape[0]}")
    if isinstance(length, np.ndarray) and ((length < 0) | (length > tokens.shape[1])).any():
        raise ValueError(f"`length` holds {length.tolist()}; give 0 to {tokens.shape[1]}")
    if isinstance(tokens, np.ndarray) and (tokens < 0).any():
        raise ValueError(f"`tokens` holds {tokens.min()}; ids are 0 or more")


def pad_batch(layout: Layout, prompts, vocabulary: int | None = None):
    """Prompts as the arrays that `query` takes: padded to the smallest bucket that holds them.

    Args:
        layout: gives the buckets.
        prompts: a sequence of sequences of token ids; `bytes` are ids of a byte-level model.
        vocabulary: number of token ids, to refuse those out of range.

    Returns:
        `i32[Q, T]` tokens and `i32[Q]` lengths.

    Raises:
        ValueError: no prompts, one longer than the longest bucket, or a token id out of range.
        TypeError: ids that are not integers.
    """
    check_type("layout", layout, Layout)
    if vocabulary is not None:
        check_int("vocabulary", vocabulary, 1, 2**31 + 1)
    if isinstance(prompts, str | bytes) or not hasattr(prompts, "__len__"):
        raise TypeError(f"`prompts` is {prompts!r}; give a sequence of prompts")
    if not len(prompts):
        raise ValueError("`prompts` is empty; give at least one prompt")
    arrays = [token_ids(p, f"prompts[{q}]", vocabulary) for q, p in enumerate(prompts)]
    T = layout.bucket(max(len(a) for a in arrays))
    out = np.zeros((len(arrays), T), np.int32)
    for q, a in enumerate(arrays):
        out[q, : len(a)] = a
    return jax.device_put((out, np.array([len(a) for a in arrays], np.int32)))


@jax.jit
def _query(cache: Cache, tokens: jax.Array, length: jax.Array, need: Need) -> Availability:
    def one(tokens, length, need):
        right = (length >= 0) & (length <= tokens.shape[0])
        length = jnp.where(right, length, 0)
        word = asked(tokens, length, need)
        answer = assess(cache, find(cache, tokens, length, need), length, need, word)
        return dataclasses.replace(
            answer,
            status=jnp.where(right, answer.status, jnp.uint8(Status.RECOMPUTE)),
            reason=jnp.where(right, answer.reason, jnp.uint8(Reason.LENGTH)),
        )

    return jax.vmap(one)(tokens, length, need)


def find(
    cache: Cache, tokens: jax.Array, length: jax.Array, need: Need, *, all_but_one: bool = True
) -> Match:
    """The chain of candidates for one prompt, with their verdicts at levels 1, 2 and 4.

    Args:
        cache: the cache.
        tokens: `i32[T]`.
        length: `i32[]`.
        need: of this request, without the axis Q.
        all_but_one: match at most all tokens but the last, as a prompt can be reused.
    """
    lay, t = cache.layout, cache.table
    B, N = lay.segment_tokens, lay.segments
    S = tokens.shape[0] // B
    blocks = tokens.reshape(S, B)
    column = jnp.arange(S, dtype=jnp.int32)
    after, before = block_keys(blocks, need.identity, need.start, need.media)
    rows = jax.vmap(lambda key: by_key(cache, key, need.epoch))(after)
    rows = jnp.where((column + 1) * B <= length, rows, N)
    parent = jnp.concatenate([jnp.full(1, N, jnp.int32), rows[:-1]])

    def judge(row, block, media, start, parent, limit):
        """One candidate: shared tokens, whether it is the segment, and reasons per group."""
        seg = rows_of(t, row)
        share = jnp.minimum(leading_equal(take(cache.tokens, row, -1), block), limit)
        ask = _verify.Ask(
            row=row, identity=need.identity, media=media, start=start, parent=parent,
            parent_born=take(t.born, parent, 0), matched=share,
        )  # fmt: skip
        linked = _verify.link_holds(lay, seg, ask) & (row < N)
        reason = _verify.check_segment(cache, seg, ask, need)
        copied = jnp.zeros_like(seg.copied)
        if lay.disk:
            there = _verify.copy_holds(lay, seg, need) & linked
            copied = jnp.where(there[:, None], seg.copied - need.start, copied)
        return seg, share, linked, reason, seg.held - need.start, copied

    seg, share, linked, reason, held, copied = jax.vmap(judge, in_axes=(0, 0, 0, 0, 0, None))(
        rows, blocks, need.media, need.start + column * B, parent, jnp.int32(B)
    )
    chain = jnp.cumprod((linked & (share == B) & (seg.length == B)).astype(jnp.int32))
    limit = jnp.maximum(length - 1, 0) if all_but_one else length
    whole = jnp.minimum(jnp.sum(chain), limit // B)

    # The next segment: any stored one that shares its first tokens, up to the last token but one.
    spot = jnp.minimum(whole, S - 1)
    base = whole * B
    cand = jnp.concatenate([rows[spot][None], by_opening(cache, before[spot], blocks[spot])])
    most = jnp.minimum(take(t.length, cand, 0), jnp.minimum(limit - base, B - 1))
    before_row = jnp.where(spot > 0, rows[spot - 1], N)
    _, c_share, c_linked, c_reason, c_held, c_copied = jax.vmap(
        judge, in_axes=(0, None, None, None, None, 0)
    )(cand, blocks[spot], need.media[spot], need.start + base, before_row, most)
    run = runs_at(lay, reason, held, whole)
    end = base + c_share
    usable = jax.vmap(lambda r, h, e: jnp.all(enough(lay, e, run_inside(lay, r, h, run, base, e))))(
        c_reason, c_held, end
    )
    score = jnp.where(c_linked, c_share + B * usable.astype(jnp.int32), 0)
    pick = jnp.argmax(score)
    partial = jnp.where(score[pick] > 0, c_share[pick], 0)

    # Put the choice where it stands; past it nothing is reachable.
    here = (column == whole) & (partial > 0)
    beyond = (column >= whole) & ~here
    broken = jnp.where(column > whole, jnp.uint8(Reason.PARENT), jnp.uint8(Reason.NOT_FOUND))
    missing = jnp.where(rows < N, broken, jnp.uint8(Reason.NOT_FOUND))[:, None]
    known = (rows < N)[:, None] & (reason != 0)
    reason = jnp.where(beyond[:, None], jnp.where(known, reason, missing), reason)

    def place(mine, chosen):
        mine = jnp.where(beyond[:, None, None], 0, mine)
        return jnp.where(here[:, None, None], chosen[pick][None], mine)

    return Match(
        rows=jnp.where(here, cand[pick], jnp.where(beyond, N, rows)),
        reason=jnp.where(here[:, None], c_reason[pick][None], reason),
        held=place(held, c_held),
        copied=place(copied, c_copied),
        whole=whole,
        partial=partial,
    )


def assess(cache: Cache, match: Match, length, need: Need, word) -> Availability:
    """Boundaries of each group, their intersection, and the vector at the furthest match."""
    lay = cache.layout
    B = lay.segment_tokens
    S = match.rows.shape[0]
    base = match.whole * B
    target = base + match.partial
    chain = (match.whole, match.partial)
    b = boundaries(lay, match.reason, match.held, *chain)
    positions, valid, ok = b.positions, b.valid, b.ok
    met = _verify.check_groups(ok)
    replayable = not any(of_kind(lay, Kind.STATE))
    bound = lay.closed | (not replayable)
    can = ok
    if lay.disk:
        every = np.ones(len(lay.groups), bool)
        can = boundaries(lay, *fetched(match.reason, match.held, match.copied, every), *chain).ok

    # The vector, for a resume at `target`.
    at = jnp.where(match.partial > 0, S + match.partial, match.whole)
    run, covered = b.runs[:, at], ok[:, at]
    history_ok = jnp.all(can[:, at] | ~lay.closed)
    lo, hi = spans_of(lay, target)

    def judge(begin, reason, held, copied):
        """One segment: status and reason per group, and which of them a copy makes good."""
        stop = jnp.minimum(hi, begin + B)
        needed = jnp.maximum(lo, begin) < stop
        first = jnp.maximum(lo, begin)
        covers = (held[:, 0] <= first) & (held[:, 1] >= stop)
        helps = needed & (copied[:, 0] <= first) & (copied[:, 1] >= stop)
        state = of_kind(lay, Kind.STATE)
        needed = jnp.where(state, (target > begin) & (target <= begin + B), needed)
        covers = jnp.where(state, held[:, 1] == target, covers)
        replay = history_ok & replayable & ~lay.closed
        status = jnp.where(replay, jnp.uint8(Status.RECOVER), jnp.uint8(Status.RECOMPUTE))
        status = jnp.where((reason == 0) & covers, jnp.uint8(Status.REUSE), status)
        status = jnp.where(needed, status, jnp.uint8(Status.NOT_NEEDED))
        past = (begin >= target) & (begin < length)
        status = jnp.where(past, jnp.uint8(Status.RECOMPUTE), status)
        why = jnp.where(reason == 0, jnp.uint8(Reason.RANGE), reason)
        why = jnp.where(status >= Status.RECOVER, why, jnp.uint8(Reason.OK))
        return status, why, helps & (status >= Status.RECOVER)

    begin = jnp.arange(S, dtype=jnp.int32) * B
    status, why, helps = jax.vmap(judge)(begin, match.reason, match.held, match.copied)
    fetch = jnp.zeros(S, jnp.int32)
    if lay.disk:
        fetch = jnp.sum(jnp.where(helps, lay.group_bytes[None], 0), axis=1)
    lost = jnp.where(covered | lay.closed, target, lo)
    have = jnp.stack([target - run, jnp.broadcast_to(target, run.shape)], -1)
    replay = target - replay_start(lay.layers, target, lost, have)
    some = jnp.any(match.copied[..., 0] < match.copied[..., 1], axis=1)
    status, why, place = _by_form(cache, match.rows, status, why, helps, some)
    left = jnp.clip(length - begin, 0, B)[:, None]
    tokens = jnp.where(status == Status.RECOMPUTE, left, 0)
    tokens = jnp.where(status == Status.RECOVER, replay, tokens)
    tokens = tokens.at[:, Form.DISK].set(0)
    return Availability(
        status=status, reason=why, place=place, tokens=tokens, group_reason=match.reason,
        rows=match.rows, version=take(cache.table.version, match.rows, 0),
        mark=jax.vmap(segment_mark)(rows_of(cache.table, match.rows)), held=match.held,
        copied=match.copied, bytes=fetch,
        matched=target, length=length, need=need, asked=word,
        furthest=jnp.max(jnp.where(ok, positions[None], 0), axis=1), positions=positions,
        usable=valid & (met == 0),
        recoverable=valid & jnp.all(can | ~bound[:, None], axis=0),
        boundary_reason=jnp.where(valid, met, jnp.uint8(Reason.NOT_FOUND)),
        group_ok=ok, runs=b.runs, layout=lay,
    )  # fmt: skip


def _by_form(cache: Cache, rows, status, why, helps, copied):
    """From groups to forms: the worst status and its reason, and where the bytes lie.

    Of copies only those `copied`, `bool[S]`, lie anywhere for this request: other weights' do not.
    """
    lay, S = cache.layout, rows.shape[0]
    best, reason = [], []
    for f in Form:
        s, r = jnp.zeros(S, jnp.uint8), jnp.zeros(S, jnp.uint8)
        for g in lay.form_groups(f):
            r = jnp.where(status[:, g] > s, why[:, g], r)
            s = jnp.maximum(s, status[:, g])
        best.append(s)
        reason.append(r)
    place = [jnp.where(s == Status.REUSE, jnp.uint8(Place.DEVICE), jnp.uint8(0)) for s in best]
    if lay.disk:
        lacking = functools.reduce(jnp.logical_or, (s >= Status.RECOVER for s in best))
        life = take(cache.table.life[:, Form.DISK], rows, 0)
        stale = lacking & (life == Life.STALE)
        disk = jnp.where(jnp.any(helps, axis=1), jnp.uint8(Status.RECOVER), best[Form.DISK])
        best[Form.DISK] = jnp.where(stale, jnp.uint8(Status.RECOMPUTE), disk)
        reason[Form.DISK] = jnp.where(stale, jnp.uint8(Reason.LIFECYCLE), jnp.uint8(Reason.OK))
        stored = take(cache.table.place, rows, 0)
        place[Form.DISK] = jnp.where(copied & (life == Life.ON_DISK), stored, jnp.uint8(Place.NONE))
    return jnp.stack(best, -1), jnp.stack(reason, -1), jnp.stack(place, -1)
