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
from hkv._boundary import boundaries, fetched, spans_of
from hkv._identity import Need, fold
from hkv._layout import FORMS, Form, Layout
from hkv._rules import Kind, replay_start, required
from hkv._slots import take


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Prices in one unit of the caller's choice, for instance seconds."""

    prefill: jax.Array  # f32[], of a token that runs through the model and is stored
    replay: jax.Array  # f32[], of a token that runs through the model to restore lost rows
    recover: jax.Array  # f32[], of each replay or refill, whatever its length
    fetch: jax.Array  # f32[P], of a byte to fetch, by `Place`


def costs(
    prefill: float = 1.0, replay: float = 1.0, recover: float = 0.0, *, host: float = 0.0,
    disk: float = 0.0, remote: float = 0.0,
) -> Costs:  # fmt: skip
    """Checked prices.

    Args:
        prefill: of a token that runs through the model and is stored.
        replay: of a token that runs through the model to restore lost rows; `math.inf` takes only
            what is usable as it stands.
        recover: of each replay or refill, whatever its length.
        host: of a byte to fetch from host memory; `math.inf` fetches none.
        disk: of a byte to fetch from a local disk, likewise.
        remote: of a byte to fetch from an object store, likewise.

    Raises:
        TypeError: a price that is no number.
        ValueError: a price that is NaN or negative, or an infinite `prefill`.
    """
    named = dict(
        prefill=prefill, replay=replay, recover=recover, host=host, disk=disk, remote=remote
    )
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise TypeError(f"`{name}` is {value!r}; give a number")
        if math.isnan(value) or value < 0:
            raise ValueError(f"`{name}` is {value}; give a price of 0 or more")
    with np.errstate(over="ignore"):
        prices = {name: np.float32(named[name]) for name in ("prefill", "replay", "recover")}
        fetch = np.array([np.inf, 0, host, disk, remote], np.float32)  # by Place
    if np.isinf(prices["prefill"]):
        raise ValueError("`prefill` is infinite; then nothing could be run cold")
    return Costs(**jax.device_put({**prices, "fetch": fetch}))


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
    fetch: jax.Array  # bool[Q, S, F], forms to fetch first, after which to query again
    fetch_bytes: jax.Array  # f32[Q], of these
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
            if p.fetch[q].any():
                names = [f.name for f in Form if p.fetch[q, :, f].any()]
                parts.append(f"fetch {p.fetch_bytes[q]:,.0f} bytes of {', '.join(names)} first")
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
    """The plan of one request, `a` without the axis Q."""
    lay = a.layout
    every = np.ones(len(lay.groups), bool)
    if not lay.disk:
        return _weigh(a, costs, ~every)
    # Without copies, without those of what a replay can make anew, with all.
    plans = [_weigh(a, costs, groups) for groups in (~every, lay.closed, every)]
    best = jnp.argmin(jnp.stack([p.cost for p in plans]))
    return jax.tree.map(lambda *x: jnp.stack(x)[best], *plans)


def _weigh(a: Availability, costs: Costs, groups: np.ndarray) -> Plan:
    """The best plan that fetches copies of some groups, `bool[G]`. K boundaries at once."""
    lay = a.layout
    B, G, S = lay.segment_tokens, len(lay.groups), a.rows.shape[0]
    position = a.positions  # [K]
    column = jnp.arange(S, dtype=jnp.int32)
    whole = a.matched // B  # segments that match whole, before the last shared token
    closed, units = lay.closed, lay.units
    reason, held, runs, group_ok = a.group_reason, a.held, a.runs, a.group_ok
    if groups.any():
        reason, held = fetched(reason, held, a.copied, groups)
        b = boundaries(lay, reason, held, whole, a.matched - whole * B)
        runs, group_ok = b.runs, b.ok

    # Holes in history: whole segments before the boundary, of each history group.
    full = held[..., 1] >= ((column + 1) * B)[:, None]
    bad = (column < whole)[:, None] & ((reason != 0) | ~full) & closed[None]  # [S, G]
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
    start, gone, have = jax.vmap(replay)(position, group_ok.T, runs.T)

    # History inside the partly shared segment is not made again, and no state is.
    spot = jnp.minimum(whole, S - 1)
    top = position[:, None] // units[None] * units[None]
    there = (reason[spot] == 0)[None] & (held[spot, :, 1][None] >= top)
    partly = (position > whole * B)[:, None]
    possible = jnp.all(~partly | ~closed[None] | (top <= whole * B) | there, axis=1)
    if any(g.rule.kind is Kind.STATE for g in lay.groups):
        possible &= ~jnp.any(gone, axis=1) & ~jnp.any(holed, axis=1)
    possible &= (position <= a.matched) & (position < jnp.maximum(a.length, 1))

    def price(tokens, each):
        return jnp.where(tokens > 0, tokens.astype(jnp.float32) * each + costs.recover, 0.0)

    total = price(position - start, costs.replay) + price(hole[:, 1] - fill_start, costs.replay)
    total += (a.length - position).astype(jnp.float32) * costs.prefill
    fetch, size = jnp.zeros((S, FORMS), bool), jnp.zeros((S, FORMS))
    if groups.any():
        size, since, fetch_price = _copies(a, groups, costs)
        total += fetch_price
    cold = a.length.astype(jnp.float32) * costs.prefill
    total = jnp.where(position == 0, cold, jnp.where(possible, total, jnp.inf))
    best = jnp.min(total)
    # Of equal ones the longest: it shares most.
    pick = jnp.argmax(jnp.where(total == best, position, -1))
    resume = position[pick]
    used = column * B < resume
    if groups.any():
        fetch = (column[:, None] >= since[pick][None]) & used[:, None] & (size > 0)
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
        fetch=fetch,
        fetch_bytes=jnp.sum(jnp.where(fetch, size, 0.0)),
        prefill=jnp.stack([resume, a.length]),
        cost=best,
        cold=cold,
        need=a.need,
        asked=a.asked,
        word=a.asked,
        layout=lay,
    )


def _copies(a: Availability, groups: np.ndarray, costs: Costs):
    """What is to be fetched of the copies of some groups, `bool[G]`.

    Returns:
        `f32[S, F]` bytes that there are; `i32[K, F]` the first segment of which each boundary needs
        them; `f32[K]` the price of all from there on.
    """
    lay, position = a.layout, a.positions
    S, B = a.rows.shape[0], lay.segment_tokens
    some = (a.copied[..., 0] < a.copied[..., 1]) & groups[None]
    each = jnp.where(some, lay.group_bytes.astype(np.float32)[None], 0.0)
    mine = lay.forms[:, None] == np.arange(FORMS)[None]  # [G, F]
    size = each @ mine.astype(np.float32)
    place = take(costs.fetch, a.place[:, Form.DISK].astype(jnp.int32), 0)[:, None]
    never = (size > 0) & jnp.isinf(place)
    price = jnp.where((size > 0) & ~never, size * place, 0.0)
    total, bars = (
        jnp.concatenate([jnp.zeros((1, FORMS), x.dtype), jnp.cumsum(x, axis=0, dtype=x.dtype)])
        for x in (price, never.astype(jnp.int32))
    )
    end = jnp.minimum(-(-position // B), S)
    lo, hi = jax.vmap(lambda p: spans_of(lay, p))(position)  # [K, G]
    since = jnp.where(lo < hi, lo // B, end[:, None])
    first = jnp.min(jnp.where(mine[None], since[..., None], end[:, None, None]), axis=1)
    upto = jnp.arange(FORMS, dtype=jnp.int32)[None]
    over = total[end] - total[first, upto]
    barred = jnp.any(bars[end] > bars[first, upto], axis=1)
    return size, first, jnp.where(barred, jnp.inf, jnp.sum(over, axis=1))


def _leads(lay: Layout) -> np.ndarray:
    """`i32[G]`: tokens before its own that the first entry of a history group folds as well."""
    return np.array([
        g.rule.unit if any(
            t.rule.kind is Kind.TAIL and t.rule.overlap and t.rule.size == g.rule.size
            and set(t.layers) & set(g.layers) for t in lay.groups
        ) else 0
        for g in lay.groups
    ], np.int32)  # fmt: skip
