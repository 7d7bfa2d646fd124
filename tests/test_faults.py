"""Faults that caches of this kind had in real systems, by kind: reuse without its state, rewinds,
window arithmetic, compressor boundaries, partial blocks, identity, padding and NaN.

Rows are known rows (see `payload`), so that a row of somebody else, of a removed future or of
another place is seen wherever a request would read it.
"""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from payload import QUICK, Payload, group, lib, poisoned

import hkv
from hkv import Form, Reason, Status
from hkv.models.deepseek_v4 import DeepseekV4, groups, mini_config
from hkv.nn import bind
from pallas_kernels import window_mask

B = 64
LAYOUT = hkv.Layout(
    groups=(
        group("w8", Form.WINDOW, hkv.window(8), (0, 1), 4),
        group("w32", Form.WINDOW, hkv.window(32), (2,), 16),
        group("c4", Form.COMPRESSED, hkv.history(4), (2,), 4),
        group("c4_tail", Form.TAIL, hkv.tail(4, overlap=True), (2,), 16),
        group("idx", Form.INDEXER, hkv.indexer(4), (2,), 16),
        group("c16", Form.COMPRESSED, hkv.history(16), (3,), 4),
        group("c16_tail", Form.TAIL, hkv.tail(16), (3,), 16),
    ),
    segment_tokens=B, segments=14, buckets=(256,), leases=4,
)  # fmt: skip
NAMES = [g.name for g in LAYOUT.groups]


def text(n, seed=0):
    return np.random.default_rng(seed).integers(1, 200, n).tolist()


A, Z = text(256), text(256, 1)


@pytest.fixture
def p():
    return Payload(LAYOUT, chunk=64)


def drop(p, prompt, forms, segments=None, need=None):
    """Takes forms away from the stored segments of a prompt."""
    rows = np.asarray(p.query([prompt], need).rows[0])
    rows = [r for i, r in enumerate(rows) if r < 14 and (segments is None or i in segments)]
    rows = jnp.asarray(np.array(rows + [14] * (4 - len(rows)), np.int32))
    mask = jnp.asarray(np.array([f in forms for f in Form]))
    p.cache, done = lib.drop(p.cache, rows, mask)
    return done


def free(p):
    return np.asarray(hkv.occupancy(p.cache)["free"])


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


# Window and other state that goes stale or missing under a prefix that is there (K01).


def test_another_request_in_the_same_slot_leaves_the_window_of_a_prefix_alone(p):
    p.store([A[:200]])
    p.store([Z[:40]])  # takes the lease slot that A had
    assert p.boundary([A[:201], Z[:41]]) == [200, 40]
    p.start([A[:201], Z[:41]])  # checks every row that would be read


@pytest.mark.parametrize("form", [Form.COMPRESSED, Form.TAIL, Form.WINDOW, Form.INDEXER])
@pytest.mark.parametrize("n", [64, 70, 128, 150])
def test_one_form_there_proves_nothing_about_another(p, form, n):
    p.store([A[:200]])
    drop(p, A[:200], {form})
    a = p.query([A[:n] + Z[:9]])
    at = n - 1 if n % 4 else n  # a tail of 4 without overlap would need nothing at 64
    spot = (at - 1) // B
    status = np.asarray(a.status[0, spot])
    assert status[form] != Status.REUSE
    assert all(status[f] == Status.REUSE for f in range(4) if f != form)
    assert np.asarray(a.reason[0, spot])[form] == Reason.LIFECYCLE
    assert not np.asarray(a.usable)[0, np.asarray(a.positions)[0] > 0].any()
    assert any(form.name in line and "not READY" in line for line in hkv.explain(a))
    # A lost window or tail can be replayed; then, and only then, it is read.
    rolling = form in (Form.TAIL, Form.WINDOW)
    assert np.asarray(a.recoverable)[0, np.asarray(a.positions)[0] == n].all() == rolling
    lease = p.start([A[:n] + Z[:9]], costs=hkv.costs(replay=0.1))
    lease = p.advance(lease, [A[:n] + Z[:9]])
    p.check_rows(lease, [A[:n] + Z[:9]])


def test_a_store_of_compressed_rows_alone_gives_no_reuse_and_one_reason_per_form(p):
    p.store([A[:200]])
    drop(p, A[:200], {Form.TAIL, Form.WINDOW, Form.INDEXER})
    a = p.query([A[:201]])
    assert a.boundary[0] == 0
    assert np.asarray(a.positions)[0, np.asarray(a.recoverable)[0]].tolist() == [0]
    lines = [x for x in hkv.explain(a)[1:] if x.startswith("  ") and "not READY" in x]
    assert [x.split(":")[0].strip() for x in lines] == ["TAIL", "WINDOW", "INDEXER"]


@pytest.mark.parametrize("left_out", ["idx", "w32", "c4_tail"])
def test_a_model_that_forgets_a_group_is_told_which_before_anything_is_written(p, left_out):
    def run(params, view):
        view = p.run(params, None, view)
        pending = {k: v for k, v in view.pending.items() if k != left_out}
        return dataclasses.replace(view, pending=pending)

    @functools.partial(jax.jit, donate_argnames=("cache",), compiler_options=QUICK)
    def step(params, cache, lease, count):
        return hkv.append(run(params, hkv.view(cache, lease, count)))

    lease = p.start([A[:64]])
    count = jnp.asarray(np.array([64, 0], np.int32))
    with pytest.raises(ValueError, match=left_out):
        step(p.params([A[:64]]), p.cache, lease, count)
    assert p.boundary([A[:65]]) == [0]
    p.check_rows(p.advance(lease, [A[:64]]), [A[:64]])  # and nothing was lost


@pytest.mark.parametrize("n", [100, 150, 191, 192, 193, 197, 199])
def test_a_window_that_was_given_back_is_not_there_before_its_oldest_row(p, n):
    lease = p.start([A[:200]])
    lease = p.advance(lease, [A[:200]])
    p.cache, lease = lib.trim(p.cache, lease)  # w8 keeps [192, 200), w32 [160, 200)
    lease, _ = p.publish(lease, [A[:200]])
    p.release(lease)
    before = free(p)
    a = p.query([A[:n] + Z[:20]])
    at = np.asarray(a.positions)[0] == n
    kept8, kept32 = n >= 199, n >= 191
    assert np.asarray(a.group_ok)[0, :2, at].all(0).tolist() == [kept8, kept32]
    assert (a.boundary[0] == n) == (kept8 and kept32)
    plan = lib.route(a, hkv.costs(replay=0.01))
    assert plan.resume[0] == n
    assert (plan.replay[0, 1] > plan.replay[0, 0]) == (not kept8)
    lease = p.start([A[:n] + Z[:20]], costs=hkv.costs(replay=0.01))
    assert lease.length[0] == n  # the next token is written at n and nowhere else
    lease = p.advance(lease, [A[:n] + Z[:20]])
    p.check_rows(lease, [A[:n] + Z[:20]])
    p.release(lease)
    assert (free(p) == before).all()


@pytest.mark.parametrize("n", [183, 184, 185, 192])
def test_the_same_prompt_four_times_gives_the_same_answer_from_the_second_on(p, n):
    answers = []
    for _ in range(4):
        answers.append(jax.device_get(p.query([A[:n]])))
        p.store([A[:n]])
    assert answers[0].boundary[0] == 0
    for other in answers[1:]:
        assert other.boundary[0] == n - 1
        same(other, answers[1])


# Rewinds and lengths (K02). Nothing rolls: a window is a run of pages, read by position.


@pytest.mark.parametrize("n", [6, 7, 8, 9, 10, 30, 31, 32, 33, 34])
def test_a_window_at_its_full_length_loses_no_row_and_keeps_the_order_of_time(p, n):
    lease = p.advance(p.start([A[: n - 1]], [n]), [A[: n - 1]])
    lease = p.advance(lease, [A[:n]])
    rows, _ = p.rows(lease)
    for name, W in (("w8", 8), ("w32", 32)):
        seen = rows[name, LAYOUT.groups[NAMES.index(name)].layers[0]][0][0]
        lo = max(0, n - W)
        assert seen[lo:n, 1].tolist() == list(range(lo, n))
    p.check_rows(lease, [A[:n]])


@pytest.mark.parametrize("back", [70, 64, 65, 99, 100, 96])
def test_stepping_back_inside_what_a_request_wrote_leaves_no_row_of_the_removed_future(p, back):
    lease = p.advance(p.start([A[:100]], [256]), [A[:100]])
    other = A[:back] + Z[:30]
    lease, ok = p.step(lease, [30], p.params([other]), position=[back])
    assert ok[0]
    p.check_rows(lease, [other])
    lease, _ = p.publish(lease, [other])
    p.release(lease)
    assert p.boundary([other + [7]]) == [back + 30]
    assert p.boundary([A[:100]]) == [min(back, 99)]
    p.start([A[:100]])


def test_a_step_back_too_far_or_ahead_is_refused_and_changes_nothing(p):
    p.store([A[:80]])
    lease = p.start([A[:80] + Z[:20]], [200])  # resumes at 80, in a copy of the second segment
    lease = p.advance(lease, [A[:80] + Z[:20]])
    params = p.params([Z[:256]])
    for position, why in ((-1, "negative"), (0, "shared"), (63, "shared"), (79, "copied"),
                          (101, "a gap"), (150, "a gap")):  # fmt: skip
        before = jax.device_get(p.cache)
        again, ok = p.step(lease, [4], params, position=[position])
        assert not ok[0] and again.length[0] == 100, why
        same(before, p.cache)
    lease = p.advance(lease, [A[:80] + Z[:60]])
    lease, n = p.publish(lease, [A[:80] + Z[:60]], partial=False)
    assert n[0] == 1
    _, ok = p.step(lease, [4], params, position=[127])
    assert not ok[0]  # published: others may read it
    p.check_rows(lease, [A[:80] + Z[:60]])


@pytest.mark.parametrize("at", [8, 20, 40, 64, 100])
def test_after_a_trim_positions_before_cannot_be_stepped_back_to(p, at):
    lease = p.advance(p.start([A[:120]], [200]), [A[:120]])
    p.cache, lease = lib.trim(p.cache, lease)
    before = jax.device_get(p.cache)
    again, ok = p.step(lease, [4], p.params([A]), position=[at])
    assert not ok[0] and again.length[0] == 120
    same(before, p.cache)


@pytest.mark.parametrize("n, w8, w32", [(20, True, True), (190, False, False), (195, False, True),
                                        (199, True, True)])  # fmt: skip
def test_of_several_windows_each_answers_for_itself(p, n, w8, w32):
    lease = p.advance(p.start([A[:20]]), [A[:20]])
    lease, _ = p.publish(lease, [A[:20]])
    p.release(lease)
    lease = p.advance(p.start([A[:200]]), [A[:200]])
    p.cache, lease = lib.trim(p.cache, lease)
    lease, _ = p.publish(lease, [A[:200]])
    a = p.query([A[:n] + Z[:3]])
    at = np.asarray(a.positions)[0] == n
    ok = np.asarray(a.group_ok)[0][:, at].any(1)
    assert (ok[0], ok[1]) == (w8, w32)
    assert np.asarray(a.usable)[0, at].any() == (w8 and w32)


@pytest.mark.parametrize("n", [5, 8, 20, 40, 130])
def test_no_form_reports_a_length_capped_by_its_window(p, n):
    lease = p.advance(p.start([A[:n]], [n + 1]), [A[:n]])
    assert lease.length[0] == n
    lease, _ = p.publish(lease, [A[:n]])
    p.release(lease)
    a = p.query([A[: n + 1]])
    assert a.matched[0] == n
    row = int(a.rows[0, (n - 1) // B])
    seg = p.cache.segment(row)
    assert int(seg.start) + int(seg.length) == n
    units = np.array([g.rule.unit for g in LAYOUT.groups])
    assert np.asarray(seg.held)[:, 1].tolist() == (n // units * units).tolist()
    lease = p.advance(p.start([A[: n + 1]]), [A[: n + 1]])
    assert lease.length[0] == n + 1


# Window arithmetic (K03).


@pytest.mark.parametrize("W", [1, 2, 7, 8, 9, 16, 32])
def test_mask_and_storage_agree_on_every_position_of_a_window(W):
    at = jnp.arange(201, dtype=jnp.int32)
    mask = np.asarray(window_mask(at[None], at[None], jnp.ones((1, 201), bool), W))[0]
    lo, hi = (np.asarray(x) for x in hkv.required(hkv.window(W), at))
    for t in range(201):
        assert np.flatnonzero(mask[t]).tolist() == [*range(lo[t], hi[t]), t]


def test_windows_that_count_differently_are_different_kernel_abis():
    prints = {group("w", Form.WINDOW, hkv.window(W)).fingerprint() for W in (7, 8, 9)}
    plain = group("w", Form.WINDOW, hkv.window(8))
    prints |= {
        dataclasses.replace(plain, abi=(("window_counts_self", x),)).fingerprint() for x in (0, 1)
    }
    assert len(prints) == 5


@pytest.mark.parametrize("settled", [192, 193, 195, 196, 199, 200])
def test_fewer_settled_tokens_than_the_trim_assumed_never_make_a_window_look_whole(p, settled):
    lease = p.advance(p.start([A[:200]]), [A[:200]])
    p.cache, lease = lib.trim(p.cache, lease)
    lease, _ = p.publish(lease, [A[:200]], length=[settled])
    p.release(lease)
    a = p.query([A[:settled] + Z[:3]])
    assert a.matched[0] == settled
    assert (a.boundary[0] == settled) == (settled - 7 >= 192)
    p.start([A[:settled] + Z[:3]], costs=hkv.costs(replay=0.01))
    o = hkv.occupancy(p.cache)
    assert (np.asarray(o["free"] + o["live"] + o["pinned"]) == np.asarray(o["capacity"])).all()


@pytest.mark.parametrize("n", [64, 70, 127, 128, 129, 135, 158, 159, 160, 192, 199])
def test_a_window_starts_anew_after_every_hole(p, n):
    p.store([A[:200]])
    drop(p, A[:200], {Form.WINDOW}, segments=[1])
    a = p.query([A[:n] + Z[:3]])
    into = n - 128
    whole = n <= 64 or into >= 31  # w32 looks back at 31 rows, which lie in the third segment
    assert (a.boundary[0] == n) == whole
    if not whole:
        at = np.asarray(a.positions)[0] == n
        assert np.asarray(a.group_ok)[0, 0, at].any() == (into >= 7)
        assert a.boundary[0] == (64 if into <= 0 else 64)


# Compressor boundaries (K04).


@pytest.mark.parametrize("shared", [1, 3, 4, 15, 16, 17, 31, 32, 60, 63])
def test_a_block_that_is_shared_in_part_gives_only_rows_of_the_shared_tokens(p, shared):
    p.store([A[:64]])
    other = A[:shared] + Z[:80]
    a = p.query([other])
    assert a.matched[0] == shared == a.boundary[0]
    lease = p.start([other])
    rows, _ = p.rows(lease)
    assert rows["c16", 3][1][0].sum() == shared // 16
    assert rows["c4", 2][1][0].sum() == rows["idx", 2][1][0].sum() == shared // 4
    lease = p.advance(lease, [other])
    p.check_rows(lease, [other])


@pytest.mark.parametrize("n", [61, 63, 64, 65, 67, 68, 128])
def test_the_first_entry_after_a_hit_needs_the_rows_before_it(p, n):
    """An entry of the overlapping compressor folds the 4 tokens before its own as well."""
    p.store([A[:n]])
    lo, hi = hkv.required(hkv.tail(4, overlap=True), jnp.int32(n))
    assert (int(lo), int(hi)) == (n // 4 * 4 - 4, n)
    assert p.boundary([A[:n] + Z[:8]]) == [n]
    drop(p, A[:n], {Form.TAIL})
    a = p.query([A[:n] + Z[:8]])
    assert a.boundary[0] == 0
    plan = lib.route(a, hkv.costs(replay=0.01))
    assert plan.resume[0] == n and plan.replay[0, 0] <= n // 4 * 4 - 4
    prompt = A[:n] + Z[:8]
    lease = p.advance(p.start([prompt], costs=hkv.costs(replay=0.01)), [prompt])
    p.check_rows(lease, [prompt])


@pytest.mark.parametrize("n", [64, 65, 70, 77, 80, 99])
def test_a_prompt_that_leaves_between_boundaries_is_judged_form_by_form(p, n):
    p.store([A[:100]])
    assert p.boundary([A[:n] + Z[:5]]) == [n]
    drop(p, A[:100], {Form.TAIL}, segments=[1])
    a = p.query([A[:n] + Z[:5]])
    # At 64 the open rows lie in the first segment.
    assert a.boundary[0] == 64
    assert a.furthest[0, NAMES.index("c4")] == n and a.furthest[0, NAMES.index("c4_tail")] == 64
    status = np.asarray(a.status[0, 1])
    if n > 64:
        assert status[Form.TAIL] == Status.RECOVER
        assert (status[Form.COMPRESSED] == Status.NOT_NEEDED) == (n < 68)
    p.start([A[:n] + Z[:5]])


# Partial blocks and the last token (K07).


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 127, 128, 129, 192])
def test_a_full_hit_leaves_one_token_and_the_chain_goes_on(p, n):
    p.store([A[:n]])
    assert p.boundary([A[:n]]) == [n - 1]
    longer = A[: n + 63]
    lease = p.advance(p.start([A[:n]], [n + 64]), [longer])
    p.check_rows(lease, [longer])
    lease, _ = p.publish(lease, [longer])
    p.release(lease)
    assert p.boundary([longer + [7]]) == [n + 63]


@pytest.mark.parametrize("shared", [3, 4, 8, 15, 16, 33])
def test_what_a_loaded_block_holds_past_the_match_is_never_read(p, shared):
    """Poison in place of all that was not shared."""
    p.store([A[:64]])
    other = A[:shared] + Z[:40]
    lease = p.start([other])
    row = int(lease.rows[0, 0])
    pools = []
    for g, (spec, pool) in enumerate(zip(LAYOUT.groups, p.cache.pools, strict=True)):
        pages = np.asarray(p.cache.table.pages[g][row])
        data = np.array(pool.data)
        for n in range(shared // spec.rule.unit, B // spec.rule.unit):
            data[:, pages[n // spec.rows_per_page], n % spec.rows_per_page] = np.nan
        pools.append(dataclasses.replace(pool, data=jnp.asarray(data)))
    p.cache = dataclasses.replace(p.cache, pools=tuple(pools))
    p.check_rows(lease, [other])
    lease = p.advance(lease, [other])
    p.check_rows(lease, [other])


GRID = hkv.Layout(
    groups=(
        group("big", Form.COMPRESSED, hkv.history(1), (0,), 32),
        group("half", Form.COMPRESSED, hkv.history(1), (1,), 16),
        group("few", Form.COMPRESSED, hkv.history(4), (2,), 2),
        group("tiny", Form.TAIL, hkv.tail(4), (2,), 2),
        group("state", Form.TAIL, hkv.state(), (3,)),
    ),
    segment_tokens=32, segments=6, buckets=(64,), leases=2,
)  # fmt: skip


def test_page_sizes_do_not_set_the_grid_and_a_state_without_snapshot_stands_alone():
    """Pages of 32, 16, 8 and 2 tokens beside a state: each group has a figure of its own."""
    p = Payload(GRID, chunk=32, requests=1)
    p.store([A[:50]])
    a = p.query([A[:40] + Z[:3]])
    by_name = dict(zip([g.name for g in GRID.groups], np.asarray(a.furthest[0]), strict=True))
    assert by_name == {"big": 40, "half": 40, "few": 40, "tiny": 40, "state": 0}
    assert a.matched[0] == 40 and a.boundary[0] == 0  # no state was ever written
    assert np.asarray(a.positions)[0, np.asarray(a.recoverable)[0]].tolist() == [0]
    status, reason = np.asarray(a.status[0]), np.asarray(a.reason[0])
    assert (status[:, Form.COMPRESSED] == Status.REUSE).tolist() == [True, True]
    assert (status[1, Form.TAIL], reason[1, Form.TAIL]) == (Status.RECOMPUTE, Reason.RANGE)


def test_pages_per_segment_are_a_group_s_own():
    per = {g.name: LAYOUT.segment_pages(g) for g in LAYOUT.groups}
    assert per == {"w8": 16, "w32": 4, "c4": 4, "c4_tail": 4, "idx": 1, "c16": 1, "c16_tail": 4}


# Identity (K09).

IDENTITIES = [
    {"salts": "tenant"}, {"model": b"w2"}, {"adapter": b"d1"}, {"adapter": b"d2"}, {"epoch": 2},
    {"version": 1}, {"start": 64}, {"model": b"w", "adapter": b"2"}, {"salts": "w2"},
]  # fmt: skip


def test_prefixes_of_other_weights_adapters_tenants_epochs_or_places_are_not_shared(p):
    prompt = [A[:70]]
    for i, kw in enumerate([{}, *IDENTITIES[:4]]):
        assert p.boundary(prompt, p.need(**kw)) == [0], kw
        p.store(prompt, p.need(**kw), [str(i)])
    for i, kw in enumerate([{}, *IDENTITIES[:4]]):
        assert p.boundary(prompt, p.need(**kw)) == [69]
        p.release(p.start(prompt, need=p.need(**kw), seeds=[str(i)]))
    for kw in IDENTITIES[4:]:
        assert p.boundary(prompt, p.need(**kw)) == [0], kw


@pytest.mark.parametrize("at, hit", [(10, 0), (63, 0), (64, 64), (70, 64), (128, 128)])
def test_images_whose_digests_agree_in_the_low_bits_are_two_images(p, at, hit):
    one, two = (bytes([i]) * 14 + b"\x12\x34" for i in (1, 2))
    media = {
        d: np.stack([hkv.media_digests(LAYOUT, 200, [(at, 40, d)]), np.zeros((4, 4), np.uint32)])
        for d in (one, two)
    }
    prompt = A[:at] + [3] * 40 + A[at + 40 : 200]
    p.store([prompt], p.need(media=media[one]), ["one"])
    assert p.boundary([prompt], p.need(media=media[one])) == [199]
    assert p.boundary([prompt], p.need(media=media[two])) == [hit]
    pair = [(at, 40, one), (at + 40, 2, two)]
    there = hkv.media_digests(LAYOUT, 200, pair)
    assert (hkv.media_digests(LAYOUT, 200, pair[::-1]) == there).all()
    moved = np.stack([hkv.media_digests(LAYOUT, 200, [(at + 1, 40, one)]), media[one][1]])
    assert p.boundary([prompt], p.need(media=moved)) == [hit]
    assert p.boundary([prompt]) == [hit]


def test_a_hundred_thousand_ids_have_as_many_digests():
    ids = np.random.default_rng(0).integers(0, 2**63, 100_000).astype("<u8")
    assert len({hkv.digest128(x.tobytes()).tobytes() for x in ids}) == len(set(ids.tolist()))


def test_after_a_weight_update_old_entries_are_not_served_and_go_first(p):
    p.store([A[:100], Z[:100]], p.need(epoch=1))
    assert p.boundary([A[:100]], p.need(epoch=2)) == [0]
    assert (
        np.asarray(p.query([A[:100]], p.need(epoch=2)).group_reason)[0, 0] == Reason.EPOCH
    ).all()
    p.cache, n = lib.invalidate(p.cache, p.cache.table.epoch != 2)
    assert n == 4
    p.store([A[:100]], p.need(epoch=2))
    assert p.boundary([A[:100]], p.need(epoch=2)) == [99]
    want = free(p) + np.array([LAYOUT.segment_pages(g) for g in LAYOUT.groups])
    p.cache = lib.evict(p.cache, jnp.asarray(want.astype(np.int32)))
    assert p.boundary([A[:100]], p.need(epoch=2)) == [99]  # an older one went


VECTORS = """
import jax, numpy as np, jax.numpy as jnp, hkv
from hkv._identity import block_keys
from pallas_kernels import digest_pages
f = hkv.Form
g = hkv.Group("c", f.COMPRESSED, hkv.history(4), (0, 2), (3,), "bfloat16", (("b", None is None),))
lay = hkv.Layout((g,), 8, 4, (16,))
tokens = jnp.asarray(np.arange(16, dtype=np.int32).reshape(2, 8))
ident = hkv.digest128(b"tenant", b"", b"model")
media = hkv.media_digests(lay, 16, [(9, 3, b"image")])
after, before = block_keys(tokens, jnp.asarray(ident), jnp.int32(5), jnp.asarray(media))
data = jnp.asarray(np.arange(2 * 3 * 2 * 3, dtype=np.float32).reshape(2, 3, 2, 3))
table, lo, hi = (jnp.asarray(np.array(x, np.int32)) for x in ([[1, 2]], [1], [3]))
page = digest_pages(data, table, lo, hi)
print([x.tolist() for x in (ident, media, after, before, page, np.uint32(g.fingerprint()))])
"""
PRINTED = [
    [3169143118, 3856296700, 3440325615, 4153409613],  # identity
    [[0, 0, 0, 0], [105190884, 658873608, 4203767110, 1676958829]],  # media
    [[3064186488, 3929093312], [349463609, 518130804]],  # keys after
    [[1376677687, 1262906948], [3064186488, 3929093312]],  # keys before
    [[1649051155, 2344580574]],  # page digest
    1032126855,  # kernel ABI
]


def test_keys_and_digests_are_equal_in_fresh_processes_with_random_string_hashes():
    """A root drawn at random, or a hash of an address, would differ from one to the next."""
    seen = set()
    for seed in ("1", "2", "random"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        env["PYTHONPATH"] = str(Path(__file__).parents[1])
        done = subprocess.run(
            [sys.executable, "-c", VECTORS], env=env, capture_output=True, text=True, check=True
        )
        seen.add(done.stdout.strip())
    assert seen == {str(PRINTED)}


# Padding, null pages and NaN (K17).


@pytest.mark.parametrize("count, total", [(0, 64), (1, 64), (63, 64), (6, 250 + 6), (64, 64)])
def test_padding_writes_no_row_anywhere(p, count, total):
    start = total - count if total > 64 else 0
    p.store([Z[:256]])
    lease = p.start([A[:start] or [1]], [total])
    if start:
        lease = p.advance(lease, [A[:start]])
    before = jax.device_get(p.cache)
    mine = np.asarray(lease.rows[0])
    lease, ok = p.step(lease, [count], p.params([A[:total]]))
    assert ok[0] and lease.length[0] == start + count
    after = jax.device_get(p.cache)
    for g, (spec, old, new) in enumerate(
        zip(LAYOUT.groups, before.pools, after.pools, strict=True)
    ):
        u, R = spec.rule.unit, spec.rows_per_page
        allowed = np.zeros(new.data.shape[1:3], bool)
        for n in range(start // u, (start + count) // u):
            page = after.table.pages[g][mine[n * u // B], n % (B // u) // R]
            allowed[page, n % R] = True
        changed = (old.data != new.data).any((0, 3))
        assert (changed <= allowed).all(), spec.name
        assert not new.data[:, 0].any()


def test_a_refused_step_writes_nothing_and_reads_zeros(p):
    lease = p.advance(p.start([A[:70]], [100]), [A[:70]])
    p.cache, _ = lib.invalidate(p.cache, jnp.arange(14) == lease.rows[0, 0])
    before = jax.device_get(p.cache)
    again, ok = p.step(lease, [8], p.params([A]))
    assert not ok[0] and again.length[0] == 70
    same(before, p.cache)
    rows, ok = p.rows(lease)
    assert not ok[0]
    assert all(not r[0].any() and not v[0].any() for r, v in rows.values())


@pytest.fixture(scope="module")
def mini():
    """One layer of each kind with random weights, and its jitted steps."""
    config = dataclasses.replace(
        mini_config(16), layers=mini_config().layers[1:4], hashed=(True, False, False)
    )
    layout = hkv.Layout(groups(config), segment_tokens=16, segments=8, buckets=(64,), leases=2)
    weights, build = bind(DeepseekV4.random(config, jax.random.key(1)))

    @functools.partial(jax.jit, donate_argnames=("cache",), compiler_options=QUICK)
    def step(weights, cache, lease, tokens, count):
        spot = lease.length[:, None] + jnp.arange(16, dtype=jnp.int32)[None]
        piece = jnp.take_along_axis(tokens, jnp.minimum(spot, 63), axis=1)
        logits, view = build(weights)(piece, hkv.view(cache, lease, count))
        return *hkv.append(view, after=logits), logits

    return layout, weights, step


def decode(mini, cache, prompt, until, lengths):
    """Logits of a run through `lengths` tokens at a time, from what the cache has of the prompt."""
    layout, weights, step = mini
    need = hkv.need(cache)
    tokens, length = hkv.pad_batch(layout, [prompt])
    plan = lib.route(lib.query(cache, tokens, length, need), hkv.costs())
    cache, lease, answer = lib.admit(cache, plan, jnp.asarray(np.array([until], np.int32)))
    assert answer.verdict[0] == hkv.Verdict.ADMIT
    out, at = [], int(plan.resume[0])
    while at < until:
        n = min(lengths, until - at)
        cache, lease, ok, logits = step(
            weights, cache, lease, tokens, jnp.asarray(np.array([n], np.int32))
        )
        assert ok[0]
        out.append(np.asarray(logits)[0, :n])
        at += n
    return cache, lease, np.concatenate(out), int(plan.resume[0])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("n", [13, 16, 17, 23, 31, 32, 45])
def test_poison_in_every_unused_row_and_page_never_reaches_a_logit(mini, n, value):
    layout = mini[0]
    prompt = np.random.default_rng(n).integers(0, 256, 64).tolist()
    cache, lease, _, _ = decode(mini, hkv.init(layout), prompt[:n], n, 16)
    tokens, length = hkv.pad_batch(layout, [prompt[:n]])
    cache, lease, _ = lib.publish(cache, lease, tokens, length, partial=True)
    cache = lib.release(cache, lease)
    dirty = poisoned(cache, value)
    null = dataclasses.replace(
        dirty,
        pools=tuple(
            dataclasses.replace(x, data=x.data.at[:, 0].set(value)) for x in dirty.pools
        ),
    )  # fmt: skip
    null = jax.tree.map(jnp.copy, null)
    dirty = jax.tree.map(jnp.copy, dirty)
    clean, _, want, resumed = decode(mini, cache, prompt, n + 9, 4)
    assert resumed == n and np.isfinite(want).all()
    for c in (dirty, null):
        c, _, got, again = decode(mini, c, prompt, n + 9, 4)
        assert again == n
        np.testing.assert_array_equal(got, want)
    assert all(not np.asarray(x.data)[:, 0].any() for x in clean.pools)
