"""What publication passes on: the provenance of what was read, and rows that were restored."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import hkv
from hkv.testing import invariants


class Two:
    """Two requests at a time on one small cache, with a model that costs nothing."""

    def __init__(self):
        self.cache = hkv.init(tiny.layout(pages=(65, 65, 65, 65), row=4))

    def need(self, **identity):
        return hkv.need(self.cache, requests=2, bucket=64, **identity)

    def ask(self, prompts, need):
        tokens = np.zeros((2, 64), np.int32)
        for q, prompt in enumerate(prompts):
            tokens[q, : len(prompt)] = prompt
        tokens, length = jnp.asarray(tokens), jnp.asarray([len(p) for p in prompts], jnp.int32)
        return tokens, length, hkv.query(self.cache, tokens, length, need)

    def serve(self, prompts, need):
        tokens, length, available = self.ask(prompts, need)
        plan = hkv.route(available, hkv.costs())
        self.cache, lease, _ = hkv.admit(self.cache, plan, length)
        self.cache, lease, why = hkv.recover(
            tiny.replay, jnp.float32(1), self.cache, lease, plan, tokens, chunk=tiny.CHUNK
        )
        assert not np.asarray(why).any()
        while (np.asarray(lease.length) < np.asarray(length)).any():
            count = jnp.minimum(length - lease.length, tiny.CHUNK)
            self.cache, lease, _, ok = tiny.step(jnp.float32(1), self.cache, lease, tokens, count)
            assert np.asarray(ok).all()
        self.cache, lease, _ = hkv.publish(self.cache, lease, tokens, length, partial=True)
        self.cache = hkv.release(self.cache, lease)
        return available, plan


@pytest.fixture
def two():
    return Two()


OLD = np.random.default_rng(0).integers(0, 99, 40).tolist()


def test_what_continues_a_replayed_segment_is_replayed_itself_and_refused_by_default(two):
    exact, loose = two.need(), two.need(provenance=hkv.Provenance.REPLAYED)
    two.serve([OLD, []], exact)
    table = two.cache.table
    marked = jnp.where(table.length > 0, jnp.uint8(hkv.Provenance.REPLAYED), jnp.uint8(0))
    two.cache = dataclasses.replace(two.cache, table=dataclasses.replace(table, provenance=marked))
    # 37 tokens are shared: two whole segments and, copied, a part of the third.
    available, _ = two.serve([[*OLD[:37], *range(9)], []], loose)
    assert int(available.boundary[0]) == 37
    lengths, marks = np.asarray(two.cache.table.length), np.asarray(two.cache.table.provenance)
    assert (marks[lengths > 0] == hkv.Provenance.REPLAYED).all()
    _, _, available = two.ask([[*OLD[:37], *range(9)], []], exact)
    assert int(available.boundary[0]) == 0
    assert (available.group_reason[0, :2] == hkv.Reason.PROVENANCE).all()


def test_rows_restored_for_two_requests_at_once_serve_the_third_without_a_replay(two):
    need = two.need()
    two.serve([OLD[:32], []], need)
    rows = jnp.arange(two.cache.layout.segments, dtype=jnp.int32)
    gone = jnp.asarray([f is hkv.Form.WINDOW for f in hkv.Form])
    two.cache, _ = hkv.drop(two.cache, rows, gone)
    _, plan = two.serve([[*OLD[:32], 1, 2], [*OLD[:32], 3]], need)
    assert (np.asarray(plan.replay[:, 1] - plan.replay[:, 0]) > 0).all()
    _, _, available = two.ask([[*OLD[:32], 4], [*OLD[:32], 5, 6]], need)
    assert np.asarray(available.boundary).tolist() == [32, 32]


def test_a_plan_with_something_to_recover_is_not_read_before_it_is_recovered(two):
    need = two.need()
    two.serve([OLD, OLD[:20]], need)
    rows = jnp.arange(two.cache.layout.segments, dtype=jnp.int32)
    two.cache, _ = hkv.drop(two.cache, rows, jnp.asarray([f is hkv.Form.WINDOW for f in hkv.Form]))
    tokens, length, available = two.ask([[*OLD, 1], []], need)
    plan = hkv.route(available, hkv.costs())
    two.cache, reader, answer = hkv.lease(two.cache, plan)
    assert answer.verdict[0] == hkv.Verdict.WAIT and answer.blocker[0] == hkv.Blocker.RECOVER
    two.cache = hkv.release(two.cache, reader)
    two.cache, lease, _ = hkv.admit(two.cache, plan, length)
    assert hkv.verify_lease(two.cache, lease)[0] != hkv.Reason.OK
    count = jnp.asarray([1, 0], jnp.int32)
    two.cache, lease, _, ok = tiny.step(jnp.float32(1), two.cache, lease, tokens, count)
    assert not bool(ok[0]) and int(lease.length[0]) == 40


def test_a_replay_of_other_tokens_is_refused_and_its_rows_go_to_nobody(two):
    need = two.need()
    two.serve([OLD, []], need)
    rows = jnp.arange(two.cache.layout.segments, dtype=jnp.int32)
    two.cache, _ = hkv.drop(two.cache, rows, jnp.asarray([f is hkv.Form.WINDOW for f in hkv.Form]))
    tokens, length, available = two.ask([[*OLD, 1], []], need)
    plan = hkv.route(available, hkv.costs())
    two.cache, lease, _ = hkv.admit(two.cache, plan, length)
    two.cache, lease, why = hkv.recover(
        tiny.replay, jnp.float32(1), two.cache, lease, plan, tokens * 0 + 9, chunk=tiny.CHUNK
    )
    assert why[0] == hkv.Reason.TOKENS
    two.cache, lease, _ = hkv.publish(two.cache, lease, tokens, length)
    two.cache = hkv.release(two.cache, lease)
    assert int(two.ask([[*OLD, 1], []], need)[2].boundary[0]) == 0


def written(two):
    """A request for `OLD` whose rows are all written, none published."""
    tokens, length, available = two.ask([OLD, []], two.need())
    two.cache, lease, _ = hkv.admit(two.cache, hkv.route(available, hkv.costs()), length + 8)
    for _ in range(5):
        count = jnp.minimum(length - lease.length, tiny.CHUNK)
        two.cache, lease, _, _ = tiny.step(jnp.float32(1), two.cache, lease, tokens, count)
    return tokens, length, lease


def test_a_request_cannot_step_back_over_rows_that_its_branch_reads(two):
    tokens, length, lease = written(two)
    two.cache, branch, _ = hkv.fork(two.cache, lease, length + 8)
    back = jnp.asarray([8, 0], jnp.int32)
    view = hkv.view(two.cache, lease, jnp.asarray([4, 0], jnp.int32), back)
    _, view = tiny.forward(jnp.float32(1), tokens[:, : tiny.CHUNK] * 0 + 3, view)
    two.cache, _, ok = hkv.append(view)
    assert not bool(ok[0])
    assert np.asarray(hkv.verify_lease(two.cache, branch))[0] == hkv.Reason.OK


def test_a_step_back_over_them_without_any_token_is_refused_as_well(two):
    tokens, length, lease = written(two)
    two.cache, lease, _ = hkv.publish(two.cache, lease, tokens, length)
    for back, good in ((8, False), (40, True)):
        view = hkv.view(two.cache, lease, jnp.zeros(2, jnp.int32), jnp.asarray([back, 0]))
        _, view = tiny.forward(jnp.float32(1), tokens[:, : tiny.CHUNK], view)
        two.cache, after, ok = hkv.append(view)
        assert bool(ok[0]) == good and int(after.length[0]) == (back if good else 40), back


def test_a_count_past_all_numbers_is_not_served(two):
    need = two.need()
    tokens, length, available = two.ask([OLD, []], need)
    two.cache, lease, _ = hkv.admit(two.cache, hkv.route(available, hkv.costs()), length)
    count = jnp.minimum(length, tiny.CHUNK)
    two.cache, lease, _, _ = tiny.step(jnp.float32(1), two.cache, lease, tokens, count)
    for n in (2**31 - 1, 41, -(2**31), -1):
        assert not hkv.view(two.cache, lease, jnp.asarray([n, 0], jnp.int32)).ok[0], n


def test_what_is_not_recovered_yet_cannot_be_branched(two):
    need = two.need()
    two.serve([OLD[:12], OLD], need)
    rows = jnp.arange(two.cache.layout.segments, dtype=jnp.int32)
    two.cache, _ = hkv.drop(two.cache, rows, jnp.asarray([f is hkv.Form.WINDOW for f in hkv.Form]))
    # Of the first only a part of a segment is shared, which is copied: it has no page but its own.
    _, length, available = two.ask([[*OLD[:12], 1], [*OLD, 1]], need)
    two.cache, lease, _ = hkv.admit(two.cache, hkv.route(available, hkv.costs()), length)
    two.cache, _, answer = hkv.fork(two.cache, lease, length)
    assert (answer.verdict != hkv.Verdict.ADMIT).all()
    assert answer.blocker.tolist() == [hkv.Blocker.RECOVER, hkv.Blocker.PRIVATE]


def test_payloads_are_verified_where_there_are_some(two):
    two.serve([OLD, []], two.need())
    rows = jnp.arange(two.cache.layout.segments, dtype=jnp.int32)
    two.cache, _ = hkv.drop(two.cache, rows, jnp.asarray([f is hkv.Form.WINDOW for f in hkv.Form]))
    stored = np.flatnonzero(np.asarray(two.cache.table.length))
    free = np.flatnonzero(np.asarray(two.cache.table.length) == 0)
    for row in (-1, len(rows), -(2**31), 2**31 - 1, int(free[0])):
        why = hkv.verify_payload(two.cache, jnp.asarray([row], jnp.int32))
        assert (np.asarray(why) == hkv.Reason.NOT_FOUND).all(), row
    window = np.asarray(two.cache.layout.forms) == hkv.Form.WINDOW
    why = np.asarray(hkv.verify_payload(two.cache, jnp.asarray(stored, jnp.int32)))
    assert window.any() and (why[:, window] == hkv.Reason.LIFECYCLE).all()
    assert (why[:, ~window] == hkv.Reason.OK).all()


def test_a_segment_that_fills_the_bucket_is_listed_once(two):
    need, full = two.need(), np.random.default_rng(1).integers(0, 99, 64).tolist()
    two.serve([full, []], need)
    used = int(two.cache.n_free_rows)
    two.serve([full, []], need)
    assert int(two.cache.n_free_rows) == used


def test_the_openings_of_segments_listed_together_are_all_found(two):
    need = two.need()
    for seed in range(6):
        text = np.random.default_rng(seed).integers(0, 99, 48).tolist()
        two.serve([text, []], need)
        cuts = [(text[:n], []) for n in (16, 32, 48)]
        assert [int(two.ask(c, need)[2].matched[0]) for c in cuts] == [15, 31, 47], seed


def test_padding_may_hold_anything_and_a_bad_token_is_listed_nowhere(two):
    need = two.need()
    tokens, length, available = two.ask([OLD, OLD[:20]], need)
    two.cache, lease, _ = hkv.admit(two.cache, hkv.route(available, hkv.costs()), length)
    for _ in range(5):
        count = jnp.clip(length - lease.length, 0, tiny.CHUNK)
        two.cache, lease, _, _ = tiny.step(jnp.float32(1), two.cache, lease, tokens, count)
    bad = tokens.at[0, 40:].set(-1).at[1, 3].set(-1)
    two.cache, lease, listed = hkv.publish(two.cache, lease, bad, length, partial=True)
    assert np.asarray(listed).tolist() == [3, 0]


def test_dropping_a_row_named_twice_frees_its_pages_once(two):
    two.serve([OLD, []], two.need())
    stored = np.flatnonzero(np.asarray(two.cache.table.length) > 0)
    rows = jnp.asarray([stored[0], stored[0], stored[1]], jnp.int32)
    two.cache, done = hkv.drop(two.cache, rows, jnp.ones(5, bool))
    assert np.asarray(done).tolist() == [True, False, True]
    o = hkv.occupancy(two.cache)
    assert (np.asarray(o["free"] + o["live"] + o["pinned"]) == np.asarray(o["capacity"])).all()


# One cache and a copy of it, or another one of the same layout.


def _copy(cache):
    return jax.tree.map(jnp.copy, cache)


NEW = np.random.default_rng(5).integers(0, 99, 40).tolist()


def _admitted(two, prompt, need):
    tokens, length, available = two.ask([prompt, []], need)
    two.cache, lease, answer = hkv.admit(two.cache, hkv.route(available, hkv.costs()), length + 8)
    assert answer.verdict[0] == hkv.Verdict.ADMIT
    return lease, tokens, length


def _run(two, lease, tokens, length):
    for _ in range(5):
        count = jnp.minimum(length - lease.length, tiny.CHUNK)
        two.cache, lease, _, _ = tiny.step(jnp.float32(1), two.cache, lease, tokens, count)
    return lease


@pytest.mark.parametrize("other", [{}, {"epoch": 1}, {"indexer_version": 1}, {"salt": "b"}])
def test_a_plan_is_not_admitted_where_its_rows_hold_something_else(two, other):
    empty = _copy(two.cache)
    two.serve([OLD, []], two.need())
    tokens, length, available = two.ask([[*OLD, 1], []], two.need())
    plan = hkv.route(available, hkv.costs())
    assert int(plan.resume[0]) == 40
    two.cache = empty  # the same rows, versions and clock, with other contents
    two.serve([NEW if not other else OLD, []], two.need(**other))
    assert (np.asarray(two.cache.table.version)[np.asarray(plan.rows[0])[:3]]
            == np.asarray(plan.version[0])[:3]).all()  # fmt: skip
    two.cache, lease, answer = hkv.admit(two.cache, plan, length)
    assert answer.verdict[0] == hkv.Verdict.WAIT and answer.blocker[0] == hkv.Blocker.CHANGED


@pytest.mark.parametrize("salt", ["", "b"])
def test_a_lease_does_not_hold_in_a_copy_that_admitted_another_request(two, salt):
    copy = _copy(two.cache)
    lease, tokens, length = _admitted(two, OLD, two.need())
    two.cache = copy
    theirs, *_ = _admitted(two, OLD if salt else NEW, two.need(salt=salt))
    assert (lease.slot == theirs.slot).all()
    assert not bool(hkv.check_lease(two.cache, lease)[0])
    *_, ok = tiny.step(jnp.float32(1), two.cache, lease, tokens, length * 0 + 3)
    assert not bool(ok[0])


def test_a_lease_does_not_hold_where_fewer_of_its_tokens_are_stored(two):
    lease, tokens, length = _admitted(two, OLD, two.need())
    copy = _copy(two.cache)
    ahead = _run(two, lease, tokens, length)
    assert bool(hkv.check_lease(two.cache, ahead)[0]) and int(ahead.length[0]) == 40
    two.cache = copy  # for instance after a failed step
    assert bool(hkv.check_lease(two.cache, lease)[0])
    assert not bool(hkv.check_lease(two.cache, ahead)[0])
    two.cache, _, listed = hkv.publish(two.cache, ahead, tokens, length)
    assert int(listed[0]) == -1


@pytest.mark.parametrize("length", [-1, 21, 2**31 - 1])
def test_a_length_that_the_lease_has_not_reached_lists_nothing(two, length):
    tokens, n, available = two.ask([OLD[:20], OLD[:20]], two.need())
    two.cache, lease, _ = hkv.admit(two.cache, hkv.route(available, hkv.costs()), n)
    lease = _run(two, lease, tokens, n)
    wrong = jnp.asarray([length, 20], jnp.int32)
    two.cache, lease, listed = hkv.publish(two.cache, lease, tokens, wrong)
    assert np.asarray(listed).tolist() == [-1, 1]
    two.cache, lease, listed = hkv.publish(two.cache, lease, tokens, n)
    assert np.asarray(listed).tolist() == [0, 0]  # the lease went on; the other was first


def test_a_run_is_published_under_what_it_was_verified_for(two):
    old, new = two.need(epoch=1, salt="a"), two.need(epoch=2, salt="a")
    two.serve([OLD, NEW], old)
    for need, stored in ((old, [39, 39]), (new, [0, 0]), (two.need(epoch=1), [0, 0])):
        assert np.asarray(two.ask([OLD, NEW], need)[2].boundary).tolist() == stored


def test_a_plan_of_another_request_is_not_carried_out(two):
    two.serve([OLD, NEW], two.need())
    rows = jnp.arange(two.cache.layout.segments, dtype=jnp.int32)
    two.cache, _ = hkv.drop(two.cache, rows, jnp.asarray([f is hkv.Form.WINDOW for f in hkv.Form]))
    tokens, length, available = two.ask([[*OLD, 1], [*NEW, 1]], two.need())
    plan = hkv.route(available, hkv.costs())
    swapped = jax.tree.map(lambda a: a[::-1], plan)
    two.cache, lease, _ = hkv.admit(two.cache, plan, length)
    two.cache, lease, why = hkv.recover(
        tiny.replay, jnp.float32(1), two.cache, lease, swapped, tokens, chunk=tiny.CHUNK
    )
    assert (np.asarray(why) == hkv.Reason.LIFECYCLE).all()
    two.cache, _, why = hkv.recover(
        tiny.replay, jnp.float32(1), two.cache, lease, plan, tokens, chunk=tiny.CHUNK
    )
    assert (np.asarray(why) == hkv.Reason.OK).all()


# Of a lease only the newest counts.


@pytest.mark.parametrize("verb", ["append", "publish", "trim", "recover"])
def test_the_lease_before_a_change_no_longer_holds(two, verb):
    need = two.need()
    two.serve([OLD[:32], []], need)
    rows = jnp.arange(two.cache.layout.segments, dtype=jnp.int32)
    two.cache, _ = hkv.drop(two.cache, rows, jnp.asarray([f is hkv.Form.WINDOW for f in hkv.Form]))
    tokens, length, available = two.ask([OLD, []], need)
    plan = hkv.route(available, hkv.costs())
    two.cache, old, _ = hkv.admit(two.cache, plan, length + 8)

    def recovered(lease):
        return hkv.recover(
            tiny.replay, jnp.float32(1), two.cache, lease, plan, tokens, chunk=tiny.CHUNK
        )

    if verb == "recover":
        two.cache, new, _ = recovered(old)
    else:
        two.cache, old, _ = recovered(old)
        if verb == "append":
            new = _run(two, old, tokens, length)
        elif verb == "publish":
            old = _run(two, old, tokens, length)
            two.cache, new, _ = hkv.publish(two.cache, old, tokens, length)
        else:
            old = _run(two, old, tokens, length)
            two.cache, new = hkv.trim(two.cache, old)
    assert np.asarray(hkv.check_lease(two.cache, new))[0]
    assert not np.asarray(hkv.check_lease(two.cache, old))[0]
    kept = jax.device_get((two.cache.table, [p.owner for p in two.cache.pools]))
    two.cache, after = hkv.trim(two.cache, old)
    two.cache, after, listed = hkv.publish(two.cache, after, tokens, length)
    assert int(listed[0]) == -1
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(jax.device_get(
        (two.cache.table, [p.owner for p in two.cache.pools]))), strict=True):  # fmt: skip
        np.testing.assert_array_equal(a, b)
    invariants(two.cache, [new])
    two.cache = hkv.release(two.cache, old)  # whichever is at hand gives everything back
    invariants(two.cache, [])


def test_a_draft_that_was_taken_back_cannot_go_on_beside_what_replaced_it(two):
    lease, tokens, length = _admitted(two, OLD, two.need())
    lease = _run(two, lease, tokens, length)
    drafts = tokens.at[0, 40:44].set(7)
    count = jnp.asarray([4, 0], jnp.int32)
    two.cache, draft, _, ok = tiny.step(jnp.float32(1), two.cache, lease, drafts, count)
    back = dataclasses.replace(draft, length=draft.length - count)
    other = tokens.at[0, 40:44].set(8)
    two.cache, kept, out, ok = tiny.step(jnp.float32(1), two.cache, back, other, count)
    want = tiny.dense(np.array([*OLD, 8, 8, 8, 8]), row=4)
    assert bool(ok[0])
    np.testing.assert_array_equal(np.asarray(out)[0, :4], want[40:])
    *_, ok = tiny.step(jnp.float32(1), two.cache, draft, drafts, count)
    assert not bool(ok[0])


def test_a_request_is_recovered_with_the_plan_it_was_admitted_by(two):
    two.serve([OLD, []], two.need())
    rows = jnp.arange(two.cache.layout.segments, dtype=jnp.int32)
    two.cache, _ = hkv.drop(two.cache, rows, jnp.asarray([f is hkv.Form.WINDOW for f in hkv.Form]))
    tokens, length, available = two.ask([[*OLD, 1], []], two.need())
    plan, cold = (hkv.route(available, hkv.costs(replay=x)) for x in (1.0, float("inf")))
    assert int(cold.resume[0]) < int(plan.resume[0])
    two.cache, lease, _ = hkv.admit(two.cache, plan, length)
    two.cache, lease, why = hkv.recover(
        tiny.replay, jnp.float32(1), two.cache, lease, cold, tokens, chunk=tiny.CHUNK
    )
    assert why[0] == hkv.Reason.LIFECYCLE


def test_a_chunk_narrower_than_its_count_is_not_stored(two):
    lease, tokens, length = _admitted(two, OLD, two.need())
    view = hkv.view(two.cache, lease, jnp.asarray([2 * tiny.CHUNK, 0], jnp.int32))
    _, view = tiny.forward(jnp.float32(1), tokens[:, : tiny.CHUNK], view)
    two.cache, lease, ok = hkv.append(view)
    assert not bool(ok[0]) and int(lease.length[0]) == 0
    two.cache, _, listed = hkv.publish(two.cache, lease, tokens, length)
    assert int(listed[0]) == -1
