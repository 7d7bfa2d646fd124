"""Records in a local directory, which is its own index: one file per record, by name.

A file is written without a name, synced, and then linked into place, so a name always stands for a
whole record, whatever is killed when. Several processes may share a directory.
"""

import contextlib
import enum
import errno
import fcntl
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hkv.disk._record import PAGE, Header, Problem, Record, Rejected, aligned, pack, parse, unpack

VERSION = "v1"  # of the names and directories
DAMAGED = "damaged"
_NAME = re.compile(r"[0-9a-f]{64}\.\w+\.\d+-\d+")  # whatever else lies there is somebody else's
_OLD = 3600.0  # seconds after which a file that a killed writer left behind is swept
_PROBLEMS = {
    errno.ENOSPC: Problem.FULL, errno.EDQUOT: Problem.FULL, errno.EFBIG: Problem.FULL,
    errno.EROFS: Problem.READ_ONLY, errno.EACCES: Problem.READ_ONLY, errno.EPERM: Problem.READ_ONLY,
    errno.ENOENT: Problem.GONE, errno.ENOTDIR: Problem.GONE,
}  # fmt: skip


class Outcome(enum.Enum):
    """What became of a record that was to be stored."""

    STORED = "stored; durable if the store is"
    EXISTS = "an equal record was there"


class Name(NamedTuple):
    """Which record: the key of the prefix through its segment, and the part of it."""

    key: bytes
    part: str


class Entry(NamedTuple):
    """One record in the directory."""

    name: Name
    nbytes: int  # on the disk
    used: int  # nanoseconds since the epoch; a segment counts as used before those it follows
    shard: int = 0
    shards: int = 1


class Handle:
    """An open record. Its header is verified; `read` verifies the rest.

    Deleting the record changes nothing for who has it open.
    """

    def __init__(self, store: "LocalStore", path: Path, descriptor: int, header: Header):
        self.header = header
        self._store, self._path, self._descriptor = store, path, descriptor

    def read(self) -> dict[str, np.ndarray]:
        """The arrays by name, token ids as "tokens"; new memory at multiples of 64 bytes.

        Raises:
            Rejected: the payload is damaged or cut off; the record is moved aside.
        """
        try:
            payload = aligned(self.header.nbytes - PAGE)
            view, at = memoryview(payload), PAGE
            while len(view):
                n = os.preadv(self._descriptor, [view], at)
                if n == 0:
                    raise Rejected(Problem.TRUNCATED, str(self._path))
                view, at = view[n:], at + n
            return unpack(self.header, payload, str(self._path))
        except Rejected:
            self._store._set_aside(self._path, os.fstat(self._descriptor).st_ino)
            raise
        except OSError as error:
            raise Rejected(_problem(error), str(self._path), str(error)) from error

    def close(self) -> None:
        """Lets the file go. Harmless a second time."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = close

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *_) -> None:
        self.close()


class LocalStore:
    """Records in a directory.

    Args:
        root: the directory; made if it is not there.
        cap_bytes: most bytes on the disk in all; None for no cap. What other processes have stored
            is noticed each time this one has stored a sixteenth of it.
        caps: most bytes of each part by name, beside that.
        floor_bytes: bytes that stay free on the file system.
        durable: whether what is stored is synced to the disk before `put` returns.
        threads: for reading and writing.

    Raises:
        OSError: the directory can be neither found nor made.
    """

    def __init__(
        self, root: str | os.PathLike, *, cap_bytes: int | None = None,
        caps: Mapping[str, int] | None = None, floor_bytes: int = 0, durable: bool = True,
        threads: int = 8,
    ):  # fmt: skip
        self.root = Path(root).absolute()
        self.cap_bytes, self.caps = cap_bytes, dict(caps or {})
        self.floor_bytes, self.durable = floor_bytes, durable
        (self.root / VERSION).mkdir(parents=True, exist_ok=True)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hkv-disk")
        with contextlib.suppress(OSError):
            self._sweep()
        self._count(self.scan())
        self._oldest: dict[str, deque[Entry]] = {}  # what to evict next, by part

    # Storing.

    def put(self, records: Sequence[tuple[Record, np.ndarray]]) -> list[Outcome | Rejected]:
        """Stores records with their token ids `i32[length]`, each after its parent if both are new.

        Returns:
            For each what became of it. What is not stored leaves nothing behind.
        """
        packed, now = [pack(record, tokens) for record, tokens in records], time.time_ns()
        refused = self._make_room([header for header, _ in packed])
        written = list(self._pool.map(self._write, packed, refused, [now] * len(packed)))
        order = sorted(range(len(packed)), key=lambda i: packed[i][0].start)
        out: list[Outcome | Rejected] = [Outcome.EXISTS] * len(packed)
        touched: set[Path] = set()
        lost: set[Name] = set()
        for i in order:
            header, file = packed[i][0], written[i]
            name = Name(header.key, header.part)
            path = self._path(name, header.shard, header.shards)
            try:
                if isinstance(file, Rejected):
                    raise file
                if Name(header.parent, header.part) in lost:
                    raise Rejected(Problem.PARENT, str(path))
                out[i] = self._link(file, path, header, now)
                touched.add(path.parent)
            except Rejected as error:
                out[i] = error
            except OSError as error:
                out[i] = Rejected(_problem(error), str(path), str(error))
            finally:
                if not isinstance(file, Rejected):
                    os.close(file)
            if isinstance(out[i], Rejected):
                lost.add(name)
        if self.durable:
            list(self._pool.map(_sync_directory, touched))
        return out

    def _write(
        self, packed: tuple[Header, list], refused: Problem | None, now: int
    ) -> int | Rejected:
        """An open file without a name that holds a record."""
        header, buffers = packed
        path = self._path(Name(header.key, header.part), header.shard, header.shards)
        if refused is not None:
            return Rejected(refused, str(path), f"{header.nbytes} bytes")
        file = -1
        try:
            if self.root.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o644)
            views = [memoryview(b).cast("B") for b in buffers]
            while views:
                n = os.writev(file, views[:512])
                while views and n >= len(views[0]):
                    n -= len(views.pop(0))
                if views and n:
                    views[0] = views[0][n:]
            os.utime(file, ns=(_used(header, now),) * 2)
            if self.durable:
                os.fdatasync(file)
            return file
        except OSError as error:
            if file >= 0:
                os.close(file)
            return Rejected(_problem(error), str(path), str(error))

    def _link(self, file: int, path: Path, header: Header, now: int) -> Outcome:
        """Gives a written record its name, in place of one that is no longer right."""
        source = f"/proc/self/fd/{file}"
        try:
            _linkat(source, path)
        except FileExistsError:
            if self._same(path, header):
                os.utime(path, ns=(_used(header, now),) * 2)
                return Outcome.EXISTS
            other = path.with_name(f".new.{os.getpid()}.{file}.{path.name}")
            _linkat(source, other)
            os.replace(other, path)
        part = header.part
        self._bytes[part] = self._bytes.get(part, 0) + header.nbytes
        self._news += header.nbytes
        return Outcome.STORED

    def _same(self, path: Path, header: Header) -> bool:
        try:
            with open(path, "rb") as f:
                return parse(f.read(PAGE), os.fstat(f.fileno()).st_size, str(path)) == header
        except (Rejected, OSError):
            return False

    # Room.

    def _make_room(self, headers: Sequence[Header]) -> list[Problem | None]:
        """Evicts so that records fit under the caps; for each why it can't be stored, if so."""
        size: dict[str, int] = {}
        for h in headers:
            size[h.part] = size.get(h.part, 0) + h.nbytes
        try:
            if self.cap_bytes is not None and self._news * 16 > self.cap_bytes:
                self._count(self.scan())
            if self._over(size):
                with self._only_evictor():
                    self._evict(size)
        except OSError as error:
            return [_problem(error)] * len(headers)
        return [Problem.FULL if self._over(size) else None] * len(headers)

    def _over(self, size: Mapping[str, int]) -> dict[str | None, int]:
        """Bytes too many of each part, and under None in all."""
        out: dict[str | None, int] = {}
        total = sum(size.values())
        if self.cap_bytes is not None:
            out[None] = sum(self._bytes.values()) + total - self.cap_bytes
        if self.floor_bytes:
            free = os.statvfs(self.root)
            short = self.floor_bytes + total - free.f_bavail * free.f_frsize
            out[None] = max(out.get(None, short), short)
        for part, cap in self.caps.items():
            if size.get(part):
                out[part] = self._bytes.get(part, 0) + size[part] - cap
        return {k: n for k, n in out.items() if n > 0}

    @contextlib.contextmanager
    def _only_evictor(self) -> Iterator[None]:
        with open(self.root / ".evict", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _evict(self, size: Mapping[str, int]) -> None:
        """The least recently used first; at equal use what a replay makes anew.

        The directory is read once for many evictions: what it had then and has not been used since
        is older than whatever came later.
        """
        lacks, read = self._over(size), False
        while lacks:
            entry = self._victim(next((p for p in lacks if p is not None), None))
            if entry is None:
                if read:
                    return
                entries = sorted(self.scan(), key=_age)
                self._count(entries)  # other processes may have been busy
                self._oldest = {}
                for e in entries:
                    self._oldest.setdefault(e.name.part, deque()).append(e)
                lacks, read = self._over(size), True
            elif self.delete([entry.name], shard=entry.shard, shards=entry.shards):
                for k in (entry.name.part, None):
                    if k in lacks:
                        lacks[k] -= entry.nbytes
                lacks = {k: n for k, n in lacks.items() if n > 0}

    def _victim(self, part: str | None) -> Entry | None:
        """The oldest of a part, or of all, that has not been used since the directory was read."""
        while True:
            mine = [q for p, q in self._oldest.items() if q and part in (p, None)]
            if not mine:
                return None
            entry = min(mine, key=lambda q: _age(q[0])).popleft()
            with contextlib.suppress(OSError):
                path = self._path(entry.name, entry.shard, entry.shards)
                if os.stat(path).st_mtime_ns == entry.used:
                    return entry

    def _count(self, entries: Iterable[Entry]) -> None:
        """Takes over the bytes that are really there."""
        self._bytes, self._news = _by_part(entries), 0  # bytes of each part; stored since then

    # Finding and reading.

    def open(
        self, names: Sequence[tuple[bytes, str]], *, shard: int = 0, shards: int = 1
    ) -> list[Handle | Rejected]:
        """Opens records; of each the header is read and verified, or it is said what is wrong."""

        now = time.time_ns()

        def one(name):
            return self._open(Name(*name), shard, shards, now)

        return list(self._pool.map(one, names)) if len(names) > 1 else [one(n) for n in names]

    def _open(self, name: Name, shard: int, shards: int, now: int) -> Handle | Rejected:
        path = self._path(name, shard, shards)
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return Rejected(Problem.MISSING, str(path))
        except OSError as error:
            return Rejected(_problem(error), str(path), str(error))
        try:
            info = os.fstat(file)
            header = parse(os.pread(file, PAGE, 0), info.st_size, str(path))
            if (header.key, header.part) != name:
                raise Rejected(Problem.KEY, str(path), header.key.hex())
            with contextlib.suppress(OSError):  # a directory that can only be read
                os.utime(path, ns=(_used(header, now),) * 2)
            return Handle(self, path, file, header)
        except Rejected as error:
            if error.problem is not Problem.VERSION:
                self._set_aside(path, os.fstat(file).st_ino)
            os.close(file)
            return error
        except OSError as error:
            os.close(file)
            return Rejected(_problem(error), str(path), str(error))

    def read_all(self, handles: Iterable[Handle]) -> list[dict[str, np.ndarray] | Rejected]:
        """`read` of several at once."""
        return list(self._pool.map(_read, handles))

    def _set_aside(self, path: Path, inode: int) -> None:
        """Takes a damaged record out of use, if the name still stands for that very file."""
        with contextlib.suppress(OSError):
            if os.stat(path).st_ino == inode:
                (self.root / DAMAGED).mkdir(exist_ok=True)
                os.replace(path, self.root / DAMAGED / path.name)

    # Looking after it.

    def delete(self, names: Iterable[tuple[bytes, str]], *, shard: int = 0, shards: int = 1) -> int:
        """Deletes records; how many there were."""
        count = 0
        for name in names:
            path = self._path(Name(*name), shard, shards)
            try:
                size = os.stat(path).st_size
                os.unlink(path)
            except OSError:
                continue
            part = name[1]
            self._bytes[part] = max(self._bytes.get(part, 0) - size, 0)
            count += 1
        return count

    def scan(self) -> Iterator[Entry]:
        """Every record in the directory, by names alone."""
        for path in self._files():
            with contextlib.suppress(OSError):
                key, part, shard = path.name.split(".")
                name, place = Name(bytes.fromhex(key), part), map(int, shard.split("-"))
                info = path.stat()
                yield Entry(name, info.st_size, info.st_mtime_ns, *place)

    def usage(self) -> dict[str, int]:
        """Bytes of each part."""
        return _by_part(self.scan())

    def check(self) -> Iterator[tuple[Path, Rejected]]:
        """Reads everything; every damaged record with its problem. Each is moved aside."""
        for path in sorted(self._files()):
            try:
                key, part, _ = path.name.split(".")
                with open(path, "rb") as f:
                    inode = os.fstat(f.fileno()).st_ino
                    size = os.fstat(f.fileno()).st_size
                    header = parse(f.read(PAGE), size, str(path))
                    if (header.key.hex(), header.part) != (key, part):
                        raise Rejected(Problem.KEY, str(path), header.key.hex())
                    payload = aligned(size - PAGE)
                    f.readinto(memoryview(payload))
                    unpack(header, payload, str(path))
            except Rejected as error:
                if error.problem is not Problem.VERSION:
                    self._set_aside(path, inode)
                    yield path, error
            except OSError:
                continue

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()

    def _files(self) -> Iterator[Path]:
        with contextlib.suppress(FileNotFoundError):
            for directory in os.scandir(self.root / VERSION):
                with contextlib.suppress(OSError), os.scandir(directory) as files:
                    for file in files:
                        if _NAME.fullmatch(file.name):
                            yield Path(file.path)

    def _sweep(self) -> None:
        """Deletes what a killed writer left behind."""
        for path in (self.root / VERSION).glob("*/.new.*"):
            if time.time() - path.stat().st_mtime > _OLD:
                path.unlink(missing_ok=True)

    def _path(self, name: Name, shard: int, shards: int) -> Path:
        text = name.key.hex()
        return self.root / VERSION / text[:2] / f"{text}.{name.part}.{shard}-{shards}"


def _age(entry: Entry) -> tuple[int, bool]:
    return entry.used, entry.name.part != "rolling"


def _by_part(entries: Iterable[Entry]) -> dict[str, int]:
    out: dict[str, int] = {}
    for e in entries:
        out[e.name.part] = out.get(e.name.part, 0) + e.nbytes
    return out


def _read(handle: Handle) -> dict[str, np.ndarray] | Rejected:
    try:
        return handle.read()
    except Rejected as error:
        return error


def _used(header: Header, now: int) -> int:
    """Now, and a little earlier the further on a segment lies, so that parents go last."""
    return now - header.start // max(header.segment_tokens, 1) * 1000


def _problem(error: OSError) -> Problem:
    return _PROBLEMS.get(error.errno or 0, Problem.IO)


def _linkat(source: str, path: Path) -> None:
    """`os.link` follows the link of a descriptor only when it goes through directories."""
    here = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.link(source, path, src_dir_fd=here, dst_dir_fd=here, follow_symlinks=True)
    finally:
        os.close(here)


def _sync_directory(path: Path) -> None:
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
