"""The host side: one object that owns the current state, for any number of threads.

What a request may reuse is decided by the functions it calls; here is who may when, and what
happens when something fails.
"""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from hkv._admit import Admission
from hkv._arguments import check_callable, check_int, check_type, token_ids
from hkv._availability import Availability
from hkv._caps import set_caps
from hkv._counters import Counters as Counters
from hkv._counters import Overview, impossible, occupancy_tables
from hkv._layout import Layout
from hkv._lease import Lease
from hkv._line import PAUSE, Line, no_reuse
from hkv._owner import Conflict as Conflict
from hkv._owner import StateLost as StateLost
from hkv._pages import occupancy
from hkv._publish import publish
from hkv._query import query
from hkv._request import Cancelled as Cancelled
from hkv._request import Closed as Closed
from hkv._request import Preempted as Preempted
from hkv._request import Refused as Refused
from hkv._request import Request as Request
from hkv._request import State as State
from hkv._request import Stopped as Stopped
from hkv._request import Waiting as Waiting
from hkv._retain import Retention
from hkv._route import Costs
from hkv._tier import Tier as Tier
from hkv._trim import trim

PROMPTS = 16  # sequences after which it is reported that none fills a segment


class Manager(Line):
    """Owns a cache. Every method may be called from any thread.

        manager = hkv.Manager(layout, replay=replay, params=weights)
        with manager.admit(prompt, total=len(prompt) + 100) as request:
            logits, ok = request.step(step, weights, tokens)
            request.finish(prompt)

    A program that fails before it is dispatched changes nothing, and its error is raised as it
    is. One that fails later has taken the pools along: new ones are made, empty, and whatever
    runs gets `StateLost` at its next call and is to be admitted again. Waiting requests go on.

    Args:
        layout: the static description.
        replay: `replay(params, tokens i32[1, chunk], view) -> view`, the model as `recover` takes
            it. Without one only what is usable as it stands is reused.
        params: the model's arrays.
        chunk: tokens per step of a replay; a segment by default.
        retention: which boundaries of what is published are kept longest; see `hkv.retention`.
        costs: prices for `route`; by default a token costs 1 however it is run, and a recovery 1.
        sharding: as `init` takes it.
        store: where segments go beside device memory, `hkv.disk.LocalStore` for instance; what a
            prompt needs of it is fetched before the request joins the line.
        tier: what goes there and comes back when, as `hkv.Tier` takes it: `write`, `windows`,
            `staging`, `timeout`, `spare`.
        vocabulary: number of token ids that the model knows; others are refused.
        identity: defaults for what `need` takes: salt, adapter, model, epoch ...
    """

    def __init__(
        self, layout: Layout, *, replay: Callable | None = None, params: Any = None,
        chunk: int | None = None, costs: Costs | None = None, retention: Retention | None = None,
        sharding: jax.sharding.NamedSharding | None = None, store: Any = None,
        tier: Mapping[str, Any] | None = None, vocabulary: int | None = None, **identity,
    ):  # fmt: skip
        if replay is not None:
            check_callable("replay", replay)
        if chunk is not None:
            check_int("chunk", chunk, 1)
        if vocabulary is not None:
            check_int("vocabulary", vocabulary, 1)
        if costs is not None:
            check_type("costs", costs, Costs)
        if retention is not None:
            check_type("retention", retention, Retention)
        super().__init__(
            layout, sharding, identity, replay=replay, params=params, chunk=chunk, prices=costs,
            vocabulary=vocabulary,
        )  # fmt: skip
        self.retention = retention
        self._need(layout.buckets[0], {})  # refuses wrong defaults now
        self._warned: set[str] = set()
        self._longest, self._stored, self._partly = 0, 0, False  # of what was published
        self._check_caps()
        if tier and store is None:
            raise ValueError("`tier` is given without a `store`")
        self._tier = None if store is None else Tier(self, store, **(tier or {}))

    def query(self, prompts, **identity) -> Availability:
        """What one prompt, or each of several, can reuse now.

        Args:
            prompts: a sequence of token ids, or a sequence of such; one program per number of
                prompts and bucket.
            identity: what `need` takes, in place of the manager's defaults.
        """
        if not hasattr(prompts, "__len__"):
            raise TypeError(f"`prompts` is {prompts!r}; give token ids, or a sequence of prompts")
        one = isinstance(prompts, bytes) or not len(prompts) or np.isscalar(prompts[0])
        one = one and not (len(prompts) and isinstance(prompts[0], bytes))
        some = [prompts] if one else prompts
        arrays = [token_ids(p, "prompts", self.vocabulary) for p in some]
        bucket = self.layout.bucket(max(len(a) for a in arrays))
        tokens = np.zeros((len(arrays), bucket), np.int32)
        for q, a in enumerate(arrays):
            tokens[q, : len(a)] = a
        length = np.array([len(a) for a in arrays], np.int32)
        need = self._need(bucket, identity, len(arrays))
        with self._lock:
            self._counts.queries += 1
            ids, lengths = jax.device_put((tokens, length))
            return query(self._state(), ids, lengths, need)

    # Admission, in order of arrival.

    def admit(
        self, prompt, total: int | None = None, *, timeout: float | None = None,
        bucket: int | None = None, **identity,
    ) -> Request:  # fmt: skip
        """A request for a prompt, admitted when it is entered as a context manager.

        Requests are admitted in order of arrival: the first in line waits for room and nobody
        overtakes it. Everything it can need is reserved at once, so no two wait for each other.

        Args:
            prompt: token ids.
            total: tokens it may reach, growth and lookahead included; the prompt's by default.
            timeout: seconds to wait in line; None for ever.
            bucket: length bucket of its lease, at least `total`; the smallest by default.
            identity: what `need` takes, in place of the manager's defaults.

        Returns:
            The request. Entering it raises `Refused` with the numbers if it can never fit,
            `TimeoutError` with what it waits for, `Cancelled`, or `Closed`.

        Raises:
            ValueError: token ids out of range, or `total` under the prompt or past its bucket.
        """
        return self._request(prompt, total, bucket, identity, timeout, False)

    def try_admit(
        self, prompt, total: int | None = None, *, bucket: int | None = None, **identity
    ) -> Request | Admission:
        """As `admit`, without waiting in line: the running request, or why not, as data.

        While others wait in line the answer is that of the first of them. A request that is
        returned is the caller's to `release` or `finish`.
        """
        while True:
            request = self._request(prompt, total, bucket, identity, 0.0, False)
            with self._lock:
                while (head := self._head()) is not None and head.admission is None:
                    self._changed.wait(PAUSE)  # it is being tried at the moment
                if head is not None:
                    return cast(Admission, head.admission)
                self._join(request)
            try:
                self._enter(request, joined=True)
            except Refused as error:
                return error.admission
            except TimeoutError:
                if request.admission is None:  # the pools were lost, and others came before it
                    continue
                return request.admission
            return request

    def _stand(self, prompt, total: int, bucket: int, identity: Mapping[str, Any]) -> Request:
        """A request that is admitted by `_poll`, in its turn, without a thread that waits."""
        request = self._request(prompt, total, bucket, dict(identity), None, False)
        if self._tier is not None:
            request._fetched = self._tier.fetch_later(request)
        return request

    def lease(self, prompt, *, timeout: float | None = None, **identity) -> Request:
        """As `admit`, for reading alone: pins what of a prompt is usable as it stands.

        Nothing is reserved and nothing can be appended. Read through `read`.
        """
        return self._request(prompt, None, None, identity, timeout, True)

    # Running.

    def step(self, fn: Callable, *args, requests: Sequence[Request] | None = None) -> tuple:
        """Runs one step of a batch: `fn(cache, *args) -> (cache, *out)`, a donating program.

        Leases of several requests are put together by whoever runs them as a batch, as with
        `jax.tree.map(lambda a, b: a.at[q].set(b[0]), batch, request.lease)`.

        Args:
            fn: the step.
            args: the rest of its arguments, leases among them.
            requests: whose step it is: none is released before it has finished. All that run by
                default.

        Returns:
            The tuple `out`; the device may still be at work on it.

        Raises:
            Cancelled, Preempted, StateLost: one of `requests` may not run on; `request` says
                which, and nothing was done.
        """
        with self._lock:
            self._prune()
            for request in requests or ():
                request.check()
            out = self._commit(fn, *args)
            number = self._launched()
            for request in self._running if requests is None else requests:
                request._last = number
            return out

    def _step_one(self, request: Request, fn: Callable, args: tuple) -> tuple:
        with self._lock:
            self._prune()
            request.check()
            lease, *out = self._commit(fn, request.lease, *args)
            request._last = self._launched()
            check_type("lease returned by `fn`", lease, Lease)
            request.lease = lease
            return tuple(out)

    def publish(self, request: Request, tokens=None, length: int | None = None, **options):
        """Publishes what of a request the device has finished; waits for its steps.

        Args:
            request: a running one.
            tokens: the ids that ran, as a sequence; the prompt's by default.
            length: how many of them; those given by default. What the lease lacks is left out.
            options: as `publish` takes them, `partial` for instance.

        Returns:
            `i32[1]`, how many segments were listed; -1 where the lease no longer holds.
        """
        ids = None if tokens is None else token_ids(tokens, "tokens", self.vocabulary)
        T = request.tokens.shape[1]
        if ids is None:
            padded, given = request.tokens, request.length
        else:
            if len(ids) > T:
                raise ValueError(f"`tokens` has {len(ids)} ids; the lease is for {T}")
            row = np.zeros((1, T), np.int32)
            row[0, : len(ids)] = ids
            padded, given = jax.device_put(row), len(ids)
        n = given if length is None else length
        check_int("length", n, 0, T + 1)
        if n > given:
            raise ValueError(f"`length` is {n}, of {given} token ids; give `tokens`, all that ran")
        many = jax.device_put(np.array([n], np.int32))
        options = {"prompt": request._numbers[0], "retention": self.retention, **options}
        self._wait(request._last)
        with self._lock:
            if request.state is not State.PREEMPTED or request not in self._running:
                request.check(cancelled=False)
            if request.reading:
                raise RuntimeError("the request was leased for reading; it has written nothing")
            request.lease, listed = self._commit(
                lambda cache: publish(
                    cache, request.lease, padded, jnp.minimum(many, request.lease.length), **options
                )
            )
            self._counts.published += 1
            self._stored += 1
            self._longest = max(self._longest, n)
            self._partly |= bool(options.get("partial"))
            self._notify()
        self._check_prompts()
        if self._tier is not None:
            ran = request._ids if ids is None else row[0]
            prefix = self._tier.prefix(padded, ran, n, request.identity)
            self._tier.published(prefix, request.resume)
        return listed

    def finish(
        self, request: Request, tokens=None, length: int | None = None, *, partial: bool = True,
        **options,
    ):  # fmt: skip
        """`publish`, the last segment even if it is not full, and `release`."""
        try:
            return self.publish(request, tokens, length, partial=partial, **options)
        finally:
            self.release(request)

    def release(self, request: Request) -> None:
        """Gives a request's lease back once its steps have finished. Harmless a second time.

        Raises:
            StateLost: its last steps are not known to have finished, and the pools are lost.
        """
        with self._lock:
            if request.state is State.LOST and request._torn:
                request._torn = False
                raise StateLost("the pools were lost before the request's last step had finished")
            if request.state is not State.RUNNING:
                return
            request.state = State.DONE
            self._running.discard(request)
            self._end(request.lease, request._last)
        self._wait(request._last)
        with self._lock:
            error = self._sweep()
            self._notify()
        if error is not None:
            raise error

    def preempt(self, request: Request, tokens=None, length: int | None = None) -> bool:
        """Stops a running request, publishes what it has done, and takes its pages back.

        Its next step raises `Preempted`. Admitted again it resumes from what was published.

        Args:
            request: the request.
            tokens: the ids that ran, as for `publish`.
            length: likewise.

        Returns:
            Whether it was running.
        """
        with self._lock:
            if request.state is not State.RUNNING:
                return False
            request.state = State.PREEMPTED
        try:
            if not request.reading:
                self.publish(request, tokens, length, partial=True)
        finally:
            with self._lock:
                self._counts.preempted += 1
                if request in self._running:
                    self._running.discard(request)
                    self._end(request.lease, request._last)
                error = self._sweep()
                self._notify()
        if error is not None:
            raise error
        return True

    def offload(self, prompt, *, keep: bool = True, **identity) -> "Future[int]":
        """Puts the stored segments of a prefix away, while steps go on.

        Args:
            prompt: token ids; whole segments of it are put away.
            keep: whether they stay in device memory too.
            identity: what `need` takes, in place of the manager's defaults.

        Returns:
            A future: how many of its segments were in the table.

        Raises:
            RuntimeError: the manager has no `store`.
        """
        return self._with_store().put_away(self._prefix(prompt, identity)[0], keep)

    def restore(self, prompt, **identity) -> int:
        """Fetches what a prompt can reuse, as `admit` does before it joins the line.

        Returns:
            How many segments were loaded.

        Raises:
            RuntimeError: the manager has no `store`.
        """
        return self._with_store().fetch(*self._prefix(prompt, identity))

    def _with_store(self) -> Tier:
        if self._tier is None:
            raise RuntimeError("the manager has no `store`; make it with one")
        return self._tier

    def _prefix(self, prompt, identity):
        ids = token_ids(prompt, vocabulary=self.vocabulary)
        row = np.zeros((1, self.layout.bucket(len(ids))), np.int32)
        row[0, : len(ids)] = ids
        tokens, length = jax.device_put((row, np.array([len(ids)], np.int32)))
        return self._with_store().prefix(tokens, row[0], len(ids), identity), length

    def trim(self, request: Request) -> None:
        """Gives back the window and tail pages that a running request no longer needs."""
        self._wait(request._last)
        with self._lock:
            request.check()
            (request.lease,) = self._commit(trim, request.lease)
            self._notify()

    def set_caps(
        self, pages: Mapping | None = None, *, bytes: Mapping | None = None,
        tenant: str | None = None,
    ) -> None:  # fmt: skip
        """Changes the caps, as `hkv.set_caps`; waiters try again.

        Set so, and not through `update`, they last when the pools are lost.
        """
        with self._lock:
            self._commit(lambda cache: set_caps(cache, pages, bytes=bytes, tenant=tenant))
            self._caps = jax.device_get(self._state().caps)
            self._notify()
        self._check_caps()

    def set_params(self, params: Any, **identity) -> None:
        """Changes the model's arrays, and the identity that belongs to them: `epoch` for one.

        For requests that are admitted from now on; those that run go on with what they have.
        """
        self._need(self.layout.buckets[0], identity)  # refuses what is no identity
        with self._lock:
            self.params = params
            self.identity = {**self.identity, **identity}
            self._notify()

    # Starting, looking, ending.

    def warmup(self) -> None:
        """Compiles every program of the manager, for each length bucket; call it first.

        A step of the caller's compiles when it first runs.
        """
        with self._lock:
            kept = (self._counts.copy(), self._stored, self._longest, self._partly)
        for T in self.layout.buckets:
            with self.admit([0], bucket=T) as request:
                no_reuse(request.plan)
                request._replays = int(self.replay is not None)
                self._recovered(request)
                for partial in (False, True):
                    self.publish(request, [0], 0, partial=partial)
                self.trim(request)
                if self._tier is not None:
                    prefix = self._tier.prefix(request.tokens, request._ids, 0, {})
                    self._tier.warmup(prefix, request.plan)
            with self._request([0], None, T, {}, None, True) as request:
                assert request.availability is not None
                _ = request.availability.boundary
        self.status()
        with self._lock:
            self._counts, self._stored, self._longest, self._partly = kept

    @property
    def counters(self) -> Counters:
        """A copy of the counters as they are now."""
        with self._lock:
            return self._counts.copy()

    def status(self) -> Overview:
        """Everything there is to see, as plain numbers; prints as a table."""
        with self._lock:
            self._prune()
            pages = occupancy(self._state())
            view: dict[str, Any] = dict(
                version=self.version, era=self.era, running=len(self._running),
                waiting=len(self._line), in_flight=len(self._flight),
                counters=self._counts.copy(),
            )  # fmt: skip
            caps, era = self._caps, self.era
        pages = self._fetch(pages, era)
        if pages is None:  # lost at this moment
            return self.status()
        groups, forms = occupancy_tables(self.layout, pages, caps)
        return Overview(groups=groups, forms=forms, **view)

    def shutdown(self, wait: bool = True, timeout: float | None = None) -> None:
        """Admits nobody from now on; who waits in line gets `Closed`, who runs may finish.

        Args:
            wait: until everybody has.
            timeout: seconds to wait at most.

        Raises:
            TimeoutError: requests still run.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._closed = True
            for request in [r for r in self._line if r._asked is not None]:
                self._give_up(request)
            self._changed.notify_all()
            while wait and (self._running or self._line or self._ended):
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"{len(self._running)} requests run after {timeout} s")
                if self._ended:
                    self._sweep()
                    left = min(PAUSE, math.inf if left is None else left)
                self._changed.wait(left)
        if wait:
            self.settle()
        if self._tier is not None:
            self._tier.close(wait)

    def __enter__(self) -> "Manager":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.shutdown(wait=error is None)

    def __repr__(self) -> str:
        with self._lock:
            return (
                f"Manager(version {self.version}, era {self.era}: {len(self._running)} running, "
                f"{len(self._line)} waiting)"
            )

    # Geometry.

    def _check_caps(self) -> None:
        text = impossible(self.layout, self._caps)
        if text is not None:
            self._warn("window", text)

    def _check_prompts(self) -> None:
        B = self.layout.segment_tokens
        if self._stored >= PROMPTS and self._longest < B and not self._partly:
            self._warn(
                "segment",
                f"`segment_tokens` is {B}, but the longest of {self._stored} sequences had "
                f"{self._longest} tokens: none fills a segment, so nothing is ever reused; take "
                "shorter segments, or publish with partial=True",
            )

    def _warn(self, kind: str, text: str) -> None:
        with self._lock:
            if kind in self._warned:
                return
            self._warned.add(kind)
        warnings.warn(text, stacklevel=4)
