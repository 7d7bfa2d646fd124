"""Between query and read anything may happen: who reads gets what was verified, or is refused.

Two requests walk from query to publication in one batch, and the first one branches on the way. At
a point of the way something happens to what the first one reads: eviction and refill, a lost form,
a page rewritten where it lies, stale segments, another indexer, other weights, lower caps, a lease
given back. From then on each reads its own rows bit for bit, or reads zeros, writes nothing, and is
served by the next query.
"""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from payload import QUICK, Payload, expected, group, lib

import hkv
from hkv import Blocker, Form, Reason, Verdict
from hkv._cache import bumped, same_generation
from hkv.testing import invariants

MANY = os.environ.get("HKV_FULL") == "1"
B, N = 8, 18
LAYOUT = hkv.Layout(
    groups=(
        group("c4", Form.COMPRESSED, hkv.history(4), (1,), 1),
        group("full", Form.COMPRESSED, hkv.history(1), (0,), 8),
        group("tail", Form.TAIL, hkv.tail(4, overlap=True), (1,), 4),
        group("w5", Form.WINDOW, hkv.window(5), (0, 2), 4),
        group("w12", Form.WINDOW, hkv.window(12), (2,), 8),
        group("idx", Form.INDEXER, hkv.indexer(4), (1,), 2),
    ),
    segment_tokens=B, segments=N, buckets=(64,), leases=6,
    shards=int(os.environ.get("HKV_SHARDS", "1")),
)  # fmt: skip
NAMES = [g.name for g in LAYOUT.groups]
PER = [LAYOUT.segment_pages(g) for g in LAYOUT.groups]
FORMS = (Form.COMPRESSED, Form.TAIL, Form.WINDOW, Form.INDEXER)
FULL = jnp.asarray(np.array([g.pages - 1 for g in LAYOUT.groups], np.int32))


def text(n, seed=0):
    return np.random.default_rng(seed).integers(1, 200, n).tolist()


# Each request shares 19 tokens with what is stored: two segments, and a part of the third, which
# is copied. At 19 every rolling group needs rows on both sides of that seam.
SHARED, MIDDLE, SEAM, END = 19, 24, 26, 27
STORED = [text(22, 1), text(22, 2)]
PROMPTS = [STORED[0][:SHARED] + text(8, 3), STORED[1][:SHARED] + text(8, 4)]
BRANCH = PROMPTS[0][:SEAM] + text(2, 5)
POINTS = ("query", "route", "admit", "recover", "step", "fork", "publish")
verify_lease = jax.jit(hkv.verify_lease, compiler_options=QUICK)


def needed(rule, p):
    """Rows that a resume at `p` needs, by the definitions."""
    m = rule.size
    match rule.kind:
        case hkv.Kind.WINDOW:
            return range(max(0, p - m + 1), p)
        case hkv.Kind.TAIL:  # with overlap
            return range(max(0, p - p % m - m), p)
    return range(p // m)


def reads(p, lease, prompts):
    """Who is served now: they find every row they need and only right ones, the others zeros."""
    out, ok = p.rows(lease)
    length = np.asarray(lease.length)
    for q, prompt in enumerate(prompts):
        for g, spec in enumerate(LAYOUT.groups):
            for layer in spec.layers:
                rows, valid = (x[q] for x in out[spec.name, layer])
                if not ok[q]:
                    assert not rows.any() and not valid.any(), (q, spec.name)
                    continue
                at = np.flatnonzero(valid)
                assert set(needed(spec.rule, int(length[q]))) <= set(at.tolist()), (q, spec.name)
                assert not at.size or (at[-1] + 1) * spec.rule.unit <= length[q], (q, spec.name)
                right = expected(LAYOUT, g, layer, prompt)
                np.testing.assert_array_equal(rows[at], right[at], f"{q} {spec.name}")
    why = np.asarray(verify_lease(p.cache, lease))[: len(prompts)]
    assert ((why == Reason.OK) == ok[: len(prompts)]).all(), (why, ok)
    return ok[: len(prompts)].tolist()


def wrote_only(before, after, lease, served):
    """Every page that changed is one that a served request may write."""
    lease = jax.device_get(lease)
    for g, (old, new) in enumerate(zip(before, after, strict=True)):
        changed = (old.data != new.data).any(axis=(0, 2, 3)) | (old.stamp != new.stamp).any(axis=1)
        mine = np.repeat(lease.own | lease.private[:, g], PER[g], 1)
        allowed = lease.pages[g][mine & np.asarray(served)[:, None]]
        assert set(np.flatnonzero(changed)) <= set(allowed.tolist()) - {0}, NAMES[g]


@functools.cache
def stored():
    p = Payload(LAYOUT)
    p.store(STORED)
    return p.cache


copied = jax.jit(lambda cache: jax.tree.map(jnp.copy, cache), compiler_options=QUICK)


class Way:
    """A batch of two requests on its way, and a branch of the first. Three are `alive` or not."""

    actions = POINTS
    prices = hkv.costs(replay=0.1)

    def __init__(self, lost=(), segments=(0, 1, 2)):
        self.p = Payload(LAYOUT)
        self.p.cache = copied(stored())
        self.lease = self.branch = self.older = None
        self.alive = [True] * 3
        self.others = []
        for prompt in STORED if lost else ():
            self.drop(lost, [self.rows_of(prompt)[i] for i in segments])

    def walk(self, *happens):
        """All actions; `happens` are (point, event): what comes after the action of that name."""
        for name in self.actions:
            self.older = self.lease
            getattr(self, {"lease": "take"}.get(name, name))()
            for event in (None, *(act for point, act in happens if point == name)):
                if event is not None:
                    event(self)
                self.look(recovered=name not in ("query", "route", "admit"))
        self.end()
        return self.alive

    # The way.

    def query(self):
        self.found = self.p.query(PROMPTS)
        assert np.asarray(self.found.matched).tolist() == [SHARED] * 2

    def route(self):
        self.plan = lib.route(self.found, self.prices)
        assert np.asarray(self.plan.resume).tolist() == [SHARED] * 2

    def admit(self):
        self.lease, answer = self.p.admit(self.plan, [END, END])
        self.answer = jax.device_get(answer)
        self.alive[:2] = (self.answer.verdict == Verdict.ADMIT).tolist()

    def recover(self):
        before = jax.device_get(self.p.cache.pools)
        lease, why = self.p.recover(self.lease, self.plan, PROMPTS)
        wrote_only(before, jax.device_get(self.p.cache.pools), self.lease, self.alive[:2])
        self.lease = lease
        self.note(0, why == Reason.OK)

    def step(self, until=MIDDLE):
        self.lease = self._step(self.lease, PROMPTS, until, 0)

    def fork(self):
        self.step(SEAM)
        total = jnp.asarray(np.array([len(BRANCH), -1], np.int32))
        self.p.cache, self.branch, answer = lib.fork(self.p.cache, self.lease, total)
        self.note(2, np.asarray(answer.verdict)[:1] == Verdict.ADMIT)
        assert self.alive[0] or not self.alive[2]

    def publish(self):
        """The last step before it; `end` publishes."""
        self.step(END)
        self.branch = self._step(self.branch, [BRANCH], len(BRANCH), 2)

    def end(self):
        for lease, prompts, first in ((self.lease, PROMPTS, 0), (self.branch, [BRANCH], 2)):
            if lease is None:
                continue
            _, n = self.p.publish(lease, prompts)
            assert all(self.alive[first + q] or n[q] < 1 for q in range(len(prompts))), n

    def _step(self, lease, prompts, until, first):
        before = jax.device_get(self.p.cache.pools)
        length = np.asarray(lease.length)[: len(prompts)]
        params = self.p.params(prompts)
        new, ok = self.p.step(lease, [max(1, until - n) for n in length], params)
        now = np.where(ok[: len(prompts)], until, length)
        assert np.asarray(new.length)[: len(prompts)].tolist() == now.tolist()
        wrote_only(before, jax.device_get(self.p.cache.pools), lease, ok)
        self.note(first, ok[: len(prompts)])
        return new

    def note(self, first, ok):
        """Once refused, always refused: nothing becomes right by itself."""
        for q, good in enumerate(ok, first):
            assert self.alive[q] or not good, q
            self.alive[q] = bool(good)

    def look(self, recovered):
        """Reads what there is to read; before its recovery a request may have to wait for it."""
        for lease, prompts, first in ((self.lease, PROMPTS, 0), (self.branch, [BRANCH], 2)):
            if lease is None:
                continue
            seen = reads(self.p, lease, prompts)
            if recovered:
                self.note(first, seen)
            else:
                assert self.alive[0] or not seen[0]
                assert self.alive[1] or not seen[1]

    def serve_again(self):
        """What was refused is served by a new query, and in the end nothing is left behind."""
        p = self.p
        for lease in (self.lease, self.branch, *self.others):
            if lease is not None:
                p.release(lease)
        self.caps(10**6)
        for prompt, ok in zip([*PROMPTS, BRANCH], self.alive, strict=True):
            if not ok:
                p.store([prompt])
        for prompts in (PROMPTS, [BRANCH]):  # every row is checked
            p.release(p.start([prompt + [7] for prompt in prompts]))
        p.cache = lib.evict(p.cache, FULL)
        invariants(p.cache, [])
        assert (np.asarray(hkv.occupancy(p.cache)["free"]) == np.asarray(FULL)).all()

    # What may happen on it.

    def rows_of(self, prompt):
        """Rows of the stored segments along a prompt, N for none."""
        return np.asarray(self.p.query([prompt + [7]]).rows)[0, :3].tolist()

    def drop(self, forms, rows):
        rows = jnp.asarray(np.array(rows + [N] * (3 - len(rows)), np.int32))
        mask = jnp.asarray(np.array([f in forms for f in Form]))
        self.p.cache, done = lib.drop(self.p.cache, rows, mask)
        return np.asarray(done)

    def caps(self, n):
        self.p.cache = hkv.set_caps(self.p.cache, dict.fromkeys(FORMS, n))

    def store(self, prompts, need=None, seeds=None):
        caps = self.p.cache.caps
        self.caps(10**6)
        self.p.store(prompts, need, seeds)
        self.p.cache = dataclasses.replace(self.p.cache, caps=caps)

    def refill(self):
        """All that nobody holds goes, and others take every row and page of it that they can."""
        self.p.cache = lib.evict(self.p.cache, FULL)
        while n := self.room():
            each = (min(8, (n + 1) // 2), min(8, n // 2))
            self.store([text(B * k, 90 + n + i) for i, k in enumerate(each) if k])

    def room(self):
        """Segments for which there are a row and pages of every group."""
        pages = (int(p.n_free) // n for p, n in zip(self.p.cache.pools, PER, strict=True))
        return min(int(self.p.cache.n_free_rows), *pages)

    def rewrite(self, name, segment, row, word):
        """Somebody writes a page where it lies, and stamps it as his."""
        g = NAMES.index(name)
        n = PER[g]
        if self.lease is not None and self.alive[0]:
            page = int(self.lease.pages[g][0, segment * n + n - 1])
        else:
            at = self.rows_of(STORED[0])[segment]
            page = int(self.p.cache.table.pages[g][at, n - 1]) if at < N else 0
        if page == 0:
            return
        pool = self.p.cache.pools[g]
        data, stamp = np.array(pool.data), np.array(pool.stamp)
        data[:, page] = -5.0
        stamp[page] += np.array([row, word], np.uint32)
        new = dataclasses.replace(pool, data=jnp.asarray(data), stamp=jnp.asarray(stamp))
        pools = tuple(new if i == g else x for i, x in enumerate(self.p.cache.pools))
        self.p.cache = dataclasses.replace(self.p.cache, pools=pools)

    def invalidate(self):
        mask = np.zeros(N + 1, bool)
        mask[self.rows_of(STORED[0])[1]] = True
        self.p.cache, _ = lib.invalidate(self.p.cache, jnp.asarray(mask[:N]))

    def update_indexer(self):
        rows = self.rows_of(STORED[0])[:2]
        keys = expected(LAYOUT, NAMES.index("idx"), 1, STORED[0][: 2 * B], version=1)
        self.p.cache, _ = lib.update_indexer(
            self.p.cache, jnp.asarray(np.array(rows, np.int32)),
            {"idx": jnp.asarray(keys.reshape(1, 2, 2, 3))}, jnp.uint32(1),
        )  # fmt: skip

    def give_back(self, lease):
        """The first request of a batch alone, or nobody before there is a lease."""
        if lease is not None:
            alone = lease.serial * jnp.asarray(np.array([[1], [0]], np.uint32))
            self.p.release(dataclasses.replace(lease, serial=alone))
            self.refill()

    def admit_again(self):
        """The same prompt in the same slot and rows, as if nothing had been."""
        if self.lease is None:
            return
        alone = self.lease.serial * jnp.asarray(np.array([[1], [0]], np.uint32))
        self.p.release(dataclasses.replace(self.lease, serial=alone))
        caps = self.p.cache.caps
        self.caps(10**6)
        again = self.p.start([PROMPTS[0]], [END], costs=self.prices)
        self.p.cache = dataclasses.replace(self.p.cache, caps=caps)
        self.others.append(again)

    def come_round(self):
        """Other segments in the same rows, whose versions have come round to the same number."""
        rows = np.asarray(self.found.rows)[:, :3].reshape(-1)
        versions = np.asarray(self.found.version)[:, :3].reshape(-1)
        for lease in (self.lease, self.branch):
            if lease is not None:
                rows = np.append(rows, np.asarray(lease.rows))
                versions = np.append(versions, np.asarray(lease.version))
                self.p.release(lease)
        self.refill()
        now = np.append(np.array(self.p.cache.table.version), np.uint32(0))
        now[rows] = versions
        table = dataclasses.replace(self.p.cache.table, version=jnp.asarray(now[:N]))
        self.p.cache = dataclasses.replace(self.p.cache, table=table)

    def step_back(self):
        """The host goes on with the lease from before the last action."""
        if self.older is not None:
            self.lease = self.older

    def trim(self):
        if self.lease is not None:
            self.p.cache, self.lease = lib.trim(self.p.cache, self.lease)
            self.refill()


def _events():
    """Per name: what happens; who is refused if it comes before the lease, and if after."""
    out = {
        "evict and refill": (Way.refill, {0, 1}, set()),
        "invalidate": (Way.invalidate, {0}, {0}),
        "update the indexer": (Way.update_indexer, {0}, {0}),
        "publish under other weights": (
            lambda w: w.store([PROMPTS[0]], w.p.need(epoch=1), ["other weights"]), set(), set(),
        ),
        "publish the same": (lambda w: w.store([PROMPTS[0]]), set(), set()),
        "caps of 0": (lambda w: w.caps(0), {0, 1}, set()),
        "caps of 0, refill": (lambda w: (w.caps(0), w.refill()), {0, 1}, set()),
        "release": (lambda w: w.give_back(w.lease), set(), {0}),
        "release the branch": (lambda w: w.give_back(w.branch), set(), set()),
        "release and admit again": (Way.admit_again, set(), {0}),
        "come round": (Way.come_round, {0, 1}, {0, 1}),
        "go on with an older lease": (Way.step_back, set(), {0, 1}),
        "trim and refill": (Way.trim, set(), set()),
        "rewrite the copy": (lambda w: w.rewrite("full", 2, 1, 0), {0}, {0}),
    }  # fmt: skip
    for f in FORMS:
        out[f"drop {f.name}"] = (lambda w, f=f: w.drop({f}, w.rows_of(STORED[0])), {0}, set())
    for i, name in enumerate(NAMES):
        # As another segment's, or as a later page of the same row.
        words = (1, 0) if i % 2 else (0, 1)
        act = lambda w, name=name, words=words: w.rewrite(name, 1, *words)  # noqa: E731
        out[f"rewrite {name}"] = (act, {0}, {0})
    return out


EVENTS = _events()


def expect(point, name):
    """Who is still served in the end: the two requests and the branch of the first."""
    _, before, held = EVENTS[name]
    refused = before if point in POINTS[:2] else held
    alive = [q not in refused for q in range(2)]
    forked = point in ("fork", "publish")
    if name.startswith("caps"):
        return [*alive, alive[0] and forked]  # no room for a branch
    if point == "admit" and name == "go on with an older lease":
        return [True] * 3  # there is none
    if name == "release the branch":
        return [*alive, not forked]
    if name in ("release", "release and admit again", "go on with an older lease"):
        return [*alive, alive[0] or forked]  # a branch outlives its stem
    return [*alive, alive[0]]


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("point", POINTS)
def test_whatever_happens_on_the_way_a_request_reads_its_own_rows_or_is_refused(point, name):
    way = Way()
    assert way.walk((point, EVENTS[name][0])) == expect(point, name)
    if point in POINTS[:2]:
        changed = Blocker.CHANGED if EVENTS[name][1] else Blocker.NONE
        changed = Blocker.NONE if name.startswith("rewrite") else changed  # found by the recovery
        wanted = Blocker.CAP if name.startswith("caps") else changed
        assert way.answer.blocker[0] == wanted
    way.serve_again()


LOST = [
    ((), ()), ((Form.WINDOW,), (0, 1, 2)), ((Form.WINDOW, Form.TAIL), (1, 2)), ((Form.TAIL,), (1,)),
    ((Form.COMPRESSED,), (1,)), ((Form.COMPRESSED, Form.WINDOW), (0,)), ((Form.INDEXER,), (0, 1)),
]  # fmt: skip


@settings(max_examples=300 if MANY else 30)
@given(
    st.sampled_from(LOST),
    st.lists(st.tuples(st.sampled_from(POINTS), st.sampled_from(sorted(EVENTS))), min_size=1,
             max_size=3),
)  # fmt: skip
def test_so_it_is_whatever_was_lost_before_and_however_much_happens(lost, happens):
    way = Way(*lost)
    way.walk(*((point, EVENTS[name][0]) for point, name in happens))
    way.serve_again()


@pytest.mark.parametrize("lost", LOST[1:])
@pytest.mark.parametrize("point", ["query", "admit", "recover"])
def test_rows_given_back_by_another_meanwhile_change_nothing_for_who_restores_his_own(point, lost):
    """Another request restores the same rows first, and publishes them."""
    way = Way(*lost)
    gift = lambda w: w.store([STORED[0] + [9]])  # noqa: E731
    alive = way.walk((point, gift))
    if not alive[0]:  # good rows took the place of others in the shared segment
        assert point == "query" and way.answer.blocker[0] == Blocker.CHANGED
    assert alive[1]
    way.serve_again()


class Reader(Way):
    """Two requests that only read: nothing is reserved or copied, all three segments are shared."""

    actions = ("query", "route", "lease")
    prices = hkv.costs(replay=float("inf"))

    def take(self):
        self.p.cache, self.lease, answer = lib.lease(self.p.cache, self.plan)
        self.answer = jax.device_get(answer)
        self.alive[:2] = (self.answer.verdict == Verdict.ADMIT).tolist()

    def end(self):
        before = jax.device_get(self.p.cache.pools)
        _, ok = self.p.step(self.lease, [1, 1], self.p.params(PROMPTS))
        assert not ok.any()
        wrote_only(before, jax.device_get(self.p.cache.pools), self.lease, ok)
        super().end()


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("point", Reader.actions)
def test_who_only_reads_reads_what_was_verified_or_nothing(point, name):
    way = Reader()
    alive = way.walk((point, EVENTS[name][0]))[:2]
    _, before, held = EVENTS[name]
    refused = held if point == "lease" else before
    if name in ("caps of 0", "go on with an older lease"):
        refused = set()  # nothing is reserved, and there is no older one
    assert alive == [q not in refused for q in range(2)]
    way.serve_again()


def test_the_stamps_of_pages_refuse_alone_when_all_other_numbers_have_come_round():
    """Row versions, lease slot and serial are those of the reader; only the pages are others'."""
    way = Way()
    p = way.p
    for name in POINTS[:4]:
        getattr(way, name)()
    serials, reached = jnp.copy(p.cache.serials), jnp.copy(p.cache.reached)
    assert reads(p, way.lease, PROMPTS) == [True, True]
    way.come_round()
    after = p.cache.serials, p.cache.reached
    p.cache = dataclasses.replace(p.cache, serials=serials, reached=reached)
    assert np.asarray(hkv.check_lease(p.cache, way.lease)).all()
    assert reads(p, way.lease, PROMPTS) == [False, False]
    before = jax.device_get(p.cache.pools)
    _, ok = p.step(way.lease, [1, 1], p.params(PROMPTS))
    assert not ok.any()
    wrote_only(before, jax.device_get(p.cache.pools), way.lease, ok)
    _, n = p.publish(way.lease, PROMPTS)
    assert (n == -1).all()
    p.cache = dataclasses.replace(p.cache, serials=after[0], reached=after[1])
    way.alive = [False] * 3
    way.serve_again()


def test_a_row_taken_over_and_over_never_looks_like_the_segment_it_was():
    """Two generations each time: a counter of 8 bits would have come round more than once."""
    p = Payload(LAYOUT)
    p.store([STORED[0][:B]])
    old = p.plan([STORED[0][:B] + [7]])
    reader = p.start([STORED[0][:B] + [7]])
    row, page = int(old.rows[0, 0]), int(p.cache.table.pages[1][int(old.rows[0, 0]), 0])
    p.release(reader)
    p.cache = lib.evict(p.cache, FULL)
    cold, low = p.plan([text(B, 9)]), []
    for _ in range(140):
        lease, answer = p.admit(old, [B + 1])
        assert answer.blocker[0] == Blocker.CHANGED
        assert reads(p, reader, [STORED[0]]) == [False]
        lease, _ = p.admit(cold, [B])
        assert (int(lease.rows[0, 0]), int(lease.pages[1][0, 0])) == (row, page)
        low.append(int(lease.version[0, 0]) & 0xFF)
        p.release(lease)
    assert len(set(low)) == 1  # the low bits are no generation
    invariants(p.cache, [])


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.lists(st.booleans(), min_size=1, max_size=30))
def test_a_generation_ends_for_good_with_the_first_transition_that_spoils_rows(first, readable):
    first = jnp.uint32(first)
    now = first
    for i, keep in enumerate(readable):
        now = bumped(now, readable=keep)
        if not all(readable[: i + 1]):
            assert not same_generation(first, now)


def test_where_a_generation_has_no_more_numbers_a_reader_is_refused_rather_than_misled():
    now = jnp.uint32(7 << 8)
    for _ in range(255):
        now = bumped(now, readable=True)
        assert same_generation(jnp.uint32(7 << 8), now)
    assert not same_generation(jnp.uint32(7 << 8), bumped(now, readable=True))
