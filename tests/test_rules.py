"""`required` against sets built from the definitions, `replay_start` against closed formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv import _rules
from hkv._rules import Kind

END = 200
QUICK = settings(max_examples=60, deadline=None)
LONG = settings(max_examples=150, deadline=None)


def numbers(rule, p):
    lo, hi = _rules.required(rule, p)
    return np.asarray(lo), np.asarray(hi)


def needed(rule, p):
    """Rows that the tokens from `p` on read, by what each kind of attention reads."""
    n, past = rule.size, range(p)

    def unfinished(entry):
        return any(j >= p for j in range(entry * n, entry * n + n))

    match rule.kind:
        case Kind.HISTORY | Kind.INDEXER:
            return {e for e in range(p + 1) if not unfinished(e)}
        case Kind.WINDOW:
            return {j for j in past if j in range(p - n + 1, p + 1)}
        case Kind.CHUNK:
            return {j for j in past if j // n == p // n}
        case Kind.TAIL:
            folds = {j: {j // n, j // n + 1} if rule.overlap else {j // n} for j in past}
            return {j for j in past if any(unfinished(e) for e in folds[j])}
        case Kind.STATE:
            return {p} - {0}


sizes = st.integers(1, 40)
rolling = st.one_of(
    st.builds(_rules.window, sizes),
    st.builds(_rules.chunk, sizes),
    st.builds(_rules.tail, sizes, st.booleans()),
)
rules = st.one_of(
    rolling,
    st.builds(_rules.history, sizes),
    st.builds(_rules.indexer, sizes),
    st.just(_rules.state()),
)


@QUICK
@given(rules, st.lists(st.integers(0, END), min_size=1, max_size=12))
def test_required_is_what_the_definitions_say(rule, ps):
    lo, hi = numbers(rule, np.array(ps))
    for p, a, b in zip(ps, lo, hi, strict=True):
        assert 0 <= a <= b
        assert set(range(a, b)) == needed(rule, p)


@QUICK
@given(rules, st.integers(0, END), st.integers(0, END))
def test_only_prefix_closed_rules_hold_at_every_smaller_position(rule, p, q):
    small, big = sorted((p, q))
    (lo, hi), (lo2, hi2) = numbers(rule, small), numbers(rule, big)
    if rule.prefix_closed:
        assert lo == lo2 == 0 and hi <= hi2
    else:
        assert rule.unit == 1 and hi <= small + 1


@QUICK
@given(rolling.filter(lambda rule: rule.kind is not Kind.TAIL), st.integers(0, END))
def test_first_seen_is_the_oldest_row_that_the_token_reads(rule, p):
    assert int(_rules.first_seen(rule, jnp.int32(p))) == min(needed(rule, p), default=p)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (_rules.history(), {0: (0, 0), 1: (0, 1), 128: (0, 128)}),
        (_rules.history(4), {0: (0, 0), 3: (0, 0), 4: (0, 1), 7: (0, 1), 128: (0, 32)}),
        (_rules.history(128), {127: (0, 0), 128: (0, 1), 1000: (0, 7)}),
        (_rules.indexer(4), {3: (0, 0), 4: (0, 1), 130: (0, 32)}),
        (_rules.window(1), {0: (0, 0), 1: (1, 1), 9: (9, 9)}),
        (_rules.window(4), {0: (0, 0), 2: (0, 2), 3: (0, 3), 4: (1, 4), 9: (6, 9)}),
        (_rules.window(128), {127: (0, 127), 128: (1, 128), 1000: (873, 1000)}),
        (_rules.chunk(8), {0: (0, 0), 7: (0, 7), 8: (8, 8), 9: (8, 9), 8192: (8192, 8192)}),
        (_rules.tail(128), {0: (0, 0), 127: (0, 127), 128: (128, 128), 200: (128, 200)}),
        (
            _rules.tail(4, overlap=True),
            {0: (0, 0), 3: (0, 3), 4: (0, 4), 7: (0, 7), 8: (4, 8), 11: (4, 11), 128: (124, 128)},
        ),
        (_rules.tail(2), {0: (0, 0), 1: (0, 1), 2: (2, 2), 3: (2, 3)}),
        (_rules.state(), {0: (0, 0), 1: (1, 2), 64: (64, 65)}),
    ],
    ids=str,
)
def test_required_by_hand(rule, expected):
    for p, (a, b) in expected.items():
        assert numbers(rule, p) == (a, b), p


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (2, 0, 3), (2, 3, 4)])
@pytest.mark.parametrize(
    "rule",
    [_rules.history(4), _rules.window(4), _rules.chunk(8), _rules.tail(4, True), _rules.state()],
    ids=str,
)
def test_required_keeps_the_shape_and_is_int32(rule, shape):
    p = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    for value in (*_rules.required(rule, p), _rules.first_seen(rule, jnp.asarray(p))):
        assert value.shape == shape and value.dtype == jnp.int32
    one_by_one = [numbers(rule, n) for n in p.ravel()]
    lo, hi = jax.jit(_rules.required, static_argnums=0)(rule, jnp.asarray(p))
    assert [(a, b) for a, b in zip(lo.ravel(), hi.ravel(), strict=True)] == one_by_one


@pytest.mark.parametrize("value", [0, -1, True, 4.0, "4", None])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (_rules.history, "m"),
        (_rules.window, "W"),
        (_rules.chunk, "C"),
        (_rules.tail, "m"),
        (_rules.indexer, "m"),
    ],
)
def test_bad_sizes_are_refused_by_name(make, name, value):
    with pytest.raises((TypeError, ValueError), match=f"`{name}` is .*give "):
        make(value)


def test_rules_are_hashable_and_say_what_they_are():
    assert len({_rules.tail(4), _rules.tail(4, True), _rules.tail(4, overlap=True)}) == 2
    assert str(_rules.tail(4, True)) == "tail(4, overlap)"
    assert str(_rules.window(128)) == "window(128)" and str(_rules.state()) == "state"


# replay_start


def layer_rules(kind, W, H):
    """The groups of one layer by its letter: S, F, C, K, H or N (chunks of W)."""
    if kind == "F":
        return [_rules.history()]
    if kind == "N":
        return [_rules.chunk(W)]
    own = [_rules.window(W)]
    if kind in "CK":
        own += [_rules.history(4), _rules.tail(4, True)]
    if kind == "K":
        own += [_rules.indexer(4), _rules.tail(4, True)]
    if kind == "H":
        own += [_rules.history(H), _rules.tail(H)]
    return own


def numbered(layers):
    """`layers` with group numbers, and all rules by number."""
    flat = [rule for own in layers for rule in own]
    number = iter(range(len(flat)))
    return tuple(tuple((next(number), rule) for rule in own) for own in layers), flat


def all_lost(flat, p):
    """`lost` and `have` where every rolling group lacks everything and history is whole."""
    lost = [p if rule.prefix_closed else int(numbers(rule, p)[0]) for rule in flat]
    return np.array(lost, np.int32), np.zeros((len(flat), 2), np.int32)


def replay_start(layers, end, lost, have):
    return np.asarray(
        _rules.replay_start(layers, jnp.int32(end), jnp.asarray(lost), jnp.asarray(have))
    )


def length_of_full_replay(kinds, Ws, H, p):
    """Tokens to replay when all windows and tails are lost and history is kept."""
    back = [0 if kind == "F" else W - 1 for kind, W in zip(kinds, Ws, strict=True)]
    open_rows = {"C": min(p, p % 4 + 4), "K": min(p, p % 4 + 4), "H": p % H}
    reach = [sum(back[:i]) + max(back[i], open_rows.get(kind, 0)) for i, kind in enumerate(kinds)]
    return min(p, max(reach))


@LONG
@given(st.data(), st.text("SFCKH", min_size=1, max_size=6), st.integers(1, 20), st.integers(0, END))
def test_replay_start_when_all_windows_and_tails_are_lost(data, kinds, H, p):
    Ws = data.draw(st.lists(st.integers(1, 9), min_size=len(kinds), max_size=len(kinds)))
    layers, flat = numbered([layer_rules(k, W, H) for k, W in zip(kinds, Ws, strict=True)])
    start = replay_start(layers, p, *all_lost(flat, p))
    assert start == p - length_of_full_replay(kinds, Ws, H, p)


@pytest.mark.parametrize(
    ("kinds", "W", "H", "least", "most"),
    [
        ("H", 4, 16, 3, 15),
        ("C", 4, 16, 4, 7),
        ("HS", 4, 16, 6, 15),
        ("SH", 4, 8, 6, 10),
        ("SC", 4, 16, 7, 10),
        ("CS", 4, 16, 6, 7),
        ("CH", 5, 16, 8, 19),
        ("SSH", 4, 16, 9, 21),
        ("HCH", 8, 16, 21, 29),
        ("SSCH", 8, 8, 28, 28),
        ("SSKH", 4, 16, 12, 24),
        ("SCHC", 4, 8, 13, 16),
        ("KKHK", 7, 8, 24, 25),
        ("HSSS", 4, 16, 12, 15),
        ("N", 8, 16, 0, 7),
        ("NN", 8, 16, 0, 7),
        ("SN", 8, 16, 7, 14),
    ],
)
def test_length_of_a_full_replay_by_hand(kinds, W, H, least, most):
    layers, flat = numbered([layer_rules(kind, W, H) for kind in kinds])
    length = [p - replay_start(layers, p, *all_lost(flat, p)) for p in range(64, 128)]
    if kinds == "SN":  # at a chunk boundary nothing of the chunk is lost, only the window below
        assert min(length) == 7
    assert (min(length), max(length)) == (least, most)


@pytest.mark.parametrize(
    ("layers", "tokens"), [("SS" + "CH" * 20 + "C", 5461), ("HH" + "CH" * 29 + "C", 7747)]
)
def test_full_replay_of_large_models(layers, tokens):
    numbers_, flat = numbered([layer_rules(kind, 128, 128) for kind in layers])
    if len(layers) == 61:
        assert layers.count("C") == 30 and layers.count("H") == 31
    for p in (8000, 8191, 8192, 100_001):
        start = replay_start(numbers_, p, *all_lost(flat, p))
        assert p - start == length_of_full_replay(layers, [128] * len(layers), 128, p) == tokens


@pytest.mark.parametrize("kept", [127, 254])
def test_one_lost_window_replays_the_layers_up_to_it(kept):
    layers, flat = numbered([layer_rules("S", 128, 0)] * 6)
    p = 5000
    for lost_layer in range(6):
        lost = np.full(6, p, np.int32)
        lost[lost_layer] = p - 127
        have = np.tile(np.array([p - kept, p], np.int32), (6, 1))
        have[lost_layer] = 0
        below = lost_layer if kept < 254 else 0  # lower layers that keep enough need no more input
        assert p - replay_start(layers, p, lost, have) == 127 * (below + 1)


def test_a_lost_tail_alone():
    layers, flat = numbered([layer_rules(kind, 4, 16) for kind in "SSHS"])
    tail = [i for i, rule in enumerate(flat) if rule.kind is Kind.TAIL]
    for p in (64, 65, 79):
        lost, have = np.full(len(flat), p, np.int32), np.zeros((len(flat), 2), np.int32)
        have[:] = (p - 3, p)
        lost[tail] = p - p % 16
        assert p - replay_start(layers, p, lost, have) == (6 + p % 16 if p % 16 else 0)


def partial_replay_start(layers, end, lost, have):
    """The recursion over layers from the top, in tokens before the end, in plain Python."""
    above = 0
    for groups in reversed(layers):
        own = max(end - lost[g] for g, _ in groups)
        reach = above
        for g, rule in groups:
            if rule.kind is Kind.STATE and (above or end - lost[g] > 0):
                reach = end
            if above and rule.kind in (Kind.WINDOW, Kind.CHUNK):
                read = needed(rule, end - above)
                oldest = end - min(read, default=end - above)
                keeps = have[g][1] >= end and end - have[g][0] >= oldest
                reach = max(reach, above if keeps else oldest)
        above = max(own, reach)
    return end - above


@st.composite
def partial_losses(draw):
    kinds = draw(st.text("SFCKHNR", min_size=1, max_size=5))
    W, H = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    layers, flat = numbered([[_rules.state()] if k == "R" else layer_rules(k, W, H) for k in kinds])
    end = draw(st.integers(0, 90))
    lost, have = [], []
    for rule in flat:
        first = min(needed(rule, end), default=end) if rule.unit == 1 else 0
        lost.append(min(end, draw(st.sampled_from([end, end, first * rule.unit, end // 2]))))
        lo = draw(st.integers(0, end))
        have.append(
            draw(st.sampled_from([(0, 0), (lo, end), (min(first, end), end), (lo, end - 1)]))
        )
    return layers, end, np.array(lost, np.int32), np.array(have, np.int32)


@LONG
@given(partial_losses())
def test_replay_start_when_some_groups_are_lost(case):
    layers, end, lost, have = case
    assert replay_start(layers, end, lost, have) == partial_replay_start(layers, end, lost, have)


@QUICK
@given(st.data(), st.text("SCKH", min_size=1, max_size=5), st.integers(1, 9))
def test_replay_start_of_a_hole_in_history(data, kinds, W):
    H = 8
    layers, flat = numbered([layer_rules(kind, W, H) for kind in kinds])
    compressed = [(i, g, r) for i, own in enumerate(layers) for g, r in own if r.prefix_closed]
    A, tokens = H * data.draw(st.integers(0, 12)), H * data.draw(st.integers(1, 4))
    holes = data.draw(st.lists(st.sampled_from(compressed), unique=True)) if compressed else []
    lost, lead = np.full(len(flat), A + tokens, np.int32), None
    for i, g, rule in holes:
        overlap = 4 if rule.size == 4 else 0
        lost[g] = max(0, A - overlap)
        lead = max(lead or 0, i * (W - 1) + overlap)
    have = np.zeros((len(flat), 2), np.int32)
    expected = A + tokens if lead is None else max(0, A - lead)
    assert replay_start(layers, A + tokens, lost, have) == expected


def test_replay_start_with_nothing_lost_is_the_end():
    layers, flat = numbered([layer_rules(kind, 4, 8) for kind in "SKFHN"] + [[_rules.state()]])
    for p in (0, 1, 40):
        lost = np.full(len(flat), p, np.int32)
        assert replay_start(layers, p, lost, np.zeros((len(flat), 2), np.int32)) == p


def test_replay_through_a_recurrent_layer_starts_at_zero():
    layers, flat = numbered([layer_rules("S", 4, 8), [_rules.state()], layer_rules("S", 4, 8)])
    have = np.array([[37, 40], [40, 41], [37, 40]], np.int32)
    for lost, start in (([37, 40, 40], 37), ([40, 40, 37], 0), ([40, 39, 40], 0)):
        assert replay_start(layers, 40, np.array(lost, np.int32), have) == start


def test_replay_start_of_a_batch_in_one_program():
    layers, flat = numbered([layer_rules(kind, 4, 16) for kind in "SSKH"])
    ends = np.arange(60, dtype=np.int32).reshape(3, 20)
    cases = [all_lost(flat, p) for p in ends.ravel()]
    lost = np.stack([a for a, _ in cases]).reshape(3, 20, -1)
    have = np.stack([b for _, b in cases]).reshape(3, 20, -1, 2)
    starts = jax.jit(_rules.replay_start, static_argnums=0)(layers, ends, lost, have)
    assert starts.shape == (3, 20) and starts.dtype == jnp.int32
    expected = [p - length_of_full_replay("SSKH", [4] * 4, 16, p) for p in range(60)]
    np.testing.assert_array_equal(starts.ravel(), expected)
