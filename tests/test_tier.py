"""A manager beside a store: what it answers equals a cold run, wherever the prefix lay.

The model is the small one of `tiny`, whose outputs are exact; the store is a real directory.
"""

import dataclasses
import threading
import time

import jax
import numpy as np
import pytest
import soak
import tiny

import hkv
from hkv import Form, Life
from hkv._tier import prefix_keys
from hkv.disk import LocalStore, Problem
from hkv.manager import Manager, StateLost
from hkv.testing import count_compiles, invariants

ROW, CHUNK, B = 4, tiny.CHUNK, 16
LAYOUT = dataclasses.replace(soak.LAYOUT, disk=True)
ONE = jax.device_put(np.float32(1))
STREAMS = np.random.default_rng(7).integers(0, 50, (8, 64))
COLD = [tiny.dense(s, row=ROW) for s in STREAMS]  # what a run without any cache gives


@pytest.fixture
def store(tmp_path):
    store = LocalStore(tmp_path, threads=2)
    yield store
    store.close()


def make(store, layout=LAYOUT, **tier):
    tier = {"staging": 2, **tier}
    return Manager(
        layout, replay=tiny.replay, params=ONE, chunk=CHUNK, store=store, tier=tier,
        costs=hkv.costs(recover=1.0),
    )  # fmt: skip


def step(cache, lease, tokens, count):
    return tiny.step(ONE, cache, lease, tokens, count)


def advance(request, s, until):
    at = int(request.lease.length[0])
    while at < until:
        n = min(CHUNK, until - at)
        tokens = np.zeros((1, 64), np.int32)
        tokens[0] = STREAMS[s]
        count = jax.device_put(np.array([n], np.int32))
        out, ok = request.step(step, jax.device_put(tokens), count)
        assert ok[0] and (np.asarray(out)[0, :n] == COLD[s][at : at + n]).all()
        at += n


def serve(m, s, n, total=None):
    """A whole request; returns how much of its prompt was reused."""
    with m.admit(STREAMS[s][:n], total or n) as request:
        advance(request, s, total or n)
        request.finish(STREAMS[s][: total or n])
    return request.resume


def settled(m):
    """Waits until everything that is to be put away is."""
    done = m._tier.put_away(m._prefix(STREAMS[0][:1], {})[0])
    assert done.result(30) == 0
    m._tier._jobs.join()


def drop(m, forms=(True, True, True, True, False)):
    rows = np.arange(m.layout.segments, dtype=np.int32)
    m.update(hkv.drop, *jax.device_put((rows, np.array(forms))))


def files(store, part=None):
    return [e for e in store.scan() if part in (None, e.name.part)]


def test_another_manager_resumes_from_the_store_and_answers_as_a_cold_run(store):
    with make(store) as m:
        assert serve(m, 0, 50) == 0
    assert len(files(store)) == 6
    with make(store) as m:
        assert serve(m, 0, 60) >= 48
        assert m.counters.segments_fetched == 3 and not m.counters.rejected
        assert serve(m, 0, 60) >= 48
        assert m.counters.segments_fetched == 3
        assert serve(m, 1, 40) == 0
        m.read(lambda c: invariants(c, []))


def test_what_was_dropped_or_lost_with_the_pools_comes_back(store):
    with make(store) as m:
        serve(m, 0, 50)
        settled(m)
        drop(m)
        assert m.query(STREAMS[0][:60]).boundary[0] == 0
        assert m.restore(STREAMS[0][:60]) == 3
        assert m.query(STREAMS[0][:60]).boundary[0] == 48
        drop(m)
        assert serve(m, 0, 60) >= 48
        settled(m)

        def fails(cache):
            jax.tree.map(lambda a: a.delete(), cache)
            raise RuntimeError("after it took the pools")

        with pytest.raises(StateLost):
            m.update(fails)
        assert serve(m, 0, 60) >= 48
        m.read(lambda c: invariants(c, []))


def test_nothing_compiles_after_warm_up(store):
    with make(store) as m:
        m.warmup()
        serve(m, 0, 50)
        settled(m)
        with count_compiles() as compiles:
            serve(m, 1, 50)
            settled(m)
            drop(m)
            assert serve(m, 1, 60) >= 48
        assert not [n for n in compiles.names if "drop" not in n]


@pytest.mark.parametrize("windows", [0, 1, 32])
def test_windows_on_disk_are_all_some_or_none_with_a_replay(store, windows):
    with make(store, windows=windows) as m:
        serve(m, 0, 64)
    many = {0: 0, 1: 4, 32: 4 if hkv.__name__ and _near() else 2}[windows]
    assert len(files(store, "history")) == 4 and len(files(store, "rolling")) == many
    with make(store, windows=windows) as m:
        assert serve(m, 0, 60) >= 48
        assert (m.counters.tokens_replayed > 0) == (windows == 0)


def _near():
    from hkv._retain import _reach

    return _reach(LAYOUT) > 0


def test_selective_puts_away_only_what_was_used_again(store):
    with make(store, write="selective") as m:
        serve(m, 0, 50)
        settled(m)
        assert not files(store)
        serve(m, 0, 60)
        settled(m)
        assert len(files(store, "history")) == 3


def test_back_puts_away_what_is_oldest_once_pages_run_short(store):
    with make(store, write="back", spare=0.3) as m:
        serve(m, 0, 64)
        settled(m)
        assert not files(store)
        for s in range(1, 5):
            serve(m, s, 64)
        settled(m)
        assert len(files(store, "history")) >= 4
        assert serve(m, 0, 60) >= 48
        m.read(lambda c: invariants(c, []))


def test_nothing_is_put_away_unasked_without_a_policy(store):
    with make(store, write=None) as m:
        serve(m, 0, 50)
        settled(m)
        assert not files(store)
        assert m.offload(STREAMS[0][:50], keep=False).result(30) == 3
        assert m.offload(STREAMS[1][:50]).result(30) == 0
        life = m.read(lambda c: np.asarray(c.table.life))[1]
        assert (life[:, Form.COMPRESSED] == Life.ON_DISK).sum() == 3
        assert serve(m, 0, 60) >= 48


def spoil(store, how, part="history"):
    for n, entry in enumerate(sorted(files(store, part))):
        path = store._path(entry.name, 0, 1)
        if how == "gone":
            path.unlink()
        elif n == 1:
            data = bytearray(path.read_bytes())
            if how == "payload":
                data[-70] ^= 1
            elif how == "header":
                data[40] ^= 1
            else:
                del data[-9:]
            path.write_bytes(data)


@pytest.mark.parametrize("when", ["before it is known", "after it was entered"])
@pytest.mark.parametrize("how", ["payload", "header", "cut", "gone"])
def test_a_bad_record_costs_its_request_a_recomputation_and_is_counted(store, how, when):
    with make(store) as m:
        serve(m, 0, 64)
        serve(m, 1, 64)
        settled(m)
        if when == "after it was entered":
            drop(m)
            spoil(store, how)
            assert serve(m, 0, 60) < 60 and serve(m, 1, 60) < 60
            assert how == "gone" or m.counters.rejected
    if when == "before it is known":
        spoil(store, how)
    with make(store) as m:
        for s in (0, 1):
            serve(m, s, 60)
            serve(m, s, 60)
        m.read(lambda c: invariants(c, []))


def test_a_store_that_does_not_answer_costs_no_more_than_the_timeout(store, monkeypatch):
    with make(store) as m:
        serve(m, 0, 50)
    hang = threading.Event()
    with make(store, timeout=1.0) as m:
        m.warmup()
        serve(m, 1, 50)
        real = store.open
        monkeypatch.setattr(store, "open", lambda *a, **k: (hang.wait(20), real(*a, **k))[1])
        begin = time.monotonic()
        assert m.restore(STREAMS[0][:60]) == 0
        assert time.monotonic() - begin < 10
        assert m.counters.rejected == {"TIMEOUT": 1}
        assert serve(m, 0, 60) == 0
        hang.set()
        monkeypatch.undo()
        drop(m)
        assert serve(m, 0, 60) >= 48


def test_a_full_store_loses_nothing_of_the_cache(store, monkeypatch):
    with make(store) as m:
        store.cap_bytes = 1
        serve(m, 0, 50)
        settled(m)
        assert not files(store) and m.counters.rejected == {Problem.FULL.name: 4}
        assert serve(m, 0, 60) >= 48
        settled(m)
        life = m.read(lambda c: np.asarray(c.table.life))[1]
        assert not (life == Life.OFFLOADING).any() and not (life[:, Form.DISK] != 0).any()


def test_other_weights_and_other_tenants_find_nothing(store):
    with make(store) as m:
        serve(m, 0, 50)
    with make(store) as m:
        m.set_params(ONE, epoch=1)
        assert serve(m, 0, 60) == 0
        m.set_params(ONE, epoch=0, salt="someone")
        assert serve(m, 0, 60) == 0
        m.set_params(ONE, epoch=0, salt="")
        assert serve(m, 0, 60) >= 48


def test_another_kernel_abi_is_refused_from_the_header_for_its_group_alone(store):
    with make(store) as m:
        serve(m, 0, 50)
    layout = LAYOUT.with_abi("window", version=2)
    with make(store, layout) as m:
        assert serve(m, 0, 60) >= 48
        assert m.counters.rejected == {"ABI": 3} and m.counters.tokens_replayed > 0
    layout = LAYOUT.with_abi("history", version=2)
    with make(store, layout) as m:
        serve(m, 0, 60)


def test_many_threads_share_a_store(store):
    with make(store) as m:
        m.warmup()
        errors = []

        def run(seed):
            r = np.random.default_rng(seed)
            try:
                for _ in range(6):
                    s = int(r.integers(0, 6))
                    serve(m, s, int(r.integers(20, 64)))
                    if r.random() < 0.3:
                        drop(m)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
        assert not errors and not any(t.is_alive() for t in threads)
        settled(m)
        m.read(lambda c: invariants(c, []))
        assert m.counters.segments_fetched > 0


def test_names_of_prefixes_are_fixed(store):
    with make(store) as m:
        prefix = m._prefix(STREAMS[0][:40], {"salt": "tenant"})[0]
        keys = [k.hex()[:16] for k in prefix.keys]
        assert keys == KEYS
        assert prefix_keys(LAYOUT, prefix.ids, 1, prefix.need) == prefix.keys[:1]


KEYS = ["ea0cde0cb51e42c8", "6506870754e4d985"]


def test_a_manager_without_a_store_says_so():
    with Manager(LAYOUT) as m:
        for call in (m.offload, m.restore):
            with pytest.raises(RuntimeError, match="`store`"):
                call([1, 2])
    with pytest.raises(ValueError, match="`tier`"):
        Manager(LAYOUT, tier={"write": "back"})


@pytest.mark.parametrize(
    "tier", [{"write": "sometimes"}, {"staging": 0}, {"windows": -1}, {"timeout": 0}]
)
def test_wrong_settings_are_named(store, tier):
    with pytest.raises(ValueError, match=f"`{next(iter(tier))}`"):
        make(store, **tier)
    with pytest.raises(ValueError, match="disk=True"):
        make(store, soak.LAYOUT)


LONG = np.random.default_rng(8).integers(0, 50, 128)  # 8 segments


def long_layout(rolling=17, history=17, **rest):
    sizes = {"segments": 20, "buckets": (128,), "leases": 2, "disk": True, **rest}
    return tiny.layout(pages=(history, rolling, rolling, history), row=ROW, **sizes)


def answer(manager, request, until):
    """Runs a request on and compares with a cold run."""
    want, at = tiny.dense(LONG, row=ROW), int(request.lease.length[0])
    tokens = jax.device_put(LONG[None].astype(np.int32))
    while at < until:
        n = min(CHUNK, until - at)
        out, ok = request.step(step, tokens, jax.device_put(np.array([n], np.int32)))
        assert ok[0] and (np.asarray(out)[0, :n] == want[at : at + n]).all()
        if manager.layout.ahead:
            manager.trim(request)  # gives what slid out of its windows to the tokens ahead
        at += n


def test_a_prefix_larger_than_the_pool_of_windows_comes_back_with_what_its_end_needs(store):
    with make(store, layout=long_layout()) as m, m.admit(LONG) as request:
        answer(m, request, 128)
        request.finish(LONG)
    assert len(files(store, "rolling")) == 8
    few = long_layout(rolling=4, ahead=CHUNK)  # room for the windows of 3 segments of the 8
    with make(store, layout=few) as m:
        with m.admit(LONG[:124]) as request:
            assert request.resume >= 112
            answer(m, request, 124)
            request.finish(LONG[:124])
        assert not m.counters.rejected and not m.counters.tokens_replayed
        m.read(lambda c: invariants(c, []))


def test_a_prefix_larger_than_every_pool_is_refused_with_the_numbers(store):
    with make(store, layout=long_layout()) as m, m.admit(LONG) as request:
        answer(m, request, 128)
        request.finish(LONG)
    with pytest.raises(ValueError, match="one request of 128 tokens: give 9"):
        long_layout(history=5)  # 4 of 8 segments: such a bucket would be a promise nobody can keep
    with make(store, layout=long_layout(rolling=5, history=5, buckets=(64,))) as m:
        with pytest.raises(ValueError, match="124.*64"), m.admit(LONG[:124]):
            pass
        with m.admit(LONG[:60]) as request:  # what fits is served from the same records
            assert request.resume >= 48
        m.read(lambda c: invariants(c, []))
