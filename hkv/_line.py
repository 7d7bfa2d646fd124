"""Admission in order of arrival: the first in line waits for room, and nobody overtakes it.

A request reserves all that it can need in one program, so no two of them wait for each other.
"""

import bisect
import dataclasses
import math
import time
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from hkv._admit import Blocker, Verdict, admit, lease
from hkv._arguments import check_int, token_ids
from hkv._availability import Reason
from hkv._counters import Numbers, count, numbers
from hkv._owner import Owner, StateLost
from hkv._query import query
from hkv._recover import recover
from hkv._request import Cancelled, Closed, Refused, Request, State, Waiting
from hkv._route import Costs, Plan, costs, route, signed
from hkv._tier import Tier

TRIES = 8  # admissions begun again before a request runs cold, and as many before it gives up
PATIENCE = 1.0  # seconds after which the first in line would rather run cold than wait
GRACE = 1.0  # seconds for which a place is kept of who stands in line and does not ask
PAUSE = 0.05  # seconds between looks at leases whose release was interrupted
ROOM = (Blocker.ROWS, Blocker.PAGES, Blocker.CAP)


class Line(Owner):
    """The part of a manager that admits; `Manager` is the class to use."""

    def __init__(
        self, layout, sharding, identity, *, replay, params, chunk, prices: Costs | None,
        vocabulary: int | None,
    ):  # fmt: skip
        super().__init__(layout, sharding, identity)
        self.vocabulary = vocabulary
        self.replay, self.params = replay, params
        self.chunk = layout.segment_tokens if chunk is None else chunk
        strict = costs(replay=math.inf)
        self._costs = strict if replay is None else (prices or costs(recover=1.0))
        self._strict, self._here = map(_without_fetches, (strict, self._costs))
        self._tier: Tier | None = None
        self._line: list[Request] = []  # in order of arrival
        self._arrivals = 0
        self._running: set[Request] = set()  # whoever holds or may hold a lease
        self._closed = False

    def waiting(self) -> list[Waiting]:
        """Who stands in line, and what each waits for."""
        with self._lock:
            return [r.waited() for r in self._line]

    def _reroute(self) -> None:
        for request in self._running:
            request.state = State.LOST
            request._torn = request._last > self._settled
        self._running.clear()

    def _request(self, prompt, total, bucket, identity, timeout, reading) -> Request:
        ids = token_ids(prompt, vocabulary=self.vocabulary)
        if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
            raise ValueError(f"`timeout` is {timeout!r}; give seconds, 0 or more, or None")
        total = len(ids) if total is None else total
        check_int("total", total, len(ids))
        T = self.layout.bucket(total)
        if bucket is not None:
            fit = [n for n in self.layout.buckets if n >= T]
            if bucket not in fit:
                raise ValueError(f"`bucket` is {bucket!r}; give one of {fit}")
            T = bucket
        tokens = np.zeros((1, T), np.int32)
        tokens[0, : len(ids)] = ids
        self._need(T, identity)  # refuses what is no identity now, not later
        return Request(
            self, tokens, len(ids), total, identity=identity, timeout=timeout, reading=reading
        )

    def _join(self, request: Request) -> None:
        """Under the lock: to the end of the line."""
        if self._closed:
            raise Closed("the manager was shut down")
        if request.state is not State.NEW:
            raise RuntimeError(f"the request is {request.state.value}; make another")
        self._arrivals += 1
        request.state, request._place = State.WAITING, self._arrivals
        request._since = time.monotonic()
        self._line.append(request)

    def _head(self) -> Request | None:
        """Under the lock: the first in line, those left out who have not asked for long."""
        late = time.monotonic() - GRACE
        return next((r for r in self._line if r._asked is None or r._asked > late), None)

    def _poll(self, request: Request) -> bool:
        """Whether a request is admitted now; else it keeps its place in line, if it asks again.

        Raises:
            Refused, Cancelled, Closed, StateLost: it is no longer in line, and holds nothing.
        """
        if request._fetched is not None and not request._fetched.done():
            return False
        with self._lock:
            request._asked = time.monotonic()
            try:
                self._may_wait(request)
                if request.state is not State.WAITING:
                    self._join(request)
            except BaseException:
                self._give_up(request)
                raise
            if self._head() is not request or not self._worth_a_try(request):
                return False
        try:
            return self._once(request)
        except BaseException as error:
            self._failed(request, error)
            raise

    def _may_wait(self, request: Request) -> None:
        if request.cancelled:
            raise Cancelled("the request was cancelled while it waited", request)
        if self._closed:
            raise Closed("the manager was shut down")

    def _worth_a_try(self, request: Request) -> bool:
        """Whether something changed since its last try, or it has lost its patience."""
        impatient = time.monotonic() - request._since > PATIENCE and not request._impatient
        request._impatient |= impatient
        return impatient or request._seen != self._changes

    def _give_up(self, request: Request) -> None:
        """Takes a request out of the line that does not want to wait any more."""
        with self._lock:
            self._leave(request)
            request.state = State.DONE

    def _failed(self, request: Request, error: BaseException) -> None:
        with self._lock:
            c = self._counts
            c.refused += isinstance(error, Refused)
            c.timeouts += isinstance(error, TimeoutError) and bool(request.timeout)
            c.cancelled += isinstance(error, Cancelled)
            self._give_up(request)

    def _enter(self, request: Request, joined: bool = False) -> None:
        """Waits until a request is admitted and recovered; on any error it holds nothing.

        With `joined` it stands in line already.
        """
        if self._tier is not None and request.state is State.NEW:
            prefix = self._tier.prefix(
                request.tokens, request._ids, request.length, request.identity
            )
            self._tier.fetch(prefix, request._numbers[0])
        if not joined:
            with self._lock:
                self._join(request)
        try:
            self._arrive(request)
        except BaseException as error:
            self._failed(request, error)
            raise

    def _arrive(self, request: Request) -> None:
        self._take_turn(request)
        while not self._once(request):
            self._take_turn(request)

    def _once(self, request: Request) -> bool:
        """One try of the first in line: whether it runs now; if not it stands where it stood."""
        got = self._try(request, cold=request._begun >= TRIES)
        if got and self._recovered(request):
            if request.cancelled:
                raise Cancelled("the request was cancelled while it waited", request)
            return True
        if got is False:
            return False
        request._begun += 1
        if request._begun == 2 * TRIES:
            raise StateLost(f"admission was begun {request._begun} times, and lost each time")
        with self._lock:
            self._counts.rerouted += 1
            self._leave(request)
            request.state, request._seen = State.WAITING, -1
            bisect.insort(self._line, request, key=lambda r: r._place)
        return False

    def _leave(self, request: Request) -> None:
        """Under the lock: out of the line, and back with what it may hold."""
        if request in self._line:
            self._line.remove(request)
        if request in self._running:
            self._running.discard(request)
            if request.lease is not None:
                self._end(request.lease, request._last)
        self._sweep()
        self._notify()

    def _take_turn(self, request: Request) -> None:
        """Waits until a request is the first in line and something changed since its last try."""
        with self._changed:
            while True:
                self._may_wait(request)
                first = self._head() is request
                if first and self._worth_a_try(request):
                    return
                waited = time.monotonic() - request._since
                left = math.inf if request._impatient or not first else PATIENCE - waited + 0.01
                if not first and any(r._asked is not None for r in self._line):
                    left = GRACE
                ends = math.inf if request.timeout is None else request.timeout - waited
                left = min(left, ends)
                if ends <= 0:
                    w = request.waited()
                    numbers = "" if w.admission is None else f"; {w.admission!r}"
                    raise TimeoutError(
                        f"not admitted within {request.timeout} s: {w.blocker}{numbers}"
                    )
                if self._ended:  # whoever was to release them may have been interrupted
                    before = self._changes
                    self._sweep()
                    if self._changes != before:
                        continue
                    left = min(left, PAUSE)
                self._changed.wait(None if left == math.inf else left)

    def _try(self, request: Request, cold: bool) -> bool | None:
        """One try of the first in line: True admitted, False it waits, None to be begun again."""
        n = self._attempt(request, cold)
        if n is None:
            return None
        # What a plan keeps pinned may be the very pages that the rest of the request needs.
        patient = time.monotonic() - request._since < PATIENCE and not request._alone
        stuck = n.verdict == Verdict.REFUSE or (n.verdict == Verdict.WAIT and not patient)
        if stuck and n.resume > 0 and n.blocker in ROOM:
            n, cold = self._attempt(request, True), True
            if n is None:
                return None
        with self._lock:
            if request.state is State.LOST:
                return None
            if n.verdict == Verdict.ADMIT:
                self._line.remove(request)
                request.resume, request._replays = n.resume, n.replayed
                self._counts.admit(n, cold=cold, reading=request.reading)
                self._notify()
                return True
            self._running.discard(request)
            era = self.era
        answer = self._fetch(request._answer, era)
        if answer is None or n.blocker == Blocker.CHANGED:
            return None
        if n.verdict == Verdict.REFUSE:
            raise Refused(answer)
        with self._lock:
            count(self._counts.waits, [Blocker(n.blocker).name], [1])
            request.admission = answer
            self._changed.notify_all()
        return False

    def _attempt(self, request: Request, cold: bool) -> Numbers | None:
        """Query, route and admit in one go, and the numbers of the outcome; None if lost."""
        length, total = request._numbers
        with self._lock:
            self._sweep()
            request._alone = not (self._running - {request}) and not self._ended
            need = self._need(request.tokens.shape[1], request.identity)
            found = query(self._state(), request.tokens, length, need)
            plan = route(found, self._strict if request.reading else self._here)
            plan = no_reuse(plan) if cold else plan

            def take(cache):
                out = lease(cache, plan) if request.reading else admit(cache, plan, total)
                request.lease = out[1]  # here, so that no interrupt can come in between
                return out

            request.lease, request.plan, request.availability = cast(Any, None), plan, found
            request._seen, request._params = self._changes, self.params
            self._running.add(request)
            _, answer = self._commit(take)
            request._answer = answer
            free = tuple(p.n_free for p in self._state().pools)
            packed = numbers(found, plan, answer, free)
            era = self.era
        packed = self._fetch(packed, era)
        if packed is None:
            return None
        n = Numbers.of(self.layout, packed)
        with self._lock:
            names = [g.form.name for g in self.layout.groups]
            count(self._counts.evictions, names, n.evicted)
        return n

    def _recovered(self, request: Request) -> bool:
        """Carries out what an admitted request's plan says; False if it must be planned again."""
        why: Any = np.zeros(1, np.uint8)
        if request._replays:
            with self._lock:
                if request.state is State.LOST:
                    return False
                era = self.era
                request.lease, why = self._commit(
                    lambda cache: recover(
                        self.replay, request._params, cache, request.lease, request.plan,
                        request.tokens, chunk=self.chunk,
                    )
                )  # fmt: skip
            why = self._fetch(why, era)
        with self._lock:
            if request.state is State.LOST or why is None or why[0] != Reason.OK:
                return False
            request.state = State.RUNNING
        return True

    def _cancel(self, request: Request) -> None:
        with self._lock:
            request.cancelled = True
            self._changed.notify_all()


def _without_fetches(prices: Costs) -> Costs:
    """The same where nothing more is fetched: that was done before, and may be gone again."""
    return dataclasses.replace(prices, fetch=jnp.full_like(prices.fetch, jnp.inf))


@jax.jit
def no_reuse(plan: Plan) -> Plan:
    """The plan that reuses nothing."""
    names = (
        "version", "mark", "resume", "fill", "fill_start", "fill_groups", "replay",
        "replay_groups", "have", "fetch", "fetch_bytes",
    )  # fmt: skip
    zero: dict[str, Any] = {n: jnp.zeros_like(getattr(plan, n)) for n in names}
    rows = jnp.full_like(plan.rows, plan.layout.segments)
    prefill = plan.prefill.at[:, 0].set(0)
    return signed(dataclasses.replace(plan, **zero, rows=rows, prefill=prefill, cost=plan.cold))
