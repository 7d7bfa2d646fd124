"""Caps: per form, group and tenant, in pages and bytes, held to whatever is done in what order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import hkv
from hkv import Blocker, Form, Verdict
from hkv._cache import cap_names, cap_unit
from hkv.testing import count_compiles, invariants

LAYOUT = dataclasses.replace(
    tiny.layout(row=4, pages=(49, 13, 13, 25), segments=12, leases=4, buckets=(64,)), tenants=2
)
SIZE = {g.name: g.page_bytes for g in LAYOUT.groups}  # of a page, which holds a whole segment
WEIGHTS = jnp.float32(1)


def text(seed, n=40):
    return np.random.default_rng(seed).integers(1, 99, n).tolist()


class One:
    """One request at a time, of one of three tenants, on one small cache."""

    def __init__(self):
        self.cache = hkv.init(LAYOUT)
        self.needs = {s: hkv.need(self.cache, salt=s) for s in ("a", "b", "c")}
        self.costs = hkv.costs()

    def admit(self, prompt, total=None, salt="a"):
        tokens, length = hkv.pad_batch(LAYOUT, [prompt])
        plan = hkv.route(hkv.query(self.cache, tokens, length, self.needs[salt]), self.costs)
        total = jnp.asarray([total or len(prompt)], jnp.int32)
        self.cache, lease, answer = hkv.admit(self.cache, plan, total)
        if answer.verdict[0] == Verdict.ADMIT:
            self.cache, lease, why = hkv.recover(
                tiny.replay, WEIGHTS, self.cache, lease, plan, tokens, chunk=tiny.CHUNK
            )
            assert not np.asarray(why).any()
        return lease, answer, tokens

    def run(self, lease, tokens, length):
        while int(lease.length[0]) < length:
            count = jnp.asarray([min(tiny.CHUNK, length - int(lease.length[0]))], jnp.int32)
            self.cache, lease, _, ok = tiny.step(WEIGHTS, self.cache, lease, tokens, count)
            assert bool(ok[0])
        self.cache, lease, _ = hkv.publish(
            self.cache, lease, tokens, jnp.asarray([length], jnp.int32), partial=True
        )
        return lease

    def serve(self, prompt, salt="a"):
        lease, answer, tokens = self.admit(prompt, salt=salt)
        if answer.verdict[0] == Verdict.ADMIT:
            lease = self.run(lease, tokens, len(prompt))
            self.cache = hkv.release(self.cache, lease)
        return answer

    def used(self, tenant=None):
        """Pages per group by the owners of pages and the table alone."""
        c, N = jax.device_get(self.cache), LAYOUT.segments
        word = None if tenant is None else int(self.needs[tenant].tenant[0])
        out = {}
        for g, pool in zip(LAYOUT.groups, c.pools, strict=True):
            n = 0
            for owner in pool.owner[1:]:
                if owner < N:
                    n += word is None or c.table.tenant[owner] == word
                elif owner > N:
                    n += word is None or c.tenants[owner - N - 1] == word
            out[g.name] = n
        return out


@pytest.fixture
def one():
    return One()


def test_the_default_caps_are_the_pools(one):
    names = cap_names(LAYOUT)
    limit = np.asarray(one.cache.caps.limit)
    assert (limit == limit[0]).all()  # a tenant may have everything
    assert limit[0, names.index(("window", "pages"))] == 12
    assert limit[0, names.index(("COMPRESSED", "pages"))] == 48
    whole = sum(SIZE[g.name] * (g.pages - 1) for g in LAYOUT.groups)
    assert limit[0, names.index(("shared", "bytes"))] * cap_unit(LAYOUT) == whole


@pytest.mark.parametrize(
    ("pages", "size", "told"),
    [
        ({Form.WINDOW: 2}, {}, "cap of WINDOW: 0 used and 3 more of 2 pages"),
        ({"index": 2}, {}, "cap of index: 0 used and 3 more of 2 pages"),
        ({}, {Form.TAIL: 1025}, "cap of TAIL: 0 used and 1,536 more of 1,024 bytes"),
        ({}, {"history": 300}, "cap of history: 0 used and 3 more of 2 pages"),
        ({}, {("window", "tail"): 2048}, "cap of shared: 0 used and 3,072 more of 2,048 bytes"),
    ],
    ids=["form", "group", "bytes of a form", "bytes of a group", "shared"],
)  # fmt: skip
def test_what_can_never_fit_is_refused_and_what_does_not_fit_now_waits(one, pages, size, told):
    assert SIZE == {"history": 128, "window": 512, "tail": 512, "index": 64}
    one.cache = hkv.set_caps(one.cache, pages, bytes=size)
    _, answer, _ = one.admit(text(0, 40))  # three segments, where there is room for two
    assert answer.verdict[0] == Verdict.REFUSE and answer.blocker[0] == Blocker.CAP
    assert told in str(answer)
    first, answer, _ = one.admit(text(1, 16))
    assert answer.verdict[0] == Verdict.ADMIT
    _, answer, _ = one.admit(text(2, 16), total=32)
    assert answer.verdict[0] == Verdict.WAIT and answer.blocker[0] == Blocker.CAP
    one.cache = hkv.release(one.cache, first)
    assert one.admit(text(2, 16), total=32)[1].verdict[0] == Verdict.ADMIT
    invariants(one.cache)


def test_a_tenant_over_its_cap_gives_up_its_own_and_nobody_elses(one):
    one.cache = hkv.set_caps(one.cache, {"window": 3}, tenant="a")
    for i in range(2):
        assert one.serve(text(10 + i, 48), "b").verdict[0] == Verdict.ADMIT
    for i in range(3):
        assert one.serve(text(20 + i, 32), "a").verdict[0] == Verdict.ADMIT
        assert one.used("a")["window"] <= 3
    assert one.used("b")["window"] == 6
    answer = one.serve(text(30, 64), "a")
    assert answer.verdict[0] == Verdict.REFUSE and answer.blocker[0] == Blocker.CAP
    assert "tenant 1" in str(answer)
    assert one.serve(text(31, 64), "c").verdict[0] == Verdict.ADMIT  # who has no cap of its own


def test_places_for_tenants_run_out_with_a_message(one):
    cache = hkv.set_caps(
        hkv.set_caps(one.cache, {"window": 3}, tenant="a"), {"tail": 3}, tenant="b"
    )
    cache = hkv.set_caps(cache, {"tail": 4}, tenant="a")
    with pytest.raises(ValueError, match="`tenant` is 'c'"):
        hkv.set_caps(cache, {"window": 3}, tenant="c")


def test_a_cap_lowered_under_a_running_request_stops_the_next_one_only(one):
    lease, _, tokens = one.admit(text(0, 40), total=48)
    one.cache = hkv.set_caps(one.cache, {Form.WINDOW: 1})
    _, answer, _ = one.admit(text(1, 16))
    assert answer.verdict[0] == Verdict.WAIT and answer.blocker[0] == Blocker.CAP
    lease = one.run(lease, tokens, 40)  # what was reserved is there
    one.cache = hkv.release(one.cache, lease)
    _, answer, _ = one.admit(text(1, 16))  # the windows of the first go for it
    assert answer.verdict[0] == Verdict.ADMIT
    assert one.used()["window"] <= 1
    tokens, length = hkv.pad_batch(LAYOUT, [text(0, 40)])
    found = hkv.query(one.cache, tokens, length, one.needs["a"])
    assert bool(found.recoverable[0].any()) and int(found.matched[0]) == 39


def test_changing_caps_compiles_nothing(one):
    one.serve(text(0))
    with count_compiles() as count:
        for n in (3, 9, 6):
            one.cache = hkv.set_caps(
                one.cache, {Form.WINDOW: n, "tail": n}, bytes={("window", "tail"): n * 4000},
            )  # fmt: skip
            one.cache = hkv.set_caps(one.cache, {"window": n}, tenant="b")
            one.serve(text(n), "b")
    assert not count.names


numbers = st.integers(0, 12)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["serve", "serve", "start", "end", "caps", "lose"]),
                       numbers, st.sampled_from("abc")), min_size=5, max_size=25)
)  # fmt: skip
def test_no_sequence_of_operations_takes_more_than_the_caps_allow(steps):
    one, running = One(), []
    tight: dict = {}
    for what, n, salt in steps:
        if what == "caps":
            tight = {"window": 2 + n % 5, "tail": 3 + n % 4}
            tenant = {"window": 1 + n % 4}
            shared = (20 + 3 * n) * 1024
            one.cache = hkv.set_caps(one.cache, tight, bytes={("window", "tail"): shared})
            one.cache = hkv.set_caps(one.cache, tenant, tenant="a")
        elif what == "serve":
            one.serve(text(n, 16 + n), salt)
        elif what == "start" and len(running) < 3:
            lease, answer, tokens = one.admit(text(n, 16 + n), salt=salt)
            if answer.verdict[0] == Verdict.ADMIT:
                running.append((lease, tokens, 16 + n))
        elif what == "end" and running:
            lease, tokens, length = running.pop(n % len(running))
            lease = one.run(lease, tokens, length)
            one.cache = hkv.release(one.cache, lease)
        elif what == "lose":
            forms = jnp.asarray([f is Form.WINDOW for f in Form])
            one.cache, _ = hkv.drop(one.cache, jnp.asarray([n], jnp.int32), forms)
        if what in ("serve", "start") and tight:
            # Whoever was admitted since fits; what was there before may be over, and only shrinks.
            used, mine = one.used(), one.used("a")
            last = getattr(one, "last", None)
            for name, cap in tight.items():
                assert used[name] <= max(cap, last[0][name] if last else used[name])
            assert mine["window"] <= max(tenant["window"], last[1]["window"] if last else 99)
            total = sum(used[g] * SIZE[g] for g in ("window", "tail"))
            before = sum(last[0][g] * SIZE[g] for g in ("window", "tail")) if last else total
            assert total <= max(shared, before)
        one.last = (one.used(), one.used("a"))
        invariants(one.cache, [x[0] for x in running])
