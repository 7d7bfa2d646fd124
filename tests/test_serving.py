"""Continuous batching: what a request is answered does not depend on who comes, goes or fails."""

import dataclasses
import functools
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soak
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import hkv
from hkv import serving
from hkv.manager import Closed, Manager, Refused, StateLost
from hkv.models.deepseek_v4 import DeepseekV4, groups
from hkv.nn import bind
from hkv.serving import Engine, Stream
from hkv.testing import count_compiles, invariants

ROW, CHUNK, SLOTS, STEPS = 4, tiny.CHUNK, 3, 3
LAYOUT = soak.LAYOUT  # room for four requests of 64 tokens
ONE = jax.device_put(np.float32(1))
PROMPTS = np.random.default_rng(3).integers(0, 50, (4, 40)).astype(np.int32)
PROMPTS[1, :25] = PROMPTS[0, :25]  # two that share a beginning
FOLDER = Path(__file__).parents[1] / "examples" / "checkpoints" / "dsv4"


def token(out, key):
    """The next token, a function of the exact output."""
    return (out.astype(jnp.int32) * 31 + 7) % 50


def drawn(out, key):
    """A token that depends on the key."""
    return jax.random.randint(key, (), 0, 50) ^ (out.astype(jnp.int32) % 2)


BROKEN = []


def pop(tokens):
    if BROKEN:
        time.sleep(BROKEN.pop())
        raise ValueError("planted")
    return tokens


def fragile(params, tokens, view):
    """The model, which fails on the device after the seconds that `BROKEN` holds."""
    shape = jax.ShapeDtypeStruct(tokens.shape, jnp.int32)
    return tiny.forward(params, jax.pure_callback(pop, shape, tokens), view)


@functools.cache
def whole(prompt):
    """A prompt with 24 tokens of answer, run without any cache; and what came behind each."""
    ids = list(prompt)
    for _ in range(24):
        ids.append((int(tiny.dense(np.array(ids), row=ROW)[-1]) * 31 + 7) % 50)
    return ids, tiny.dense(np.array(ids), row=ROW)


def right(stream):
    """What a request is to be answered."""
    n = len(stream.prompt)
    said = whole(tuple(stream.prompt.tolist()))[0][n : n + stream.max_tokens]
    ends = [i for i, t in enumerate(said) if t in stream.stop]
    return said[: ends[0] + 1] if ends else said


def check(*streams):
    for s in streams:
        assert s.result() == right(s), (len(s.prompt), s.max_tokens)


def make():
    return Manager(LAYOUT, replay=tiny.replay, params=ONE, chunk=CHUNK)


class Checked(Engine):
    """An engine that compares every output with that of a run without any cache."""

    def __init__(self, m):
        self.compared = 0
        super().__init__(
            m, tiny.forward, slots=SLOTS, chunk=CHUNK, budget=2 * CHUNK, steps=STEPS,
            sample=token, on_logits=self.compare,
        )  # fmt: skip

    def compare(self, stream, position, out):
        want = whole(tuple(stream.prompt.tolist()))[1]
        assert (out == want[position : position + len(out)]).all()
        self.compared += len(out)

    def ask(self, which, n, many=24, **options) -> Stream:
        return self.submit(PROMPTS[which, :n], many, **options)


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Compiles everything once; engines of one layout share their programs."""
    with make() as m:
        Checked(m).warmup()


@pytest.fixture
def m():
    with make() as m:
        yield m
        m.read(lambda cache: invariants(cache, []))


@pytest.fixture
def engine(m):
    engine = Checked(m)
    yield engine
    engine.close(wait=False)
    assert not engine.step()


@pytest.fixture
def plain(m):
    """An engine that draws its tokens, with room for one chunk per turn."""
    return Engine(m, fragile, slots=SLOTS, chunk=CHUNK, steps=STEPS, sample=drawn)


def turns(engine, n):
    for _ in range(n):
        engine.step()


def lose(m):
    """Loses the pools, as a program does that fails while it runs."""

    def fail(cache):
        for a in jax.tree.leaves(cache):
            a.delete()
        raise RuntimeError("planted")

    with pytest.raises(StateLost):
        m.update(fail)


def invalidate(m):
    m.update(hkv.invalidate, jax.device_put(np.ones(LAYOUT.segments, bool)))


def drop_windows(m):
    rows = jax.device_put(np.arange(LAYOUT.segments, dtype=np.int32))
    m.update(hkv.drop, rows, jax.device_put(np.arange(len(hkv.Form)) == hkv.Form.WINDOW))


def pinned(m):
    return m.status().groups["history"]["pinned"]


# Answers.


def test_answers_are_those_of_a_run_without_a_cache_whoever_else_is_there(engine):
    alone = engine.ask(0, 33, keep=False)
    check(alone)
    streams = [engine.ask(w, n, keep=False) for w, n in ((0, 33), (2, 40), (3, 1), (2, 7), (1, 16))]
    turns(engine, 4)
    streams.append(engine.ask(0, 20))
    check(*streams)
    assert engine.compared == sum(s.total for s in [alone, *streams])


def test_tokens_come_in_order_while_the_answer_goes_on(engine):
    stream, seen = engine.ask(0, 20), []
    for said in stream:
        seen.append((said, len(stream.tokens), stream.done))
    assert [t for t, *_ in seen] == right(stream) == stream.result()
    assert not seen[0][2] and seen[0][1] <= 1 + STEPS and len({n for _, n, _ in seen}) == 8
    assert stream.seconds > 0 and list(stream) == []


def test_prompt_and_answer_are_published_for_the_next_turn(engine):
    first = engine.ask(0, 20, 20)
    said = first.result()
    assert first.reused == 0 and int(first.plan.prefill[0, 1]) == 20
    more = engine.submit([*PROMPTS[0, :20], *said, 5], 1)
    assert more.result() == right(more)
    assert more.reused == 20 + 19 and int(more.availability.matched[0]) == 39


def test_what_is_not_to_be_kept_is_not(engine):
    engine.ask(0, 20, keep=False).result()
    second = engine.ask(0, 20)
    second.result()
    assert second.reused == 0


@pytest.mark.parametrize("at", [0, 1, 7, 23])
def test_a_stop_token_ends_the_answer_and_is_its_last(engine, at):
    said = right(engine.ask(2, 7, keep=False))
    stream = engine.ask(2, 7, stop=[51, said[at]])
    assert stream.result() == right(stream) == said[: said.index(said[at]) + 1]
    again = engine.ask(2, 7)
    assert again.result() == said and again.reused == 6


def test_a_sampled_answer_depends_on_its_seed_alone(plain):
    alone = plain.submit(PROMPTS[0], 12, seed=5).result()
    same = plain.submit(PROMPTS[0], 12, seed=5)
    other = plain.submit(PROMPTS[0], 12, seed=6)
    turns(plain, 3)
    plain.preempt(same)
    assert same.result() == alone != other.result()
    assert len({t // 2 for t in alone}) > 4  # a key of its own at each position


# Turns.


def test_decoders_get_their_tokens_while_long_prompts_share_the_budget(engine):
    decoding = engine.ask(3, 1)
    turns(engine, 2)
    long = [engine.ask(0, 40, 1, keep=False), engine.ask(2, 40, 1, keep=False)]
    said = []
    while not long[0].done:
        engine.step()
        said.append(len(decoding.tokens))
    assert (np.diff(said) == STEPS).all() and len(said) >= 5
    assert long[1].done  # one did not wait for the other
    decoding.result()


def test_the_prompt_that_waited_longest_gets_the_next_chunk(plain):
    long, short = plain.submit(PROMPTS[0], 2), plain.submit(PROMPTS[2, :8], 2)
    next(short)
    assert not long.tokens
    assert len(long.result()) == len(short.result()) == 2


def test_nothing_compiles_after_warmup(engine, m):
    with count_compiles() as compiles:
        streams = [engine.ask(w, n) for w, n in ((0, 40), (1, 30), (2, 3), (3, 17))]
        turns(engine, 3)
        streams[2].cancel()
        engine.preempt(streams[0])
        turns(engine, 2)
        lose(m)
        assert [s.result() == right(s) for s in streams] == [True, True, False, True]
        streams = [engine.ask(0, 40, stop=[1]), engine.ask(1, 40, salt="b")]
        check(*streams)
    assert not compiles.names


@settings(max_examples=25)
@given(st.data())
def test_whatever_comes_and_goes_answers_are_right_and_nothing_is_left_behind(data):
    lengths = st.sampled_from([1, 7, 16, 20, 33, 40])
    calls = st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 3), lengths, st.integers(1, 24)),
        st.tuples(st.just("ask"), st.integers(0, 3), lengths, st.integers(1, 24)),
        st.tuples(st.just("turns"), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("preempt"), st.integers(0, 9), st.integers(0, 2)),
        st.tuples(st.sampled_from(["drop", "invalidate", "lose"])),
    )
    with make() as m:
        engine, streams = Checked(m), []
        for name, *args in data.draw(st.lists(calls, max_size=16)):
            if name == "ask":
                stop = data.draw(st.lists(st.integers(0, 49), max_size=2))
                streams.append(engine.ask(*args, stop=stop))
            elif name == "turns":
                turns(engine, *args)
            elif name == "cancel" and streams:
                streams[args[0] % len(streams)].cancel()
            elif name == "preempt" and streams:
                engine.preempt(streams[args[0] % len(streams)], args[1])
            elif name in ("drop", "invalidate", "lose"):
                {"drop": drop_windows, "invalidate": invalidate, "lose": lose}[name](m)
        for _ in range(400):
            if not engine.step():
                break
        for s in streams:
            assert s.done and s.error is None
            assert s.tokens == right(s)[: len(s.tokens) if s.cancelled else None]
        m.read(lambda cache: invariants(cache, []))


# Leaving, and coming back.


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_a_cancelled_request_ends_where_it_is_and_frees_its_pages(engine, m, after):
    free = m.status().groups
    stream = engine.ask(0, 20)
    turns(engine, after)
    stream.cancel()
    said = stream.result()
    assert said == right(stream)[: len(said)] and len(said) < 24 and list(stream) == said
    assert m.status().groups == free


def test_a_preempted_request_goes_on_from_what_it_had_done(engine, m):
    stream, other = engine.ask(0, 30), engine.ask(2, 30)
    turns(engine, 6)
    had = len(stream.tokens)
    engine.preempt(stream)
    check(stream, other)
    assert 0 < had and stream.reused == 30 + had + STEPS - 1  # what was in flight included
    assert m.counters.preempted == 1
    engine.preempt(stream)
    assert not engine.step() and m.counters.preempted == 1


def test_a_preempted_request_lets_others_go_first(engine):
    running = [engine.ask(w, 8) for w in range(3)]
    turns(engine, 2)
    urgent, patient = engine.ask(3, 8, 6), engine.ask(3, 9, 1)
    turns(engine, 2)
    assert not urgent.tokens
    engine.preempt(running[0], after=1)
    check(urgent)
    assert not running[0].done and not patient.done
    check(*running, patient)


def test_who_waits_cannot_be_preempted(engine, m):
    stream = engine.ask(0, 20)
    engine.preempt(stream)
    check(stream)
    assert m.counters.preempted == 0


def test_a_preempted_prompt_keeps_the_chunks_that_ran(engine):
    stream = engine.ask(0, 40, 2)
    turns(engine, 2)
    engine.preempt(stream)
    check(stream)
    assert stream.reused == 16


@pytest.mark.parametrize("turn", range(7))
def test_who_reads_what_was_invalidated_is_run_again(engine, m, turn):
    engine.ask(0, 40, 2).result()
    streams = [engine.ask(1, 40), engine.ask(2, 20)]
    turns(engine, turn)
    invalidate(m)
    check(*streams)
    assert m.counters.admitted == 3 + 2 * (turn > 0)


@pytest.mark.parametrize("turn", range(6))
def test_after_a_loss_of_the_pools_everybody_is_run_again(engine, m, turn):
    streams = [engine.ask(w, 20 + w) for w in range(4)]
    turns(engine, turn)
    lose(m)
    turns(engine, 2)
    assert [run.stream for run in engine._running()] == streams[:SLOTS]
    check(*streams)
    assert m.era == 1


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", ["query", "admit", "publish", "release", "step"])
def test_a_failure_anywhere_costs_time_and_no_answer(engine, m, monkeypatch, place, when):
    from hkv import _line, _owner, manager

    owner = {"query": _line, "admit": _line, "publish": manager, "release": _owner}.get(place)
    streams = [engine.ask(w, 20 + w, 9) for w in range(4)]
    turns(engine, 3)
    left = [1]
    real = engine._decode if owner is None else getattr(owner, place)

    def failing(*args, **options):
        left[0] -= 1
        if left[0] == 0 and when == "before":
            raise ArithmeticError("planted")
        out = real(*args, **options)
        if left[0] == 0:
            raise ArithmeticError("planted")
        return out

    monkeypatch.setattr(owner or engine, "_decode" if owner is None else place, failing)
    for _ in range(100):
        try:
            if not engine.step():
                break
        except ArithmeticError:
            assert when == "before" or place == "query"
    assert left[0] <= 0
    check(*streams)


def test_who_gets_on_in_between_is_run_again_as_often_as_it_takes(engine, m, monkeypatch):
    monkeypatch.setattr(serving, "TRIES", 2)
    stream = engine.ask(0, 1)
    while not stream.done:
        had = len(stream.tokens)
        while len(stream.tokens) == had and engine.step():
            pass
        invalidate(m)
    check(stream)
    assert m.counters.admitted > 1 + 2


@pytest.mark.parametrize("seconds", [0.0, 0.3])  # found out by the next step, or by who waits
def test_a_step_that_fails_on_the_device_is_run_again(plain, m, seconds):
    alone = plain.submit(PROMPTS[0, :20], 12, keep=False).result()
    streams = [plain.submit(PROMPTS[0, :20], 12) for _ in range(2)]
    turns(plain, 4)
    BROKEN.append(seconds)
    assert [s.result() for s in streams] == [alone] * 2
    assert m.era == 1 and not BROKEN


def test_what_never_gets_to_a_token_ends_with_an_error(engine, m):
    stream = engine.ask(0, 20)
    with pytest.raises(RuntimeError, match="begun 8 times"):
        while True:
            engine.step()
            invalidate(m)
            if stream.done:
                stream.result()


def test_other_parameters_begin_everybody_again(engine, m):
    engine.ask(0, 20, 2).result()
    stream = engine.ask(0, 30)
    turns(engine, 3)
    engine.on_logits = lambda *_: None
    m.set_params(jax.device_put(np.float32(2)), epoch=1)
    said = stream.result()
    had = int(stream.plan.prefill[0, 1]) - 30  # when it was begun again
    assert said[:had] == right(stream)[:had] and had > 0 == stream.reused
    fresh = engine.submit([*PROMPTS[0, :30], *said[:had]], 24 - had, salt="nothing stored")
    assert said[had:] == fresh.result() != right(stream)[had:]


# Room, refusals, threads.


def test_who_finds_no_room_waits_for_it(engine, m):
    held = [m.try_admit(PROMPTS[i], 64) for i in range(4)]
    stream = engine.ask(0, 20)
    turns(engine, 3)
    assert not stream.done and m.counters.waits["PAGES"] >= 1
    m.release(held.pop())
    check(stream)
    for request in held:
        m.release(request)


def test_what_can_never_fit_is_refused_with_the_numbers(engine, m):
    m.set_caps({hkv.Form.TAIL: 2})
    with pytest.raises(Refused, match="cap of TAIL: 0 used and 4 more of 2 pages"):
        engine.ask(0, 40).result()
    check(engine.ask(0, 20, 12))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(prompt=PROMPTS[0], max_tokens=26), "40 tokens and `max_tokens` is 26: 65 would run"),
        (dict(prompt=[], max_tokens=1), "`prompt` is empty"),
        (dict(prompt=[1], max_tokens=0), "`max_tokens` is 0"),
        (dict(prompt=[-1], max_tokens=1), "-1"),
        (dict(prompt=[1], max_tokens=1, stop=range(9)), "`stop` has 9 tokens"),
        (dict(prompt=[1], max_tokens=1, epoch=-1), "`epoch` is -1"),
    ],
)
def test_what_is_no_request_is_refused_at_once(engine, arguments, message):
    with pytest.raises(ValueError, match=message):
        engine.submit(**arguments)
    assert not engine.step()


def test_an_engine_of_other_things_is_refused(m):
    for arguments, name in (((None, len), "manager"), ((m, 3), "forward")):
        with pytest.raises(TypeError, match=f"`{name}` is"):
            Engine(*arguments)
    for name in ("sample", "on_logits"):
        with pytest.raises(TypeError, match=f"`{name}` is 3; give a function"):
            Engine(m, len, **{name: 3})


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(slots=0), "`slots` is 0"),
        (dict(budget=4, chunk=8), "`budget` is 4"),
        (dict(bucket=48), "`bucket` is 48"),
    ],
)
def test_an_engine_that_cannot_work_is_refused(m, arguments, message):
    with pytest.raises(ValueError, match=message):
        Engine(m, tiny.forward, **arguments)


def test_many_threads_ask_and_one_serves(m):
    wrong = []

    def client(i):
        for n in (8 + i, 20 + i, 30):
            stream = engine.ask(i % 4, n, 8)
            if i == 5:
                next(stream)
                stream.cancel()
            elif list(stream) != right(stream):
                wrong.append(stream)

    with Checked(m) as engine:
        threads = [threading.Thread(target=client, args=(i,)) for i in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        last = engine.ask(0, 5)
    assert not wrong
    check(last)
    with pytest.raises(Closed):
        engine.ask(0, 5)


def test_an_engine_that_is_closed_at_once_ends_answers_where_they_are(m):
    engine = Checked(m).start()
    streams = [engine.ask(w, 20) for w in range(4)]
    next(streams[0])
    engine.close(wait=False)
    assert all(s.done for s in streams)


def test_an_error_in_the_thread_reaches_whoever_waits(m):
    engine = Engine(m, lambda params, tokens, view: 1 / 0, slots=2)
    stream = engine.submit(PROMPTS[0], 2)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.start()
    with pytest.raises(ZeroDivisionError):
        stream.result()
    with pytest.raises(Closed):
        engine.submit(PROMPTS[0], 2)


def test_a_manager_that_was_shut_down_ends_who_waits(engine, m):
    stream = engine.ask(0, 20)
    m.shutdown(wait=False)
    with pytest.raises(Closed):
        stream.result()


# The trained model.


@pytest.fixture(scope="module")
def trained():
    """An engine on the shipped checkpoint, and where the logits of each stream go."""
    model = DeepseekV4.load(FOLDER)
    weights, build = bind(model)

    def forward(weights, tokens, view):
        return build(weights)(tokens, view)

    def collect(stream, position, logits):
        seen.setdefault(stream, []).append((position, logits))

    layout = hkv.Layout(groups(model.config), segment_tokens=128, segments=16, buckets=(384,))
    seen: dict = {}
    manager = Manager(layout, params=weights)
    engine = Engine(manager, forward, slots=3, chunk=32, budget=64, on_logits=collect)
    return engine, lambda stream: np.concatenate([x for _, x in sorted(
        seen[stream], key=lambda x: x[0])])  # fmt: skip


@pytest.fixture(scope="module")
def text():
    return np.load(FOLDER / "golden.npz")["greedy"].astype(np.int32)


def test_greedy_text_equals_transformers_and_logits_do_not_depend_on_the_batch(trained, text):
    engine, logits = trained
    others = [engine.submit(text[i : i + 90], 40, keep=False) for i in (7, 100)]
    turns(engine, 2)
    stream = engine.submit(text[:64], 240, keep=False)
    others.append(engine.submit(text[30:200], 60, keep=False))
    assert stream.result() == text[64:].tolist() and all(s.result() for s in others)
    alone = engine.submit(text[:64], 40, keep=False)
    assert alone.result() == text[64:104].tolist() and logits(alone).shape == (103, 256)
    np.testing.assert_array_equal(logits(stream)[:103], logits(alone))


# Windows that recycle.

FEW = 3 * 2 + 2  # segments' worth of window and tail pages: two for each slot, and two to spare
ROLLING = (hkv.Form.WINDOW, hkv.Form.TAIL)


@pytest.fixture
def narrow():
    groups = [
        dataclasses.replace(g, pages=FEW * LAYOUT.segment_pages(g) + 1) if g.form in ROLLING else g
        for g in LAYOUT.groups
    ]
    layout = dataclasses.replace(LAYOUT, groups=tuple(groups), ahead=CHUNK)
    with Manager(layout, replay=tiny.replay, params=ONE, chunk=CHUNK) as m:
        engine = Checked(m)
        yield engine
        engine.close(wait=False)
        assert not engine.step()
        m.read(lambda cache: invariants(cache, []))


def test_answers_are_the_same_where_windows_recycle_and_few_fit(narrow):
    assert [LAYOUT.reserved(f, 4) for f in ROLLING] == [4, 4]
    assert [narrow.manager.layout.reserved(f, 4) for f in ROLLING] == [2, 2]
    streams = [narrow.ask(w, n) for w, n in ((0, 33), (2, 40), (3, 1), (2, 7), (1, 16), (0, 40))]
    turns(narrow, 5)
    assert len(narrow._running()) == SLOTS  # of which two would not fit side by side otherwise
    check(*streams)
    more = [narrow.submit([*s.prompt, *right(s)[:-2], 5], 1, keep=False) for s in streams]
    check(*more)
    assert any(s.reused > 0 for s in more)


def test_the_end_of_a_long_prompt_is_still_there_after_a_long_answer(narrow):
    check(narrow.ask(0, 32))
    again = narrow.submit([*PROMPTS[0, :32], 3], 1)
    check(again)
    assert again.reused == 32 and int(again.plan.replay[0, 0]) == 32


def test_nothing_compiles_after_warmup_where_windows_recycle(narrow):
    narrow.warmup()
    narrow.ask(0, 5).result()
    with count_compiles() as compiles:
        check(*(narrow.ask(w, n) for w, n in ((0, 33), (2, 40), (3, 1))))
    assert not compiles.names


def test_a_turn_longer_than_the_layout_says_is_refused(narrow):
    with pytest.raises(ValueError, match="`ahead`"):
        Engine(narrow.manager, tiny.forward, slots=SLOTS, chunk=CHUNK + 8, steps=STEPS)


# An engine among others, and what comes from outside.


def test_an_engine_gets_its_turn_beside_threads_that_admit_all_the_time(m):
    stop, errors = threading.Event(), []

    def run():
        while not stop.is_set():
            try:
                with m.admit(PROMPTS[3, :20], 64):
                    time.sleep(0.02)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for t in threads:
        t.start()
    with Checked(m) as engine:
        streams = [engine.ask(0, 20), engine.ask(1, 30)]
        check(*streams)
        assert threads[0].is_alive()
        stop.set()
    for t in threads:
        t.join(60)
    assert not errors


def test_who_stops_asking_keeps_nobody_waiting(m):
    held = [m.try_admit(PROMPTS[i, :20], 64) for i in range(4)]
    idle = m._stand(PROMPTS[0, :8], 64, 64, {})
    assert not m._poll(idle)
    m.release(held.pop())
    with m.admit(PROMPTS[1, :8], 64, timeout=30):  # after a while
        pass
    for request in held:
        m.release(request)
    assert m._poll(idle)
    m.release(idle)


def test_an_engine_driven_by_hand_can_be_started(plain, m):
    stream = plain.submit(PROMPTS[0, :20], 20)
    next(stream)
    plain.start()
    assert len(stream.result()) == 20
    plain.close()


def test_an_engine_that_was_closed_is_not_started_again(m):
    engine = Checked(m)
    engine.close()
    with pytest.raises(Closed):
        engine.start()


def test_an_interrupt_while_a_request_leaves_loses_no_stream(plain, m, monkeypatch):
    first, second = plain.submit(PROMPTS[0, :20], 20), plain.submit(PROMPTS[1, :20], 20)
    next(first)
    first.cancel()
    real = m.release

    def interrupted(request):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(m, "release", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plain.step()
    assert real == m.release
    first.result()
    assert first.done and len(second.result()) == 20


def test_what_is_wrong_with_one_request_ends_that_one_alone(m):
    def told(stream, position, out):
        if stream.max_tokens == 5:
            raise ZeroDivisionError("the caller's")

    engine = Engine(
        m, tiny.forward, slots=SLOTS, chunk=CHUNK, budget=2 * CHUNK, steps=STEPS, sample=token,
        on_logits=told,
    )  # fmt: skip
    with engine:
        for bad in (dict(timeout=5.0), dict(colour=1), dict(stop="a"), dict(stop=5)):
            with pytest.raises((TypeError, ValueError), match=f"{next(iter(bad))}"):
                engine.submit(PROMPTS[0, :20], 4, **bad)
        good, bad = engine.submit(PROMPTS[0, :20], 24), engine.submit(PROMPTS[1, :20], 5)
        with pytest.raises(ZeroDivisionError):
            bad.result()
        check(good)


def test_a_loss_that_another_thread_finds_first_ends_no_engine(plain, m, monkeypatch):
    real = m.settle

    def settle():
        monitor = threading.Thread(target=m.status)
        monitor.start()
        monitor.join()
        real()

    monkeypatch.setattr(m, "settle", settle)
    streams = [plain.submit(PROMPTS[i, :20], 20) for i in range(2)]
    next(streams[0])
    era = m.era

    class Failed:
        def __array__(self, *args, **kwargs):
            raise jax.errors.JaxRuntimeError("planted")

        copy_to_host_async = __array__

    plain._flight[0].out = (Failed(),) * 3 if plain._flight else ()
    with m._lock:
        m._lose()
    assert m.era == era + 1
    for stream in streams:
        assert len(stream.result()) == 20
