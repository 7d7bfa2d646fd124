"""Records on a local disk: what was acknowledged is there and right, the damaged is never served.

`HKV_FULL=1` runs the full counts: 200 killed writers, and 200 of each kind of damage.
"""

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.disk import (
    Header,
    LocalStore,
    Outcome,
    Problem,
    Record,
    Rejected,
    Section,
    Wanted,
    _local,
    _record,
)

FULL = os.environ.get("HKV_FULL") == "1"
B = 8
DTYPES = ("float32", "bfloat16", "uint8", "int32", "float8_e4m3fn", "float16")


def key(i):
    return i.to_bytes(32, "big")


def record(i, part="history", size=1500, seed=None, **changes):
    """Record number `i` of a chain: its parent is the one before."""
    r = np.random.default_rng(i if seed is None else seed)
    arrays = {
        "full": r.integers(0, 255, (2, size), dtype=np.uint8),
        "keys": r.standard_normal((1, 2, 3)).astype("float32"),
    }
    sections = tuple(
        Section(name, 7, str(a.dtype), a.shape, (0, B), (i, 5)) for name, a in arrays.items()
    )
    plain = dict(
        key=key(i), parent=key(i - 1) if i else bytes(32), part=part, start=i * B, length=B,
        segment_tokens=B, epoch=0, indexer_version=0, provenance=0, sections=sections,
    )  # fmt: skip
    tokens = r.integers(0, 99, B).astype(np.int32)
    return Record(Header(**{**plain, **changes}), arrays), tokens


def name(i, part="history"):
    return key(i), part


def path_of(store, i, part="history"):
    return store._path(_local.Name(*name(i, part)), 0, 1)


def served(store, i, part="history"):
    """The arrays of a record, or why there are none."""
    (handle,) = store.open([name(i, part)])
    if isinstance(handle, Rejected):
        return handle.problem
    with handle:
        try:
            return handle.read()
        except Rejected as error:
            return error.problem


def is_right(got, i, **more):
    want, tokens = record(i, **more)
    assert isinstance(got, dict), got
    assert set(got) == {"tokens", *want.arrays}
    np.testing.assert_array_equal(got["tokens"], tokens)
    for n, a in want.arrays.items():
        np.testing.assert_array_equal(got[n], a)


@pytest.fixture
def store(tmp_path):
    with_threads = LocalStore(tmp_path / "store", threads=4)
    yield with_threads
    with_threads.close()


def test_what_is_stored_is_read_back_by_another_store(store):
    assert store.put([record(i) for i in range(6)]) == [Outcome.STORED] * 6
    assert store.put([record(2)]) == [Outcome.EXISTS]
    other = LocalStore(store.root)
    for i in range(6):
        is_right(served(other, i), i)
    assert served(other, 6) is Problem.MISSING
    handles = other.open([name(i) for i in (0, 3)])
    for i, got in zip((0, 3), other.read_all(handles), strict=True):
        is_right(got, i)
        assert all(a.ctypes.data % 64 == 0 for a in got.values())
    assert other.usage() == {"history": sum(e.nbytes for e in store.scan())}
    assert not list(other.check())


@settings(max_examples=40)
@given(st.data())
def test_packing_and_unpacking_changes_nothing(data):
    draw = data.draw
    arrays, sections = {}, []
    for i in range(draw(st.integers(1, 12))):
        shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        raw = np.random.default_rng(i).integers(0, 255, int(np.prod(shape)) * dtype.itemsize)
        arrays[f"g{i}"] = raw.astype(np.uint8).view(dtype).reshape(shape)
        digest = tuple(draw(st.integers(0, 2**32 - 1)) for _ in range(2))
        sections.append(Section(f"g{i}", draw(st.integers(0, 2**32 - 1)), str(dtype), shape, (0, 3),
                                digest))  # fmt: skip
    n = draw(st.integers(0, 600))
    plain, _ = record(3)
    header = dataclasses.replace(plain.header, length=n, sections=tuple(sections))
    tokens = np.arange(n, dtype=np.int32)
    full, buffers = _record.pack(Record(header, arrays), tokens)
    whole = b"".join(bytes(memoryview(b).cast("B")) for b in buffers)
    assert len(whole) == full.nbytes and all(s.offset % 64 == 0 for s in full.sections)
    assert _record.parse(whole[:4096], len(whole), "x") == full
    got = _record.unpack(full, np.frombuffer(whole, np.uint8)[4096:], "x")
    np.testing.assert_array_equal(got.pop("tokens"), tokens)
    for k, a in arrays.items():
        assert got[k].dtype == a.dtype and got[k].shape == a.shape
        assert got[k].tobytes() == a.tobytes()


def test_a_header_that_does_not_fit_its_page_is_refused():
    plain, tokens = record(0)
    many = tuple(dataclasses.replace(plain.header.sections[0], name=f"g{i:03}") for i in range(99))
    arrays = {s.name: plain.arrays["full"] for s in many}
    header = dataclasses.replace(plain.header, sections=many)
    with pytest.raises(ValueError, match="does not fit"):
        _record.pack(Record(header, arrays), tokens)


# Damage.


def flip(data, r):
    at = r.randrange(len(data))
    data[at] ^= 1 << r.randrange(8)


def cut(data, r):
    del data[r.randrange(len(data)) :]


def zero(data, r):
    at = r.randrange(-(-len(data) // 4096)) * 4096
    data[at : at + 4096] = bytes(len(data[at : at + 4096]))


@pytest.mark.parametrize("damage", [flip, cut, zero])
def test_a_damaged_record_is_named_and_never_served_and_no_other_suffers(store, damage):
    r, size = random.Random(1), 9000
    for turn in range(200 if FULL else 30):
        store.put([record(i, size=size) for i in range(3)])
        victim = r.randrange(3)
        path = path_of(store, victim)
        whole = path.read_bytes()
        data = bytearray(whole)
        while bytes(data) == whole:
            damage(data, r)
        path.write_bytes(data)
        if turn % 2:
            ((where, error),) = store.check()
            assert where == path and str(path) in str(error)
        else:
            got = served(store, victim)
            # Between sections lie zeros that nobody reads.
            assert got is not None and (isinstance(got, Problem) or _only_gaps(whole, data))
            if not isinstance(got, Problem):
                is_right(got, victim, size=size)
                continue
            assert got in (Problem.FORMAT, Problem.HEADER, Problem.TRUNCATED, Problem.PAYLOAD)
        assert served(store, victim) is Problem.MISSING  # moved aside
        for i in {0, 1, 2} - {victim}:
            is_right(served(store, i), i, size=size)
        assert store.put([record(victim, size=size)]) == [Outcome.STORED]
        is_right(served(store, victim), victim, size=size)


def _only_gaps(whole, data):
    """Whether all that differs lies between sections."""
    header = _record.parse(whole[:4096], len(whole), "x")
    used = np.zeros(len(whole), bool)
    used[:4096] = True
    for s in header.sections:
        used[s.offset : s.offset + s.nbytes] = True
    differs = np.frombuffer(whole, np.uint8) != np.frombuffer(bytes(data), np.uint8)
    return not (differs & used).any()


def test_records_that_changed_places_are_refused(store):
    store.put([record(i) for i in range(3)])
    a, b = path_of(store, 0), path_of(store, 2)
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    assert served(store, 0) is Problem.KEY and served(store, 2) is Problem.KEY
    is_right(served(store, 1), 1)


def test_a_record_that_is_deleted_or_replaced_while_open_is_read_as_it_was(store):
    store.put([record(0), record(1)])
    first, second = store.open([name(0), name(1)])
    assert store.delete([name(0), name(5)]) == 1
    store.put([record(1, epoch=3, seed=77)])
    is_right(first.read(), 0)
    is_right(second.read(), 1)
    is_right(served(store, 1), 1, seed=77)
    assert served(store, 0) is Problem.MISSING


# What a reader accepts, from the header alone.

WANTED = Wanted(
    segment_tokens=B, epoch=0, indexer_version=0, provenance=0, indexed=frozenset({"keys"}),
    groups={"full": (7, "uint8", (2, 1500)), "keys": (7, "float32", (1, 2, 3))},
)  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (dict(epoch=1), Problem.EPOCH), (dict(shards=2), Problem.SHARDS),
        (dict(shard=1, shards=2), Problem.SHARDS), (dict(segment_tokens=16), Problem.SEGMENT),
    ],
)  # fmt: skip
def test_a_foreign_record_is_refused_from_its_header(store, monkeypatch, wanted, problem):
    store.put([record(0)])
    reads = []
    monkeypatch.setattr(os, "preadv", lambda *args: reads.append(args))
    (handle,) = store.open([name(0)])
    with pytest.raises(Rejected) as error:
        dataclasses.replace(WANTED, **wanted).check(handle.header)
    assert error.value.problem is problem and not reads
    assert WANTED.check(handle.header) == {}


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        ((8, "uint8", (2, 1500)), Problem.ABI), ((7, "int8", (2, 1500)), Problem.DTYPE),
        ((7, "uint8", (2, 1501)), Problem.SHAPE),
    ],
)  # fmt: skip
def test_one_groups_mismatch_touches_that_group_alone(store, group, problem):
    store.put([record(0)])
    (handle,) = store.open([name(0)])
    groups = {**WANTED.groups, "full": group}
    assert dataclasses.replace(WANTED, groups=groups).check(handle.header) == {"full": problem}
    newer = dataclasses.replace(WANTED, indexer_version=1)
    assert newer.check(handle.header) == {"keys": Problem.INDEXER}
    (approximate,) = store.open([name(0)])
    lossy = dataclasses.replace(approximate.header, provenance=2)
    with pytest.raises(Rejected, match="approximation"):
        WANTED.check(lossy)


def test_a_record_of_a_later_format_is_refused(store, monkeypatch):
    monkeypatch.setattr(_record, "FORMAT", 2)
    store.put([record(0)])
    monkeypatch.undo()
    assert served(store, 0) is Problem.VERSION
    assert not list(store.check()) and path_of(store, 0).exists()  # whoever can read it may


def test_a_record_that_means_something_else_now_is_replaced(store):
    store.put([record(0)])
    assert store.put([record(0, epoch=1, seed=5)]) == [Outcome.STORED]
    is_right(served(store, 0), 0, seed=5)


# Room.


def test_caps_hold_and_the_least_recently_used_goes_first_and_parents_last(tmp_path):
    size = _record.pack(*record(0))[0].nbytes
    store = LocalStore(tmp_path, cap_bytes=6 * size, caps={"rolling": 2 * size})
    store.put([record(i) for i in range(4)])
    store.put([record(i, "rolling") for i in range(2)])
    store.open([name(i) for i in range(2)])  # used
    assert store.put([record(2, "rolling")]) == [Outcome.STORED]
    here = {e.name for e in store.scan()}
    assert store.usage()["rolling"] == 2 * size
    assert name(1, "rolling") not in here  # of one batch the last segment
    assert store.put([record(9), record(10)]) == [Outcome.STORED] * 2
    here = {e.name for e in store.scan()}
    assert sum(store.usage().values()) <= 6 * size
    assert {name(0), name(1), name(9), name(10)} <= here
    (big,) = store.put([record(20, size=9 * size)])
    assert big.problem is Problem.FULL and name(20) not in {e.name for e in store.scan()}


def test_the_floor_of_free_space_holds(tmp_path, monkeypatch):
    store = LocalStore(tmp_path, floor_bytes=10**6)
    store.put([record(0)])
    real = os.statvfs(tmp_path)
    low = os.statvfs_result([real.f_bsize, real.f_frsize, real.f_blocks, 0, 0, *real[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: low)
    (refused,) = store.put([record(1)])
    assert refused.problem is Problem.FULL
    monkeypatch.undo()
    assert store.put([record(1)]) == [Outcome.STORED]


def test_where_no_byte_can_be_written_earlier_records_stay_and_writing_works_again(
    store, monkeypatch
):
    store.put([record(0), record(1)])
    real = os.writev

    def full(file, views):
        real(file, [bytes(views[0])[:100]])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    (refused,) = store.put([record(2)])
    assert refused.problem is Problem.FULL and str(path_of(store, 2)) in str(refused)
    assert served(store, 2) is Problem.MISSING
    is_right(served(store, 0), 0)
    assert store.delete([name(0)]) == 1
    monkeypatch.undo()
    assert store.put([record(2)]) == [Outcome.STORED]
    is_right(served(store, 2), 2)
    assert len(list(store._files())) == 2


FILL = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import test_disk as t
from hkv.disk import LocalStore, Outcome, Problem
store = LocalStore(sys.argv[1])
outcomes = [store.put([t.record(i, size=200_000)])[0] for i in range(12)]
kept = [i for i, x in enumerate(outcomes) if x is Outcome.STORED]
assert 0 < len(kept) < 12, outcomes
assert all(x.problem is Problem.FULL for x in outcomes if x is not Outcome.STORED), outcomes
for i in kept:
    t.is_right(t.served(store, i), i, size=200_000)
assert store.delete([t.name(kept[0]), t.name(kept[1])]) == 2
assert store.put([t.record(20, size=200_000)]) == [Outcome.STORED]
t.is_right(t.served(store, 20), 20, size=200_000)
assert not list(store.check())
"""


def test_a_disk_that_is_full(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no file system of a limited size can be mounted here")
    try:
        here = Path(__file__).parent
        run = subprocess.run(
            [sys.executable, "-c", FILL, str(tmp_path / "s"), str(here), str(here.parent)],
            capture_output=True, text=True,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_directory_that_is_gone_says_so_and_serves_nothing(store):
    store.put([record(0)])
    moved = store.root.with_name("moved")
    store.root.rename(moved)
    (refused,) = store.put([record(1)])
    assert refused.problem is Problem.GONE
    assert served(store, 0) is Problem.MISSING and list(store.scan()) == []
    moved.rename(store.root)
    assert store.put([record(1)]) == [Outcome.STORED]


def test_a_directory_that_can_only_be_read_serves_and_refuses(store, monkeypatch):
    store.put([record(0)])

    def denied(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    for call in ("mkdir", "utime", "replace", "unlink"):
        monkeypatch.setattr(os, call, denied)
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda p, flags, *a: denied() if flags & os.O_RDWR else real(p, flags, *a)
    )
    (refused,) = store.put([record(1)])
    assert refused.problem is Problem.READ_ONLY
    is_right(served(store, 0), 0)


# Processes.

WRITER = """
import sys
sys.path[:0] = sys.argv[2:]
import test_disk as t
from hkv.disk import LocalStore, Outcome
store = LocalStore(sys.argv[1], threads=2)
print("ready", flush=True)
for i in range(0, 100_000, 2):
    out = store.put([t.record(i, size=20_000), t.record(i + 1, size=20_000)])
    assert all(isinstance(x, Outcome) for x in out), out
    print(i, i + 1, flush=True)
"""


def writer(root):
    here = Path(__file__).parent
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), str(here), str(here.parent)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_whatever_a_killed_writer_had_acknowledged_is_there_and_right(tmp_path):
    r = random.Random(3)
    for turn in range(200 if FULL else 5):
        process = writer(tmp_path / str(turn))
        assert process.stdout.readline() == "ready\n"
        time.sleep(r.random() * 0.15)
        process.send_signal(signal.SIGKILL)
        acknowledged = [int(i) for line in process.stdout for i in line.split()]
        process.wait()
        process.stdout.close()
        store = LocalStore(tmp_path / str(turn))
        for i in acknowledged[-40:]:
            is_right(served(store, i), i, size=20_000)
        assert not list(store.check())
        hidden = [p for p in store.root.glob("v1/*/.*")]
        assert not hidden
        store.close()


def test_two_writers_and_a_reader_during_deletion_never_see_a_wrong_value(tmp_path):
    processes = [writer(tmp_path) for _ in range(2)]
    for p in processes:
        assert p.stdout.readline() == "ready\n"
    store, r, seen = LocalStore(tmp_path), random.Random(1), 0
    end = time.monotonic() + (20 if FULL else 2)
    while time.monotonic() < end:
        i = r.randrange(60)
        got = served(store, i)
        if isinstance(got, dict):
            is_right(got, i, size=20_000)
            seen += 1
        else:
            assert got is Problem.MISSING
        if r.random() < 0.3:
            store.delete([name(i)])
    for p in processes:
        assert p.poll() is None
        p.kill()
        p.wait()
        p.stdout.close()
    assert seen and not list(store.check())


def test_what_was_never_synced_is_never_served_wrongly(store):
    """Power loss: of a record without its sync, any of the pages may be what they were: zeros."""
    r = random.Random(5)
    for turn in range(200 if FULL else 30):
        store.put([record(0, size=9000)])
        path = path_of(store, 0)
        whole = bytearray(path.read_bytes())
        pages = range(0, len(whole), 4096)
        lost = [at for at in pages if r.random() < 0.5] or [pages[-1]]
        for at in lost:
            whole[at : at + 4096] = bytes(len(whole[at : at + 4096]))
        if r.random() < 0.3:
            del whole[r.choice(pages) :]
        path.write_bytes(whole)
        assert isinstance(served(store, 0), Problem), turn


def test_a_record_is_named_only_after_it_was_synced(store, monkeypatch):
    calls = []
    for call in ("fdatasync", "link", "fsync"):
        real = getattr(os, call)
        monkeypatch.setattr(
            os, call, lambda *a, real=real, call=call, **k: (calls.append(call), real(*a, **k))[1]
        )
    store.put([record(i) for i in range(3)])
    assert calls[:3] == ["fdatasync"] * 3 and calls[3:6] == ["link"] * 3
    assert set(calls[6:]) == {"fsync"}


def test_the_command_names_what_is_damaged(store):
    store.put([record(i) for i in range(3)])
    path = path_of(store, 1)
    data = bytearray(path.read_bytes())
    data[-1700] ^= 1
    path.write_bytes(data)
    here = Path(__file__).parent.parent

    def run(command):
        return subprocess.run(
            [sys.executable, "-m", "hkv.disk", command, str(store.root)], text=True,
            capture_output=True, env={**os.environ, "PYTHONPATH": str(here)},
        )  # fmt: skip

    first, second = run("check"), run("check")
    assert first.returncode == 1 and f"{path}: PAYLOAD" in first.stdout, first
    assert second.returncode == 0 and "0 damaged" in second.stdout
    assert "history: 2 records" in run("list").stdout
