"""Boundaries: where a run can resume, given what each segment of a prefix holds.

Each group's own set of boundaries comes from how far back its rows reach without a gap. Positions
count from the start of the request.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from hkv._layout import Layout
from hkv._rules import Kind, required


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Boundaries:
    """The boundaries of one request: the ends of its S segments, then inside the last one."""

    positions: jax.Array  # i32[K]
    valid: jax.Array  # bool[K], stored tokens reach that far
    runs: jax.Array  # i32[G, K], how far back each group is held without a gap, in tokens
    ok: jax.Array  # bool[G, K], boundaries of each group alone


def boundaries(lay: Layout, reason, held, whole, partial) -> Boundaries:
    """The boundaries of each group along one chain of segments.

    Args:
        lay: the static description.
        reason: `u8[S, G]` of each segment, OK where its rows count.
        held: `i32[S, G, 2]` positions whose rows it holds.
        whole: `i32[]` segments that match whole.
        partial: `i32[]` tokens that the next one shares.
    """
    B, S = lay.segment_tokens, reason.shape[0]
    base = whole * B
    inside = jnp.arange(1, B, dtype=jnp.int32)
    aligned = jnp.arange(S + 1, dtype=jnp.int32) * B
    positions = jnp.concatenate([aligned, base + inside])
    valid = jnp.concatenate([aligned <= base, inside <= partial])
    runs = _runs(lay, reason, held, whole)
    before, spot = runs[:, whole], jnp.minimum(whole, S - 1)

    def run_to(end):
        return run_inside(lay, reason[spot], held[spot], before, base, end)

    runs = jnp.concatenate([runs, jax.vmap(run_to, out_axes=1)(base + inside)], axis=1)
    each = jax.vmap(lambda p, r: enough(lay, p, r), in_axes=(0, 1), out_axes=1)
    ok = each(positions, runs) & valid[None]
    return Boundaries(positions=positions, valid=valid, runs=runs, ok=ok)


def fetched(reason, held, copied, groups) -> tuple[jax.Array, jax.Array]:
    """`reason` and `held` as they are once the copies of some groups, `bool[G]`, were fetched."""
    got = (copied[..., 0] < copied[..., 1]) & groups[None]
    return jnp.where(got, jnp.uint8(0), reason), jnp.where(got[..., None], copied, held)


def of_kind(lay: Layout, *kinds: Kind) -> np.ndarray:
    """`bool[G]`: which groups have a rule of these kinds."""
    return np.array([g.rule.kind in kinds for g in lay.groups])


def spans_of(lay: Layout, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`i32[G]` twice: tokens `[lo, hi)` that each group must hold to resume at `position`."""
    spans = [[x * g.rule.unit for x in required(g.rule, position)] for g in lay.groups]
    lo, hi = zip(*spans, strict=True)
    return jnp.stack(lo), jnp.stack(hi)


def _runs(lay: Layout, reason, held, whole) -> jax.Array:
    """`i32[G, S + 1]`: at each segment boundary, how far back rows are held without a gap.

    For history in tokens from the start, or -1 after a hole; for a state 0 or, where a snapshot
    was taken at that very boundary, 1.
    """
    full, mine = _held_to_end(lay, reason, held, whole)
    gap = jax.lax.cummax(jnp.where(full, -1, jnp.arange(full.shape[1], dtype=jnp.int32)[None]), 1)
    run = _run_since(lay, gap, mine, jnp.arange(full.shape[1], dtype=jnp.int32)[None])
    return jnp.concatenate([jnp.zeros((full.shape[0], 1), jnp.int32), run], axis=1)


def runs_at(lay: Layout, reason, held, whole) -> jax.Array:
    """`i32[G]`: what `_runs` says at the boundary after `whole` segments, without the others."""
    full, mine = _held_to_end(lay, reason, held, whole)
    column = jnp.arange(full.shape[1], dtype=jnp.int32)[None]
    gap = jnp.max(jnp.where(full | (column >= whole), -1, column), axis=1, keepdims=True)
    run = _run_since(lay, gap, mine, jnp.broadcast_to(whole - 1, (1, 1)))[:, 0]
    return jnp.where(whole > 0, run, 0)


def _held_to_end(lay: Layout, reason, held, whole) -> tuple[jax.Array, jax.Array]:
    """Of each segment `bool[G, S]` whether it is held whole, `i32[G, S]` tokens up to its end."""
    S = reason.shape[0]
    column = jnp.arange(S, dtype=jnp.int32)[None]
    begin, end = column * lay.segment_tokens, (column + 1) * lay.segment_tokens
    lo, hi = held[..., 0].T, held[..., 1].T
    to_end = (reason.T == 0) & (column < whole) & (hi == end)
    kept = jnp.where(of_kind(lay, Kind.STATE)[:, None], 1, end - jnp.maximum(lo, begin))
    return to_end & (lo <= begin), jnp.where(to_end, kept, 0)


def _run_since(lay: Layout, gap, mine, column) -> jax.Array:
    """`i32[G, n]`: runs up to the end of `column`, the last segment not held whole being `gap`."""
    B = lay.segment_tokens
    extra = jnp.take_along_axis(mine, jnp.maximum(gap, 0), axis=1)
    run = (column - gap) * B + jnp.where(gap >= 0, extra, 0)
    closed, state = lay.closed[:, None], of_kind(lay, Kind.STATE)[:, None]
    run = jnp.where(closed & (gap >= 0), -1, run)
    snapshot = jnp.take_along_axis(mine, jnp.broadcast_to(column, run.shape), axis=1) > 0
    return jnp.where(state, snapshot.astype(jnp.int32), run)


def run_inside(lay: Layout, reason, held, before, base, end) -> jax.Array:
    """`i32[G]`: the runs at position `end`, inside one segment after the whole ones.

    Args:
        reason: `u8[G]` of that segment.
        held: `i32[G, 2]` of that segment.
        before: `i32[G]` the runs where the segment starts.
        base: `i32[]` where it starts.
        end: `i32[]`.
    """
    ok = reason == 0
    lo, hi = held[:, 0], held[:, 1]
    _, last = spans_of(lay, end)
    fine = (before >= 0) & ((last <= base) | (ok & (hi >= last)))
    mine = jnp.where(ok & (hi >= end) & (lo < end), end - jnp.maximum(lo, base), 0)
    run = mine + jnp.where((mine > 0) & (lo <= base), before, 0)
    run = jnp.where(lay.closed, jnp.where(fine, end, -1), run)
    run = jnp.where(of_kind(lay, Kind.STATE), (ok & (hi == end)).astype(jnp.int32), run)
    return jnp.where(end > base, run, before)


def enough(lay: Layout, position: jax.Array, run: jax.Array) -> jax.Array:
    """`bool[G]`: whether runs `i32[G]` cover what each group requires to resume at `position`."""
    lo, hi = spans_of(lay, position)
    rolling = (lo >= hi) | (run >= position - lo)
    rolling = jnp.where(of_kind(lay, Kind.STATE), (lo >= hi) | (run > 0), rolling)
    return jnp.where(lay.closed, run >= 0, rolling)
