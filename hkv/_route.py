"""`route`: what to do with an availability, decided before any attention runs.

For every boundary: tokens to replay, tokens whose history is to be made again, tokens to prefill;
the cheapest by the caller's prices, not simply the longest.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from hkv._arguments import check_type
from hkv._availability import Availability
from hkv._identity import Need, fold
from hkv._layout import Layout
from hkv._rules import Kind, replay_start, required


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Prices in one unit of the caller's choice, for instance seconds."""

    prefill: jax.Array  # f32[], of a token that runs through the model and is stored
    replay: jax.Array  # f32[], of a token that runs through the model to restore lost rows
    recover: jax.Array  # f32[], of each replay or refill, whatever its length


def costs(prefill: float = 1.0, replay: float = 1.0, recover: float = 0.0) -> Costs:
    """Checked prices; `replay=math.inf` takes only what is usable as it stands.

    Raises:
        TypeError: a price that is no number.
        ValueError: a price that is NaN or negative, or an infinite `prefill`.
    """
    for name, value in (("prefill", prefill), ("replay", replay), ("recover", recover)):
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise TypeError(f"`{name}` is {value!r}; give a number")
        if math.isnan(value) or value < 0:
            raise ValueError(f"`{name}` is {value}; give a price of 0 or more")
    with np.errstate(over="ignore"):
        prices = [np.float32(x) for x in (prefill, replay, recover)]
    if np.isinf(prices[0]):
        raise ValueError("`prefill` is infinite; then nothing could be run cold")
    names = ("prefill", "replay", "recover")
    return Costs(**dict(zip(names, jax.device_put(prices), strict=True)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What each request reuses, makes again, replays and prefills. All ranges in tokens."""

    rows: jax.Array  # i32[Q, S], segments to reuse; N for none
    version: jax.Array  # u32[Q, S], as verified
    mark: jax.Array  # u32[Q, S], likewise
    resume: jax.Array  # i32[Q], position from which new tokens run
    fill: jax.Array  # i32[Q, 2], history to be made again, [A, B)
    fill_start: jax.Array  # i32[Q], where the run that makes it starts
    fill_groups: jax.Array  # bool[Q, G], history groups that lost it
    replay: jax.Array  # i32[Q, 2], run that restores rolling forms, up to `resume`
    replay_groups: jax.Array  # bool[Q, G], rolling groups that lost rows
    have: jax.Array  # i32[Q, G, 2], rows of rolling groups that pages still hold at `resume`
    prefill: jax.Array  # i32[Q, 2], tokens to run as new
    cost: jax.Array  # f32[Q]
    cold: jax.Array  # f32[Q], cost of prefilling everything
    need: Need  # what was asked with
    asked: jax.Array  # u32[Q], digest of prompt and need
    word: jax.Array  # u32[Q], digest of the whole plan; see `signed`
    layout: Layout = jax.tree.static()

    def __repr__(self) -> str:
        if isinstance(self.resume, jax.core.Tracer) or not hasattr(self.resume, "shape"):
            return "Plan(traced)"
        p = jax.device_get(self)
        out = []
        for q in range(len(p.resume)):
            parts = [f"reuse {p.resume[q]}"]
            if p.fill[q, 1] > p.fill[q, 0]:
                names = [g.name for g, f in zip(p.layout.groups, p.fill_groups[q], strict=True)
                         if f]  # fmt: skip
                parts.append(
                    f"make history {p.fill[q, 0]}-{p.fill[q, 1]} of {', '.join(names)} again "
                    f"from {p.fill_start[q]}"
                )
            if p.replay[q, 1] > p.replay[q, 0]:
                names = [g.name for g, f in zip(p.layout.groups, p.replay_groups[q], strict=True)
                         if f]  # fmt: skip
                parts.append(f"replay {p.replay[q, 1] - p.replay[q, 0]} for {', '.join(names)}")
            parts.append(f"prefill {p.prefill[q, 1] - p.prefill[q, 0]}")
            out.append(f"request {q}: " + ", ".join(parts))
        return "\n".join(out)


def route(availability: Availability, costs: Costs) -> Plan:
    """The cheapest verified way to serve each request.

    Args:
        availability: from `query`.
        costs: prices from `costs`.

    Returns:
        The plan. A request for which nothing stored helps gets `resume` 0.
    """
    check_type("availability", availability, Availability)
    check_type("costs", costs, Costs)
    return _route(availability, costs)


@jax.jit
def _route(availability: Availability, costs: Costs) -> Plan:
    return signed(jax.vmap(lambda a: _route_one(a, costs))(availability))


def signed(plan: Plan) -> Plan:
    """The plan with `word` renewed: a lease is recovered with the very plan it was admitted by."""

    def one(p: Plan):
        ranges = (p.resume, p.fill, p.fill_start, p.replay, p.have, p.fill_groups, p.replay_groups)
        return fold(p.asked, *(a.astype(jnp.int32) for a in ranges))

    return dataclasses.replace(plan, word=jax.vmap(one)(plan))


def _route_one(a: Availability, costs: Costs) -> Plan:
    """The plan of one request, `a` without the axis Q. K boundaries are weighed at once."""
    lay = a.layout
    B, G, S = lay.segment_tokens, len(lay.groups), a.rows.shape[0]
    position = a.positions  # [K]
    column = jnp.arange(S, dtype=jnp.int32)
    whole = a.matched // B  # segments that match whole, before the last shared token
    closed, units = lay.closed, lay.units

    # Holes in history: whole segments before the boundary, of each history group.
    full = a.held[..., 1] >= ((column + 1) * B)[:, None]
    bad = (column < whole)[:, None] & ((a.group_reason != 0) | ~full) & closed[None]  # [S, G]
    begin = (column * B)[:, None]
    first = jnp.min(jnp.where(bad, begin, lay.buckets[-1]), axis=0)  # [G]
    last = jax.lax.cummax(jnp.where(bad, begin + B, 0), axis=0)
    last = jnp.concatenate([jnp.zeros((1, G), jnp.int32), last])  # at segment boundary j

    def fill(at):
        """What it takes to have history whole at boundary `at`: range, groups, start."""
        end = last[jnp.minimum(at // B, whole)]
        holed = end > 0
        hi = jnp.max(end)
        lo = jnp.min(jnp.where(holed, first, jnp.where(hi > 0, hi, at)))
        hi = jnp.where(hi > 0, hi, at)
        lost = jnp.where(holed, jnp.maximum(lo - _leads(lay), 0), hi)
        start = replay_start(lay.layers, hi, lost, jnp.full((G, 2), hi, jnp.int32))
        return jnp.stack([lo, hi]), holed, start

    def replay(at, ok, run):
        """What it takes to have the rolling groups at boundary `at`: start, groups, rows kept."""
        gone = ~ok & ~closed
        kept = jnp.where(closed, at, jnp.maximum(run, 0))
        have = jnp.stack([at - kept, jnp.broadcast_to(at, kept.shape)], -1)
        lows = jnp.stack([required(g.rule, at)[0] * g.rule.unit for g in lay.groups])
        start = replay_start(lay.layers, at, jnp.where(gone, lows, at), have)
        return start, gone, have

    hole, holed, fill_start = jax.vmap(fill)(position)
    start, gone, have = jax.vmap(replay)(position, a.group_ok.T, a.runs.T)

    # History inside the partly shared segment is not made again, and no state is.
    spot = jnp.minimum(whole, S - 1)
    top = position[:, None] // units[None] * units[None]
    there = (a.group_reason[spot] == 0)[None] & (a.held[spot, :, 1][None] >= top)
    partly = (position > whole * B)[:, None]
    possible = jnp.all(~partly | ~closed[None] | (top <= whole * B) | there, axis=1)
    if any(g.rule.kind is Kind.STATE for g in lay.groups):
        possible &= ~jnp.any(gone, axis=1) & ~jnp.any(holed, axis=1)
    possible &= (position <= a.matched) & (position < jnp.maximum(a.length, 1))

    def price(tokens, each):
        return jnp.where(tokens > 0, tokens.astype(jnp.float32) * each + costs.recover, 0.0)

    total = price(position - start, costs.replay) + price(hole[:, 1] - fill_start, costs.replay)
    total += (a.length - position).astype(jnp.float32) * costs.prefill
    cold = a.length.astype(jnp.float32) * costs.prefill
    total = jnp.where(position == 0, cold, jnp.where(possible, total, jnp.inf))
    best = jnp.min(total)
    # Of equal ones the longest: it shares most.
    pick = jnp.argmax(jnp.where(total == best, position, -1))
    resume = position[pick]
    used = column * B < resume
    return Plan(
        rows=jnp.where(used, a.rows, lay.segments),
        version=jnp.where(used, a.version, jnp.uint32(0)),
        mark=jnp.where(used, a.mark, jnp.uint32(0)),
        resume=resume,
        fill=hole[pick],
        fill_start=fill_start[pick],
        fill_groups=holed[pick],
        replay=jnp.stack([start[pick], resume]),
        replay_groups=gone[pick],
        have=have[pick],
        prefill=jnp.stack([resume, a.length]),
        cost=best,
        cold=cold,
        need=a.need,
        asked=a.asked,
        word=a.asked,
        layout=lay,
    )


def _leads(lay: Layout) -> np.ndarray:
    """`i32[G]`: tokens before its own that the first entry of a history group folds as well."""
    return np.array([
        g.rule.unit if any(
            t.rule.kind is Kind.TAIL and t.rule.overlap and t.rule.size == g.rule.size
            and set(t.layers) & set(g.layers) for t in lay.groups
        ) else 0
        for g in lay.groups
    ], np.int32)  # fmt: skip
