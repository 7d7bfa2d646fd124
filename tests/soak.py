"""Many threads on one manager, with failures injected at each place that can fail.

    python tests/soak.py --operations 20000

Every output is compared with a run without any cache, the bookkeeping is checked on the way, and
at the end nothing may be leased, in flight, compiled since the start, or grown.
"""

import argparse
import collections
import contextlib
import dataclasses
import datetime
import gc
import json
import logging
import os
import pathlib
import platform
import random
import threading
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import tiny

import hkv
from hkv import _line, _owner, manager
from hkv.manager import (
    Cancelled,
    Conflict,
    Manager,
    Preempted,
    Refused,
    StateLost,
)
from hkv.testing import count_compiles, invariants

ROW, CHUNK = 4, tiny.CHUNK
# Room for four requests of 64 tokens.
LAYOUT = tiny.layout(pages=(17,) * 4, row=ROW, segments=20, buckets=(64,), leases=6)
ONE = jax.device_put(np.float32(1))
_rng = np.random.default_rng(7)
STREAMS = _rng.integers(0, 50, (8, 64))
STREAMS[4:] = STREAMS[:4]  # share a beginning with another
for _i, _n in enumerate((7, 16, 25, 40)):
    STREAMS[4 + _i, _n:] += 1
COLD = [tiny.dense(s, row=ROW) for s in STREAMS]  # what a run without any cache gives
COUNTS = [jax.device_put(np.array([n], np.int32)) for n in range(CHUNK + 1)]
TOKENS = [jax.device_put(s[None].astype(np.int32)) for s in STREAMS]
BAD = [jax.device_put(np.int32(n)) for n in range(2)]


def step(cache, lease, tokens, count):
    return tiny.step(ONE, cache, lease, tokens, count)


def _fail(count, bad):
    if bad:
        raise ValueError("planted on the device")
    return count


@jax.jit
def _slow(x):
    a = jnp.full((200, 200), 1e-3, jnp.float32)
    return (
        jnp.minimum(jax.lax.fori_loop(0, 20, lambda i, y: y @ y, a)[0, 0].astype(jnp.int32), 0) + x
    )


@jax.jit
def _count_on_device(count, bad):
    return jax.pure_callback(_fail, jax.ShapeDtypeStruct((1,), jnp.int32), count, bad)


_on_device = jax.jit(
    lambda cache, lease, tokens, count, bad: step(
        cache, lease, tokens, _count_on_device(count, bad)
    ),
    donate_argnames=("cache",),
)


class Planted(RuntimeError):
    """An injected failure."""


PLACES = {
    "query": (_line, "query"), "route": (_line, "route"), "admit": (_line, "admit"),
    "recover": (_line, "recover"), "numbers": (_line, "numbers"), "lease": (_line, "lease"),
    "publish": (manager, "publish"), "trim": (manager, "trim"), "caps": (manager, "set_caps"),
    "release": (_owner, "release"), "init": (_owner, "init"), "step": (tiny, "step"),
}  # fmt: skip
RARE = {"recover": 8, "trim": 4, "caps": 4, "release": 2, "init": 25}  # these fail more often
EXPECTED = (Planted, StateLost, Cancelled, Preempted, TimeoutError, Refused, Conflict)


@dataclasses.dataclass
class Soak:
    """What one run does and has seen."""

    operations: int
    threads: int = 16
    seed: int = 0
    failures: float = 0.008  # chance of one at each passage of a place
    done: int = 0
    seen: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    problems: list = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.lock = threading.Lock()
        self.running = []
        self.dice = random.Random(self.seed)
        self.on = False

    # Injection.

    def wrap(self, name, real):
        """`real`, which now and then fails before it is dispatched, or when it has the pools."""

        def wrapped(*args, **options):
            if not self.on:
                return real(*args, **options)
            with self.lock:
                dice, before = self.dice.random(), self.dice.random() < 0.6
            if dice < self.failures * RARE.get(name, 1):
                with self.lock:
                    self.seen[f"failed {'before' if before else 'after'} {name}"] += 1
                if not before:
                    real(*args, **options)
                raise Planted(name)
            return real(*args, **options)

        return wrapped

    @contextlib.contextmanager
    def injected(self):
        real = {n: getattr(owner, name) for n, (owner, name) in PLACES.items()}
        try:
            for n, (owner, name) in PLACES.items():
                setattr(owner, name, self.wrap(n, real[n]))
            yield
        finally:
            for n, (owner, name) in PLACES.items():
                setattr(owner, name, real[n])

    # What a thread does.

    def count(self, what):
        with self.lock:
            self.done += 1
            self.seen[what] += 1

    def fetch(self, arrays):
        """Results on the host; those of a step that failed on the device are lost."""
        try:
            return jax.device_get(arrays)
        except jax.errors.JaxRuntimeError as error:
            raise StateLost("found out by reading an answer") from error

    def advance(self, request, s, until, rng):
        """Runs on, a few steps ahead of the answers, and compares these with the cold run's."""
        at, answers = int(self.fetch(request.lease.length)[0]), []
        while at < until or answers:
            if at < until:
                n = min(rng.randint(1, CHUNK), until - at)
                if self.on and rng.random() < 0.01:
                    bad = int(rng.random() < 0.3)
                    self.seen["failed on the device"] += bad
                    count = _slow(COUNTS[n])
                    out, ok = request.step(_on_device, TOKENS[s], count, BAD[bad])
                else:
                    out, ok = request.step(step, TOKENS[s], COUNTS[n])
                answers.append((at, n, out, ok))
                self.count("step")
                at += n
            if at >= until or len(answers) > rng.randint(0, 2):
                start, n, out, ok = answers.pop(0)
                out, ok = self.fetch((out, ok))
                self.check_answer(request, s, start, n, out, ok)

    def check_answer(self, request, s, start, n, out, ok):
        if not ok[0]:
            # Another thread invalidated what it read, or its open segment was published.
            self.count("turned away")
            raise Cancelled("reroute", request)
        if (out[0, :n] != COLD[s][start : start + n]).any():
            raise AssertionError(f"wrong answer: stream {s}, position {start}")

    def serve(self, m, rng):
        s, n = rng.randrange(len(STREAMS)), rng.randint(1, 60)
        total = min(64, n + rng.randint(0, 12))
        timeout = rng.choice([None, None, 0.5, 0.02])
        salt = rng.choice(["", "", "", "b"])
        request = m.admit(STREAMS[s][:n], total, timeout=timeout, salt=salt)
        if rng.random() < 0.02:
            request.cancel()
        self.count("admit")
        with request:
            entry = (request, s)
            with self.lock:
                self.running.append(entry)
            try:
                if not request.resume < max(n, 1):
                    raise AssertionError("reused the whole prompt")
                self.advance(request, s, n, rng)
                if rng.random() < 0.2:
                    request.publish(STREAMS[s][:n], partial=rng.random() < 0.2)
                    self.count("publish")
                    if request.lease is not None and rng.random() < 0.3:
                        m.trim(request)
                        self.count("trim")
                if rng.random() < 0.03:
                    raise KeyboardInterrupt
                with contextlib.suppress(Cancelled):  # a partial segment was published: no more
                    self.advance(request, s, total, rng)
                if rng.random() < 0.8:
                    at = int(self.fetch(request.lease.length)[0])
                    request.finish(STREAMS[s][:at])
                    self.count("finish")
            finally:
                with self.lock:
                    self.running.remove(entry)
        self.count("release")

    def try_admit(self, m, rng):
        s, n = rng.randrange(len(STREAMS)), rng.randint(1, 64)
        got = m.try_admit(STREAMS[s][:n])
        self.count("try_admit")
        if isinstance(got, hkv.Request):
            try:
                self.advance(got, s, n, rng)
            finally:
                m.release(got)

    def read(self, m, rng):
        s, n = rng.randrange(len(STREAMS)), rng.randint(1, 64)
        with m.lease(STREAMS[s][:n], timeout=1.0) as reading:
            assert reading.resume < n
            time.sleep(rng.random() * 0.01)
        self.count("lease")

    def query(self, m, rng):
        s, n = rng.randrange(len(STREAMS)), rng.randint(1, 64)
        assert int(self.fetch(m.query(STREAMS[s][:n]).boundary)[0]) < n
        self.count("query")

    def disturb(self, m, rng):
        """Something that another thread's request did not ask for."""
        with self.lock:
            request, s = rng.choice(self.running) if self.running else (None, 0)
        kind = rng.choice(["preempt", "cancel", "caps", "drop", "invalidate", "status", "settle"])
        if kind in ("preempt", "cancel") and request is None:
            return
        if kind == "preempt":
            at = request.lease.length
            m.preempt(request, STREAMS[s][: int(self.fetch(at)[0])])
        elif kind == "cancel":
            request.cancel()
        elif kind == "caps":
            low = rng.random() < 0.5
            m.set_caps({f: rng.randint(3, 12) if low else 16 for f in hkv.Form if f < 3})
        elif kind == "drop":
            version, _ = m.read(lambda cache: None)
            rows = jax.device_put(np.array([rng.randrange(20) for _ in range(4)], np.int32))
            forms = jax.device_put(np.array([rng.random() < 0.4 for _ in hkv.Form]))
            m.update(hkv.drop, rows, forms, expect=version)
        elif kind == "invalidate" and rng.random() < 0.3:
            rows = jax.device_put(np.array([rng.random() < 0.1 for _ in range(20)]))
            m.update(hkv.invalidate, rows)
        elif kind == "status":
            str(m.status())
            m.waiting()
        elif kind == "settle":
            m.settle()
        self.count(kind)

    def work(self, m, seed, goal):
        rng = random.Random(seed)
        while self.done < goal and not self.problems:
            action = rng.choices(
                [self.serve, self.try_admit, self.read, self.query, self.disturb],
                [10, 1, 1, 2, 2],
            )[0]
            try:
                action(m, rng)
            except (*EXPECTED, KeyboardInterrupt) as error:
                self.count(type(error).__name__)
            except BaseException:
                self.problems.append(traceback.format_exc())

    # The whole.

    def look(self, m):
        """The bookkeeping, with every lease that is out, at one moment."""

        def check(cache):
            held = [r.lease for r in m._running if r.lease is not None]
            invariants(cache, held + [lease for lease, _ in m._ended.values()])

        try:
            m.read(check)
        except (Planted, StateLost) as error:  # lost at this moment
            self.count(type(error).__name__)

    def phase(self, m, goal):
        threads = [
            threading.Thread(target=self.work, args=(m, (self.seed, goal, i).__hash__(), goal))
            for i in range(self.threads)
        ]
        for t in threads:
            t.start()
        stuck, last = 0, -1
        while any(t.is_alive() for t in threads):
            time.sleep(0.25)
            try:
                self.look(m)
            except AssertionError:
                self.problems.append(traceback.format_exc())
            stuck, last = (stuck + 1 if self.done == last else 0), self.done
            if stuck > 240:
                self.problems.append(f"nothing moves: {m!r}, {m.waiting()}")
                raise AssertionError("\n".join(self.problems))
        for t in threads:
            t.join()
        with contextlib.suppress(*EXPECTED):
            m.settle()
        self.on, on = False, self.on
        with contextlib.suppress(*EXPECTED):
            m.settle()
        m.settle()
        gc.collect()
        self.on = on
        if self.problems:
            raise AssertionError("\n".join(self.problems))

    def run(self, phases=4):
        """Runs; returns the facts of the run, or raises what was wrong."""
        logging.getLogger("jax._src.callback").setLevel(logging.CRITICAL)
        begin, memory, arrays = time.monotonic(), [], []
        m = Manager(LAYOUT, replay=tiny.replay, params=ONE, chunk=CHUNK)
        with self.injected():
            self.warm(m)
            self.on = True
            start = time.monotonic()
            with count_compiles() as compiles:
                for i in range(phases):
                    self.phase(m, self.operations * (i + 1) // phases)
                    memory.append(resident())
                    arrays.append(len(jax.live_arrays()))
                seconds = time.monotonic() - start
            self.on = False
            m.set_caps(dict.fromkeys(list(hkv.Form)[:3], 16))
            for s in range(len(STREAMS)):  # right to the end
                with m.admit(STREAMS[s]) as request:
                    self.advance(request, s, 64, random.Random(s))
            m.shutdown(timeout=60)
        m.read(lambda cache: invariants(cache, []))
        groups = m.status().groups
        assert all(g["free"] + g["live"] == g["capacity"] for g in groups.values()), groups
        assert not (m._running or m._line or m._ended or m._flight), repr(m)
        assert not compiles.names, compiles.names
        assert max(arrays[1:]) <= arrays[0] + 64, arrays
        assert memory[-1] - memory[0] < 48, memory
        return {
            "date": datetime.date.today().isoformat(),
            "jax": jax.__version__,
            "python": platform.python_version(),
            "device": jax.devices()[0].device_kind,
            "cores": os.cpu_count(),
            "operations": self.done,
            "threads": self.threads,
            "seconds": round(seconds, 1),
            "warmup_seconds": round(start - begin, 1),
            "compiled_after_warmup": len(compiles.names),
            "resident_mib_after_each_quarter": memory,
            "arrays_after_each_quarter": arrays,
            "pools_lost": m.counters.lost,
            "seen": dict(sorted(self.seen.items())),
            "counters": dataclasses.asdict(m.counters),
        }

    def warm(self, m):
        m.warmup()
        m.query(STREAMS[0])
        with m.admit(STREAMS[0]) as request:
            request.step(step, TOKENS[0], COUNTS[1])
            request.step(_on_device, TOKENS[0], _slow(COUNTS[1]), BAD[0])
        m.update(hkv.drop, jnp.full(4, 20, jnp.int32), jnp.zeros(len(hkv.Form), bool))
        m.update(hkv.invalidate, jnp.zeros(20, bool))


def resident() -> int:
    """MiB of this process in memory."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    facts = Soak(options.operations, options.threads, options.seed).run()
    text = json.dumps(facts, indent=1)
    print(text)
    out = options.out or pathlib.Path(__file__).with_name("soak.json")
    out.write_text(text + "\n")


if __name__ == "__main__":
    main()
