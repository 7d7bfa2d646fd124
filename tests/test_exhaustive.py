"""Every interleaving of two requests to a depth, and bugs planted to show what would be found."""

import dataclasses
import functools
import os

import numpy as np
import pytest
from exhaustive import Search, canonical
from exhaustive_invariants import INVARIANTS, STATE, transitions_are_the_listed
from exhaustive_states import ACTIONS, Columns, N, first, packing
from mutations import replaced, rewritten, without

import hkv.testing
from hkv import (
    Form,
    Life,
    _admit,
    _cache,
    _evict,
    _lease,
    _lifecycle,
    _pages,
    _publish,
    _recover,
    _view,
)

FULL = os.environ.get("HKV_FULL") == "1"
STORED = "plan(0) admit(0) step(0) step(0) publish(0) release(0)"
# Arrays that are the same in every state, or follow from others. A new one is compared in
# `canonical`, or joins these.
LEFT_OUT = {
    *(f".cache.table.{k}" for k in (
        "abi before codes copied epoch identity indexer_version media place tenant").split()),
    ".cache.caps.limit", ".cache.caps.tenant", ".cache.caps.weight", ".cache.clock",
    ".cache.tenants", ".plan.asked", ".plan.cold", ".plan.cost", ".plan.mark", ".plan.prefill",
    ".plan.fetch", ".plan.fetch_bytes", ".plan.word",
}  # fmt: skip


@pytest.fixture(scope="module")
def search():
    return Search()


def check(found):
    """Nothing is broken, and the library's own checker agrees on some of the last states."""
    assert not found.broken, str(found)
    for i in range(0, len(found.front), len(found.front) // 50 + 1):
        state = Columns(found.front).state(i)
        hkv.testing.invariants(state.cache, [state.lease])


def test_no_interleaving_of_two_requests_breaks_an_invariant(search):
    found = search.run(11 if FULL else 9)
    print(f"\n{found}")
    check(found)
    assert found.states > 20_000 and all(found.seen.values()), str(found)


@pytest.mark.parametrize(
    ("start", "depth", "without"),
    [
        (f"{STORED} drop(1) plan(1) admit(1)", 5, ()),
        (f"{STORED} invalidate(0) plan(1)", 5, ()),
        ("", 9, ("fork", "invalidate")),
    ],
    ids=["window lost", "history stale", "no branches"],
)
def test_no_longer_interleaving_of_some_kinds_breaks_one(search, start, depth, without):
    only = tuple(a for a in ACTIONS if a not in without)
    found = search.run(depth + 2 * FULL, start=start, only=only)
    print(f"\n{found}")
    check(found)


def test_states_count_as_one_only_if_all_else_is_compared():
    c = Columns(first())
    canonical(c)
    assert set(packing().paths) - c.read <= LEFT_OUT


def sweep(search, words):
    """Every form of every row to every state, from each of these states; and what is wrong."""
    every = N * len(Form) * len(Life)
    old = np.repeat(words, every, axis=0)
    number = np.tile(np.arange(every, dtype=np.int32), len(words))
    new, moved = search.do("transition", old, number)
    return new[moved], transitions_are_the_listed(Columns(old), Columns(new), number, moved)


def test_transitions_by_hand_are_the_listed_ones_in_every_kind_of_state(search):
    words = search.run(6).front
    for kinds in (set(Life) - {Life.OFFLOADING, Life.ON_DISK, Life.LOADING}, set(Life)):
        words = words[np.linspace(0, len(words) - 1, 60).astype(int)]
        life = Columns(words)[".cache.table.life"]
        assert kinds >= {Life(x) for x in np.unique(life).tolist()}
        words, wrong = sweep(search, words)
        assert not wrong.any()
        broken = set()
        search.check(words, lambda name, bad, at, b=broken: b.update({name} if bad.any() else ()))
        # A form can be called READY by hand where nothing is held of it; a query sees that.
        assert broken <= {"ready_rows_are_what_their_tokens_say"}


# Bugs: one for each invariant.


def _nothing(cache, *args):
    return cache


def _stamps_alone(copy):
    def copies(data, *args, **kwargs):
        return data, copy(data, *args, **kwargs)[1]

    return copies


def _one_off(gather):
    def gathers(*args):
        rows, valid = gather(*args)
        return rows + 1, valid

    return gathers


def source(function, old, new):
    return functools.partial(rewritten, function, old, new)


def swap(old, new):
    return functools.partial(replaced, old, new)


@dataclasses.dataclass(frozen=True)
class Bug:
    """A change to the library, the programs that have it, and how far the search must go."""

    breaks: str
    change: object
    where: str
    depth: int
    only: str = " ".join(ACTIONS)


BUGS = (
    # Segments are freed and keep their pages.
    Bug("pages_are_conserved", swap(_evict._drop_pages, _nothing), "release", 3),
    # Of pages that are given back, one that was trimmed is the null page.
    Bug("the_null_page_is_zero", source(_publish._give_back, "each & (mine > 0)", "each"),
        "publish", 11, "plan admit recover step trim publish"),
    # Freed rows are forgotten.
    Bug("rows_are_conserved", swap(_pages.push_rows, _nothing), "release", 3),
    # A release leaves the segments pinned.
    Bug("pins_are_the_leases", source(_lease._release, "at.shape, -1,", "at.shape, 0,"),
        "release", 3),
    # Evicted segments stay listed.
    Bug("what_is_listed_can_be_found", swap(_evict.unlist, _nothing), "evict", 6),
    # Publication does not count children.
    Bug("children_are_counted", source(_publish._publish_one, "(parent < N), parent, N)",
                                       "(parent < 0), parent, N)"), "publish", 5),
    # A segment claims window rows that were trimmed.
    Bug("ready_rows_are_what_their_tokens_say",
        source(_publish._held, "jnp.clip(first - begin, 0, n)", "jnp.zeros_like(n)"),
        "publish", 6),
    # The partly shared segment is stamped, not copied.
    Bug("readers_get_what_was_verified",
        swap(_admit.copy_pages, _stamps_alone(_admit.copy_pages)), "admit", 7),
    # Forms of leased segments are dropped.
    Bug("leases_last", source(_evict.drop_forms, "mask & (take(cache.table.pins, rows, 1) == 0)",
                              "mask"), "drop", 4),
    # STALE does not end the generation.
    Bug("the_invalidated_is_not_read",
        swap(_lifecycle.spoils, lambda old, new: old != old), "invalidate", 4),
    # A query does not look at the lifecycle.
    Bug("usable_is_right", functools.partial(without, "BLOCK_CHECKS", 6), "look", 5),
    # A transition leaves the version as it was.
    Bug("versions_never_go_down", swap(_cache.bumped, lambda version, *, readable: version),
        "invalidate", 3),
    # Anything goes anywhere.
    Bug("transitions_are_the_listed", swap(_lifecycle.legal, lambda old, new: old == old),
        "transition", 3),
    # Pages of the segment that is copied are not counted among those that stay.
    Bug("alone_a_request_does_not_wait",
        source(_admit._reserve, "jnp.where(reused[:, None]", "jnp.where(shared[:, None]"),
        "admit", 9, "plan admit step publish invalidate release"),
    # A replay writes nothing.
    Bug("what_was_planned_can_be_recovered",
        source(_recover._recover, "jnp.maximum(begin, have[..., 0])", "begin"),
        "recover", 9, "plan admit step publish release drop recover"),
    # Rows that are read are not those that were written.
    Bug("outputs_are_a_cold_runs", swap(_view.gather_rows, _one_off(_view.gather_rows)),
        "step", 4),
    # A released lease still holds.
    Bug("released_is_released", source(_lease._release, "jnp.where(held, x.slot, M)", "M"),
        "release", 3),
    # What was trimmed can still be written through the lease from before.
    Bug("a_changed_lease_ends_the_one_before",
        swap(_lease.advance, lambda cache, lease, ok: (cache, lease)), "trim", 4),
    # A branch does not look at versions.
    Bug("no_branch_of_the_invalidated",
        swap(_cache.same_generation, lambda a, b: a == a), "fork", 5),
)  # fmt: skip


def test_every_invariant_has_its_bug():
    assert sorted(b.breaks for b in BUGS) == sorted(INVARIANTS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.breaks)
def test_a_planted_bug_is_found(search, bug):
    with bug.change():
        planted = search.without(bug.where)
    found = planted.run(bug.depth, only=tuple(bug.only.split()))
    if bug.breaks == transitions_are_the_listed.__name__:
        assert sweep(planted, found.front)[1].any()
        return
    assert bug.breaks in found.broken, str(found)
    if bug.breaks in {f.__name__ for f in STATE}:
        state = Columns(planted.play(found.broken[bug.breaks])).state()
        with pytest.raises(AssertionError):
            hkv.testing.invariants(state.cache, [state.lease])
