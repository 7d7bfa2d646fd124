"""The rules against a toy model: exactly the required rows matter, and no shorter replay is exact.

`HKV_FULL=1` runs more weights and more random losses.
"""

import math
import os

import jax.numpy as jnp
import numpy as np
import pytest
import toy

from hkv import _rules
from hkv._rules import Kind

FULL = bool(int(os.environ.get("HKV_FULL", "0")))
SEEDS = range(5) if FULL else range(1)
LOSSES = 600 if FULL else 60  # random losses a configuration
LAST = 40  # resume at 0..LAST
CASES = 128  # cases computed at once


def model_of(name, seed=0):
    """`"SH 4 8"`: layers from the bottom up, window, ratio of H; chunks are of 8 tokens."""
    kinds, W, H = name.split()
    return toy.Model(kinds, W=int(W), H=int(H), seed=seed)


def run(model, tokens, start, truth, held, skip=False):
    """`toy.run` in pieces that fit the processor's cache."""
    parts = []
    for i in range(0, len(start), CASES):
        s = slice(i, i + CASES)
        parts.append(toy.run(model, tokens, start[s], truth, [h[s] for h in held], skip))
    logits = np.concatenate([a for a, _ in parts])
    return logits, [np.concatenate(rows) for rows in zip(*(b for _, b in parts), strict=True)]


def required_at(rule, p):
    lo, hi = _rules.required(rule, p)
    return np.asarray(lo), np.asarray(hi)


def required_rows(rule, p, rows):
    """`bool[len(p), rows]`: which rows the rule requires at each position."""
    lo, hi = required_at(rule, p)
    row = np.arange(rows)
    return (row >= lo[:, None]) & (row < hi[:, None])


ONE_LAYER = ["S 4 8", "N 4 8", "F 4 8", "C 4 8", "K 4 8", "H 4 8", "H 4 16"]
DEEPER = ["SC 4 8", "CS 4 8", "KH 5 8", "NFN 4 8", "HKF 4 8", "SSKH 4 16"]


@pytest.mark.parametrize("name", ["KCHNF 4 8", "SSKH 4 16"])
def test_the_toy_computes_the_same_with_and_without_a_cache(name):
    model = model_of(name)
    tokens = model.tokens(60)
    logits, truth = toy.dense(model, tokens)
    start = np.array([0, 0, 17])
    held = [np.zeros((3, len(rows)), bool) for rows in truth]
    for h, rule in zip(held, model.rules, strict=True):
        h[1] = True
        h[2] = required_rows(rule, np.array([17]), h.shape[1])[0]
    got, rows = run(model, tokens, start, truth, held)
    np.testing.assert_allclose(got[0], logits, rtol=0, atol=1e-12)
    np.testing.assert_allclose(got[1], logits, rtol=0, atol=1e-12)
    np.testing.assert_allclose(got[2, 17:], logits[17:], rtol=0, atol=1e-12)
    for made, true in zip(rows, truth, strict=True):
        np.testing.assert_allclose(made[0], true, rtol=0, atol=1e-12)


def test_the_toy_is_causal():
    model = model_of("KCHNF 4 8")
    tokens = model.tokens(40)
    logits, _ = toy.dense(model, tokens)
    changed, _ = toy.dense(model, np.where(np.arange(40) < 23, tokens, (tokens + 1) % toy.VOCAB))
    np.testing.assert_array_equal(logits[:23], changed[:23])
    assert (np.abs(logits - changed)[23:].max(-1) > 1e-3).all()


def resumes(model, T):
    """Every resume with exactly the required rows, then with each one of them taken away.

    Returns:
        `p[cases]`, `group[cases]` and `row[cases]` taken away (-1: none), `held` for each group.
    """
    p = np.arange(LAST + 1)
    whole = []
    for rule in model.rules:
        whole.append(required_rows(rule, p, T // rule.unit))
    cases = [(q, -1, -1) for q in p]
    for g, rows in enumerate(whole):
        cases += [(q, g, row) for q, row in zip(*np.nonzero(rows), strict=True)]
    at, group, row = np.array(cases).T
    held = [rows[at] for rows in whole]
    for i in range(len(p), len(cases)):
        held[group[i]][i, row[i]] = False
    return at, group, row, held


def within(layer, name):
    """In how many tokens after the resume a missing row is bound to show."""
    if layer.kind == "K" and name in ("raw", "entry"):
        return 99  # whenever the indexer picks it
    return layer.main.ratio if name in ("raw", "key_raw") else 1


@pytest.mark.parametrize("name", ONE_LAYER + DEEPER)
def test_exactly_the_required_rows_matter(name):
    model = model_of(name)
    T = LAST + (40 if "K" in name else 18)
    tokens = model.tokens(T)
    logits, truth = toy.dense(model, tokens)
    at, group, row, held = resumes(model, T)
    got, _ = run(model, tokens, at, truth, held)
    after = np.arange(T) >= at[:, None]
    error = np.where(after, np.abs(got - logits).max(-1), 0.0)  # NaN where a missing row was read
    whole = group < 0
    assert error[whole].max() < 1e-12
    spoilt = np.isnan(error)
    shown = np.where(spoilt.any(-1), spoilt.argmax(-1) - at, 10**6)
    bound = [1] * whole.sum() + [
        within(model.layers[model.groups[g][0]], model.groups[g][1]) for g in group[~whole]
    ]
    late = ~whole & (shown >= bound)
    assert not late.any(), [
        (p, model.groups[g], r, n)
        for p, g, r, n in zip(at[late], group[late], row[late], shown[late], strict=True)
    ]


@pytest.mark.parametrize("name", ["SC 4 8", "KH 5 8", "NFN 4 8"])
def test_without_a_required_row_a_later_logit_is_another(name):
    model = model_of(name)
    T = LAST + (40 if "K" in name else 18)
    tokens = model.tokens(T)
    logits, truth = toy.dense(model, tokens)
    at, group, _, held = resumes(model, T)
    got, _ = run(model, tokens, at, truth, held, skip=True)
    after = np.arange(T) >= at[:, None]
    error = np.where(after, np.abs(got - logits).max(-1), 0.0).max(-1)
    whole = group < 0
    assert error[whole].max() < 1e-12
    finite = np.array([model.groups[g][1][:3] != "key" for g in group])
    assert (error[~whole & finite] > 1e-9).all()
    # an indexer row acts only through what is picked: many a finite change of one changes nothing
    keys = ~whole & ~finite
    assert not keys.any() or 0 < (error[keys] < 1e-12).mean() < 1


def test_the_window_before_the_open_one_is_read_by_its_next_half_only():
    model = model_of("CK 4 8")
    T = LAST + 18
    tokens = model.tokens(T)
    logits, truth = toy.dense(model, tokens)
    at, _, _, held = resumes(model, T)
    at, held = at[: LAST + 1], [h[: LAST + 1] for h in held]
    poisoned = []
    for (i, name, _), rows in zip(model.groups, truth, strict=True):
        rows = np.broadcast_to(rows, (len(at), *rows.shape)).copy()
        if name in ("raw", "key_raw"):
            layer = model.layers[i]
            part = (layer.main if name == "raw" else layer.index).split(rows)
            closed = np.arange(T) < (at - at % 4)[:, None]
            part[..., 1, :][closed] = np.nan
        poisoned.append(rows)
    got, _ = toy.run(model, tokens, at, poisoned, held)
    error = np.where(np.arange(T) >= at[:, None], np.abs(got - logits).max(-1), 0.0)
    assert error.max() < 1e-12


REPLAYS = [
    "H 4 16", "SH 4 8", "SC 4 8", "CS 4 8", "CH 5 16", "HCH 8 16", "SSKH 4 16", "SCHC 4 8",
    "KKHK 7 8", "HSSS 4 16", "SNF 4 8", "NCN 4 8", "SFHS 4 8",
]  # fmt: skip


def replay_starts(model, ends, lost, have):
    return np.asarray(
        _rules.replay_start(
            model.layout,
            jnp.asarray(ends, jnp.int32),
            jnp.asarray(lost, jnp.int32),
            jnp.asarray(have, jnp.int32),
        )
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", REPLAYS)
def test_a_replay_of_all_windows_and_tails_can_start_no_later(name, seed):
    model = model_of(name, seed)
    T = 72
    tokens = model.tokens(T, seed)
    _, truth = toy.dense(model, tokens)
    history = [rule.prefix_closed for rule in model.rules]
    held = [np.full((T + 1, len(rows)), h) for h, rows in zip(history, truth, strict=True)]
    _, made = run(model, tokens, np.arange(T + 1), truth, held, skip=True)
    ends = np.arange(T + 1)
    worst = np.zeros((T + 1, T + 1))  # [end, start], of every row required at the end
    lost = np.tile(ends[:, None], (1, len(history)))
    for g, (kept, rows) in enumerate(zip(history, made, strict=True)):
        if kept:
            continue
        error = np.abs(rows - truth[g]).max(-1)
        error = np.where(np.isnan(error), np.inf, error)
        need = required_rows(model.rules[g], ends, T)
        lost[:, g] = np.where(need.any(-1), need.argmax(-1), ends)
        worst = np.maximum(worst, np.where(need[:, None], error, 0.0).max(-1))
    start = replay_starts(model, ends, lost, np.zeros((*lost.shape, 2)))
    assert (start < ends).sum() > T // 2
    for p in ends:
        assert (worst[p, : start[p] + 1] < 1e-10).all(), p
        assert (worst[p, start[p] + 1 : p + 1] > 1e-9).all(), p


def random_losses(model, T, count, rng, mode):
    """Random damage: what each case has lost, what it still holds, and what a replay must make.

    Args:
        mode: `"rolling"`: windows and tails, whole or their oldest rows; `"holes"`: windows and
            history before the end; `"early"`: as rolling, and some lack their newest rows.

    Returns:
        `ends[cases]`, `lost[cases, G]`, `have[cases, G, 2]`, and for each group `bool[cases, rows]`
        which rows are held and which must be exact when the replay ends.
    """
    rules, holes = model.rules, mode == "holes"
    unit = math.lcm(*(rule.unit for rule in rules))
    ends = rng.integers(1, T + 1, count)
    if holes:
        ends = unit * rng.integers(1, T // unit + 1, count)
    begin = unit * rng.integers(0, np.maximum(ends // unit, 1))
    lost = np.tile(ends[:, None], (1, len(rules)))
    have = np.zeros((count, len(rules), 2), int)
    held = [np.zeros((count, T // rule.unit), bool) for rule in rules]
    must = [np.zeros((count, T // rule.unit), bool) for rule in rules]
    overlap = {i: layer.main.ratio for i, layer in enumerate(model.layers) if layer.kind in "CK"}
    for c, end in enumerate(ends):
        for g, (i, _, rule) in enumerate(model.groups):
            lo, hi = (int(x) for x in required_at(rule, end))
            if rule.prefix_closed:
                held[g][c, :hi] = True
                if holes and rng.random() < 0.4:
                    hole = slice(begin[c] // rule.unit, hi)
                    held[g][c, hole], must[g][c, hole] = False, True
                    lost[c, g] = max(0, begin[c] - overlap.get(i, 0))
                continue
            what = rng.choice(["lost", "kept", "more", "some", "not needed"])
            early = mode == "early" and rng.random() < 0.5
            tail = rule.kind is Kind.TAIL
            if holes and (tail or what == "not needed"):
                continue  # a tail that is held could be folded into an entry of the hole
            must[g][c, lo:hi] = True
            more = 0 if tail else rng.integers(0, 13)
            first = {"lost": end, "more": lo - more, "some": rng.integers(lo, end + 1)}
            first = max(0, first.get(what, lo))
            last = max(first, end - rng.integers(1, 9)) if early else end
            held[g][c, first:last] = True
            have[c, g] = first, last
            lost[c, g] = lo if first > lo else max(lo, last)
    return ends, lost, have, held, must


@pytest.mark.parametrize("mode", ["rolling", "holes", "early"])
@pytest.mark.parametrize("name", REPLAYS)
def test_a_replay_after_random_losses_can_start_no_later(name, mode):
    model = model_of(name)
    T = 64
    rng = np.random.default_rng(7)
    tokens = model.tokens(T)
    _, truth = toy.dense(model, tokens)
    ends, lost, have, held, must = random_losses(model, T, LOSSES, rng, mode)
    start = replay_starts(model, ends, lost, have)
    case = np.flatnonzero(start < ends)
    assert len(case) > LOSSES // 3
    for late in (0, 1):
        _, made = run(model, tokens, start[case] + late, truth, [h[case] for h in held], skip=True)
        worst = np.zeros(len(case))
        for g, rows in enumerate(made):
            error = np.abs(rows - truth[g]).max(-1)
            error = np.where(np.isnan(error), np.inf, error)
            worst = np.maximum(worst, np.where(must[g][case], error, 0.0).max(-1))
        if not late:
            assert (worst < 1e-10).all(), case[worst >= 1e-10]
        elif mode != "early":  # rows that end early are exact to use but not counted on
            assert (worst > 1e-9).all(), case[worst <= 1e-9]
