"""Between a manager and a store: what is put away when, and what is fetched before admission.

Programs are dispatched under the manager's lock; files are read and written outside of it. What
goes wrong with a record costs the request that wanted it a recomputation, and nobody else anything.
"""

import dataclasses
import hashlib
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hkv._admit import Verdict
from hkv._arguments import check_int
from hkv._availability import Place, Status
from hkv._cache import Cache
from hkv._copies import adopt, begin_load, end_load, load, offload, offloaded
from hkv._counters import count
from hkv._identity import Need
from hkv._layout import DEVICE_FORMS, FORMS, Form, Layout
from hkv._lifecycle import Life
from hkv._owner import StateLost
from hkv._pages import occupancy
from hkv._query import find, query
from hkv._retain import _reach
from hkv._route import Plan, route
from hkv._slots import take

if TYPE_CHECKING:
    from hkv._line import Line
    from hkv._request import Request
    from hkv.disk import LocalStore

WRITES = ("through", "selective", "back")
PARTS = {"history": (Form.COMPRESSED, Form.INDEXER), "rolling": (Form.WINDOW, Form.TAIL)}
TRIES = 4  # plans of one request that are fetched one after the other
AHEAD = 16  # segments of a prefix that are looked up at once


@dataclasses.dataclass(frozen=True)
class _Prefix:
    """Whole segments at the beginning of a prompt, and what names them."""

    tokens: jax.Array  # i32[1, T], on the device
    ids: np.ndarray  # i32[T]
    segments: int  # how many of them
    need: Need  # of one request
    keys: list[bytes]


@dataclasses.dataclass
class _Wait:
    """How many seconds one request may still wait for files."""

    left: float


class Tier:
    """What moves between one manager's cache and a store.

    Args:
        owner: the manager.
        store: where records are kept.
        write: "through" puts away what is published; "selective" what was published and then
            reused; "back" what was published longest ago, once pages run short; None nothing that
            is not asked for.
        windows: windows and tails go along for boundaries at multiples of so many tokens; up to
            a segment for all; 0 for none, so that they are replayed.
        staging: segments that are on their way at once, in each direction.
        timeout: seconds for which a request waits for what it fetches.
        spare: with "back", the part of the pages of each group that is kept free.
    """

    def __init__(
        self, owner: "Line", store: "LocalStore", *, write: str | None = "through",
        windows: int = 1, staging: int = 8, timeout: float = 5.0, spare: float = 0.1,
    ):  # fmt: skip
        if not owner.layout.disk:
            raise ValueError("`layout` has no DISK form for the `store`; make it with disk=True")
        if write is not None and write not in WRITES:
            raise ValueError(f"`write` is {write!r}; give one of {WRITES} or None")
        check_int("windows", windows, 0)
        check_int("staging", staging, 1)
        if not timeout > 0:
            raise ValueError(f"`timeout` is {timeout!r}; give seconds, more than 0")
        self.owner, self.store, self.layout = owner, store, owner.layout
        self.write, self.windows, self.staging = write, windows, staging
        self.timeout, self.spare = timeout, spare
        self.fetching = threading.Lock()  # one request at a time, so that none fetches twice
        self._files = ThreadPoolExecutor(1, thread_name_prefix="hkv-files")
        self._fetches = ThreadPoolExecutor(1, thread_name_prefix="hkv-fetch")
        self._backlog: OrderedDict[bytes, _Prefix] = OrderedDict()  # with "back", oldest first
        self._jobs: queue.Queue[tuple | None] = queue.Queue()
        self._worker = threading.Thread(target=self._work, name="hkv-offload", daemon=True)
        self._worker.start()

    def prefix(self, tokens: jax.Array, ids: np.ndarray, length: int, identity: Mapping) -> _Prefix:
        """What names the whole segments of a prompt."""
        need = self.owner._need(tokens.shape[1], identity)
        n = length // self.layout.segment_tokens
        return _Prefix(tokens, ids, n, need, prefix_keys(self.layout, ids, n, need))

    # Out.

    def published(self, prefix: _Prefix, reused: int) -> None:
        """What a policy does about segments that were published, `reused` tokens of them again."""
        if self.write == "through":
            self.put_away(prefix)
        elif self.write == "selective":
            n = min(reused // self.layout.segment_tokens, prefix.segments)
            if n:
                self.put_away(dataclasses.replace(prefix, segments=n, keys=prefix.keys[:n]))
        elif self.write == "back" and prefix.segments:
            self._backlog.pop(prefix.keys[-1], None)
            self._backlog[prefix.keys[-1]] = prefix
            self._jobs.put((None, None, False))

    def put_away(self, prefix: _Prefix, keep: bool = True) -> "Future[int]":
        """Has a prefix put away; the future says how many segments lie in the store then."""
        future: Future[int] = Future()
        if prefix.segments:
            self._jobs.put((future, prefix, keep))
        else:
            future.set_result(0)
        return future

    def warmup(self, prefix: _Prefix, plan: Plan) -> None:
        """Compiles the programs for one length bucket; `plan` fetches nothing."""
        owner, lay, K, N = self.owner, self.layout, self.staging, self.layout.segments
        S = prefix.tokens.shape[1] // lay.segment_tokens
        none = np.full(K, N, np.int32), np.zeros((K, FORMS), bool), np.uint8(Place.LOCAL_DISK)
        which, forms, place = jax.device_put(none)
        empty = np.zeros((S, len(lay.groups), 2), np.int32), np.zeros(S, np.uint8)
        copied, zero = jax.device_put(empty)
        handles: dict = {}
        none_of = np.zeros((S, FORMS), bool)
        payload, digest = self._read(prefix, [], none_of, handles, _Wait(self.timeout))
        arrays = jax.device_put((payload, digest))
        with owner._lock:
            _stored(owner._state(), prefix.tokens, plan.resume, prefix.need)
            (copies,) = owner._commit(offload, which, forms)
            for keep in (False, True):
                owner._commit(lambda c, k=keep: offloaded(c, copies, forms, place, k))
            owner._commit(adopt, prefix.need, prefix.tokens, copied, zero, zero)
            loading, _ = owner._commit(begin_load, plan)
            owner._commit(load, loading, which, *arrays)
            owner._commit(end_load, loading)

    def close(self, wait: bool = True) -> None:
        """Puts away what is still to be, and ends the threads."""
        self._jobs.put(None)
        if wait:
            self._worker.join()
        self._fetches.shutdown(wait=wait)
        self._files.shutdown(wait=False)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, prefix, keep = job
            try:
                n = self._relieve() if prefix is None else self._put_away(prefix, keep)
                if future is not None:
                    future.set_result(n)
            except Exception as error:  # told to whoever asked; nobody else depends on it
                with self.owner._lock:
                    self.owner._counts.failed += 1
                if future is not None:
                    future.set_exception(error)
            self._jobs.task_done()

    def _relieve(self) -> int:
        """Puts away and lets go what was published longest ago, until enough pages are free."""
        n = 0
        while self._backlog:
            with self.owner._lock:
                pages = occupancy(self.owner._state())
            free = jax.device_get(pages["free"])
            short = [f < self.spare * (g.pages - 1)
                     for f, g in zip(free, self.layout.groups, strict=True)]  # fmt: skip
            if not any(short):
                return n
            n += self._put_away(self._backlog.popitem(last=False)[1], keep=False)
        return n

    def _put_away(self, prefix: _Prefix, keep: bool) -> int:
        owner, N, K = self.owner, self.layout.segments, self.staging
        length = jax.device_put(np.array([prefix.segments * self.layout.segment_tokens], np.int32))
        with owner._lock:
            rows, life, copied, held = _stored(owner._state(), prefix.tokens, length, prefix.need)
        rows, life, copied, held = jax.device_get((rows, life, copied, held))
        wanted = self._wanted_forms(rows, life, copied, held, keep)
        columns = np.flatnonzero(wanted.any(axis=1))
        for at in range(0, len(columns), K):
            some = columns[at : at + K]
            which, forms = np.full(K, N, np.int32), np.zeros((K, FORMS), bool)
            which[: len(some)], forms[: len(some)] = rows[some], wanted[some]
            which, forms = jax.device_put((which, forms))
            with owner._lock:
                (copies,) = owner._commit(offload, which, forms)
            stored = np.zeros((K, FORMS), bool)
            try:
                data = jax.device_get(copies)
                stored[: len(some)] = self._write(prefix, some, data)
            finally:
                done, place = jax.device_put((stored, np.uint8(Place.LOCAL_DISK)))
                with owner._lock:
                    owner._commit(lambda c, x=copies, d=done, p=place: offloaded(c, x, d, p, keep))
                    owner._notify()
            if (wanted[some] & ~stored[: len(some)]).any():
                break  # nothing is stored after what could not be: the next time begins here
        return int(np.sum(rows < N))

    def _wanted_forms(self, rows, life, copied, held, keep: bool) -> np.ndarray:
        """`bool[S, F]`: forms that are to be copied."""
        lay, B, S = self.layout, self.layout.segment_tokens, len(rows)
        out = np.zeros((S, FORMS), bool)
        disk = life[:, Form.DISK] == Life.ON_DISK
        near = _reach(lay)
        for f in DEVICE_FORMS:
            mine = list(lay.form_groups(f))
            if not mine:
                continue
            there = (life[:, f] == Life.READY) & (rows < lay.segments)
            some = (held[:, mine, 1] > held[:, mine, 0]).any(axis=1)
            known = disk & (copied[:, mine, 1] > copied[:, mine, 0]).any(axis=1)
            out[:, f] = there & some & (~known | (not keep))
            if f in PARTS["rolling"]:
                at = np.zeros(S, bool)
                for s in range(S):
                    end = (s + 1) * B
                    if self.windows and (self.windows <= B or end % self.windows < B):
                        at[max(s - near, 0) : s + 1] = True
                out[:, f] &= at
        return out

    def _write(self, prefix: _Prefix, columns: Any, data: Any) -> np.ndarray:
        """Stores copies; `bool[k, F]` which forms are in the store now."""
        from hkv.disk import Rejected

        B = self.layout.segment_tokens
        records, whose = [], []
        for k, s in enumerate(columns):
            for part, forms in PARTS.items():
                copied = [f for f in forms if data.forms[k, f]]
                if copied:
                    ids = prefix.ids[s * B : (s + 1) * B]
                    records.append((self._record(prefix, s, part, copied, data, k), ids))
                    whose.append((k, copied))
        out, counts = np.zeros((len(columns), FORMS), bool), self.owner._counts
        for (k, copied), (record, _), outcome in zip(
            whose, records, self.store.put(records), strict=True
        ):
            if isinstance(outcome, Rejected):
                with self.owner._lock:
                    count(counts.rejected, [outcome.problem.name], [1])
                continue
            out[k, copied] = True
            with self.owner._lock:
                counts.bytes_stored += sum(a.nbytes for a in record.arrays.values())
        return out

    def _record(self, prefix: _Prefix, s: int, part: str, forms, data: Any, k: int):
        from hkv.disk import Header, Record, Section

        lay, B, seg = self.layout, self.layout.segment_tokens, data.segments
        sections, arrays = [], {}
        for g, spec in enumerate(lay.groups):
            lo, hi = (int(x) for x in seg.held[k, g] - seg.start[k])
            if spec.form in forms and lo < hi:
                a = data.payload[g][k]
                digest = int(seg.digest[k, g, 0]), int(seg.digest[k, g, 1])
                abi = int(seg.abi[k, g])
                sections.append(Section(spec.name, abi, str(a.dtype), a.shape, (lo, hi), digest))
                arrays[spec.name] = a
        header = Header(
            key=prefix.keys[s], parent=prefix.keys[s - 1] if s else bytes(32), part=part,
            start=int(seg.start[k]), length=B, segment_tokens=B, epoch=int(seg.epoch[k]),
            indexer_version=int(seg.indexer_version[k]), provenance=int(seg.provenance[k]),
            sections=tuple(sections),
        )  # fmt: skip
        return Record(header, arrays)

    # In.

    def fetch(self, prefix: _Prefix, length: jax.Array) -> int:
        """Brings in what the cheapest plan for a prompt wants from the store.

        Args:
            prefix: of the prompt.
            length: `i32[1]` tokens of the prompt.

        Returns:
            Segments that were loaded. Whatever goes wrong is counted, and leaves the rest to be
            computed.
        """
        wait = _Wait(self.timeout)
        if not self.fetching.acquire(timeout=self.timeout):
            return 0
        handles: dict[tuple[int, str], Any] = {}
        n = 0
        try:
            for turn in range(TRIES):
                with self.owner._lock:
                    found = query(self.owner._state(), prefix.tokens, length, prefix.need)
                    plan = route(found, self.owner._costs)
                status, place, wants = jax.device_get((found.status, found.place, plan.fetch))
                if not turn and self._look_up(prefix, status[0], place[0], handles, wait):
                    continue
                if not wants.any():
                    break
                n += self._load(prefix, plan, handles, wait)
        except (Late, StateLost, OSError) as error:  # what is not there is computed
            name = "TIMEOUT" if isinstance(error, Late) else type(error).__name__
            with self.owner._lock:
                count(self.owner._counts.rejected, [name], [1])
        finally:
            for handle in handles.values():
                handle.close()
            self.fetching.release()
        return n

    def fetch_later(self, request: "Request") -> "Future[int]":
        """`fetch` for a request, on a thread of its own."""
        prefix = self.prefix(request.tokens, request._ids, request.length, request.identity)
        return self._fetches.submit(self.fetch, prefix, request._numbers[0])

    def _in_time(self, wait: _Wait, fn, *args):
        """`fn(*args)` on files, on a thread that is waited for no longer than is left."""
        begin = time.monotonic()
        try:
            return self._files.submit(fn, *args).result(wait.left)
        except Late:
            # Whatever it hangs on is not ours to end; others get a thread of their own.
            self._files.shutdown(wait=False)
            self._files = ThreadPoolExecutor(1, thread_name_prefix="hkv-files")
            raise
        finally:
            wait.left = max(wait.left - (time.monotonic() - begin), 0.0)

    def _look_up(self, prefix: _Prefix, status, place, handles: dict, wait: _Wait) -> bool:
        """Enters what the store has of a prefix and the table lacks; whether there was anything."""
        from hkv.disk import Rejected

        lay, S = self.layout, status.shape[0]
        lacks = (status[:, list(DEVICE_FORMS)] >= Status.RECOVER).any(axis=1)
        lacks &= place[:, Form.DISK] == Place.NONE
        known = (status != Status.NOT_NEEDED).any(axis=1) & ~lacks
        copied = np.zeros((S, len(lay.groups), 2), np.int32)
        worst = np.zeros(S, np.uint8)
        wanted = self._wanted(prefix.need)
        columns = [s for s in range(prefix.segments) if lacks[s]]
        broken = False
        for at in range(0, len(columns), AHEAD):
            some = columns[at : at + AHEAD]
            names = [(s, part) for s in some for part in PARTS]
            files = self._in_time(wait, self.store.open, [(prefix.keys[s], p) for s, p in names])
            for (s, part), handle in zip(names, files, strict=True):
                if isinstance(handle, Rejected):
                    self._reject(handle)
                    continue
                try:
                    bad = wanted.check(handle.header)
                except Rejected as error:
                    self._reject(error)
                    handle.close()
                    continue
                handles[s, part] = handle
                worst[s] = max(worst[s], handle.header.provenance)
                for section in handle.header.sections[1:]:
                    if section.name in bad:
                        self._reject(Rejected(bad[section.name], prefix.keys[s].hex()))
                    else:
                        copied[s, lay.group(section.name)] = section.held
            for s in some:
                broken |= not copied[s].any() and not known[s]
            if broken:
                break
        if not copied.any():
            return False
        arrays = jax.device_put((copied, np.full(S, Place.LOCAL_DISK, np.uint8), worst))
        with self.owner._lock:
            self.owner._commit(adopt, prefix.need, prefix.tokens, *arrays)
        return True

    def _wanted(self, need: Need):
        from hkv.disk import Wanted

        lay = self.layout
        asked = jax.device_get((need.epoch, need.indexer_version, need.provenance, need.abi))
        epoch, indexer, provenance = (int(x[0]) for x in asked[:3])
        groups = {
            g.name: (int(asked[3][0, i]), g.dtype, _shape(lay, i))
            for i, g in enumerate(lay.groups)
        }  # fmt: skip
        indexed = frozenset(g.name for g in lay.groups if g.form is Form.INDEXER)
        return Wanted(lay.segment_tokens, epoch, indexer, provenance, groups, indexed)

    def _load(self, prefix: _Prefix, plan: Plan, handles: dict, wait: _Wait) -> int:
        """Carries out the fetches of one plan; how many segments were loaded."""
        owner, K, S = self.owner, self.staging, prefix.tokens.shape[1] // self.layout.segment_tokens
        with owner._lock:
            era = owner.era
            loading, answer = owner._commit(begin_load, plan)
        n = 0
        try:
            forms, verdict = jax.device_get((loading.forms, answer.verdict))
            if verdict[0] != Verdict.ADMIT:
                return 0
            columns = np.flatnonzero(forms.any(axis=1))
            prefix = self._with_last(prefix, loading.rows, columns[-1:])
            for at in range(0, len(columns), K):
                some = columns[at : at + K]
                payload, digest = self._read(prefix, some, forms, handles, wait)
                which = np.full(K, S, np.int32)
                which[: len(some)] = some
                arrays = jax.device_put((which, payload, digest))
                with owner._lock:
                    if owner.era != era:
                        raise StateLost("the pools were lost during a fetch")
                    (right,) = owner._commit(load, loading, *arrays)
                right = np.asarray(right)[: len(some)]
                n += int(right.sum())
                with owner._lock:
                    owner._counts.segments_fetched += int(right.sum())
        finally:
            with owner._lock:
                if owner.era == era:
                    owner._commit(end_load, loading)
                    owner._notify()
        return n

    def _with_last(self, prefix: _Prefix, rows: jax.Array, column: np.ndarray) -> _Prefix:
        """The prefix with the stored tokens in `column`: a prompt may share only some of them."""
        B = self.layout.segment_tokens
        with self.owner._lock:
            block = take(self.owner._state().tokens, rows[column], 0)
        ids = prefix.ids.copy()
        for s, mine in zip(column.tolist(), np.asarray(block), strict=True):
            ids[s * B : (s + 1) * B] = mine
        n = max(prefix.segments, *(column + 1).tolist(), 0)
        keys = prefix_keys(self.layout, ids, n, prefix.need)
        return dataclasses.replace(prefix, ids=ids, segments=n, keys=keys)

    def _read(self, prefix: _Prefix, columns, forms, handles: dict, wait: _Wait):
        """Payload per group and digests of K columns; digests of 0, which none is, if it failed."""
        from hkv.disk import Rejected

        lay, K = self.layout, self.staging
        payload = [np.zeros((K, *_shape(lay, g)), jnp.dtype(lay.groups[g].dtype))
                   for g in range(len(lay.groups))]  # fmt: skip
        digest = np.zeros((K, len(lay.groups), 2), np.uint32)
        names = [(k, s, part) for k, s in enumerate(columns) for part in PARTS
                 if forms[s, list(PARTS[part])].any()]  # fmt: skip
        lack = [(s, part) for _, s, part in names if (s, part) not in handles]
        if lack:
            files = self._in_time(wait, self.store.open, [(prefix.keys[s], p) for s, p in lack])
            for at, handle in zip(lack, files, strict=True):
                if isinstance(handle, Rejected):
                    self._reject(handle)
                else:
                    handles[at] = handle
        wanted = self._wanted(prefix.need)
        ready = [(k, s, part) for k, s, part in names if (s, part) in handles]
        arrays = self._in_time(wait, self.store.read_all, [handles[s, p] for _, s, p in ready])
        for (k, s, part), got in zip(ready, arrays, strict=True):
            if isinstance(got, Rejected):
                self._reject(got)
                continue
            header = handles[s, part].header
            B = lay.segment_tokens
            if not np.array_equal(got["tokens"], prefix.ids[s * B : (s + 1) * B]):
                continue
            bad = wanted.check(header)
            for section in header.sections[1:]:
                if section.name not in bad:
                    g = lay.group(section.name)
                    payload[g][k], digest[k, g] = got[section.name], section.digest
        return tuple(payload), digest

    def _reject(self, error) -> None:
        if error.problem.name != "MISSING":
            with self.owner._lock:
                count(self.owner._counts.rejected, [error.problem.name], [1])


def prefix_keys(layout: Layout, ids: np.ndarray, segments: int, need: Need) -> list[bytes]:
    """Names of segments that processes share: SHA-256 over identity and all tokens up to the end.

    Args:
        layout: gives B.
        ids: `i32[T]` token ids.
        segments: how many whole segments.
        need: of one request: salt, adapter and model, start, epoch and media are part of the name.
    """
    B = layout.segment_tokens
    identity, start, epoch, media = jax.device_get(
        (need.identity, need.start, need.epoch, need.media)
    )
    root = b"hkv-prefix-v1" + np.array([B, start[0], epoch[0]], "<i8").tobytes()
    key = hashlib.sha256(root + identity[0].astype("<u4").tobytes()).digest()
    out = []
    for s in range(segments):
        block = ids[s * B : (s + 1) * B].astype("<u4").tobytes()
        key = hashlib.sha256(key + media[0, s].astype("<u4").tobytes() + block).digest()
        out.append(key)
    return out


def _shape(layout: Layout, g: int) -> tuple[int, ...]:
    spec = layout.groups[g]
    return (len(spec.layers), layout.segment_pages(spec), spec.rows_per_page, *spec.row)


@jax.jit
def _stored(cache: Cache, tokens: jax.Array, length: jax.Array, need: Need):
    """Of each whole segment of a prefix: its row, N for none, and what it has where."""
    lay, N = cache.layout, cache.layout.segments
    match = find(cache, tokens[0], length[0], need.request(0), all_but_one=False)
    column = jnp.arange(match.rows.shape[0], dtype=jnp.int32)
    rows = jnp.where(column < match.whole, match.rows, N)
    t = cache.table
    whole = take(t.length, rows, 0) == lay.segment_tokens
    rows = jnp.where(whole, rows, N)
    return rows, take(t.life, rows, 0), take(t.copied, rows, 0), take(t.held, rows, 0)
