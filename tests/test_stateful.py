"""Random lives of a small cache against a plain Python model, with the invariants after each step.

Pools are so small that requests wait, are refused, and push others out.
"""

import copy
import dataclasses
import os

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model_cache import ModelCache, Request, Segment, needed
from payload import Payload, expected, group, lib

import hkv
from hkv import Blocker, Form, Life, Reason, Verdict

FULL = os.environ.get("HKV_FULL") == "1"
SMALL = hkv.Layout(
    groups=(
        group("full", Form.COMPRESSED, hkv.history(1), (0,), 8, 12),
        group("c4", Form.COMPRESSED, hkv.history(4), (1, 2), 2, 13),
        group("c4_tail", Form.TAIL, hkv.tail(4, overlap=True), (1, 2), 4, 21),
        group("win", Form.WINDOW, hkv.window(5), (0,), 4, 22),
        group("idx", Form.INDEXER, hkv.indexer(4), (1,), 1, 24),
    ),
    segment_tokens=8, segments=12, buckets=(64,), leases=5,
)  # fmt: skip
B, N, M, Q = 8, 12, 5, 2
BLOCKS = ((1, 1, 1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 2, 2, 2), (3, 1, 1, 1, 2, 2, 2, 2))

prompts = st.builds(
    lambda blocks, cut: tuple(t for b in blocks for t in BLOCKS[b])[: len(blocks) * B - cut],
    st.sampled_from([(0,), (0, 1), (0, 1, 2), (0, 1, 0), (0, 2), (1, 0)]),
    st.sampled_from([0, 0, 1, 2, 3, 5, 7]),
)  # fmt: skip
owners = st.sampled_from(["", "", "", "", "", "b"])
epochs = st.sampled_from([0, 0, 0, 0, 0, 1])
versions = st.sampled_from([0, 0, 0, 0, 0, 1])
pairs = st.tuples


@dataclasses.dataclass(eq=False)
class Running:
    """A lease of Q requests and the model's requests in it, None where not admitted."""

    lease: object
    requests: list
    need: object
    read_only: bool = False


class CacheLife(RuleBasedStateMachine):
    @initialize()
    def empty(self):
        self.p = Payload(SMALL)
        self.model = ModelCache(SMALL)
        self.running = []
        self.seen = np.zeros(N, np.uint32)
        self.look()

    # Helpers.

    def look(self):
        """The state as numpy."""
        self.c = jax.device_get(self.p.cache)
        return self.c

    def need(self, owner, epoch, version):
        return self.p.need(list(owner), epoch, version)

    def pick(self, i):
        return self.running[i % len(self.running)]

    def settle_evictions(self):
        """Takes out of the model what the library chose to evict, if it was allowed to."""
        old, new = self.c.table, self.look().table
        born = {s.row: s for s in self.model.segs.values()}
        for row, s in sorted(born.items(), key=lambda x: -len(x[1].prefix)):
            gone = new.length[row] == 0 or new.born[row] != old.born[row]
            lost = {f for f in s.ready if new.life[row, f] != Life.READY}
            if gone or lost:
                assert old.pins[row] == 0, (row, s)
            if gone:
                assert not self.model.children(s.uid), (row, "had children")
                del self.model.segs[s.uid]
                continue
            for f in lost:
                assert f in (Form.WINDOW, Form.TAIL) and new.life[row, f] == Life.EMPTY
                self.lose(s, {f})

    def lose(self, s, forms):
        s.ready -= forms
        for g in SMALL.groups:
            if g.form in forms:
                s.held[g.name] = set()

    def requests_of(self, plan, batch, owner, epoch, version, lease, answer, totals):
        """The model's requests of a new lease, with the numbers of the admission checked."""
        out = []
        lease, answer, plan = jax.device_get((lease, answer, plan))
        for q in range(Q):
            verdict, blocker = Verdict(int(answer.verdict[q])), Blocker(int(answer.blocker[q]))
            assert (verdict is Verdict.ADMIT) == (blocker is Blocker.NONE)
            if not 0 <= totals[q] <= 64 or totals[q] < plan.resume[q]:
                assert verdict is Verdict.REFUSE and blocker is Blocker.LENGTH
            if blocker is Blocker.PAGES and verdict is Verdict.WAIT:
                short = (answer.need[q] > answer.free[q]).any()
                short |= answer.need_rows[q] > answer.free_rows[q]
                short |= (answer.cap_used[q] + answer.cap_need[q] > answer.cap[q]).any()
                assert short
            if verdict is not Verdict.ADMIT:
                assert lease.slot[q] == M and not lease.serial[q].any() and lease.length[q] == 0
                assert (lease.rows[q] == N).all()
                out.append(None)
                continue
            rows = [int(r) if r < N else None for r in lease.rows[q]]
            kept = {}
            for g, spec in enumerate(SMALL.groups):
                if not spec.rule.prefix_closed:
                    kept[spec.name] = int(lease.have[q, g, 0])
            out.append(
                Request(
                    batch[q], (owner[q],), epoch, version, rows,
                    set(np.flatnonzero(lease.own[q]).tolist()), int(lease.length[q]),
                    int(lease.total[q]), kept,
                )
            )  # fmt: skip
        return out

    def check_rows(self, run):
        """Rows that a lease reads are the right ones, all that it needs are there."""
        out, ok = self.p.rows(run.lease)
        for q, r in enumerate(run.requests):
            if r is None:
                assert not ok[q]
                continue
            assert ok[q] == r.valid, (q, r)
            for g, spec in enumerate(SMALL.groups):
                u = spec.rule.unit
                want = sorted({x // u for x in needed(spec.rule, r.length)})
                for layer in spec.layers:
                    rows, valid = out[spec.name, layer]
                    rows, valid = rows[q], valid[q]
                    if not r.valid:
                        assert not rows.any() and not valid.any()
                        continue
                    assert valid[want].all(), (q, spec.name, want, valid)
                    at = np.flatnonzero(valid)
                    assert at.size == 0 or (at[-1] + 1) * u <= r.length
                    right = expected(SMALL, g, layer, r.prompt, r.owner[0], r.version)
                    np.testing.assert_array_equal(rows[at], right[at])

    # Rules.

    def ask(self, batch, owner, epoch, version):
        """A query compared with the model."""
        a = self.p.query([list(x) for x in batch], self.need(owner, epoch, version))
        got = jax.device_get(a)
        for q in range(Q):
            every, aligned = self.model.usable(batch[q], (owner[q],), epoch, version)
            usable = {int(p) for p in got.positions[q][got.usable[q]]}
            assert usable <= every, (usable, every)
            assert aligned <= usable | {0}, (usable, aligned)
            assert int(a.boundary[q]) <= len(batch[q]) - 1
            assert int(got.matched[q]) <= len(batch[q]) - 1
            for row in got.rows[q]:
                if row < N:
                    s = self.model.at(row)
                    assert s.owner == (owner[q],)
            # The intersection of the groups' own sets, nothing else.
            both = got.group_ok[q].all(0)
            assert (got.usable[q] == both).all()
        return a

    @rule(batch=pairs(prompts, prompts), owner=pairs(owners, owners), epoch=epochs, v=versions)
    def query(self, batch, owner, epoch, v):
        self.ask(batch, owner, epoch, v)

    @precondition(lambda self: len(self.running) < 3)
    @rule(
        batch=pairs(prompts, prompts), owner=pairs(owners, owners), epoch=epochs, v=versions,
        extra=pairs(st.sampled_from([0, 1, 4, 9, 24]), st.sampled_from([-1, 0, 3, 40, 99])),
        price=st.sampled_from([1.0, 1.0, 0.1, float("inf")]),
        meddle=st.sampled_from([None, None, None, None, "evict", "invalidate"]),
    )  # fmt: skip
    def start(self, batch, owner, epoch, v, extra, price, meddle):
        self.begin(batch, owner, epoch, v, extra, price, meddle)

    def begin(self, batch, owner, epoch, v, extra, price, meddle):
        plan = lib.route(self.ask(batch, owner, epoch, v), hkv.costs(replay=price))
        if meddle == "evict":
            self.evict((4, 4, 4, 4, 4))
        elif meddle == "invalidate":
            self.invalidate({0, 3, 5})
        totals = [-1 if extra[q] < 0 else len(batch[q]) + extra[q] for q in range(Q)]
        # What a request appends past its prompt is known to the model in advance.
        batch = tuple(tuple(x) + (7, 8, 9, 10) * 25 for x in batch)
        lease, answer = self.p.admit(plan, totals)
        self.settle_evictions()
        need = self.need(owner, epoch, v)
        requests = self.requests_of(plan, batch, owner, epoch, v, lease, answer, totals)
        for r in requests:
            for i, row in enumerate(r.rows if r else ()):
                gone = row is not None and i not in r.own and self.model.at(row) is None
                assert not gone, "admitted on a segment that is gone"
        if not any(requests):
            return None
        lease, why = self.p.recover(
            lease, plan, [x[:64] for x in batch], list(owner), v
        )  # fmt: skip
        for q, r in enumerate(requests):
            assert (why[q] == Reason.OK) == (r is not None), (q, Reason(int(why[q])))
        now = jax.device_get(lease)
        for q, r in enumerate(requests):
            for g, spec in enumerate(SMALL.groups):
                if r and not spec.rule.prefix_closed:
                    r.kept[spec.name] = int(now.have[q, g, 0])
        self.running.append(Running(lease, requests, need))
        self.check_rows(self.running[-1])
        return self.running[-1]

    @rule(
        batch=pairs(prompts, prompts), owner=pairs(owners, owners), epoch=epochs, v=versions,
        price=st.sampled_from([1.0, 0.1, float("inf")]), partial=st.booleans(),
        keep=st.sampled_from([False, False, True]),
    )  # fmt: skip
    def serve(self, batch, owner, epoch, v, price, partial, keep):
        """A whole request: admitted, run to the end of its prompt, published, given back."""
        self.whole(batch, owner, epoch, v, price, partial, keep)

    @precondition(lambda self: self.model.segs)
    @rule(
        i=st.integers(0, 20), j=st.integers(0, 20), cut=st.integers(0, 7), more=st.integers(1, 9),
        price=st.sampled_from([1.0, 0.1]), keep=st.booleans(), damage=st.sets(st.integers(0, 3)),
    )  # fmt: skip
    def resume(self, i, j, cut, more, price, keep, damage):
        """Requests that go on from what is stored, one of them after forms were lost."""
        segs = sorted(self.model.segs.values(), key=lambda s: s.uid)
        a, b = segs[i % len(segs)], segs[j % len(segs)]
        if damage:
            self.lose_forms([b.row], damage)
        texts = (a.prefix[: len(a.prefix) - cut] + (2,) * more, b.prefix + (1,) * more)
        self.whole(texts, (a.owner[0], b.owner[0]), b.epoch, b.version, price, True, keep)

    def whole(self, batch, owner, epoch, v, price, partial, keep):
        while len(self.running) > 1:
            self.give(self.running[0])
        run = self.begin(batch, owner, epoch, v, (0, 0), price, None)
        if run is None:
            return
        for _ in range(4):
            left = [len(x) - r.length if r else 0 for x, r in zip(batch, run.requests, strict=True)]
            self.step(run, [min(n, 8) for n in left])
        self.list_segments(run, partial, (0, 0))
        if not keep:
            self.give(run)

    @rule(batch=pairs(prompts, prompts), owner=pairs(owners, owners), epoch=epochs, v=versions)
    def read_only(self, batch, owner, epoch, v):
        """A reader pins what is usable, takes no page, and appends nothing."""
        no_replay = hkv.costs(replay=float("inf"))
        plan = lib.route(self.ask(batch, owner, epoch, v), no_replay)
        before = np.asarray(hkv.occupancy(self.p.cache)["free"])
        self.p.cache, lease, answer = lib.lease(self.p.cache, plan)
        self.settle_evictions()
        assert (np.asarray(hkv.occupancy(self.p.cache)["free"]) == before).all()
        totals = np.asarray(plan.resume).tolist()
        requests = self.requests_of(plan, batch, owner, epoch, v, lease, answer, totals)
        if any(requests):
            need = self.need(owner, epoch, v)
            self.running.append(Running(lease, requests, need, read_only=True))
            self.check_rows(self.running[-1])

    @precondition(lambda self: self.running)
    @rule(i=st.integers(0, 2), count=pairs(st.integers(0, 8), st.integers(0, 8)))
    def append(self, i, count):
        self.step(self.pick(i), count)

    def step(self, run, count):
        texts = [r.prompt[:64] if r else () for r in run.requests]
        seeds = [r.owner[0] if r else "" for r in run.requests]
        version = next(r.version for r in run.requests if r)
        length = np.asarray(run.lease.length)
        lease, ok = self.p.step(run.lease, count, self.p.params(texts, seeds, version))
        for q, r in enumerate(run.requests):
            fits = r is not None and r.valid and length[q] + count[q] <= r.total
            if fits and count[q]:
                fits = all(
                    i in r.own and self.model.at(r.rows[i]) is None
                    for i in range(length[q] // B, (length[q] + count[q] - 1) // B + 1)
                )
            assert ok[q] == fits, (q, ok, r)
            if fits:
                r.length += count[q]
        assert np.asarray(lease.length).tolist() == [r.length if r else 0 for r in run.requests]
        run.lease = lease
        self.check_rows(run)

    @precondition(lambda self: self.running)
    @rule(i=st.integers(0, 2), partial=st.booleans(), back=pairs(st.integers(0, 9), st.just(0)))
    def publish(self, i, partial, back):
        if not self.pick(i).read_only:
            self.list_segments(self.pick(i), partial, back)

    def list_segments(self, run, partial, back):
        settled, plans = [], []
        texts = [r.prompt[:64] if r else () for r in run.requests]
        for q, r in enumerate(run.requests):
            settled.append(max(r.length - back[q], 0) if r else 0)
        before = self.look()
        lease, n = self.p.publish(run.lease, texts, settled, partial)
        c = self.look()
        for q, r in enumerate(run.requests):
            if r is None or not r.valid:
                assert n[q] == -1
                continue
            must, may = self.model.publish(r, settled[q], partial)
            if q:  # what the request before it gave back counts as stored already
                kept = copy.deepcopy(self.model.segs)
                self.given_back(before, c)
                must_too, may_too = self.model.publish(r, settled[q], partial)
                must, may = must & must_too, must | may | must_too | may_too
                self.model.segs = kept
            listed = {
                i for i, row in enumerate(r.rows)
                if row is not None and self.model.at(row) is None and c.table.length[row] > 0
            }  # fmt: skip
            assert must <= listed <= must | may, (q, listed, must, may)
            assert n[q] == len(listed)
            self.adopt(r, settled[q], listed, c)
            plans.append(r)
        run.lease = lease
        self.given_back(before, c)
        for r in plans:
            r.own -= {i for i in r.own if self.part(r.rows[i])}

    def part(self, row):
        s = self.model.at(row)
        return s is not None and s.length < B

    def adopt(self, r, settled, listed, c):
        """Enters new segments into the model with what they must hold."""
        for i in sorted(listed):
            row, lo = r.rows[i], i * B
            hi = min(settled, lo + B)
            prefix = tuple(r.prompt[:hi])
            parent = int(c.table.parent[row])
            parent = None if parent == N else self.model.at(parent).uid
            if i:
                assert parent is not None and c.table.length[c.table.parent[row]] == B
                assert self.model.segs[parent].prefix == prefix[:lo]
                assert self.model.segs[parent].listed
            held = {}
            for g in SMALL.groups:
                if g.rule.prefix_closed:
                    held[g.name] = set(range(lo, hi // g.rule.unit * g.rule.unit))
                else:
                    held[g.name] = set(range(max(lo, min(hi, r.kept[g.name])), hi))
            if hi - lo == B:
                for old in self.model.under(prefix, r.owner, r.epoch)[:1]:
                    old.listed = False  # superseded
            uid = next(self.model.uids)
            left = c.table.pins[row] == 1  # nobody else holds it, so that what slid on is gone
            ready = {
                g.form
                for g in SMALL.groups
                if g.rule.prefix_closed or r.kept[g.name] < lo + B or not left
            }
            self.model.segs[uid] = Segment(
                uid, row, prefix, r.owner, r.epoch, r.version, hi - lo, parent, held, ready
            )

    def given_back(self, old, c):
        """Rows restored by a recovery may now belong to a shared segment: the payload is checked
        by the invariant, here only that it was the lease's alone to give."""
        for s in self.model.segs.values():
            if (c.table.written[s.row] == old.table.written[s.row]).all():
                continue
            if old.table.length[s.row] == 0:
                continue  # new
            changed = c.table.written[s.row] != old.table.written[s.row]
            bare = all(not old.table.pages[g][s.row].any() for g in np.flatnonzero(changed))
            assert c.table.pins[s.row] == 1 or bare  # there was nothing that anybody could read
            for g, spec in enumerate(SMALL.groups):
                lo, hi = (int(x) for x in c.table.held[s.row, g])
                s.held[spec.name] = set(range(lo, hi)) if c.table.digest[s.row, g].any() else set()
            s.ready = {f for f in Form if c.table.life[s.row, f] == Life.READY}

    @precondition(lambda self: self.running)
    @rule(i=st.integers(0, 2), twice=st.booleans())
    def release(self, i, twice):
        self.give(self.pick(i), twice)

    def give(self, run, twice=False):
        self.running.remove(run)
        self.p.release(run.lease)
        if twice:
            first = jax.device_get(self.p.cache)
            self.p.release(run.lease)
            again = jax.device_get(self.p.cache)
            for a, b in zip(
                jax.tree.leaves(first.table), jax.tree.leaves(again.table), strict=True
            ):
                np.testing.assert_array_equal(a, b)
            for a, b in zip(first.pools, again.pools, strict=True):
                assert a.n_free == b.n_free
        assert not np.asarray(self.p.rows(run.lease)[1]).any()
        self.look()

    @precondition(lambda self: self.running)
    @rule(i=st.integers(0, 2), more=pairs(st.sampled_from([0, 3, 8]), st.sampled_from([-99, 1])))
    def fork(self, i, more):
        run = self.pick(i)
        totals = [
            -1 if r is None or m < 0 else r.length + m
            for r, m in zip(run.requests, more, strict=True)
        ]  # fmt: skip
        total = jnp.asarray(np.array(totals, np.int32))
        self.p.cache, lease, answer = lib.fork(self.p.cache, run.lease, total)
        self.settle_evictions()
        new = []
        for q, r in enumerate(run.requests):
            verdict = Verdict(int(answer.verdict[q]))
            if r is None or not r.valid:
                assert verdict is not Verdict.ADMIT
            if verdict is not Verdict.ADMIT:
                new.append(None)
                continue
            rows = [int(x) if x < N else None for x in np.asarray(lease.rows[q])]
            own = set(np.flatnonzero(np.asarray(lease.own[q])).tolist())
            # Another continuation, so that rows of the branch and of the stem differ.
            prompt = r.prompt[: r.length] + (11, 12, 13) * 40
            kept = dict(r.kept)
            new.append(dataclasses.replace(
                r, prompt=prompt, rows=rows, own=own, total=totals[q], kept=kept
            ))  # fmt: skip
        if any(new):
            self.running.append(Running(lease, new, run.need))
            self.check_rows(self.running[-1])
        self.check_rows(run)

    @precondition(lambda self: self.running)
    @rule(i=st.integers(0, 2))
    def trim(self, i):
        run = self.pick(i)
        if run.read_only:
            return
        self.p.cache, run.lease = lib.trim(self.p.cache, run.lease)
        have = np.asarray(run.lease.have)
        for q, r in enumerate(run.requests):
            for g, spec in enumerate(SMALL.groups):
                if r and r.valid and not spec.rule.prefix_closed:
                    assert have[q, g, 0] >= r.kept[spec.name]
                    r.kept[spec.name] = int(have[q, g, 0])
        self.check_rows(run)

    @rule(pages=pairs(*[st.sampled_from([0, 0, 0, 1, 2, 3, 99])] * 5))
    def evict(self, pages):
        self.p.cache = lib.evict(self.p.cache, jnp.asarray(np.array(pages, np.int32)))
        self.settle_evictions()
        free = np.array([p.n_free for p in self.c.pools])
        if (free < np.array(pages)).any():
            leaves = [
                s for s in self.model.segs.values()
                if not self.model.children(s.uid) and self.c.table.pins[s.row] == 0
            ]  # fmt: skip
            assert not leaves, "something could still go"

    def rows(self, choice):
        """Rows of stored segments, and where there are too few, others."""
        order = sorted(range(N), key=lambda r: (self.model.at(r) is None, r))
        return {order[i] for i in choice}

    @rule(rows=st.sets(st.integers(0, 5), min_size=1, max_size=3), forms=st.sets(st.integers(0, 3)))
    def drop(self, rows, forms):
        self.lose_forms(sorted(self.rows(rows)), forms)

    def lose_forms(self, rows, forms):
        at = rows + [N] * (3 - len(rows))
        mask = np.array([f in forms for f in range(5)])
        pins = self.c.table.pins
        self.p.cache, done = lib.drop(
            self.p.cache, jnp.asarray(np.array(at, np.int32)), jnp.asarray(mask)
        )
        self.look()
        for row, d in zip(at, np.asarray(done), strict=True):
            s = self.model.at(row)
            if s is None:
                continue
            if pins[row]:
                assert not d
                continue
            self.lose(s, {Form(f) for f in forms} & {g.form for g in SMALL.groups})

    @rule(rows=st.sets(st.integers(0, N - 1), max_size=2))
    def invalidate(self, rows):
        rows = self.rows(rows)
        before = self.c.table
        mask = np.array([r in rows for r in range(N)])
        self.p.cache, n = lib.invalidate(self.p.cache, jnp.asarray(mask))
        after = self.look().table
        for row in rows:
            moved = after.version[row] != before.version[row]
            s = self.model.at(row)
            if s is not None and s.ready:
                assert moved
                self.lose(s, set(Form))
            if moved:
                self.spoil(row)

    def spoil(self, row):
        """Leases that hold the row fail from now on."""
        for run in self.running:
            for r in run.requests:
                if r and row in r.rows:
                    r.valid = False

    @rule(rows=st.sets(st.integers(0, 5), min_size=1, max_size=2), v=versions)
    def update_indexer(self, rows, v):
        rows = self.rows(rows)
        at = sorted(rows) + [N] * (2 - len(rows))
        g = SMALL.group("idx")
        fresh = np.zeros((1, 2, 2, 3), np.float32)
        for k, row in enumerate(at):
            s = self.model.at(row)
            if s is not None:
                right = expected(SMALL, g, 1, s.prefix, s.owner[0], v)
                if s.length == B:
                    fresh[0, k] = right[-2:]
        self.p.cache, done = lib.update_indexer(
            self.p.cache, jnp.asarray(np.array(at, np.int32)), {"idx": jnp.asarray(fresh)},
            jnp.asarray(np.uint32(v)),
        )  # fmt: skip
        self.look()
        for row, d in zip(at, np.asarray(done), strict=True):
            s = self.model.at(row)
            if d:
                assert s is not None and s.length == B and v > s.version
                s.version = v
                self.spoil(row)
            elif s is not None:
                assert s.length < B or Form.INDEXER not in s.ready or v <= s.version

    @rule(cut=pairs(*[st.sampled_from([99, 99, 99, 99, 99, 99, 9, 4])] * 4))
    def caps(self, cut):
        pages = {Form(f): n for f, n in enumerate(cut)}
        self.p.cache = hkv.set_caps(self.p.cache, pages)

    # Invariants.

    @invariant()
    def bookkeeping(self):
        if not hasattr(self, "p"):
            return
        c = self.look()
        t = c.table
        o = {k: np.asarray(v) for k, v in hkv.occupancy(self.p.cache).items()}
        assert (o["free"] + o["live"] + o["pinned"] == o["capacity"]).all(), o
        assert all((v >= 0).all() for v in o.values())
        assert (t.version - self.seen < 2**31).all()  # never back
        self.seen = t.version.copy()

        stored = {s.row: s for s in self.model.segs.values()}
        assert len(stored) == len(self.model.segs)
        assert set(np.flatnonzero(t.length > 0).tolist()) == set(stored)
        pins = np.zeros(N, int)
        for run in self.running:
            for r in run.requests:
                for row in r.rows if r else ():
                    if row is not None:
                        pins[row] += 1
        assert (t.pins == pins).all(), (t.pins, pins)
        assert int((c.serials[:, 0] != 0).sum()) == sum(
            r is not None for run in self.running for r in run.requests
        )
        free_rows = c.free_rows[: c.n_free_rows].tolist()
        writing = {row for row in np.flatnonzero(pins).tolist()} - set(stored)
        assert sorted([*free_rows, *stored, *writing]) == list(range(N))

        # The life of each form, its bit, and the children that make a segment stay.
        for row in range(N):
            bits = sum(1 << f for f in range(4) if t.life[row, f] == Life.READY)
            assert t.form[row] == bits
            if row in stored:
                s = stored[row]
                assert {f for f in Form if t.life[row, f] == Life.READY} == s.ready
                assert t.children[row] == len(self.model.children(s.uid)), row
                parent = None if t.parent[row] == N else stored[t.parent[row]].uid
                assert parent == s.parent
                assert s.parent is None or t.parent_born[row] == t.born[t.parent[row]]
            elif row in writing:
                assert set(t.life[row].tolist()) <= {Life.WRITING, Life.STALE, Life.EMPTY}
            else:
                assert not t.life[row].any()

    @invariant()
    def pages(self):
        if not hasattr(self, "p"):
            return
        c, t = self.c, self.c.table
        leases = [jax.device_get(run.lease) for run in self.running]
        for g, (spec, pool) in enumerate(zip(SMALL.groups, c.pools, strict=True)):
            P = spec.pages
            owner = np.full(P, N)
            free = pool.free[: pool.n_free].tolist()
            assert not pool.data[:, 0].any(), "null page"
            lists = [free]
            for row in range(N):
                mine = [x for x in t.pages[g][row].tolist() if x]
                assert t.pages[g].min() >= 0 and t.pages[g].max() < P
                if row in c.free_rows[: c.n_free_rows]:
                    assert not mine
                owner[mine] = row
                lists.append(mine)
            per = SMALL.segment_pages(spec)
            for run, lease in zip(self.running, leases, strict=True):
                for q, r in enumerate(run.requests):
                    if r is None:
                        continue
                    private = np.repeat(lease.private[q, g], per)
                    mine = [x for x in lease.pages[g][q][private].tolist() if x]
                    owner[mine] = N + 1 + lease.slot[q]
                    lists.append(mine)
            every = sorted(x for part in lists for x in part)
            assert every == list(range(1, P)), (spec.name, every)
            assert (pool.owner[1:] == owner[1:]).all()

    @invariant()
    def payload(self):
        """Every stored row is the one its segment says it is, and findable in the index once."""
        if not hasattr(self, "p"):
            return
        c, t = self.c, self.c.table
        digests = np.asarray(lib.verify_payload(self.p.cache, jnp.arange(N, dtype=jnp.int32)))
        index = [x for x in c.index.tolist() if x < N]
        assert len(set(index)) == len(index)
        for row in {*index, *[x for x in c.openings.reshape(-1).tolist() if x < N]}:
            assert self.model.at(row) is not None, "an index names what is not stored"
        for s in self.model.segs.values():
            assert (s.row in index) == (s.listed and s.length == B), s
            assert (t.indexer_version[s.row], t.epoch[s.row]) == (s.version, s.epoch)
            lo = len(s.prefix) - s.length
            np.testing.assert_array_equal(c.tokens[s.row][: s.length], s.prefix[lo:])
            for g, spec in enumerate(SMALL.groups):
                pool, u = c.pools[g], spec.rule.unit
                held = s.held[spec.name]
                if spec.form in s.ready:
                    now = set(range(*(int(x) for x in t.held[s.row, g])))
                    assert now == held or not t.digest[s.row, g].any() and not held, (spec.name, s)
                if held:
                    assert digests[s.row, g] == Reason.OK, (spec.name, s)
                for n in sorted({x // u for x in held}):
                    inside = n - lo // u
                    page = t.pages[g][s.row][inside // spec.rows_per_page]
                    assert page > 0
                    assert pool.stamp[page].tolist() == [s.row, t.written[s.row, g]]
                    for i, layer in enumerate(spec.layers):
                        right = expected(SMALL, g, layer, s.prefix, s.owner[0], s.version)[n]
                        got = pool.data[i, page, inside % spec.rows_per_page]
                        assert (got == right).all(), (spec.name, s, n, got, right)

    def teardown(self):
        """When everything is given back nothing is left behind."""
        if not hasattr(self, "p"):
            return
        for run in self.running:
            self.p.release(run.lease)
        self.running = []
        everything = jnp.full(len(SMALL.groups), 99, jnp.int32)
        self.p.cache = lib.evict(self.p.cache, everything)
        c = self.look()
        for spec, pool in zip(SMALL.groups, c.pools, strict=True):
            assert pool.n_free == spec.pages - 1
        assert c.n_free_rows == N and not c.table.pins.any() and not c.table.children.any()
        assert (c.index == N).all() and (c.openings == N).all()


def test_a_random_life_keeps_every_invariant_and_agrees_with_the_model():
    examples, steps = (500, 40) if FULL else (35, 30)
    settings = hypothesis.settings(
        max_examples=examples, stateful_step_count=steps, deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(CacheLife, settings=settings)


# Lives that once went wrong, by name.


@pytest.fixture
def p():
    return Payload(SMALL)


LONG = list(range(1, 33))


def stored_row(p, prompt, i):
    return int(p.query([prompt]).rows[0, i])


def test_a_row_that_was_never_published_does_not_count_as_a_child_of_its_former_parent(p):
    p.store([LONG[:8]])
    p.store([LONG[:16]])
    parent = stored_row(p, LONG[:17], 0)
    p.cache = lib.evict(p.cache, jnp.asarray(np.array([10, 0, 0, 0, 0], np.int32)))
    lease, _ = p.admit(p.plan([[99] * 8]), [8])  # takes the row of the evicted child
    p.store([LONG[:16]])
    p.release(lease)
    assert p.cache.table.children[parent] == 1


def test_a_reader_takes_no_page_where_windows_are_lost(p):
    p.store([LONG[:25]])
    rows = jnp.asarray(np.array([stored_row(p, LONG[:25], 0), N, N], np.int32))
    p.cache, _ = lib.drop(p.cache, rows, jnp.arange(5) == Form.WINDOW)
    before = np.asarray(hkv.occupancy(p.cache)["free"])
    p.cache, lease, _ = lib.lease(p.cache, p.plan([LONG[:25]]))
    assert (np.asarray(hkv.occupancy(p.cache)["free"]) == before).all()
    p.check_rows(lease, [LONG[:25]])


def test_a_branch_goes_on_when_its_stem_publishes_and_may_publish_without_it(p):
    stem = p.advance(p.start([LONG[:12]], [24]), [LONG[:12]])
    total = jnp.asarray(np.array([24, -1], np.int32))
    p.cache, one, _ = lib.fork(p.cache, stem, total)
    p.cache, two, _ = lib.fork(p.cache, stem, total)
    two = p.advance(two, [LONG[:18]])
    two, n = p.publish(two, [LONG[:18]], partial=False)
    assert n[0] == 2
    stem, n = p.publish(stem, [LONG[:12]], partial=False)
    assert n[0] == 0
    p.release(stem)
    p.release(two)
    p.check_rows(one, [LONG[:12]])
    assert p.boundary([LONG[:18]]) == [16]


@pytest.mark.parametrize("lost", ["invalidated", "dropped"])
def test_a_prefix_whose_first_segment_was_lost_is_whole_again_after_one_run(p, lost):
    p.store([LONG[:24]])
    row = stored_row(p, LONG[:24], 0)
    if lost == "invalidated":
        p.cache, _ = lib.invalidate(p.cache, jnp.arange(N) == row)
    else:
        rows = jnp.asarray(np.array([row, N, N], np.int32))
        p.cache, _ = lib.drop(p.cache, rows, jnp.ones(5, bool))
    assert p.boundary([LONG[:24]]) == [0]
    p.store([LONG[:24]])
    assert p.boundary([LONG[:24]]) == [23]


def test_a_superseded_parent_does_not_hide_the_children_of_the_new_one(p):
    p.store([LONG[:24]])
    rows = jnp.asarray(np.array([stored_row(p, LONG[:24], 0), N, N], np.int32))
    p.cache, _ = lib.drop(p.cache, rows, jnp.ones(5, bool))
    plan = p.plan([LONG[:24]], costs=hkv.costs(replay=float("inf")))
    assert plan.resume[0] == 0
    lease = p.advance(p.admit(plan, [24])[0], [LONG[:24]])
    lease, n = p.publish(lease, [LONG[:24]])
    assert n[0] == 3
    assert p.boundary([LONG[:24]]) == [23]
