"""A request on its way through a manager, and what can happen to it.

Only the manager changes a request; other threads may read it and call `cancel`.
"""

import contextlib
import dataclasses
import enum
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

from hkv._admit import Admission, Blocker
from hkv._availability import Availability
from hkv._lease import Lease
from hkv._owner import StateLost
from hkv._route import Plan

if TYPE_CHECKING:
    from hkv._line import Line
    from hkv.manager import Manager


class State(enum.Enum):
    """Where a request stands."""

    NEW = "new"
    WAITING = "waiting"  # in line, or being recovered
    RUNNING = "running"
    DONE = "done"  # released
    PREEMPTED = "preempted"
    LOST = "lost"  # with the pools


class Refused(RuntimeError):
    """A request that can never be admitted; `admission` has the numbers."""

    def __init__(self, admission: Admission):
        super().__init__(f"can never be admitted: {admission!r}")
        self.admission = admission


class Stopped(RuntimeError):
    """A request that may not run on; `request` is the one."""

    def __init__(self, text: str, request: "Request"):
        super().__init__(text)
        self.request = request


class Cancelled(Stopped):
    """`cancel` was called."""


class Preempted(Stopped):
    """The request was preempted; admit it again and it resumes from what was published."""


class Closed(RuntimeError):
    """The manager was shut down and admits nobody."""


@dataclasses.dataclass(frozen=True)
class Waiting:
    """One request in line."""

    tokens: int  # of the prompt
    total: int
    seconds: float
    blocker: str  # what stood in the way at its last try; "LINE" behind others
    admission: Admission | None  # the numbers of that try


class Request(contextlib.AbstractContextManager):
    """A prompt that waits, runs and ends. Made by `Manager.admit`, `try_admit` or `lease`.

    As a context manager it is admitted on the way in, which may wait, and released on the way
    out. A batch of several is run with leases of their own put together, see `Manager.step`; who
    does so keeps `lease` up to date.
    """

    def __init__(
        self, manager: "Line", tokens: np.ndarray, length: int, total: int, *,
        identity: dict[str, Any], timeout: float | None, reading: bool,
    ):  # fmt: skip
        numbers = np.array([length], np.int32), np.array([total], np.int32)
        # i32[1, T] padded; i32[1] twice
        self.tokens, *self._numbers = jax.device_put((tokens, *numbers))
        self._ids = tokens[0]  # the same on the host
        self.length = length  # tokens of the prompt
        self.total = total  # tokens it may reach
        self.identity = identity  # as `need` takes it
        self.timeout = timeout  # seconds it waits in line; None for ever
        self.reading = reading  # pinned for reading alone
        self.state = State.NEW
        self.cancelled = False
        self.resume = 0  # tokens that need not run
        # Of the last try, nothing before it; `lease` moves on with each step.
        self.lease: Lease = cast(Any, None)
        self.plan: Plan = cast(Any, None)
        self.availability: Availability = cast(Any, None)
        self.admission: Admission | None = None  # of the last try that failed, as NumPy arrays
        self._manager = cast("Manager", manager)
        self._place = -1  # in the line
        self._seen = -1  # count of changes at the last try
        self._since = 0.0
        self._begun = 0  # tries that came to nothing since what they verified had changed
        self._asked: float | None = None  # when it asked last, if it stands in line by asking
        self._fetched: Future | None = None  # what the store has of it, while that is fetched
        self._impatient = False  # tried without reuse after it had waited
        self._alone = False  # nobody else held anything at the last try
        self._answer: Admission | None = None  # of the last try, on the device
        self._params: Any = None  # the model's arrays at the last try
        self._replays = 0  # tokens that its recovery runs
        self._last = 0  # number of the last step it took part in
        self._torn = False  # the pools were lost before that step had finished

    def __enter__(self) -> "Request":
        self._manager._enter(self)
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self._manager.release(self)
        except Exception:  # made up for later; not in place of the error that led here
            if error is None:
                raise

    def cancel(self) -> None:
        """Ends a wait in line, and makes the next step raise `Cancelled`. From any thread."""
        self._manager._cancel(self)

    def step(self, fn, *args):
        """Runs `fn(cache, lease, *args) -> (cache, lease, *out)`; see `Manager.step`.

        Returns:
            The tuple `out`.
        """
        return self._manager._step_one(self, fn, args)

    def publish(self, tokens=None, length: int | None = None, **options):
        """See `Manager.publish`."""
        return self._manager.publish(self, tokens, length, **options)

    def finish(self, tokens=None, length: int | None = None, **options):
        """See `Manager.finish`."""
        return self._manager.finish(self, tokens, length, **options)

    def waited(self) -> Waiting:
        """How it stands in line."""
        a = self.admission
        return Waiting(
            tokens=self.length, total=self.total, seconds=time.monotonic() - self._since,
            blocker="LINE" if a is None else Blocker(int(a.blocker[0])).name, admission=a,
        )  # fmt: skip

    def check(self, cancelled: bool = True) -> None:
        """Raises why this request may not run on, if so.

        Args:
            cancelled: whether to have been cancelled is a reason.

        Raises:
            Cancelled, Preempted, StateLost: as their names say.
            RuntimeError: it was not admitted, or is released.
        """
        if cancelled and self.cancelled:
            raise Cancelled("the request was cancelled", self)
        if self.state is State.PREEMPTED:
            raise Preempted("the request was preempted; admit it again", self)
        if self.state is State.LOST:
            raise StateLost("the pools were lost while this request ran; admit it again")
        if self.state is not State.RUNNING:
            raise RuntimeError(f"the request is {self.state.value}, not running; admit it first")

    def __repr__(self) -> str:
        return (
            f"Request({self.state.value}: {self.length} tokens of at most {self.total}, "
            f"{self.resume} reused)"
        )
