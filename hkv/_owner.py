"""The owner of the current state: one lock, one place where it is replaced, steps in flight.

Programs that take the cache are dispatched under the lock, in one order for all threads; their
results are waited for outside of it. Nothing here knows requests.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hkv._arguments import check_type
from hkv._cache import Cache, init
from hkv._counters import Counters
from hkv._identity import Need, byte_codes, need
from hkv._layout import Layout
from hkv._lease import Lease, release

# What says whose a prefix is: the arguments of `need` that a request may give.
IDENTITY = (
    "salt", "adapter", "model", "start", "media", "epoch", "indexer_version", "provenance", "abi",
    "codes",
)  # fmt: skip
NEEDS = 256  # identities whose arrays are kept


class StateLost(RuntimeError):
    """A program failed after it had taken the pools, and all of them were made anew, empty.

    Whatever was running must be admitted again.
    """


class Conflict(RuntimeError):
    """The state moved on since the version that an update expected; nothing was changed."""


class Owner:
    """Holds a cache and what is in flight on it; `Manager` is the class to use."""

    def __init__(
        self, layout: Layout, sharding: jax.sharding.NamedSharding | None, identity: dict[str, Any]
    ):
        check_type("layout", layout, Layout)
        self.layout = layout
        self.sharding = sharding
        self.identity = identity
        self.version = 0  # of the state: one more with each commit, never reset
        self.era = 0  # how often the pools were made anew
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._changes = 0  # commits that may have made room
        self._cache: Cache | None = None
        self._caps: Any = None  # `Caps` as they are now, on the host
        self._busy = False  # a commit is under way
        self._counts = Counters()
        self._steps = self._settled = 0  # numbers of the last step, and of the last that finished
        self._flight: collections.deque[tuple[int, Any]] = collections.deque()  # with their marks
        self._ended: dict[int, tuple[Lease, int]] = {}  # leases to release, after which step
        self._ends = 0
        self._needs: collections.OrderedDict[Any, Need] = collections.OrderedDict()
        self._make()

    def update(self, fn: Callable, *args, expect: int | None = None) -> tuple:
        """Runs `fn(cache, *args)`, which may donate the cache, and takes the new one over.

        Args:
            fn: returns the new cache alone, or first in a tuple.
            args: the rest of its arguments.
            expect: the version of the state that the caller has looked at; see `read`.

        Returns:
            What `fn` returned after the cache, as a tuple.

        Raises:
            Conflict: the state has another version than `expect`. Nothing was changed.
            StateLost: `fn` failed after it had taken the pools.
        """
        with self._lock:
            if expect is not None and expect != self.version:
                raise Conflict(f"the state has version {self.version}, not {expect}; read again")
            out = self._commit(fn, *args)
            self._notify()
            return out

    def read(self, fn: Callable, *args) -> tuple[int, Any]:
        """The version of the state, and `fn(cache, *args)`, which must leave the cache alone.

        Raises:
            StateLost: `fn` looked at a state that had failed on the device.
        """
        with self._lock:
            cache = self._state()
            try:
                return self.version, fn(cache, *args)
            except jax.errors.JaxRuntimeError as error:
                if not _failed(cache):
                    raise
                self._lose()
                raise StateLost(f"the pools were lost: {error!r}") from error

    def settle(self) -> None:
        """Waits until the device has finished every step, and releases what has ended.

        Raises:
            StateLost: one of them failed.
        """
        self._wait(self._steps)
        with self._lock:
            error = self._sweep()
        if error is not None:
            raise error

    # Under the lock, all of the following unless they say otherwise.

    def _state(self) -> Cache:
        if self._cache is None:
            self._make()
        assert self._cache is not None
        return self._cache

    def _make(self) -> None:
        cache = init(self.layout, self.sharding)
        # Serials of leases begin with the clock, so that none from before is one of this cache.
        word = np.uint32((self.era << 24) & 0xFFFFFFFF)
        to = cache.clock.sharding if cache.clock.committed else None
        cache = dataclasses.replace(cache, clock=jax.device_put(word, to))
        if self._caps is None:
            self._caps = jax.device_get(cache.caps)
        cache = dataclasses.replace(cache, caps=jax.device_put(self._caps, to))
        self._needs.clear()
        self._codes = byte_codes(cache)
        self._cache = cache

    def _commit(self, fn: Callable, *args) -> tuple:
        """The only place where the state is replaced."""
        if self._busy:
            raise RuntimeError("`fn` called its manager; give it what it needs as arguments")
        old = self._state()
        self._busy = True
        try:
            out = fn(old, *args)
            new, *rest = out if isinstance(out, tuple) else (out,)
            if not isinstance(new, Cache) or new.layout != self.layout or _gone(new):
                raise TypeError("`fn` returned no cache of this layout first; return (cache, ...)")
            self._cache = new
            self.version += 1
            return tuple(rest)
        except BaseException as error:
            lost = _gone(old) or (isinstance(error, jax.errors.JaxRuntimeError) and _failed(old))
            if self._cache is not old or not lost:
                self._counts.failed += 1
                raise
            del old
            self._lose()
            if not isinstance(error, Exception):
                raise
            raise StateLost(f"the pools were lost: {error!r}") from error
        finally:
            self._busy = False

    def _lose(self) -> None:
        """The pools are gone: tells whoever runs; the next to use the state makes new ones."""
        self._cache = None
        self.era += 1
        self.version += 1
        self._counts.lost += 1
        for number, mark in self._flight:  # what has finished is right, whatever came later
            try:
                mark.block_until_ready()
            except jax.errors.JaxRuntimeError:
                break
            self._settled = number
        self._reroute()
        self._settled = self._steps
        self._flight.clear()
        self._ended.clear()
        self._notify()

    def _reroute(self) -> None:
        """Tells whoever runs that the pools are gone."""

    def _poisoned(self, era: int) -> None:
        """A result of this era turned out to have failed. Takes the lock."""
        with self._lock:
            if self.era == era:
                self._lose()

    def _notify(self) -> None:
        self._changes += 1
        self._changed.notify_all()

    def _need(self, bucket: int, identity: Mapping[str, Any], requests: int = 1) -> Need:
        """What requests of an identity need; kept, since many have the same. Takes the lock."""
        asked = {**self.identity, **identity}
        for name in asked.keys() - IDENTITY:
            raise TypeError(f"`{name}` is no part of an identity; give {', '.join(IDENTITY)}")
        if asked.get("media") is not None:
            media = np.asarray(asked["media"])
            media = media[None] if media.ndim == 2 else media
            lacks = bucket // self.layout.segment_tokens - media.shape[1]  # of a shorter bucket
            asked["media"] = np.pad(media, ((0, 0), (0, max(lacks, 0)), (0, 0)))
        with self._lock:
            cache = self._state()
            asked = {"codes": self._codes, **asked}
            key = (bucket, requests, *((k, _frozen(v)) for k, v in sorted(asked.items())))
            if key not in self._needs:
                made = need(cache, requests=requests, bucket=bucket, **asked)
                self._needs[key] = made
                if len(self._needs) > NEEDS:
                    self._needs.popitem(last=False)
            self._needs.move_to_end(key)
            return self._needs[key]

    def _launched(self) -> int:
        """A step is in flight. Returns its number."""
        self._steps += 1
        self._counts.steps += 1
        self._flight.append((self._steps, _mark(*_touched(self._state()))))
        return self._steps

    def _prune(self) -> None:
        """Forgets steps that have finished; if one of them failed, the pools are lost."""
        while self._flight and self._flight[0][1].is_ready():
            number, mark = self._flight[0]
            try:
                mark.block_until_ready()
            except jax.errors.JaxRuntimeError:
                self._lose()
                return
            self._settled = number
            self._flight.popleft()

    def _wait(self, step: int) -> None:
        """Waits until a step has finished. Takes the lock, but not while it waits."""
        with self._lock:
            era = self.era
            marks = [mark for number, mark in self._flight if number <= step]
        if marks:
            try:
                marks[-1].block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                self._poisoned(era)
                raise StateLost(f"a step failed on the device: {error}") from error
        with self._lock:
            self._prune()

    def _fetch(self, arrays: Any, era: int) -> Any:
        """Results of this era on the host, waited for; None if the state was lost with them."""
        try:
            return jax.device_get(arrays)
        except jax.errors.JaxRuntimeError:
            self._poisoned(era)
            return None

    def _end(self, lease: Lease, step: int) -> None:
        """A lease is to be released after a step."""
        self._ends += 1
        self._ended[self._ends] = lease, step

    def _sweep(self) -> Exception | None:
        """Releases what ended and has no step in flight; the first error, if any.

        What could not be released stays for the next time.
        """
        if self._ended:
            self._prune()
        first = None
        for number, (lease, step) in list(self._ended.items()):
            if number not in self._ended or step > self._settled:
                continue
            try:
                self._commit(release, lease)
            except Exception as error:
                first = first or error
                continue
            self._ended.pop(number, None)
            self._counts.released += 1
            self._notify()
        return first


def _frozen(value: Any) -> Any:
    """A value of an identity in a form that can be a key."""
    if isinstance(value, np.ndarray | jax.Array):
        value = np.asarray(value)
        return value.shape, str(value.dtype), value.tobytes()
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    return type(value), value if isinstance(value, Hashable) else repr(value)


def _gone(cache: Cache) -> bool:
    return any(a.is_deleted() for a in jax.tree.leaves(cache))


def _failed(cache: Cache) -> bool:
    """Whether the program that made a cache failed on the device; waits for it."""
    try:
        jax.block_until_ready(cache)
    except jax.errors.JaxRuntimeError:
        return True
    return False


def _touched(cache: Cache) -> tuple[jax.Array, ...]:
    """What a step writes, whatever else it passes on as it was."""
    return cache.clock, cache.reached, *(p.stamp for p in cache.pools)


@jax.jit
def _mark(clock: jax.Array, reached: jax.Array, *stamps: jax.Array) -> jax.Array:
    """`u32[]`: an array of its own that is ready, or raises, once its arguments are there."""
    return sum((s[0, 0] for s in stamps), clock + reached[0].astype(jnp.uint32))
