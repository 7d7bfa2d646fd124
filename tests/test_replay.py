"""Traces: parsing, the best any cache could reach, and the library's state machine beside both."""

import json
import sys
from collections import OrderedDict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import bounds
import replay

SIMULATOR = json.loads((bounds.FOLDER / "kvcache_simulator.json").read_text())
HEAD = 600


@pytest.fixture(scope="module")
def synthetic():
    return bounds.read("mooncake_synthetic")


@pytest.fixture(scope="module")
def head(synthetic):
    """The first requests that fit the short bucket."""
    return [r for r in synthetic if len(r.ids) < 64][:HEAD]


@pytest.fixture(scope="module")
def machine():
    return replay.Machine(replay.history_alone(), 8192, (64,))


@pytest.fixture(scope="module")
def hybrid():
    """A boundary needs the window of the block before it; there is no replay to restore one."""
    return replay.Machine(replay.rolling(2), 8192, (64,))


def lru(requests, capacity):
    """Least recently used; of one prompt the last block counts as used first, so leaves go first.

    As the outside simulator does it: what hits is decided before the prompt's blocks are touched.
    """
    kept, out = OrderedDict(), []
    for r in requests:
        n = 0
        while n < len(r.ids) and r.ids[n] in kept:
            n += 1
        out.append(sum(r.sizes[:n]))
        for block in reversed(r.ids):
            kept.pop(block, None)
            kept[block] = True
            if len(kept) > capacity:
                kept.popitem(last=False)
    return out


@pytest.mark.parametrize(
    ("name", "requests", "blocks", "distinct", "tokens"),
    [
        ("mooncake_synthetic", 3993, 121_877, 43_924, 61_194_628),
        ("mooncake_conversation", 4000, 105_904, 71_424, 53_249_359),
        ("claude_code", 618, 540_756, 36_082, 34_627_561),
        ("ragpulse", 2000, 20_418, 16_718, 5_949_633),
    ],
)
def test_every_trace_is_read_whole(name, requests, blocks, distinct, tokens):
    got = bounds.read(name)
    assert len(got) == requests
    assert sum(len(r.ids) for r in got) == blocks
    assert len({k for chain in bounds.prefixes(got) for k in chain}) == distinct
    assert sum(r.length for r in got) == tokens
    for r in got:
        assert len(r.ids) == len(r.sizes) and min(r.sizes) > 0
        left = r.length - sum(r.sizes)  # an agent's last, partial block has no id
        assert 0 <= left < 64 if name == "claude_code" else left == 0


def test_the_infinite_cache_reaches_the_stated_tokens_by_sets_alone(synthetic):
    seen, hits, total = set(), 0, 0
    for i, r in enumerate(synthetic):
        n = 0
        while n < len(r.ids) and r.ids[n] in seen:  # in this trace an id names a whole prefix
            n += 1
        if i >= len(synthetic) // 2:
            hits += sum(r.sizes[:n])
            total += r.length
        seen.update(r.ids)
    assert (hits, total) == (31_535_563, 36_552_394)
    assert (hits, total) == (SIMULATOR["ceiling"], SIMULATOR["total_tokens"])
    assert bounds.last_half(bounds.infinite(synthetic)) == hits


@pytest.mark.parametrize("capacity", sorted(map(int, SIMULATOR["hit_tokens"])))
def test_belady_and_lru_equal_the_outside_simulator(synthetic, capacity):
    want = SIMULATOR["hit_tokens"][str(capacity)]
    assert bounds.last_half(bounds.belady(synthetic, capacity)) == want["optimal"]
    assert bounds.last_half(lru(synthetic, capacity)) == want["lru"]


def test_belady_forgets_nothing_where_all_blocks_fit(head):
    blocks = len({b for r in head for b in r.ids})
    assert bounds.belady(head, blocks) == bounds.infinite(head)


def test_with_room_for_all_the_library_reuses_what_an_infinite_cache_would(machine, head):
    got = machine.run(head)
    assert got.saved == got.matched == bounds.infinite(head)
    assert sum(got.stored) == len({b for r in head for b in r.ids})
    assert got.refused == 0


@pytest.mark.parametrize("capacity", [64, 500, 4000])
def test_by_recency_the_library_reuses_what_lru_does_and_no_more_than_belady(
    machine, head, capacity
):
    got = machine.run(head, pages={"history": capacity})
    assert got.saved == lru(head, capacity)
    assert sum(got.saved) <= sum(bounds.belady(head, capacity)) <= sum(bounds.infinite(head))
    assert max(got.used) <= capacity and got.refused == 0


@pytest.mark.parametrize("every", [1, 4, 0])
def test_with_room_for_all_no_retention_policy_costs_anything(hybrid, head, every):
    assert hybrid.run(head, every=every).saved == bounds.infinite(head)


@pytest.mark.parametrize("every", [1, 4, 0])
def test_short_of_windows_boundaries_go_but_history_stays(hybrid, head, every):
    got = hybrid.run(head, every=every, pages={"window": 200})
    assert got.matched == bounds.infinite(head)
    assert 0 < sum(got.saved) < sum(got.matched)
    assert got.used[1] <= 200


@pytest.mark.parametrize(("every", "boundary"), [(0, 20), (4, 20), (4, 8)])
def test_under_pressure_the_policys_boundaries_outlive_the_others(hybrid, every, boundary):
    def prompt(*ids):
        return bounds.Request(ids, (512,) * len(ids), 512 * len(ids))

    first, other = range(20), range(100, 120)
    again = prompt(*first[:boundary], 200)
    # Windows for 30 blocks: the second prompt takes the place of ten of the first one's.
    got = hybrid.run([prompt(*first), prompt(*other), again], every=every, pages={"window": 30})
    assert got.saved == [0, 0, 512 * boundary]
