"""The plan against every boundary priced one by one in Python."""

import dataclasses
import math

import jax
import numpy as np
import planted
import pytest
import test_query
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planted import Oracle, Store
from test_query import LAYOUTS, Q, ask, one

import hkv
from hkv import Kind, Reason

# Multiples of 1/8, so that sums in float32 are exact.
PRICES = st.fixed_dictionaries({
    "prefill": st.sampled_from((0.25, 1.0, 3.0)),
    "replay": st.sampled_from((0.0, 0.125, 0.5, 1.0, 3.0, math.inf)),
    "recover": st.sampled_from((0.0, 0.5, 5.0, 40.0)),
    "host": st.sampled_from((0.0, math.inf)),
    "disk": st.sampled_from((0.0, 1 / 1024, 1 / 64, math.inf)),
    "remote": st.sampled_from((0.0, 1 / 128)),
})  # fmt: skip


@dataclasses.dataclass
class Way:
    """One way to serve a request: resume at `at`."""

    at: int
    cost: float
    fill: tuple
    fill_start: int
    holed: set
    start: int  # of the replay
    gone: set
    fetch: set  # of (segment, form)
    size: int  # of these, in bytes
    o: Oracle  # as it is then


def _lead(lay, g):
    """Tokens before its own that an entry of this group folds as well."""
    mine = lay.groups[g]
    overlaps = any(
        t.rule.kind is Kind.TAIL and t.rule.overlap and t.rule.size == mine.rule.size
        and set(t.layers) & set(mine.layers) for t in lay.groups
    )  # fmt: skip
    return mine.rule.size if overlaps else 0


def ways(o, prices):
    """Every exact way with its price: without copies, with those of histories, with all."""
    every = set(range(len(o.layout.groups)))
    sets = [set(), {g for g in every if o.closed(g)}, every] if o.layout.disk else [set()]
    return [w for groups in sets for w in _ways(o, o.fetched(groups), groups, prices)]


def _fetches(o, groups, p):
    """Forms of segments to fetch for a resume at `p`, and their sizes by place."""
    lay, out, sizes = o.layout, set(), {}
    for f in hkv.Form:
        mine = [g for g in lay.form_groups(f)]
        rows = {r * lay.groups[g].rule.unit for g in mine for r in planted.needed(
            lay.groups[g].rule, p)}  # fmt: skip
        for s in range(min(rows, default=p) // o.B, math.ceil(p / o.B)) if rows else ():
            loads = [g for g in mine if g in groups and o.copies[s][g]]
            place = hkv.Place(o.store.table["place"][o.rows[s]]) if loads else None
            for g in loads:
                out.add((s, f))
                size = lay.segment_pages(lay.groups[g]) * lay.groups[g].page_bytes
                sizes[place] = sizes.get(place, 0) + size
    return out, sizes


def _ways(plain, o, groups, prices):
    lay, n, B = o.layout, len(o.prompt), o.B
    sets, out = o.sets(), []
    every = range(len(lay.groups))
    for p in o.positions:
        holes = {
            g: [s for s in range(min(p // B, o.whole)) if o.reasons[s][g] is not Reason.OK]
            for g in every
            if o.closed(g)
        }
        holes = {g: x for g, x in holes.items() if x}
        fill, begin = (p, p), p
        if holes:
            fill = (min(min(x) for x in holes.values()) * B,
                    max(max(x) for x in holes.values()) * B + B)  # fmt: skip
            lost = {g: max(fill[0] - _lead(lay, g), 0) for g in holes}
            begin = planted.replay_from(lay, fill[1], lost, {})
        gone = {g for g in every if not o.closed(g) and p not in sets[g]}
        lost = {g: min(planted.needed(lay.groups[g].rule, p)) for g in gone}
        kept = {g: p - o.run(g, p) for g in every if not o.closed(g)}
        start = planted.replay_from(lay, p, lost, kept)
        # Entries inside the partly shared segment are there or not; they are not made again.
        own = {
            g: {e for e in planted.needed(lay.groups[g].rule, p)
                if e * lay.groups[g].rule.unit >= o.base}
            for g in every if o.closed(g)
        }  # fmt: skip
        if p > o.base and any(not x <= o.group_rows(g) for g, x in own.items()):
            continue
        if not o.replayable() and (gone or holes):
            continue
        cost = (n - p) * prices["prefill"]
        for tokens in (p - start, fill[1] - begin):
            cost += tokens * prices["replay"] + prices["recover"] if tokens else 0.0
        fetch, sizes = _fetches(plain, groups, p)
        for place, size in sizes.items():
            price = {hkv.Place.HOST: "host", hkv.Place.LOCAL_DISK: "disk"}.get(place, "remote")
            cost += size * prices.get(price, 0.0)
        if p and math.isinf(cost):
            continue
        total = sum(sizes.values())
        out.append(Way(p, cost, fill, begin, set(holes), start, gone, fetch, total, o))
    return out


def expect(plan, o, prices):
    """One request's plan is the cheapest way, of equal ones the longest."""
    lay = o.layout
    all_ways = ways(o, prices)
    best = min(all_ways, key=lambda w: w.cost)
    best = min((w for w in all_ways if w.o is best.o), key=lambda w: (w.cost, -w.at))
    o = best.o
    names = range(len(lay.groups))
    assert plan.resume == best.at and plan.cost == best.cost, (plan.resume, plan.cost, best)
    assert plan.cold == len(o.prompt) * prices["prefill"] and plan.cost <= plan.cold
    assert plan.fill.tolist() == list(best.fill) and plan.fill_start == best.fill_start
    assert {g for g in names if plan.fill_groups[g]} == best.holed
    assert plan.replay.tolist() == [best.start, best.at]
    assert {g for g in names if plan.replay_groups[g]} == best.gone
    assert plan.prefill.tolist() == [best.at, len(o.prompt)]
    assert {(s, f) for s, f in np.argwhere(plan.fetch).tolist()} == best.fetch
    assert plan.fetch_bytes == best.size
    for g, spec in enumerate(lay.groups):
        if not o.closed(g) and spec.rule.kind is not Kind.STATE:
            assert plan.have[g].tolist() == [best.at - o.run(g, best.at), best.at]
    segments = math.ceil(best.at / o.B)
    rows = [lay.segments if r is None else r for r in o.rows[:segments]]
    assert plan.rows.tolist() == rows + [lay.segments] * (o.S - segments)
    versions = [int(o.store.table["version"][r]) for r in rows]
    assert plan.version.tolist() == versions + [0] * (o.S - segments)
    return best


def plan_of(answer, prices):
    return jax.device_get(hkv.route(answer, hkv.costs(**prices)))


@pytest.mark.parametrize("name", ["compressed, indexed", "chunked", "two windows", "recurrent"])
@settings(max_examples=25)
@given(st.randoms(use_true_random=False), PRICES)
def test_a_plan_is_the_cheapest_of_all_boundaries(name, r, prices):
    store, prompts, wants = test_query._scene(r, LAYOUTS[name])
    assume(store.proposes_all())
    a = ask(store, prompts, wants)
    plan = plan_of(a, prices)
    for q in range(Q):
        o = Oracle(store, prompts[q], wants[q])
        if o.best:
            o = Oracle(store, prompts[q], wants[q], pick=int(a.rows[q, o.whole]))
        expect(one(plan, q), o, prices)
    order = r.sample(range(Q), Q)
    moved = plan_of(jax.tree.map(lambda x: x[np.array(order)], a), prices)
    for i, q in enumerate(order):  # each request as if it were alone
        jax.tree.map(np.testing.assert_array_equal, one(plan, q), one(moved, i))


@pytest.mark.parametrize("bad", [math.nan, -1.0, -math.inf])
@pytest.mark.parametrize("name", ["prefill", "replay", "recover"])
def test_a_price_that_is_no_price_is_refused(name, bad):
    with pytest.raises(ValueError, match=f"`{name}`"):
        hkv.costs(**{name: bad})


def test_an_infinite_prefill_is_refused():
    with pytest.raises(ValueError, match="`prefill` is infinite"):
        hkv.costs(prefill=math.inf)


# By hand: two layers of windows over compressed history, segments of 12 tokens.

HAND = LAYOUTS["compressed"]
C, T, W = range(3)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12] * 4


def _stored():
    store = Store(HAND)
    return store, store.chain(PROMPT[:36])


def _lose(store, row, *groups):
    for g in groups:
        store.table["pages"][g][row] = 0


def _plan(store, n, **prices):
    return one(plan_of(ask(store, [PROMPT[:n]] * Q), prices), 0)


def test_nothing_stored_means_a_cold_run():
    plan = _plan(Store(HAND), 30)
    assert plan.resume == 0 and plan.cost == plan.cold == 30
    assert (plan.rows == HAND.segments).all() and plan.prefill.tolist() == [0, 30]
    assert plan.replay.tolist() == plan.fill.tolist() == [0, 0]
    assert not plan.replay_groups.any() and not plan.fill_groups.any()


def test_a_prompt_of_no_tokens_costs_nothing():
    store, _ = _stored()
    plan = _plan(store, 0)
    assert plan.resume == 0 and plan.cost == plan.cold == 0


def test_a_lost_window_is_replayed_where_that_is_cheaper():
    store, rows = _stored()
    _lose(store, rows[2], W)
    # Three layers of windows of 7 and tails of up to 7 rows in layer 1: 18 tokens of replay.
    plan = _plan(store, 37, replay=0.25)
    assert plan.resume == 36 and plan.replay.tolist() == [18, 36]
    assert plan.replay_groups.tolist() == [False, False, True]
    assert plan.cost == 18 * 0.25 + 1 and plan.have[W].tolist() == [36, 36]
    plan = _plan(store, 37, replay=2.0)
    assert plan.resume == 24 and plan.replay.tolist() == [24, 24] and plan.cost == 13


def test_a_replay_without_end_takes_only_what_is_usable():
    store, rows = _stored()
    _lose(store, rows[1], W)
    a = ask(store, [PROMPT[:24], PROMPT[:37], PROMPT[:12]])
    plan = plan_of(a, {"replay": math.inf})
    assert plan.resume.tolist() == a.boundary.tolist() == [12, 36, 11]
    assert np.isfinite(plan.cost).all() and not plan.replay_groups.any()


def test_of_equal_prices_the_longest_reuse_is_taken():
    store, rows = _stored()
    _lose(store, rows[2], W)
    # 12 tokens more of reuse for 18 of replay: equal at two thirds of the price.
    for replay, at in ((2.0, 36), (2.125, 24), (1.875, 36)):
        plan = _plan(store, 37, prefill=3.0, replay=replay)
        assert plan.resume == at
        assert plan.cost == min(18 * replay + 3, 13 * 3)


def test_the_price_of_each_recovery_can_tip_the_balance():
    store, rows = _stored()
    _lose(store, rows[2], W)
    assert _plan(store, 37, replay=0.25, recover=7.0).resume == 36
    assert _plan(store, 37, replay=0.25, recover=8.0).resume == 24


def test_a_hole_in_history_is_made_again_with_a_lead():
    store, rows = _stored()
    _lose(store, rows[1], C)
    plan = _plan(store, 37, replay=0.125)
    # Layer 1 has the entries; its first one folds the 4 tokens before, and below lies a window.
    assert plan.resume == 36 and plan.fill.tolist() == [12, 24]
    assert plan.fill_groups.tolist() == [True, False, False]
    assert plan.fill_start == 12 - 4 - 6
    assert plan.replay.tolist() == [36, 36] and plan.cost == 22 * 0.125 + 1
    # Before the hole nothing has to be made.
    plan = _plan(store, 37, replay=10.0)
    assert plan.resume == 12 and plan.fill.tolist() == [12, 12] and plan.cost == 25


def test_holes_of_several_segments_are_filled_in_one_run():
    store, rows = _stored()
    _lose(store, rows[0], C)
    _lose(store, rows[2], C)
    plan = _plan(store, 37, replay=0.0)
    assert plan.fill.tolist() == [0, 36] and plan.fill_start == 0 and plan.resume == 36


def test_history_inside_the_partly_shared_segment_is_not_made_again():
    store, rows = _stored()
    _lose(store, rows[2], C)
    plan = _plan(store, 34, replay=0.0)
    assert plan.resume == 27  # as far as no entry of that segment is needed
    assert not plan.fill_groups.any()


def test_a_window_and_a_hole_at_once_pay_for_two_runs():
    store, rows = _stored()
    _lose(store, rows[1], C)
    _lose(store, rows[2], W)
    plan = _plan(store, 37, replay=0.125, recover=1.0)
    assert plan.resume == 36 and plan.fill.tolist() == [12, 24] and plan.replay.tolist() == [18, 36]
    assert plan.cost == (22 + 18) * 0.125 + 2 + 1


def test_a_recurrent_layer_is_resumed_at_a_snapshot_or_not_at_all():
    lay = LAYOUTS["recurrent"]
    store = Store(lay)
    rows = store.chain(PROMPT[:36])
    store.table["held"][rows[2], 1] = (24, 24)
    plan = one(plan_of(ask(store, [PROMPT[:37]] * Q), {"replay": 0.0}), 0)
    assert plan.resume == 24 and not plan.replay_groups.any() and plan.cost == 13


def test_a_plan_says_what_it_does():
    store, rows = _stored()
    _lose(store, rows[1], C)
    _lose(store, rows[2], W)
    plan = hkv.route(ask(store, [PROMPT[:37], [], PROMPT[:12]]), hkv.costs(replay=0.125))
    assert repr(plan).splitlines() == [
        "request 0: reuse 36, make history 12-24 of c again from 2, replay 18 for w, prefill 1",
        "request 1: reuse 0, prefill 0",
        "request 2: reuse 11, prefill 1",
    ]


def test_layers_without_windows_below_need_no_lead():
    store = Store(LAYOUTS["full and sliding"])
    rows = store.chain(PROMPT[:36])
    _lose(store, rows[1], 0)
    plan = _plan(store, 37, replay=0.125)
    assert plan.resume == 36 and plan.fill.tolist() == [12, 24] and plan.fill_start == 12
