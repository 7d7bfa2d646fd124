"""The host side: admission in order, failures that change nothing or lose only the pools."""

import contextlib
import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soak
import tiny

import hkv
from hkv import _line, _owner, manager
from hkv.manager import (
    Cancelled,
    Closed,
    Conflict,
    Manager,
    Preempted,
    Refused,
    State,
    StateLost,
)
from hkv.testing import count_compiles, invariants

ROW, CHUNK, B = 4, tiny.CHUNK, 16
LAYOUT = soak.LAYOUT  # room for four requests of 64 tokens, and for six leases
ONE = jax.device_put(np.float32(1))
STREAMS = np.random.default_rng(7).integers(0, 50, (8, 64))
COLD = [tiny.dense(s, row=ROW) for s in STREAMS]  # what a run without any cache gives


def make(**options):
    return Manager(LAYOUT, replay=tiny.replay, params=ONE, chunk=CHUNK, **options)


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Compiles everything once; managers of one layout share their programs."""
    with make() as m:
        m.warmup()
        serve(m, 0, 24)


@pytest.fixture
def m():
    with make() as m:
        yield m
        check(m)


def check(m, requests=()):
    """The bookkeeping holds, and what is leased is what these requests lease."""
    m.read(lambda cache: invariants(cache, [r.lease for r in requests]))


def step(cache, lease, tokens, count):
    return tiny.step(ONE, cache, lease, tokens, count)


def advance(request, s, until):
    """Runs a request of stream `s` on from where its lease stands, and checks every output."""
    at = int(request.lease.length[0])
    while at < until:
        n = min(CHUNK, until - at)
        tokens = np.zeros((1, 64), np.int32)
        tokens[0] = STREAMS[s]
        out, ok = request.step(
            step, jax.device_put(tokens), jax.device_put(np.array([n], np.int32))
        )
        assert ok[0] and (np.asarray(out)[0, :n] == COLD[s][at : at + n]).all()
        at += n


def serve(m, s, n, total=None, **options):
    """A whole request; returns how much of its prompt was reused."""
    total = total or n
    with m.admit(STREAMS[s][:n], total, **options) as request:
        advance(request, s, total)
        request.finish(STREAMS[s][:total])
    return request.resume


def in_thread(fn, *args, **kwargs):
    """Starts a function in a thread; `result()` waits and gives its value or raises its error."""
    box = {}

    def run():
        try:
            box["value"] = fn(*args, **kwargs)
        except BaseException as error:
            box["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result(timeout=60):
        thread.join(timeout)
        assert not thread.is_alive(), "still running"
        if "error" in box:
            raise box["error"]
        return box["value"]

    return result


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def fill(m, requests=4):
    """Running requests that take all room, or as much as so many take."""
    return [m.try_admit(STREAMS[i]) for i in range(requests)]


def drop_windows(m):
    """Takes the WINDOW form away from all that is stored, so that a reuse must replay."""
    rows = jax.device_put(np.arange(LAYOUT.segments, dtype=np.int32))
    forms = jax.device_put(np.arange(len(hkv.Form)) == hkv.Form.WINDOW)
    m.update(hkv.drop, rows, forms)


# Serving.


def test_what_was_served_is_reused_and_the_answers_are_those_of_a_cold_run(m):
    assert serve(m, 0, 40, 50) == 0
    assert serve(m, 0, 40) == 39
    assert serve(m, 0, 64) == 50
    assert m.query(STREAMS[0]).boundary[0] == 63


def test_lost_windows_are_recovered_on_the_way_in(m):
    serve(m, 0, 40)
    drop_windows(m)
    assert serve(m, 0, 40) == 39
    assert m.counters.tokens_replayed > 0


def test_without_a_model_to_replay_only_what_is_usable_is_reused():
    with Manager(LAYOUT) as m:
        serve(m, 0, 40)
        drop_windows(m)
        assert serve(m, 0, 40) == 0


def test_each_length_bucket_has_one_program():
    lay = tiny.layout(pages=(9, 9, 9, 9), row=ROW, segments=10, buckets=(32, 64), leases=3)
    m = Manager(lay)
    with count_compiles() as compiles:
        for n in (3, 20, 32, 33, 50, 64):
            m.query(STREAMS[0][:n])
    assert compiles.names == ["jit(_query)"] * 2
    assert m.query(STREAMS[0][:3], salt="b").rows.shape == (1, 2)
    with pytest.raises(ValueError, match="longest bucket is 64"):
        m.admit(STREAMS[0], 65)


def test_tenants_and_weights_do_not_share(m):
    serve(m, 0, 12)
    assert serve(m, 0, 12, salt="b") == 0
    assert serve(m, 0, 12, salt="b") == 11
    m.set_params(ONE, epoch=1)
    assert serve(m, 0, 12) == 0
    assert serve(m, 0, 12) == 11
    assert serve(m, 0, 12, epoch=0) == 11


def test_prompts_with_other_images_do_not_share(m):
    def image(content):
        return {"media": hkv.media_digests(LAYOUT, 20, [(3, 4, content)])}

    assert serve(m, 0, 20, **image(b"cat")) == 0
    assert serve(m, 0, 20, **image(b"cat")) == 19
    assert serve(m, 0, 20, **image(b"dog")) == serve(m, 0, 20) == 0


def test_what_is_published_carries_the_end_of_its_prompt_and_the_policy(m, monkeypatch):
    real, seen = manager.publish, []

    def publish(cache, lease, tokens, length, *, prompt, retention, partial):
        seen.append((int(np.asarray(prompt)[0]), retention))
        return real(cache, lease, tokens, length, prompt=prompt, partial=partial)

    monkeypatch.setattr(manager, "publish", publish)
    m.retention = hkv.retention(0)
    serve(m, 0, 12, 20)
    assert seen == [(12, m.retention)]


def test_a_batch_of_leases_steps_together(m):
    a, b = m.try_admit(STREAMS[0][:8]), m.try_admit(STREAMS[1][:8])
    pair = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), a.lease, b.lease)
    tokens = np.zeros((2, 64), np.int32)
    tokens[:] = STREAMS[:2]
    pair, out, ok = m.step(
        step, pair, jax.device_put(tokens), jnp.full(2, 8, jnp.int32), requests=[a, b]
    )
    for q, request in enumerate((a, b)):
        assert ok[q] and (np.asarray(out)[q] == COLD[q][:8]).all()
        request.lease = jax.tree.map(lambda x, q=q: x[q : q + 1], pair)
        request.finish()
    assert serve(m, 1, 8) == 7


def test_a_lease_for_reading_pins_what_is_usable_and_reserves_nothing(m):
    serve(m, 0, 40)
    with m.lease(STREAMS[0][:40]) as reading:
        assert reading.resume == 39
        pages = m.status().groups["history"]
        assert (pages["free"], pages["pinned"]) == (13, 3)
        with pytest.raises(RuntimeError, match="for reading"):
            reading.publish()
    assert m.status().groups["history"]["pinned"] == 0


# Admission.


def test_nobody_overtakes_the_first_in_line(m):
    order = []

    def enter(name, *args):
        with m.admit(*args):
            order.append(name)

    first, *rest = fill(m, 3)
    large = m.admit(STREAMS[4][:1], 64)
    second = m.try_admit(STREAMS[5][:17])
    assert isinstance(first, hkv.Request) and isinstance(second, hkv.Request)

    def hold():
        with large:
            order.append("large")

    waits = [in_thread(hold)]
    until(lambda: m.waiting() and m.waiting()[0].blocker == "PAGES")
    for n, name in ((2, "small"), (3, "smaller")):  # these two would fit
        waits.append(in_thread(enter, name, STREAMS[6][:4]))
        until(lambda n=n: len(m.waiting()) == n)
    assert [w.total for w in m.waiting()] == [64, 4, 4]
    assert [w.blocker for w in m.waiting()] == ["PAGES", "LINE", "LINE"]
    tried = m.try_admit(STREAMS[3][:4])
    assert tried.verdict[0] == hkv.Verdict.WAIT and tried.blocker[0] == hkv.Blocker.PAGES
    time.sleep(0.1)
    assert order == []
    m.release(first)
    for wait in waits:
        wait()
    assert order == ["large", "small", "smaller"]
    for request in (second, *rest):
        m.release(request)


def test_requests_that_each_fit_alone_never_deadlock(m):
    m.set_caps({hkv.Form.TAIL: 7})
    results = [in_thread(serve, m, i, 33, 64) for i in range(8)]
    for result in results:
        result()
    assert m.counters.admitted == 8 and m.counters.waits


def test_what_can_never_fit_is_refused_with_the_numbers(m):
    m.set_caps({hkv.Form.WINDOW: 3})
    with (
        pytest.raises(Refused, match="cap of WINDOW: 0 used and 4 more of 3 pages") as caught,
        m.admit(STREAMS[0][:40], 64),
    ):
        pass
    answer = caught.value.admission
    assert answer.cap_need[0, 0, hkv.Form.WINDOW] == 4 and answer.cap[0, 0, hkv.Form.WINDOW] == 3
    assert m.try_admit(STREAMS[0][:40], 64).verdict[0] == hkv.Verdict.REFUSE
    assert serve(m, 0, 40) == 0
    assert m.counters.refused == 2


@pytest.mark.parametrize("blocker", ["PAGES", "LEASES", "CAP"])
def test_a_wait_that_times_out_names_what_it_waited_for(m, blocker):
    if blocker == "CAP":
        m.set_caps({hkv.Form.TAIL: 4})
    n = {"PAGES": [64] * 4, "LEASES": [4] * 6, "CAP": [64]}[blocker]
    held = [m.try_admit(STREAMS[i][:k]) for i, k in enumerate(n)]
    with pytest.raises(TimeoutError, match=f"0.01 s: {blocker}; .*WAIT"):
        m.admit(STREAMS[7][:4], timeout=0.01).__enter__()
    assert not m.waiting() and m.counters.timeouts == 1 and m.counters.waits == {blocker: 1}
    check(m, held)
    for request in held:
        m.release(request)
    assert serve(m, 7, 4) == 0


def test_a_changed_cap_wakes_who_waits_for_it(m):
    m.set_caps({hkv.Form.WINDOW: 4})
    first = m.try_admit(STREAMS[0])
    second = in_thread(serve, m, 1, 64)
    until(m.waiting)
    m.set_caps({hkv.Form.WINDOW: 8})
    assert second() == 0
    m.release(first)


def test_a_plan_that_pins_the_room_it_needs_gives_way_to_a_cold_run(m):
    """Room for four windows, all stored: to reuse them and to copy the last needs a fifth."""
    m.set_caps({hkv.Form.WINDOW: 4})
    serve(m, 0, 60)
    assert serve(m, 0, 60) == 0
    assert m.counters.cold == 1


@pytest.mark.parametrize("place", ["first in line", "behind others"])
def test_cancelled_in_line(m, place):
    held = fill(m)
    before = in_thread(serve, m, 4, 64) if place == "behind others" else None
    until(lambda: before is None or m.waiting())
    request = m.admit(STREAMS[5])
    entering = in_thread(request.__enter__)
    until(lambda: len(m.waiting()) == 1 + (before is not None))
    request.cancel()
    with pytest.raises(Cancelled):
        entering()
    for r in held:
        m.release(r)
    if before:
        before()
    assert m.counters.cancelled == 1


def test_cancelled_before_it_came_while_it_ran_and_after_it_ended(m):
    request = m.admit(STREAMS[0])
    request.cancel()
    with pytest.raises(Cancelled), request:
        pass
    with pytest.raises(Cancelled) as caught, m.admit(STREAMS[0]) as request:
        advance(request, 0, 8)
        request.cancel()
        advance(request, 0, 16)
    assert caught.value.request is request and request.state is State.DONE
    request.cancel()
    m.release(request)


def test_cancelled_while_it_is_recovered(m, monkeypatch):
    serve(m, 0, 40)
    drop_windows(m)
    request = m.admit(STREAMS[0][:40])
    real = _line.recover

    def recover(*args, **options):
        request.cancel()
        return real(*args, **options)

    monkeypatch.setattr(_line, "recover", recover)
    with pytest.raises(Cancelled), request:
        pass
    check(m)


def test_a_preempted_request_resumes_from_what_it_had_done(m):
    with pytest.raises(Preempted), m.admit(STREAMS[0][:20], 64) as request:
        advance(request, 0, 37)
        assert in_thread(m.preempt, request, STREAMS[0][:37])()
        assert not m.preempt(request)
        check(m)
        advance(request, 0, 64)
    assert serve(m, 0, 38, 64) == 37
    assert m.counters.preempted == 1


def test_a_preempted_request_makes_room_for_who_waits(m):
    first, *rest = fill(m)
    waits = in_thread(serve, m, 4, 64)
    until(m.waiting)
    m.preempt(first)
    assert waits() == 0
    for request in rest:
        m.release(request)


def test_trimmed_pages_serve_who_waits(m):
    with m.admit(STREAMS[0]) as first:
        advance(first, 0, 64)
        with m.admit(STREAMS[1][:16]), contextlib.ExitStack() as more:
            m.set_caps({hkv.Form.WINDOW: 5})
            with pytest.raises(TimeoutError, match="CAP"):
                more.enter_context(m.admit(STREAMS[2][:16], timeout=0.0))
            first_pages = m.status().forms["WINDOW"]["used"]
            m.trim(first)
            assert m.status().forms["WINDOW"]["used"] < first_pages
            more.enter_context(m.admit(STREAMS[2][:16], timeout=0.0))


# Steps in flight.

SLOW = jax.jit(lambda a: jax.lax.fori_loop(0, 40, lambda i, x: x @ x * np.float32(1e-3), a))
MATRIX = jnp.full((600, 600), 1e-3, jnp.float32)


def late_zero():
    """An `i32[1]` 0 that is ready after a while."""
    return jnp.minimum(SLOW(MATRIX)[0, :1].astype(jnp.int32), 0)


def test_a_lease_is_released_only_when_its_last_step_has_finished(m, monkeypatch):
    late_zero().block_until_ready()
    ready = []
    real = _owner.release
    monkeypatch.setattr(
        _owner, "release", lambda c, x: (ready.append(out.is_ready()), real(c, x))[1]
    )
    with m.admit(STREAMS[0]) as request:
        out, _ = request.step(step, request.tokens, late_zero() + jnp.int32(4))
        in_flight = m.status().in_flight
    assert ready == [True] and in_flight <= 1 and m.status().in_flight == 0


@pytest.fixture(scope="module")
def poisoned():
    """A step whose program fails on the device while `broken` holds anything."""
    broken = []

    def fail(count):
        if broken:
            raise ValueError("planted")
        return count

    @functools.partial(jax.jit, donate_argnames=("cache",))
    def run(cache, lease, tokens, count):
        shape = jax.ShapeDtypeStruct((1,), jnp.int32)
        return step(cache, lease, tokens, jax.pure_callback(fail, shape, count))

    with make() as m, m.admit(STREAMS[0]) as request:
        request.step(run, request.tokens, late_zero() + jnp.int32(8))
        assert request.lease.length[0] == 8
    broken.append(True)
    return run


@pytest.mark.parametrize("who", ["publish", "settle", "leave", "another", "admit", "caps", "read"])
def test_a_step_that_fails_on_the_device_loses_the_pools_and_is_found_out(m, poisoned, who):
    other = m.try_admit(STREAMS[1][:20])
    advance(other, 1, 8)
    with pytest.raises(StateLost), m.admit(STREAMS[0][:20]) as request:
        request.step(poisoned, request.tokens, late_zero() + jnp.int32(4))
        if who == "publish":
            request.publish()
        elif who == "settle":
            m.settle()
        elif who == "another":
            until(lambda: all(mark.is_ready() for _, mark in m._flight))
            with pytest.raises(StateLost):
                advance(other, 1, 16)
        elif who == "admit":
            assert serve(m, 2, 20) == 0
        elif who == "caps":
            m.set_caps({hkv.Form.WINDOW: 8})
        elif who == "read":
            m.read(lambda cache: np.asarray(cache.clock))
    assert m.era == 1 and other.state is State.LOST and m.counters.lost == 1
    with pytest.raises(StateLost):
        advance(other, 1, 16)
    m.release(other)
    assert serve(m, 1, 20) == 0
    assert serve(m, 1, 20) == 19


# Failures, at each place that can fail.

PLACES = {
    "query": (_line, "query"), "route": (_line, "route"), "admit": (_line, "admit"),
    "recover": (_line, "recover"), "numbers": (_line, "numbers"), "lease": (_line, "lease"),
    "publish": (manager, "publish"), "trim": (manager, "trim"), "caps": (manager, "set_caps"),
    "release": (_owner, "release"), "step": (None, "step"),
}  # fmt: skip
TAKES = ("admit", "recover", "lease", "publish", "trim", "release", "step")  # the pools along


class Planted(RuntimeError):
    pass


def failing(real, when, times=1):
    """`real`, but its first calls fail before it is dispatched, or after."""
    left = [times]

    def wrapped(*args, **options):
        if not left[0]:
            return real(*args, **options)
        left[0] -= 1
        if when == "after":
            real(*args, **options)
        raise Planted(f"{when} the call")

    return wrapped


def visit(m, s):
    """Passes every place: admission with a recovery, steps, trimming, publication, a lease."""
    with m.admit(STREAMS[s][:20], 24) as request:
        for end in (20, 24):
            advance(request, s, end)
        m.trim(request)
        request.finish(STREAMS[s][:24])
    with m.lease(STREAMS[s][:20]):
        m.set_caps({hkv.Form.WINDOW: 8})


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", PLACES)
def test_a_failure_changes_nothing_or_loses_only_the_pools(m, monkeypatch, place, when):
    serve(m, 0, 20)
    drop_windows(m)
    other = m.try_admit(STREAMS[1][:12])
    advance(other, 1, 8)
    owner, name = PLACES[place]
    owner = owner or tiny
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name), when))
        lost = when == "after" and place in TAKES
        with count_compiles() as compiles, pytest.raises(StateLost if lost else Planted):
            visit(m, 0)
        assert not compiles.names
        assert m.era == lost and not m.waiting()
        if lost:
            with pytest.raises(StateLost, match="admit it again"):
                advance(other, 1, 12)
        else:
            m.settle()  # which makes up for a release that failed
            check(m, [other])
            advance(other, 1, 12)
        m.release(other)
        visit(m, 0)
    check(m)
    assert serve(m, 1, 12) == 0
    assert serve(m, 0, 20) == 19


def test_an_argument_that_does_not_fit_and_an_error_in_tracing_change_nothing(m):
    with m.admit(STREAMS[0][:20]) as request:
        before = m.read(lambda cache: cache)
        for wrong in (np.array([8], np.uint32), np.array(8, np.int32)):
            with pytest.raises(TypeError):
                request.step(step, request.tokens, jax.device_put(wrong))
        with pytest.raises(ValueError, match="groups are"):
            request.step(jax.jit(lambda c, x: (c, x, c.layout.group("none")), donate_argnums=0))
        version, cache = m.read(lambda cache: cache)
        assert version == before[0] and cache is before[1]
        assert m.counters.failed == 3 and m.era == 0
        advance(request, 0, 20)


def test_a_step_that_returns_no_cache_is_an_error(m):
    with m.admit(STREAMS[0][:20]) as request:
        with pytest.raises(TypeError, match=r"return \(cache, ...\)"):
            m.step(lambda cache: (cache.clock, cache))
        advance(request, 0, 20)
    with pytest.raises(StateLost), m.admit(STREAMS[0][:20]) as request:
        m.step(lambda cache: step(cache, request.lease, request.tokens, eight())[1:])
    with pytest.raises(StateLost), m.admit(STREAMS[0][:20]) as request:
        m.step(lambda cache: (step(cache, request.lease, request.tokens, eight()), cache)[1:])
    assert m.era == 2
    with m.admit(STREAMS[0][:20]) as request:
        with pytest.raises(TypeError, match="lease returned"):
            request.step(lambda c, x: tiny.step(ONE, c, x, request.tokens, eight())[::3])
        check(m, [request])


def eight():
    return jax.device_put(np.array([8], np.int32))


def test_a_program_that_calls_its_manager_is_refused(m):
    with pytest.raises(RuntimeError, match="called its manager"):
        m.update(lambda cache: m.update(lambda c: c))
    assert m.update(lambda cache: (cache, 5)) == (5,)


def test_a_lease_of_lost_pools_reads_nothing_in_the_new_ones(m, monkeypatch):
    old = m.try_admit(STREAMS[0][:20])
    with pytest.raises(StateLost):
        m.update(failing(hkv.release, "after"), old.lease)
    with m.admit(STREAMS[0][:20]) as new:
        _, out, ok = m.step(step, old.lease, old.tokens, eight())
        assert not ok[0] and not np.asarray(out).any()
        advance(new, 0, 20)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Planted, SystemExit])
def test_an_error_inside_the_context_releases_the_request(m, error):
    with pytest.raises(error), m.admit(STREAMS[0][:20]) as request:
        advance(request, 0, 8)
        raise error
    check(m)
    assert m.counters.released == 1


def test_an_interrupt_while_a_request_waits_leaves_the_line(m, monkeypatch):
    held = fill(m)

    def wait(self, timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait", wait)
        with pytest.raises(KeyboardInterrupt), m.admit(STREAMS[4]):
            pass
    assert not m.waiting()
    for request in held:
        m.release(request)
    assert serve(m, 4, 64) == 0


@pytest.mark.parametrize("name", ["admit", "numbers"])
def test_an_interrupt_around_an_admission_leaves_no_lease_behind(m, monkeypatch, name):
    real = getattr(_line, name)

    def interrupted(*args):
        out = real(*args)
        if name == "numbers":
            raise KeyboardInterrupt
        return out

    monkeypatch.setattr(_line, name, interrupted)
    if name == "admit":
        monkeypatch.setattr(m, "_fetch", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt), m.admit(STREAMS[0]):
        pass
    monkeypatch.undo()
    check(m)
    assert serve(m, 0, 12) == 0


def test_an_interrupt_inside_a_program_that_had_taken_the_pools_is_raised_as_it_is(m):
    def interrupted(cache, lease):
        hkv.release(cache, lease)
        raise KeyboardInterrupt

    with m.admit(STREAMS[0]) as request, pytest.raises(KeyboardInterrupt):
        m.update(interrupted, request.lease)
    assert m.era == 1 and request.state is State.LOST


def test_a_release_that_failed_is_made_up_for_by_who_waits(m, monkeypatch):
    first, *rest = fill(m)
    waits = in_thread(serve, m, 4, 64)
    until(m.waiting)
    monkeypatch.setattr(_owner, "release", failing(hkv.release, "before", times=3))
    with pytest.raises(Planted):
        m.release(first)
    assert waits() == 0
    for request in rest:
        m.release(request)


def test_pools_for_which_there_is_no_memory_are_made_when_there_is(m, monkeypatch):
    def full(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(_owner, "init", full)
        with pytest.raises(StateLost), m.admit(STREAMS[0]) as request:
            m.update(failing(hkv.release, "after"), request.lease)
        with pytest.raises(MemoryError):
            serve(m, 0, 12)
        with pytest.raises(MemoryError):
            m.status()
    assert serve(m, 0, 12) == 0


def test_caps_outlive_the_pools(m):
    m.set_caps({hkv.Form.WINDOW: 3})
    with pytest.raises(StateLost), m.admit(STREAMS[0][:20]) as request:
        m.update(failing(hkv.release, "after"), request.lease)
    assert m.status().forms["WINDOW"]["cap"] == 3
    with pytest.raises(Refused, match="CAP"):
        serve(m, 0, 64)


def test_a_recovery_that_is_not_verified_is_begun_again_and_at_last_runs_cold(m, monkeypatch):
    serve(m, 0, 20)
    drop_windows(m)
    real = _line.recover

    def spoiled(run, params, cache, *args, **options):
        """The shared segments are invalidated before the recovery gets to them."""
        cache, _ = hkv.invalidate(cache, jax.device_put(np.ones(LAYOUT.segments, bool)))
        return real(run, params, cache, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(_line, "recover", spoiled)
        assert serve(m, 0, 20) == 0
    assert m.counters.rerouted == 1

    def refused(*args, **options):
        cache, lease, why = real(*args, **options)
        return cache, lease, why + np.uint8(1)

    drop_windows(m)
    monkeypatch.setattr(_line, "recover", refused)
    assert serve(m, 0, 20) == 0
    assert m.counters.rerouted == 1 + _line.TRIES


# Versions.


def test_an_update_of_a_state_that_moved_on_changes_nothing(m):
    version, _ = m.read(hkv.occupancy)
    serve(m, 0, 20)
    rows = jax.device_put(np.ones(LAYOUT.segments, bool))
    with pytest.raises(Conflict, match="read again"):
        m.update(hkv.invalidate, rows, expect=version)
    assert serve(m, 0, 20) == 19
    version, _ = m.read(hkv.occupancy)
    assert m.update(hkv.invalidate, rows, expect=version)[0] > 0
    assert serve(m, 0, 20) == 0


def test_updates_of_many_threads_are_made_one_after_the_other(m):
    done = []

    def work():
        for _ in range(20):
            while True:
                version, _ = m.read(lambda cache: None)
                with contextlib.suppress(Conflict):
                    m.update(lambda cache: cache, expect=version)
                    done.append(version)
                    break

    for result in [in_thread(work) for _ in range(8)]:
        result()
    assert sorted(done) == list(range(160))


# Starting, looking, ending.


def test_nothing_compiles_after_warmup_whatever_is_lost(m):
    with count_compiles() as compiles:
        serve(m, 0, 30)
        drop_windows(m)
        serve(m, 0, 30)
        with pytest.raises(StateLost), m.admit(STREAMS[0]) as request:
            m.update(failing(hkv.release, "after"), request.lease)
        with m.lease(STREAMS[0]):
            m.status()
        serve(m, 0, 30)
    assert compiles.names == ["jit(_drop)"] or not compiles.names


def test_shutdown_waits_for_who_runs_and_sends_away_who_waits(m):
    running = fill(m)
    waits = in_thread(serve, m, 4, 64)
    until(m.waiting)
    with pytest.raises(TimeoutError, match="4 requests run"):
        m.shutdown(timeout=0.01)
    with pytest.raises(Closed):
        waits()
    with pytest.raises(Closed):
        serve(m, 3, 4)
    ending = in_thread(m.shutdown)
    advance(running[0], 0, 8)
    for request in running:
        request.finish(length=8)
    ending()
    assert m.status().running == 0


def test_counters_are_plain_numbers_that_add_up(m):
    serve(m, 0, 40, 44)
    serve(m, 0, 40)
    drop_windows(m)
    serve(m, 0, 42)
    m.query(STREAMS[0])
    c = m.counters
    assert (c.admitted, c.released, c.published, c.queries) == (3, 3, 3, 1)
    assert (c.tokens_reused, c.tokens_prefilled) == (39 + 41, 40 + 1 + 1)
    assert 5 <= c.tokens_replayed <= 41
    assert c.hits["COMPRESSED"] == c.hits["INDEXER"] == 3 + 3
    assert c.hits["WINDOW"] == 1 and c.refusals["LIFECYCLE"] >= 1
    assert c.refusals["NOT_FOUND"] >= 3
    assert c.steps == 6 + 1 + 1
    for s in range(1, 6):
        serve(m, s, 60)
    assert m.counters.evictions["WINDOW"] >= 4
    text = str(m.status())
    for line in ("history", "WINDOW", "tokens_reused", "not reused, LIFECYCLE", "8 admitted"):
        assert line.split()[-1] in text
    assert "Manager(version" in repr(m) and "60 tokens" in repr(m.admit(STREAMS[0][:60]))


def test_evictions_are_the_pages_that_went(m):
    for s in range(8):
        serve(m, s, 33)
    used = m.status().forms["WINDOW"]["used"]
    assert m.counters.evictions["WINDOW"] == 8 * 3 - used > 0


def test_a_window_larger_than_its_cap_is_reported_once(m):
    with pytest.warns(UserWarning, match=r"cap of WINDOW is 1 pages.*window\(6\) takes 1, and 1"):
        m.set_caps({hkv.Form.WINDOW: 1})
    m.set_caps({hkv.Form.WINDOW: 0})


def test_a_segment_longer_than_all_that_is_stored_is_reported_once(m):
    with pytest.warns(UserWarning, match="`segment_tokens` is 16, but the longest of 16 seq.* 12"):
        for i in range(20):
            with m.admit(STREAMS[i % 4][:12]) as request:
                request.publish()
    assert all(m.query(s).boundary[0] == 0 for s in STREAMS)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(prompt=[[1]]), ValueError, "axes"),
        (dict(prompt=[0.5]), TypeError, "float64"),
        (dict(prompt=[-1]), ValueError, "-1"),
        (dict(prompt=[1] * 9, total=8), ValueError, "`total` is 8"),
        (dict(prompt=[1], total=65), ValueError, "longest bucket is 64"),
        (dict(prompt=[1], bucket=48), ValueError, "`bucket` is 48"),
        (dict(prompt=[1], salt=3), TypeError, "salt"),
    ],
)
def test_what_is_no_request_is_refused_at_once(m, arguments, error, message):
    with pytest.raises(error, match=message):
        m.admit(**arguments)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(replay=3), TypeError, "`replay` is 3"),
        (dict(chunk=0), ValueError, "`chunk` is 0"),
        (dict(chunk=1.5), TypeError, "`chunk` is 1.5"),
        (dict(costs=1.0), TypeError, "`costs` is a float"),
        (dict(retention=16), TypeError, "`retention` is a int"),
        (dict(vocabulary=0), ValueError, "`vocabulary` is 0"),
        (dict(epoch=-1), ValueError, "`epoch` is -1"),
        (dict(tennant="a"), TypeError, "`tennant` is no part of an identity; give salt"),
        (dict(salt={}), TypeError, "`salt`"),
    ],
)
def test_what_makes_no_manager_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Manager(LAYOUT, **arguments)


def test_parameters_of_no_identity_change_nothing(m):
    before = m.params, dict(m.identity)
    for identity, error in ((dict(epoch=-1), ValueError), (dict(foo=1), TypeError)):
        with pytest.raises(error, match="`epoch`|`foo`"):
            m.set_params(None, **identity)
    assert m.params is before[0] and m.identity == before[1]


def test_ids_that_the_model_does_not_know_are_refused_everywhere():
    with Manager(LAYOUT, vocabulary=50) as m:
        for call in (m.query, m.admit, m.try_admit, m.lease):
            with pytest.raises(ValueError, match="token 50; give ids of 0 to 49"):
                call([1, 50])
        with pytest.raises(ValueError, match="token 50"):
            m.query([[1], [50]])
        with m.admit([1, 49], 4) as request, pytest.raises(ValueError, match="`tokens` holds .*50"):
            request.publish([1, 50])
        for nothing in (None, 3):
            with pytest.raises(TypeError, match="`prompts` is"):
                m.query(nothing)


def test_sixteen_threads_with_failures_everywhere_lose_and_leak_nothing():
    facts = soak.Soak(operations=2000).run()
    assert facts["operations"] >= 2000 and facts["pools_lost"] > 0


def test_more_tokens_than_were_given_are_not_published(m):
    with m.admit(STREAMS[0][:20], 40) as request:
        advance(request, 0, 40)
        for ids in (None, STREAMS[0][:20]):
            with pytest.raises(ValueError, match="`length` is 40, of 20 token ids"):
                request.publish(ids, 40)
        with pytest.raises(ValueError, match="`length`"):
            m.preempt(request, length=21)
    assert m.query(STREAMS[0][:64]).matched[0] == 0


def test_one_request_cannot_be_entered_twice(m):
    blockers = [m.try_admit(STREAMS[i][:16], 64) for i in range(4)]
    waiting = m.admit(STREAMS[5][:16], 64, timeout=30)
    first = in_thread(waiting.__enter__)
    until(lambda: m.waiting())
    with pytest.raises(RuntimeError, match="make another"):
        waiting.__enter__()
    for request in blockers:
        request.release() if hasattr(request, "release") else m.release(request)
    assert first() is waiting and waiting.state is State.RUNNING
    m.release(waiting)
    m.settle()
    check(m)


def test_who_could_run_cold_does_not_wait_for_ever_beside_what_it_would_reuse():
    with Manager(LAYOUT) as m:  # strict; room for 16 segments
        one, other = STREAMS[0][:16], STREAMS[1][:40]
        for ids in (one, other):
            with m.admit(ids) as request:
                advance(request, 0 if ids is one else 1, len(ids))
                request.finish(ids)
        held = [m.try_admit(STREAMS[2 + i][:40], n) for i, n in enumerate((64, 64, 48))]
        with m.lease([*one, 1]):
            with m.admit([*other[:36], 3], 64, timeout=30) as request:
                assert request.resume == 0
        for request in held:
            m.release(request)


def test_no_admission_is_lost_where_the_pools_go_while_it_is_tried(m, monkeypatch):
    real, first = m._once, m.admit(STREAMS[1][:16], 32)
    m._join(first)

    def lost(request):
        if request is first:
            return real(request)
        monkeypatch.undo()  # as if its recovery was lost, and `first` came back in line before it
        with m._lock:
            m._leave(request)
            request.state, request._seen = State.WAITING, -1
            m._line.append(request)
        return False

    first._asked = 0.0  # it does not ask: nobody waits for it
    monkeypatch.setattr(m, "_once", lost)
    got = m.try_admit(STREAMS[2][:16], 32)
    assert got.state is State.RUNNING
    m._give_up(first)
    m.release(got)


@pytest.mark.parametrize("timeout", ["soon", float("nan"), -1])
def test_a_timeout_that_is_none_is_refused(m, timeout):
    with pytest.raises(ValueError, match="`timeout`"):
        m.admit([1], timeout=timeout)


def test_an_update_that_returns_nothing_is_refused(m):
    with pytest.raises(TypeError, match="returned no cache"):
        m.update(lambda cache: None)


def test_an_array_in_an_identity_is_looked_at(m):
    with pytest.raises((TypeError, ValueError), match="`epoch`"):
        m.admit([1], epoch=jax.device_put(np.int32(1)))
