"""Windows and tails that recycle: a request reserves what it looks back at and runs ahead.

Rows are known rows (see `payload`); a page that went on too early, or to two at once, is seen.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from payload import Payload, group, lib

import hkv
from hkv import Blocker, Form, Life, Verdict
from hkv.testing import invariants

B, N, AHEAD = 8, 24, 8
RING = 4  # segments that 11 rows back and 8 ahead can touch; of the tail, with 7 back, 3


def groups(pages=0):
    return (
        group("full", Form.COMPRESSED, hkv.history(1), (0,), 8),
        group("c4", Form.COMPRESSED, hkv.history(4), (1,), 1),
        group("tail", Form.TAIL, hkv.tail(4, overlap=True), (1,), 4, 2 * pages and 2 * pages + 1),
        group("w5", Form.WINDOW, hkv.window(5), (0, 2), 4, 2 * pages and 2 * pages + 1),
        group("w12", Form.WINDOW, hkv.window(12), (2,), 8, pages and pages + 1),
        group("idx", Form.INDEXER, hkv.indexer(4), (1,), 2),
    )


def layout(pages=0, **more):
    """`pages`: segments' worth of window and tail pages."""
    rest = dict(segment_tokens=B, segments=N, buckets=(72,), leases=6, ahead=AHEAD)
    return hkv.Layout(groups=groups(pages), **{**rest, **more})


ROLLING = [2, 3, 4]
SMALL = layout(2 * RING)  # two rings


def text(n, seed=0):
    return np.random.default_rng(seed).integers(1, 200, n).tolist()


A = text(64)


def in_use(p):
    o = hkv.occupancy(p.cache)
    used = np.asarray(o["capacity"] - o["free"])
    per = [p.layout.segment_pages(g) for g in p.layout.groups]
    return [int(used[g]) // per[g] for g in ROLLING]


def mask(form):
    return jnp.asarray(np.array([f is form for f in Form]))


def run(p, lease, prompt, until, *, publish=False, step=AHEAD):
    """Goes on to `until` by steps, each with a trim before it."""
    while int(lease.length[0]) < until:
        at = int(lease.length[0])
        if publish:
            lease, _ = p.publish(lease, [prompt], [at], partial=False)
        p.cache, lease = lib.trim(p.cache, lease)
        lease = p.advance(lease, [prompt], [min(at + step, until)])
        p.check_rows(lease, [prompt])
    return lease


def start(p, prompt, total=64):
    lease, answer = p.admit(p.plan([prompt], costs=hkv.costs(replay=float("inf"))), [total])
    assert answer.verdict[0] == Verdict.ADMIT, answer
    return lease


def test_what_a_request_reserves_is_what_the_pool_must_have():
    """A window of 8, chunks of 16: ceil((8 - 1 + 16) / 16) + 1 pages, whatever the length."""
    one = group("w", Form.WINDOW, hkv.window(8), (0,), 16, 4)
    full = group("c", Form.COMPRESSED, hkv.history(1), (0,), 16)
    rest = dict(segment_tokens=16, segments=130, buckets=(1024,), leases=4)
    lay = hkv.Layout(groups=(one, full), ahead=16, **rest)
    assert lay.reserved(Form.WINDOW, 64) == 3 and lay.reserved(Form.WINDOW, 2) == 2
    assert lay.reserved(Form.COMPRESSED, 64) == 64
    for bad in ({"ahead": 0}, {"ahead": 26}):
        with pytest.raises(ValueError, match="`pages` of group 'w'"):
            hkv.Layout(groups=(one, full), **{**rest, "ahead": 16, **bad})
    p = Payload(lay, chunk=16)
    long, short = text(1000), text(10, 1)
    lease = start(p, long, 1000)
    waits, answer = p.admit(p.plan([short]), [10])
    assert Verdict(int(answer.verdict[0])) is Verdict.WAIT
    assert Blocker(int(answer.blocker[0])) is Blocker.PAGES
    assert answer.need[0].tolist() == [1, 1] and answer.free[0, 0] == 0
    lease = run(p, lease, long, 1000, step=16)
    p.release(lease)
    p.store([short])
    invariants(p.cache, [])


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, AHEAD), st.booleans()), max_size=40),
    st.integers(0, 20), st.sampled_from([0, 8, 1000]),
)  # fmt: skip
def test_two_requests_that_fill_the_pools_run_side_by_side_to_their_ends(turns, shared, every):
    p = Payload(layout(2 * RING + 3) if shared else SMALL)
    if shared:
        p.store([A[:shared]])
    prompts = [A, A[: shared // 2] + text(64 - shared // 2, 1)]
    leases = [start(p, prompt) for prompt in prompts]
    for who, n, publish in [*turns, *[(0, 8, True), (1, 8, True)] * 8]:
        at = int(leases[who].length[0])
        if publish:
            leases[who], _ = p.publish(leases[who], [prompts[who]], [at], partial=False)
        leases[who] = run(p, leases[who], prompts[who], min(at + n, 64))
        assert max(in_use(p)) <= 2 * RING + 3 * (shared > 0)
    for lease, prompt in zip(leases, prompts, strict=True):
        assert lease.length[0] == 64
        p.check_rows(lease, [prompt])
    invariants(p.cache, leases)
    for lease, prompt in zip(leases, prompts, strict=True):
        lease, _ = p.publish(lease, [prompt])
        p.release(lease)
    invariants(p.cache, [])
    assert p.boundary([A + [1]][:1])[0] == 64


def test_who_runs_further_ahead_than_the_layout_says_is_refused_until_he_trims():
    p = Payload(SMALL)
    lease = start(p, A)
    lease = p.advance(lease, [A], [3 * B])
    before = jax.device_get(p.cache)
    lease, ok = p.step(lease, [1], p.params([A]))
    assert not ok[0] and lease.length[0] == 3 * B
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(p.cache))
    p.cache, lease = lib.trim(p.cache, lease)
    lease, ok = p.step(lease, [AHEAD], p.params([A]))
    assert ok[0]
    p.check_rows(lease, [A])


def store(p, prompt):
    lease = run(p, start(p, prompt, len(prompt)), prompt, len(prompt), publish=True)
    lease, _ = p.publish(lease, [prompt])
    p.release(lease)


def windows(p, prompt):
    """Which segments of a stored prompt have their windows."""
    rows = np.asarray(p.query([prompt + [1]]).rows)[0]
    life = np.asarray(p.cache.table.life)
    return [i for i, r in enumerate(rows[rows < N]) if life[r, Form.WINDOW] == Life.READY]


def test_published_windows_stay_while_there_are_free_pages_and_go_on_after_the_least_worth_first():
    for rings, stay in ((1, [4, 5, 6, 7]), (2, list(range(8)))):
        p = Payload(layout(rings * RING))
        store(p, A)
        assert windows(p, A) == stay, rings
        invariants(p.cache, [])
        assert p.boundary([A + [1]]) == [64]


def test_a_window_that_slides_takes_nothing_that_a_retained_boundary_needs():
    p = Payload(layout(2 * RING))
    first = text(32, 5)
    store(p, first)
    assert p.boundary([first + [1]]) == [32]
    p.cache = dataclasses.replace(
        p.cache, table=dataclasses.replace(p.cache.table, worth=p.cache.table.worth * 0 + 2)
    )
    lease = start(p, A)
    while int(lease.length[0]) < 64:
        at = int(lease.length[0])
        tokens, _ = p.pad([A])
        n = jnp.asarray(np.array([at, 0], np.int32))
        p.cache, lease, _ = lib.publish(
            p.cache, lease, tokens, n, retention=hkv.retention(0), partial=False
        )
        lease = run(p, lease, A, at + 8)
    assert p.boundary([first + [1]]) == [32] and windows(p, first) == [0, 1, 2, 3]
    p.release(lease)


def test_the_end_of_a_prompt_outlives_what_is_stored_for_nothing():
    """A full pool: what no boundary needs goes, so that the end of the prompt can stay."""
    p = Payload(layout(2 * RING))
    store(p, text(32, 5))
    p.cache = dataclasses.replace(
        p.cache, table=dataclasses.replace(p.cache.table, worth=p.cache.table.worth * 0)
    )
    lease = start(p, A)
    tokens, _ = p.pad([A])
    prompt = jnp.asarray(np.array([20, 0], np.int32))
    while int(lease.length[0]) < 64:
        at = jnp.minimum(lease.length, 64)
        p.cache, lease, _ = lib.publish(
            p.cache, lease, tokens, at, prompt=prompt, retention=hkv.retention(0), partial=False
        )
        lease = run(p, lease, A, int(at[0]) + 8)
    p.cache, lease, _ = lib.publish(
        p.cache, lease, tokens, lease.length, prompt=prompt, retention=hkv.retention(0)
    )
    p.release(lease)
    assert {1, 2} <= set(windows(p, A)) and p.boundary([A[:24] + [1]]) == [24]
    invariants(p.cache, [])


def test_what_has_recycled_can_be_replayed():
    p = Payload(layout(2 * RING))
    lease, _ = p.publish(run(p, start(p, A), A, 64), [A])
    p.release(lease)
    prompt = A[:30] + text(9, 3)
    assert p.boundary([prompt]) == [0]
    cheap = hkv.costs(replay=0.01)
    plan = p.plan([prompt], costs=cheap)
    assert plan.resume[0] == 30 and plan.replay[0, 1] > plan.replay[0, 0]
    again = run(p, p.start([prompt], [39], costs=cheap), prompt, 39)
    p.release(again)
    invariants(p.cache, [])


def test_a_branch_and_its_stem_go_on_with_pages_of_their_own():
    p = Payload(layout(4 * RING))
    stem = run(p, start(p, A), A, 21)
    total = jnp.asarray(np.array([64, -1], np.int32))
    p.cache, branch, answer = lib.fork(p.cache, stem, total)
    assert answer.verdict[0] == Verdict.ADMIT
    other = A[:21] + text(43, 7)
    for at in range(24, 65, 8):
        stem = run(p, stem, A, at)
        branch = run(p, branch, other, at)
    invariants(p.cache, [stem, branch])
    for lease, prompt in ((branch, other), (stem, A)):
        lease, _ = p.publish(lease, [prompt])
        p.release(lease)
    invariants(p.cache, [])
    assert p.boundary([A + [1], other + [1]]) == [64, 64]
