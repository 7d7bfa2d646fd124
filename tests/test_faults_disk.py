"""Faults that stores of such caches had in real systems, by kind: bytes of another format, reads
that race with eviction, damage and crashes and full disks, restores that touch what is live.

The model is the small one of `tiny`, whose outputs are exact: every answer is compared with a cold
run. Damage of each byte of a record is in `test_disk`, its request's way in `test_tier`.
"""

import dataclasses
import os
import shutil

import jax
import numpy as np
import pytest
import test_disk
import tiny
from test_tier import LAYOUT, STREAMS, advance, drop, files, make, serve, settled, spoil
from test_tier import store as store  # the fixture

import hkv
from hkv import Form
from hkv.disk import LocalStore, Outcome, Problem, _record
from hkv.manager import Manager
from hkv.testing import invariants

FULL = jax.device_put(np.array([g.pages - 1 for g in LAYOUT.groups], np.int32))


def group(name, **more):
    """The layout with one group changed."""
    groups = tuple(dataclasses.replace(g, **more) if g.name == name else g for g in LAYOUT.groups)
    return dataclasses.replace(LAYOUT, groups=groups)


def where(store, entry):
    return store._path(entry.name, entry.shard, entry.shards)


# Another format, kernel ABI, dtype or geometry (K08).


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_segment_of_several_pages_comes_back_in_order_into_pages_that_are_scattered(store, rows):
    groups = tuple(
        dataclasses.replace(g, rows_per_page=rows, pages=16 * 16 // g.rule.unit // rows + 1)
        for g in LAYOUT.groups
    )
    layout = dataclasses.replace(LAYOUT, groups=groups)
    with make(store, layout) as m:
        serve(m, 0, 64)
    with make(store, layout, write=None) as m:
        for s in (1, 2, 3, 4):  # takes the pages in turn, and gives back every other one
            serve(m, s, 40)
        used = np.flatnonzero(m.read(lambda c: np.asarray(c.table.length))[1])
        m.update(hkv.invalidate, jax.device_put(np.isin(np.arange(layout.segments), used[::2])))
        assert serve(m, 0, 64) >= 48
        found = m.query(STREAMS[0][:64])
        pages = m.read(lambda c: [np.asarray(p) for p in c.table.pages])[1]
        at = [p[np.asarray(found.rows[0, :3])].ravel() for p in pages]
        assert any((np.diff(p) != 1).any() for p in at)
        m.read(lambda c: invariants(c, []))


@pytest.mark.parametrize(
    "other",
    [
        group("window", dtype="bfloat16"),
        group("window", dtype="int32"),  # as many bytes
        group("window", row=(2,), layers=(0,)),
        group("window", rows_per_page=8),
        group("window", abi=(("scale", "of another calibration"),)),
        group("window", abi=(("store", "one object per layer"),)),
    ],
    ids=["dtype", "dtype of the same size", "shape", "page", "scale", "layout of the object"],
)
def test_bytes_that_mean_something_else_are_refused_before_any_is_read(store, monkeypatch, other):
    with make(store) as m:
        serve(m, 0, 50)
    before = {e.name for e in files(store)}
    reads, real = [], store.read_all
    monkeypatch.setattr(store, "read_all", lambda handles: (reads.extend(handles), real([]))[1])
    with Manager(other, store=store, chunk=tiny.CHUNK) as m:  # strict: nothing is replayed
        found = m.query(STREAMS[0][:50])
        assert m.restore(STREAMS[0][:50]) == 0 and not reads
        assert set(m.counters.rejected) <= {"ABI", "DTYPE", "SHAPE"} and m.counters.rejected
        found = m.query(STREAMS[0][:50])
        assert not np.asarray(found.usable)[0, 1:].any()
    monkeypatch.undo()
    assert {e.name for e in files(store)} == before  # and they stay for whom they are right
    with make(store) as m:
        assert serve(m, 0, 60) >= 48


def test_sections_of_a_record_lie_apart_and_aligned_whatever_their_sizes(store):
    for n, size in enumerate((1, 63, 64, 65, 1500, 4096)):
        store.put([test_disk.record(n, size=size)])
        (handle,) = store.open([test_disk.name(n)])
        end = 4096
        for section in handle.header.sections:
            assert section.offset % 64 == 0 and section.offset >= end
            end = section.offset + section.nbytes
        assert end <= handle.header.nbytes
        with handle:
            assert all(a.ctypes.data % 64 == 0 for a in handle.read().values())


def test_records_of_two_formats_in_one_directory_are_each_read_by_who_can(store, monkeypatch):
    with make(store) as m:
        serve(m, 0, 30)
    with monkeypatch.context() as later, make(store) as m:
        serve(m, 0, 30)
        later.setattr(_record, "FORMAT", 2)
        serve(m, 0, 64)
    formats = [where(store, e).read_bytes()[8] for e in files(store, "history")]
    assert sorted(formats) == [1, 2, 2, 2]
    with make(store, write=None) as m:
        assert serve(m, 0, 64) == 16 and set(m.counters.rejected) == {"VERSION"}
    assert len(files(store, "history")) == 4
    monkeypatch.setattr(_record, "FORMAT", 2)
    with make(store, write=None) as m:
        assert m.restore(STREAMS[0][16:]) == 0
        assert serve(m, 0, 64) == 0 and set(m.counters.rejected) == {"VERSION"}


# Reads that race with eviction (K10).


@pytest.mark.parametrize("what", ["deleted", "replaced", "evicted on the device", "all"])
def test_what_goes_while_it_is_being_read_is_read_as_it_was(store, monkeypatch, what):
    with make(store, write=None, staging=4) as m:
        serve(m, 0, 60)
        assert m.offload(STREAMS[0][:60], keep=False).result(30) == 3
        serve(m, 1, 60)
        real = store.read_all

        def meanwhile(handles):
            handles = list(handles)
            if what in ("deleted", "all"):
                store.delete([e.name for e in files(store)])
            if what in ("replaced", "all"):
                for h in handles:  # under its name, what is another segment's
                    other = dataclasses.replace(
                        test_disk.record(7)[0].header, key=h.header.key, part=h.header.part
                    )
                    record = dataclasses.replace(test_disk.record(7)[0], header=other)
                    assert store.put([(record, test_disk.record(7)[1])]) == [Outcome.STORED]
            if what in ("evicted on the device", "all"):
                m.update(hkv.evict, FULL)
            return real(handles)

        monkeypatch.setattr(store, "read_all", meanwhile)
        loaded = m.restore(STREAMS[0][:60])
        monkeypatch.undo()
        store.delete([e.name for e in files(store)])
        if what != "all":  # what was evicted and then asked for again is another's by now
            assert loaded > 0 and m.query(STREAMS[0][:60]).boundary[0] >= 48
        assert serve(m, 0, 64) >= (0 if what == "all" else 48)  # equal to a cold run
        m.read(lambda c: invariants(c, []))


def test_sources_and_targets_of_a_load_are_let_go_also_when_it_fails(store, monkeypatch):
    with make(store, write=None) as m:
        serve(m, 0, 60)
        m.offload(STREAMS[0][:60], keep=False).result(30)
        free = m.status().groups

        def broken(handles):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(store, "read_all", broken)
        open_before = len(os.listdir("/proc/self/fd"))
        assert m.restore(STREAMS[0][:60]) == 0 and m.counters.rejected == {"OSError": 1}
        assert len(os.listdir("/proc/self/fd")) == open_before
        assert m.status().groups == free
        m.read(lambda c: invariants(c, []))
        monkeypatch.undo()
        assert serve(m, 0, 64) >= 48


# Damage, crashes, full disks and lost indexes (K14).


def test_what_is_being_put_away_does_not_push_out_what_is_about_to_be_loaded(store):
    with make(store) as m:
        serve(m, 0, 64)
        settled(m)
        store.cap_bytes = sum(store.usage().values())  # just that one
    with make(store) as m:
        with m.admit(STREAMS[0][:60], 64) as request:
            assert request.resume >= 48
            serve(m, 1, 33)
            settled(m)
            advance(request, 0, 64)
        assert sum(store.usage().values()) <= store.cap_bytes


def test_usage_after_a_restart_is_what_lies_there_and_what_a_killed_writer_left_is_swept(store):
    with make(store) as m:
        serve(m, 0, 64)
    (some, *_) = (where(store, e) for e in files(store))
    for name in ("old", "young"):
        left = some.with_name(f".new.1.{name}.{some.name}")
        left.write_bytes(b"half a record")
        if name == "old":
            os.utime(left, (0, 0))
    again = LocalStore(store.root)
    size = sum(f.stat().st_size for f in (again.root / "v1").glob("*/[!.]*"))
    assert sum(again.usage().values()) == sum(again._bytes.values()) == size
    assert [f.name.split(".")[3] for f in (again.root / "v1").glob("*/.new.*")] == ["young"]
    again.close()


def test_a_file_that_somebody_removed_is_a_miss_and_eviction_goes_on(store):
    with make(store) as m:
        for s in range(3):
            serve(m, s, 64)
        settled(m)
        for entry in files(store)[::2]:
            where(store, entry).unlink()
        store.cap_bytes = sum(store.usage().values())
        drop(m)
        for s in (3, 0, 1, 2, 3):
            serve(m, s, 64)
            settled(m)
        assert sum(store.usage().values()) <= store.cap_bytes
        assert "IO" not in m.counters.rejected


def test_a_miss_is_not_remembered_once_somebody_else_has_stored_it(store):
    with make(store, write=None) as m:
        assert m.restore(STREAMS[0][:60]) == 0
        with make(LocalStore(store.root)) as other:
            serve(other, 0, 60)
        assert m.restore(STREAMS[0][:60]) == 3
        assert serve(m, 0, 64) >= 48


@pytest.mark.parametrize("call", ["open", "writev", "fdatasync", "link"])
@pytest.mark.parametrize("code", [28, 5])
def test_a_write_that_fails_anywhere_leaves_no_name_no_bytes_and_no_file_open(
    store, monkeypatch, call, code
):
    store.put([test_disk.record(0)])
    usage, names = store.usage(), {e.name for e in store.scan()}
    real = getattr(os, call)

    def fails(*args, **more):
        if call == "open" and not args[1] & os.O_TMPFILE == os.O_TMPFILE:
            return real(*args, **more)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fails)
    open_before = len(os.listdir("/proc/self/fd"))
    (refused,) = store.put([test_disk.record(1)])
    assert refused.problem is (Problem.FULL if code == 28 else Problem.IO)
    assert len(os.listdir("/proc/self/fd")) == open_before
    monkeypatch.undo()
    assert store.usage() == store._bytes == usage
    assert {e.name for e in store.scan()} == names
    assert store.put([test_disk.record(1)]) == [Outcome.STORED]


def test_several_processes_keep_one_cap_together(tmp_path):
    size = _record.pack(*test_disk.record(0))[0].nbytes
    stores = [LocalStore(tmp_path, cap_bytes=16 * size) for _ in range(4)]
    for i in range(60):
        assert stores[i % 4].put([test_disk.record(i)]) == [Outcome.STORED]
        # Each may have stored a sixteenth, one record, before it looks again.
        assert sum(stores[0].usage().values()) <= (16 + 4) * size
    kept = sorted(int.from_bytes(e.name.key, "big") for e in stores[0].scan())
    assert kept[-8:] == list(range(52, 60)) and min(kept) > 30
    for s in stores:
        s.close()


def test_records_of_every_shard_are_evicted(tmp_path):
    size = _record.pack(*test_disk.record(0))[0].nbytes
    store = LocalStore(tmp_path, cap_bytes=6 * size)
    for i in range(12):
        (out,) = store.put([test_disk.record(i // 2, shard=i % 2, shards=2)])
        assert out is Outcome.STORED
    assert sum(store.usage().values()) <= 6 * size
    store.close()


def test_what_could_not_be_stored_once_is_stored_the_next_time(store, monkeypatch):
    real = os.writev
    with make(store, staging=8) as m:
        calls = []

        def second(file, views):
            calls.append(file)
            if len(calls) == 3:  # one of the second segment's two
                raise OSError(28, "No space left on device")
            return real(file, views)

        monkeypatch.setattr(os, "writev", second)
        serve(m, 0, 64)
        settled(m)
        monkeypatch.undo()
        assert len(files(store)) < 8
        serve(m, 0, 64)
        settled(m)
        assert len(files(store)) == 8


@pytest.mark.parametrize("staging", [1, 2, 8])
def test_no_segment_is_stored_after_one_that_could_not_be(store, monkeypatch, staging):
    with make(store, staging=staging) as m:
        real = store._write

        def second(packed, *args):
            if packed[0].start == 16:
                return test_disk.Rejected(Problem.FULL, "here")
            return real(packed, *args)

        monkeypatch.setattr(store, "_write", second)
        serve(m, 0, 64)
        settled(m)
    starts = set()
    for entry in files(store):
        (handle,) = store.open([entry.name])
        starts.add(handle.header.start)
        handle.close()
    assert starts == {0}


def test_a_directory_that_was_copied_elsewhere_serves_and_what_is_none_of_ours_stays(
    store, tmp_path
):
    with make(store) as m:
        serve(m, 0, 64)
    (store.root / "v1" / "lost+found").mkdir()
    for name in ("README", "v1/notes.txt", "v1/lost+found/x.y.z", "v1/00.tmp"):
        (store.root / name).write_bytes(b"not ours")
    shutil.copytree(store.root, tmp_path / "copy")
    copy = LocalStore(tmp_path / "copy", cap_bytes=10**9)
    with make(copy, write=None) as m:
        assert serve(m, 0, 64) >= 48
    assert [e.name for e in copy.scan()] and not list(copy.check())
    copy.cap_bytes = 1
    copy.put([test_disk.record(0)])
    assert sorted(f.name for f in copy.root.rglob("*") if f.is_file() and f.name != ".evict") == [
        "00.tmp", "README", "notes.txt", "x.y.z",
    ]  # fmt: skip
    copy.close()


def test_a_hole_in_a_record_is_damage_and_not_zeros(store):
    with make(store) as m:
        serve(m, 0, 64)
    for entry in files(store, "history"):
        path = where(store, entry)
        data = bytearray(path.read_bytes())
        data[4096:] = bytes(len(data) - 4096)  # as a lost extent reads
        path.write_bytes(data)
    with make(store) as m:
        assert serve(m, 0, 64) == 0 and m.counters.rejected == {"PAYLOAD": 4}


# Restores leave what is live alone (K20).


@pytest.mark.parametrize("how", ["payload", "header", "cut", None])
def test_a_restore_whether_right_or_refused_leaves_every_other_bit_and_who_runs(store, how):
    with make(store) as m:
        serve(m, 0, 60)
    if how:
        spoil(store, how)
    with make(store, write=None) as m, m.admit(STREAMS[1][:20], 64) as other:
        advance(other, 1, 37)
        used = m.read(lambda c: np.flatnonzero(np.asarray(c.table.pins)))[1]

        def mine(cache):
            pages = [np.asarray(p)[used].ravel() for p in cache.table.pages]
            return [np.asarray(p.data)[:, at] for p, at in zip(cache.pools, pages, strict=True)]

        before = m.read(mine)[1]
        assert (m.restore(STREAMS[0][:60]) > 0) or how
        for x, y in zip(before, m.read(mine)[1], strict=True):
            np.testing.assert_array_equal(x, y)
        advance(other, 1, 64)  # equal to a cold run
        serve(m, 0, 64)  # likewise
        m.read(lambda c: invariants(c, [other.lease]))


def test_after_a_restore_a_query_finds_what_was_said_to_be_loaded(store):
    with make(store) as m:
        serve(m, 0, 64)
    with make(store, write=None) as m:
        assert m.restore(STREAMS[0][:64]) == 4
        assert m.query(STREAMS[0][:64]).boundary[0] == 63
        drop(m, [f is Form.WINDOW for f in Form])
        assert m.restore(STREAMS[0][:64]) > 0  # the window alone
        assert m.query(STREAMS[0][:64]).boundary[0] >= 48


@pytest.mark.parametrize("n", [15, 16, 17, 21, 22, 23, 31, 32, 33, 47, 48])
def test_a_prompt_of_any_length_around_window_and_segment_goes_on_as_a_cold_run(store, n):
    with make(store) as m:
        serve(m, 0, n)
    with make(store) as m:
        assert serve(m, 0, n, n + 16) == (n - 1 if n % 16 == 0 else n // 16 * 16)
