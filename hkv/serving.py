"""Continuous batching: requests join and leave a running batch between jitted steps.

Which program a token passes through, and in which chunk, depends on its own request and on what
was stored for it; so an answer does not depend on who else is in the batch. Nothing here is on
the device; `import hkv` does not import it.
"""

import collections
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from hkv import _batch
from hkv._arguments import check_callable, check_int, check_type, token_ids
from hkv._availability import Availability
from hkv._route import Plan
from hkv.manager import Closed, Manager, Refused, Request, StateLost, Stopped

TRIES = 8  # times that a request is begun again without a token in between
PAUSE = 0.02  # seconds between tries to admit while others hold the room


class Stream(Iterator[int]):
    """An answer on its way: iterate over its token ids. Made by `Engine.submit`.

    Unless the engine has a thread of its own, whoever waits for a token runs the engine.
    """

    def __init__(
        self, engine: "Engine", prompt: np.ndarray, max_tokens: int, stop: list[int], seed: int,
        keep: bool, identity: dict[str, Any],
    ):  # fmt: skip
        self.prompt, self.max_tokens, self.stop, self.seed = prompt, max_tokens, stop, seed
        self.keep, self.identity = keep, identity
        self.total = len(prompt) + max_tokens - 1  # that run at most: not the last of the answer
        self.tokens: list[int] = []  # said so far
        self.done = False  # and published, if it is to be
        self.cancelled = False
        self.error: BaseException | None = None
        self.availability: Availability | None = None  # at the last admission, as the next two
        self.plan: Plan | None = None
        self.reused = 0  # tokens that needed not run
        self.seconds: float | None = None  # from `submit` to the first token
        self._engine, self._begin = engine, time.perf_counter()
        self._number = 0  # in order of arrival
        self._read = 0  # tokens that were iterated over
        self._tries = 0
        self._request: Request | None = None  # while it stands in the manager's line
        self._preempt: int | None = None

    def __next__(self) -> int:
        self._engine._wait(lambda: self.done or self._read < len(self.tokens))
        if self._read < len(self.tokens):
            self._read += 1
            return self.tokens[self._read - 1]
        if self.error is not None:
            raise self.error
        raise StopIteration

    def result(self) -> list[int]:
        """The whole answer, waited for; of a cancelled request what there is of it."""
        self._engine._wait(lambda: self.done)
        if self.error is not None:
            raise self.error
        return list(self.tokens)

    def cancel(self) -> None:
        """Ends the answer where it is before the next turn, and frees its pages."""
        self.cancelled = True
        self._engine._tell()

    def _ids(self) -> np.ndarray:
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])


@dataclasses.dataclass(eq=False)
class _Run:
    """A stream that was admitted into a slot."""

    stream: Stream
    request: Request
    slot: int
    ids: np.ndarray  # to prefill: the prompt, and what was said before
    at: int  # tokens that will have run after what is in flight, if nothing ends it before
    slid: int  # what that was when its windows last went on
    turn: int  # when it was last given a chunk


@dataclasses.dataclass
class _Flight:
    """A program in flight: of each run its column in `out`, and the position it began at."""

    runs: list[tuple[_Run, int, int]]
    out: tuple[jax.Array, ...]  # as `_batch.decode` returns it
    era: int  # of the manager's pools


class Engine:
    """Serves requests of any length on one manager. Every method may be called from any thread.

        engine = Engine(manager, forward, slots=8, chunk=256)
        engine.warmup()
        with engine:  # in a thread of its own
            for token in engine.submit(prompt, max_tokens=100, stop=[0]):
                ...

    A turn is a chunk of each of the prompts that have waited longest, up to `budget`, and `steps`
    tokens of everybody who decodes. What it said is fetched while the next one runs.

    Where the layout says how far `ahead` a request runs, what is complete is published on the way
    and windows go on to the tokens that come next.

    A slot whose pages changed is admitted again with what it has said, and goes on from there.
    So does everybody when the pools are lost, or when the manager is given other parameters.

    Args:
        manager: owns the cache; its `params` go to `forward`.
        forward: `forward(params, tokens i32[Q, n], view) -> (logits [Q, n, ...], view)`.
        slots: Q, requests that run at once.
        chunk: tokens of one prompt per turn; a segment by default.
        budget: tokens of all prompts together per turn, in whole chunks; one chunk by default.
        steps: tokens of each answer per turn.
        sample: `sample(logits [...], key) -> i32[]`, the next token of one request; the key is of
            the request's seed and the token's position alone. The likeliest token by default.
        bucket: length bucket of all requests; the longest by default.
        on_logits: `on_logits(stream, position, logits [n, ...])`, called with what follows each
            of n tokens that ran, the first of them at `position`.
    """

    def __init__(
        self, manager: Manager, forward: Callable, *, slots: int = 8, chunk: int | None = None,
        budget: int | None = None, steps: int = 8, sample: Callable = _batch.greedy,
        bucket: int | None = None, on_logits: Callable | None = None,
    ):  # fmt: skip
        check_type("manager", manager, Manager)
        check_callable("forward", forward)
        check_callable("sample", sample)
        if on_logits is not None:
            check_callable("on_logits", on_logits)
        layout = manager.layout
        self.manager, self.slots, self.steps, self.on_logits = manager, slots, steps, on_logits
        self.chunk = layout.segment_tokens if chunk is None else chunk
        self.bucket = layout.buckets[-1] if bucket is None else bucket
        budget = self.chunk if budget is None else budget
        for name, value in (("slots", slots), ("chunk", self.chunk), ("steps", steps)):
            check_int(name, value, 1)
        check_int("budget", budget, self.chunk)
        if self.bucket not in layout.buckets:
            raise ValueError(f"`bucket` is {bucket!r}; give one of {layout.buckets}")
        if 0 < layout.ahead < max(self.chunk, steps):
            raise ValueError(
                f"`ahead` of the layout is {layout.ahead}; give the tokens of a turn or more: "
                f"{max(self.chunk, steps)}"
            )
        self.lanes = min(budget // self.chunk, slots)  # P
        model = dict(forward=forward, sample=sample, logits=on_logits is not None)
        self._prefill = functools.partial(_batch.prefill, **model)
        self._decode = functools.partial(_batch.decode, **model, steps=steps)
        self._params: Any = manager.params
        self._batch: Any = None  # `_batch.Batch`, from the first admission on
        self._runs: list[_Run | None] = [None] * slots
        self._queue: list[Stream] = []
        self._flight: collections.deque[_Flight] = collections.deque()
        self._turns = self._arrivals = 0
        self._again = 0.0  # when to try the first in the queue again
        self._turn = threading.RLock()  # held while a turn is made
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(
        self, prompt, max_tokens: int, *, stop: Sequence[int] = (), seed: int = 0,
        keep: bool = True, **identity,
    ) -> Stream:  # fmt: skip
        """Queues a request; its answer comes through the stream.

        Args:
            prompt: token ids, 1 or more.
            max_tokens: tokens of the answer at most.
            stop: token ids that end the answer; the one that does is its last.
            seed: of the sampler's keys.
            keep: publish prompt and answer when it ends, for others to reuse.
            identity: what `need` takes, in place of the manager's defaults.

        Raises:
            ValueError: token ids out of range, or more tokens than the bucket holds.
        """
        known = self.manager.vocabulary
        ids, ends = token_ids(prompt, "prompt", known), token_ids(stop, "stop", known).tolist()
        check_int("max_tokens", max_tokens, 1)
        check_int("seed", seed, 0, 2**32)
        if not len(ids):
            raise ValueError("`prompt` is empty; give one token or more")
        if len(ends) > _batch.STOPS:
            raise ValueError(f"`stop` has {len(ends)} tokens; give at most {_batch.STOPS}")
        new = Stream(self, ids.astype(np.int32), max_tokens, ends, seed, keep, identity)
        if new.total > self.bucket:
            raise ValueError(
                f"`prompt` has {len(ids)} tokens and `max_tokens` is {max_tokens}: {new.total} "
                f"would run, and there is room for {self.bucket}; give fewer, or a longer bucket"
            )
        self.manager._need(self.bucket, identity)  # refuses what is no identity now, not later
        with self._news:
            if self._closed:
                raise Closed("the engine was closed")
            self._arrivals += 1
            new._number = self._arrivals
            self._queue.append(new)
            self._news.notify_all()
        return new

    def preempt(self, stream: Stream, after: int = 0) -> None:
        """Takes a running request's slot and pages before the next turn.

        What it has done is published. It waits at the front of the queue, behind `after` others,
        and goes on from there as if it had never stopped.
        """
        check_int("after", after, 0)
        stream._preempt = after

    def warmup(self) -> None:
        """Compiles every program of the engine and of its manager; call it first."""
        self.manager.warmup()
        self.submit([0], 2, keep=False).result()
        if self.manager.layout.ahead:
            self._slide()
        _batch.lease_of(self._batch, np.int32(0))

    def start(self) -> "Engine":
        """Runs in a thread of its own from now on."""
        with self._news:
            if self._closed:
                raise Closed("the engine was closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="hkv-engine", daemon=True)
                self._thread.start()
        return self

    def close(self, wait: bool = True) -> None:
        """Accepts nothing more, and ends: after all answers, or where they are."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        if not wait:
            for stream in [*self._queue, *(run.stream for run in self._running())]:
                stream.cancel()
        if self._thread is None:
            while self.step():
                pass
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> "Engine":
        return self.start()

    def __exit__(self, kind, error, trace) -> None:
        self.close(wait=error is None)

    # Turns.

    def step(self) -> bool:
        """One turn: admits, launches, and streams what the turn before has said.

        Whatever it raises, those who run are admitted again, with what they said by then.

        Returns:
            Whether anybody still waits or runs.
        """
        with self._turn:
            earlier, launched = 0, True
            try:
                self._heed()
                self._admit()
                earlier = len(self._flight)
                launched = self._launch()
                for _ in range(earlier if launched else len(self._flight)):
                    self._collect()
            except BaseException as error:  # the state was lost, or anything may be half done
                self._flight.clear()
                self._batch = None
                self._reroute(self._running())
                if not isinstance(error, StateLost | Stopped):
                    raise
            if self._queue and not (earlier or launched or self._running()):
                time.sleep(PAUSE)  # others hold the room
            return bool(self._queue or self._running())

    def _heed(self) -> None:
        """Cancels and preempts as was asked."""
        for stream in list(self._queue):
            stream._preempt = None
            if stream.cancelled:
                self._end(stream)
        for run in self._running():
            stream, after = run.stream, run.stream._preempt
            if stream.cancelled:
                self._leave(run)
                self._end(stream)
            elif after is not None:
                stream._preempt = None
                self._drain()
                if self._runs[run.slot] is run:
                    run.request.lease = _batch.lease_of(self._batch, np.int32(run.slot))
                    self.manager.preempt(run.request, stream._ids())
                    self._leave(run)
                    self._queue.insert(after, stream)

    def _admit(self) -> None:
        """Fills free slots from the queue, in order."""
        while True:
            if self._params is not self.manager.params:  # who runs began with the old ones
                self._drain()
                self._reroute(self._running())
                self._params = self.manager.params
            while self._queue and None in self._runs and time.monotonic() >= self._again:
                if not self._admit_one(self._queue[0]):
                    self._again = time.monotonic() + PAUSE
            if self._params is self.manager.params:
                return

    def _admit_one(self, stream: Stream) -> bool:
        """False if it has to wait."""
        for other in self._queue:
            if other is not stream:
                self._step_aside(other)
        ids = stream._ids()
        try:
            if stream._request is None:
                stream._request = self.manager._stand(
                    ids, stream.total, self.bucket, stream.identity
                )
            if not self.manager._poll(stream._request):
                return False
        except BaseException as error:
            stream._request = None
            if isinstance(error, Refused | Closed | TypeError | ValueError):  # its alone
                self._end(stream, error)
                return True
            if isinstance(error, StateLost):
                self._begin_again(stream)
            raise
        got, stream._request = stream._request, None
        self._queue.remove(stream)
        slot = self._runs.index(None)
        self._runs[slot] = _Run(stream, got, slot, ids, got.resume, got.resume, self._turns)
        stream.availability, stream.plan, stream.reused = got.availability, got.plan, got.resume
        state, said, end = np.array([[_batch.PREFILL], [0], [stream.total]], np.int32)
        stop = np.array([stream.stop + [-1] * (_batch.STOPS - len(stream.stop))], np.int32)
        seed = np.array([stream.seed], np.uint32)
        one = _batch.Batch(got.lease, *jax.device_put((state, said, end, stop, seed)))
        if self._batch is None:
            self._batch = _batch.blank(one, slots=self.slots)
        self._batch = _batch.insert(self._batch, one, np.int32(slot))
        return True

    def _launch(self) -> bool:
        """Puts the programs of a turn in flight."""
        self._turns += 1
        C, P = self.chunk, self.lanes
        waiting = [r for r in self._running() if r.at < len(r.ids)]
        waiting = sorted(waiting, key=lambda r: (r.turn, r.stream._number))[:P]
        ahead = self.manager.layout.ahead
        if ahead and any(r.at + max(C, self.steps) > r.slid + ahead for r in self._running()):
            self._slide()
        if waiting:
            tokens, lane = np.zeros((P, C), np.int32), np.full(P, self.slots, np.int32)
            count, last = np.zeros(P, np.int32), np.zeros(P, bool)
            for i, r in enumerate(waiting):
                part = r.ids[r.at : r.at + C]
                tokens[i, : len(part)], count[i], lane[i] = part, len(part), r.slot
                last[i] = r.at + len(part) == len(r.ids)
            runs = [(r, i, r.at) for i, r in enumerate(waiting)]
            self._run(self._prefill, runs, *jax.device_put((tokens, lane, count, last)))
            for i, r in enumerate(waiting):
                r.at, r.turn = r.at + int(count[i]), self._turns
        decoding = [r for r in self._running() if len(r.ids) <= r.at < r.stream.total]
        if decoding:
            self._run(self._decode, [(r, r.slot, r.at) for r in decoding])
            for r in decoding:
                r.at = min(r.at + self.steps, r.stream.total)
        return bool(waiting or decoding)

    def _slide(self) -> None:
        """Publishes what is complete of everybody, and lets the windows go on."""
        runs, Q = self._running(), self.slots
        tokens, (length, prompt) = np.zeros((Q, self.bucket), np.int32), np.zeros((2, Q), np.int32)
        for r in runs:
            ids = r.stream._ids()[: r.at]
            tokens[r.slot, : len(ids)] = ids
            # The token that was said last may not have run, if the answer ends there.
            known = min(r.at, len(r.stream.prompt) + max(len(r.stream.tokens) - 1, 0))
            length[r.slot], prompt[r.slot] = known * r.stream.keep, len(r.stream.prompt)
            r.slid = r.at
        (self._batch,) = self.manager.step(
            _batch.slide, self._batch, *jax.device_put((tokens, length, prompt)),
            self.manager.retention, requests=[r.request for r in runs],
        )  # fmt: skip

    def _run(self, program: Callable, runs: list[tuple[_Run, int, int]], *args) -> None:
        self._batch, *out = self.manager.step(
            program, self._params, self._batch, *args, requests=[run.request for run, *_ in runs]
        )
        self._flight.append(_Flight(runs, tuple(out), self.manager.era))

    def _drain(self) -> None:
        while self._flight:
            self._collect()

    def _collect(self) -> None:
        """Streams what the oldest program in flight has said, and ends who is done."""
        flight = self._flight[0]
        try:
            said, state, ran, *logits = jax.device_get(flight.out)
        except jax.errors.JaxRuntimeError:
            self.manager.settle()  # finds out, and raises that the state is lost
            if self.manager.era != flight.era:  # another thread had found out
                raise StateLost("the pools were lost with a step of the batch") from None
            raise
        self._flight.popleft()
        for run, column, at in flight.runs:
            if self._runs[run.slot] is not run:
                continue
            if self.on_logits is not None and ran[column]:
                try:
                    self.on_logits(run.stream, at, logits[0][: ran[column], column])
                except Exception as error:  # the caller's, about this stream alone
                    self._leave(run)
                    self._end(run.stream, error)
                    continue
            self._say(run.stream, [int(t) for t in said[:, column] if t >= 0])
            if state[column] == _batch.DONE:
                self._finish(run)
            elif state[column] == _batch.FAILED:
                self._reroute([run])

    # How streams go on and end.

    def _running(self) -> list[_Run]:
        return [run for run in self._runs if run is not None]

    def _say(self, stream: Stream, tokens: list[int]) -> None:
        if tokens:
            with self._news:
                if stream.seconds is None:
                    stream.seconds = time.perf_counter() - stream._begin
                stream._tries = 0
                stream.tokens.extend(tokens)
                self._news.notify_all()

    def _finish(self, run: _Run) -> None:
        """Publishes a whole answer with its prompt."""
        stream = run.stream
        if stream.keep:
            run.request.lease = _batch.lease_of(self._batch, np.int32(run.slot))
            prompt = jax.device_put(np.array([len(stream.prompt)], np.int32))
            try:
                self.manager.finish(run.request, stream._ids()[: stream.total], prompt=prompt)
            except StateLost:
                pass  # the answer is right; who runs on learns of it at the next step
        self._leave(run)
        self._end(stream)

    def _leave(self, run: _Run) -> None:
        """Frees a slot, and what its request still holds."""
        try:
            self.manager.release(run.request)
        except Exception:  # the manager makes up for it
            pass
        self._runs[run.slot], self._again = None, 0.0  # last, or an interrupt would lose it

    def _reroute(self, runs: list[_Run]) -> None:
        for run in sorted(runs, key=lambda r: -r.stream._number):
            self._leave(run)
            self._begin_again(run.stream)

    def _begin_again(self, stream: Stream) -> None:
        """To the front of the queue, to go on from what was said."""
        stream._tries += 1
        if len(stream.tokens) == stream.max_tokens or set(stream.tokens[-1:]) & set(stream.stop):
            self._end(stream)
        elif stream._tries > TRIES:
            self._end(stream, RuntimeError(f"begun {TRIES} times without getting to a token"))
        elif stream not in self._queue:
            self._queue.insert(0, stream)

    def _step_aside(self, stream: Stream) -> None:
        """Out of the manager's line."""
        if stream._request is not None:
            self.manager._give_up(stream._request)
            stream._request = None

    def _end(self, stream: Stream, error: BaseException | None = None) -> None:
        self._step_aside(stream)
        with self._news:
            if stream in self._queue:
                self._queue.remove(stream)
            stream.error, stream.done = error, True
            self._news.notify_all()

    # Threads.

    def _tell(self) -> None:
        with self._news:
            self._news.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if self._thread is None:
                self.step()
            else:
                with self._news:
                    self._news.wait_for(ready)

    def _loop(self) -> None:
        try:
            while True:
                with self._news:
                    self._news.wait_for(
                        lambda: self._queue or self._closed or bool(self._running())
                    )
                    if self._closed and not self._queue and not self._running():
                        return
                while self.step():
                    pass
        except BaseException as error:
            with self._news:
                self._closed = True
            for stream in list(self._queue):
                self._end(stream, error)
