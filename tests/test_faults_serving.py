"""Faults that caches of this kind had in real systems, by kind: side pools, hits of several groups,
reads that race, pages freed too early, ownership, admission, chunks, index ranges, static shapes,
eviction order, phantom availability.

Rows are known rows (see `payload`), so that a row of somebody else, of another place or of another
indexer is seen wherever a request would read it.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import planted
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from payload import Payload, expected, lib
from test_leases import FORMS, FULL, LAYOUT, NAMES, PER, B, N, needed, reads, text

import hkv
from hkv import Blocker, Form, Life, Reason, Verdict
from hkv._cache import cap_names, cap_unit, cap_weights
from hkv._slots import add, put, swap, take
from hkv.testing import count_compiles, invariants

A, Z = text(64), text(64, 1)
STRICT = hkv.costs(replay=float("inf"))
CHEAP = hkv.costs(replay=0.01)


@pytest.fixture
def p():
    return Payload(LAYOUT)


def rows_of(p, prompt, need=None):
    """Rows of the stored segments along a prompt."""
    rows = np.asarray(p.query([prompt + [7]], need).rows)[0]
    return rows[rows < N].tolist()


def padded(rows, n=6):
    return jnp.asarray(np.array([*rows, *[N] * (n - len(rows))], np.int32))


def mask(forms):
    return jnp.asarray(np.array([f in forms for f in Form]))


def drop(p, rows, forms=FORMS):
    p.cache, done = lib.drop(p.cache, padded(rows), mask(forms))
    return np.asarray(done)[: len(rows)].tolist()


def free(p):
    return np.asarray(hkv.occupancy(p.cache)["free"]).tolist()


def check_digests(p):
    """Every stored row is what was published."""
    why = np.asarray(lib.verify_payload(p.cache, jnp.arange(N, dtype=jnp.int32)))
    t = host(p).table
    assert not why[t.digest.any(-1)].any()
    ready = t.life[:, [g.form for g in LAYOUT.groups]] == Life.READY
    assert (t.digest.any(-1) == ready).all()


def host(p):
    return jax.device_get(p.cache)


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def boundaries(n):
    """Positions that a prompt whose first `n` tokens are stored can be judged at."""
    return [*range(0, n + 1, B), *range(n // B * B + 1, n + 1)]


def furthest(n, lost):
    """Per group, and for all at once, the furthest position at which nothing lost is needed.

    `lost` are pairs of a form and the number of a segment.
    """

    def there(spec, at):
        tokens = (r * spec.rule.unit for r in needed(spec.rule, at))
        return all((spec.form, t // B) not in lost for t in tokens)

    sets = [{at for at in boundaries(n) if there(spec, at)} for spec in LAYOUT.groups]
    return [max(s) for s in sets], max(set.intersection(*sets))


# The indexer's keys beside the history that they select from (K05).


@pytest.mark.parametrize("segment", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [3, 8, 12, 17, 20, 24, 27, 30])
def test_a_prefix_ends_where_the_first_lost_index_key_is_needed(p, segment, n):
    """The history is whole, but no entry without its key may be selected from."""
    p.store([A[:30]])
    drop(p, rows_of(p, A[:30])[segment : segment + 1], {Form.INDEXER})
    prompt = A[:n] + Z[:6]
    a = p.query([prompt])
    want, usable = furthest(n, {(Form.INDEXER, segment)})
    assert a.matched[0] == n and np.asarray(a.furthest[0]).tolist() == want
    assert a.boundary[0] == usable and want[NAMES.index("full")] == n
    lease = p.start([prompt], costs=STRICT)
    assert lease.length[0] == usable
    entries, _ = p.rows(lease)
    assert entries["c4", 1][1][0].sum() == entries["idx", 1][1][0].sum() == usable // 4
    lease = p.advance(lease, [prompt])
    p.check_rows(lease, [prompt])


@pytest.mark.parametrize("new", [(), (0,), (1,), (0, 1), (1, 2), (0, 1, 2)])
def test_keys_of_two_indexers_never_serve_one_prompt(p, new):
    p.store([A[:24]])
    rows = rows_of(p, A[:24])
    keys = expected(LAYOUT, NAMES.index("idx"), 1, A[:24], version=1).reshape(3, 2, 3)
    for pair in (new[:2], new[2:]):
        at = [*pair, *[3] * (2 - len(pair))]  # by twos, as another test of this layout
        entry = jnp.asarray(np.concatenate([keys, keys[:1]])[at][None])
        p.cache, done = lib.update_indexer(
            p.cache, jnp.asarray(np.array([*rows, N])[at].astype(np.int32)), {"idx": entry},
            jnp.uint32(1),
        )  # fmt: skip
        assert np.asarray(done).tolist() == [i < 3 for i in at]
        before = jax.device_get(p.cache)
        p.cache, done = lib.update_indexer(  # not higher, or a repeat of what is none
            p.cache, jnp.asarray(np.array([*rows, N])[at].astype(np.int32)), {"idx": entry},
            jnp.uint32(1),
        )  # fmt: skip
        assert not np.asarray(done).any()
        jax.tree.map(np.testing.assert_array_equal, before.table, jax.device_get(p.cache.table))
    invariants(p.cache, [])
    check_digests(p)
    prompt = A[:24] + [7]
    for version in (0, 1):
        other = {(Form.INDEXER, i) for i in range(3) if (i in new) != (version == 1)}
        a = p.query([prompt], p.need(version=version))
        assert a.boundary[0] == furthest(24, other)[1]
        lease = p.start([prompt], need=p.need(version=version), version=version)
        lease = p.advance(lease, [prompt], version=version)
        p.check_rows(lease, [prompt], version=version)
        p.release(lease)


@pytest.mark.parametrize("name", ["c4", "idx"])
def test_pages_that_stand_for_other_numbers_of_tokens_are_missed_each_for_itself(p, name):
    """A page of keys stands for two pages of the history of the same ratio."""
    p.store([A[:30]])
    g, n = NAMES.index(name), PER[NAMES.index(name)]
    assert {k: PER[NAMES.index(k)] for k in ("c4", "idx")} == {"c4": 2, "idx": 1}
    row = rows_of(p, A[:30])[1]
    table = p.cache.table
    pages = [np.array(x) for x in table.pages]
    pages[g][row, n - 1] = 0
    new = dataclasses.replace(table, pages=tuple(jnp.asarray(x) for x in pages))
    p.cache = dataclasses.replace(p.cache, table=new)
    a = p.query([A[:30] + [7]])
    want, _ = furthest(30, {(LAYOUT.groups[g].form, 1)})
    got = np.asarray(a.furthest[0]).tolist()
    assert [x if i == g else 30 for i, x in enumerate(want)] == got
    assert a.group_reason[0, 1, g] == Reason.PAGE_MISSING and a.boundary[0] == 8
    p.start([A[:30] + [7]])


# One boundary for all groups (K06).


@settings(max_examples=25)
@given(
    st.integers(1, 31),
    st.sets(st.tuples(st.sampled_from(FORMS), st.integers(0, 3)), max_size=5),
    st.sampled_from([STRICT, CHEAP, hkv.costs()]),
)
def test_whatever_each_group_has_the_hit_is_one_position_for_all(n, lost, costs):
    p = Payload(LAYOUT)
    p.store([A[:31]])
    rows = rows_of(p, A[:31])
    for f in FORMS:
        drop(p, [rows[i] for g, i in sorted(lost) if g is f], {f})
    prompt = A[:n] + Z[:7]
    a = p.query([prompt])
    each, common = furthest(n, lost)
    assert np.asarray(a.furthest[0]).tolist() == each and a.boundary[0] == common
    plan = lib.route(a, costs)
    resume = int(plan.resume[0])
    assert resume == common or costs is not STRICT
    lease, answer = p.admit(plan, [len(prompt)])
    assert answer.verdict[0] == Verdict.ADMIT
    # What is asked of each group is what it is cut to: never less than nothing, nothing twice.
    new = -(-len(prompt) // B) - resume // B
    private = np.asarray(lease.private[0]).sum(1)
    assert np.asarray(answer.need[0]).tolist() == [
        k * (new + m) for k, m in zip(PER, private, strict=True)
    ]
    lease, why = p.recover(lease, plan, [prompt])
    assert why[0] == Reason.OK
    p.check_rows(lease, [prompt])
    lease = p.advance(lease, [prompt])
    p.check_rows(lease, [prompt])
    invariants(p.cache, [lease])
    p.release(lease)
    invariants(p.cache, [])


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_order_of_the_groups_makes_no_difference(first):
    """The history reaches 24, the long window 16, the short one 8."""
    order = ("full", "w4", "w16", "full", "w4")[first : first + 3]
    made = {
        "full": planted.group("full", hkv.history(1)),
        "w4": planted.group("w4", hkv.window(4), (1,)),
        "w16": planted.group("w16", hkv.window(16), (2,)),
    }
    lay = planted.layout(*(made[k] for k in order), B=8, S=3, segments=4)
    store = planted.Store(lay)
    rows = store.chain(A[:24])
    held = store.table["held"]
    held[rows[1:], order.index("w4"), 1] = held[rows[1:], order.index("w4"), 0]
    held[rows[2], order.index("w16"), 1] = 16
    asked = planted.Asked()
    cache = store.cache()
    tokens, length = hkv.pad_batch(lay, [A[:24]])
    a = lib.query(cache, tokens, length, store.need([asked]))
    reach = dict(zip(order, np.asarray(a.furthest[0]).tolist(), strict=True))
    assert reach == {"full": 23, "w4": 8, "w16": 16}
    assert a.boundary[0] == 8


def test_a_form_that_is_absent_keeps_no_other_from_being_stored(p):
    """Windows and tails given back before publication: the history is stored all the same."""
    lease = p.advance(p.start([A[:40]]), [A[:40]])
    p.cache, lease = lib.trim(p.cache, lease)
    lease, n = p.publish(lease, [A[:40]])
    p.release(lease)
    assert n[0] == 5
    invariants(p.cache, [])
    a = p.query([A[:40] + [7]])
    held = np.asarray(a.held[0, :5])
    for g, spec in enumerate(LAYOUT.groups):
        kept = [i * B if spec.rule.prefix_closed else None for i in range(5)]
        if not spec.rule.prefix_closed:  # whole pages that nothing at 40 needs are gone
            R = spec.rows_per_page
            first = needed(spec.rule, 40)[0] // R * R
            kept = [min(max(first, i * B), i * B + B) for i in range(5)]
        assert held[:, g].tolist() == [[lo, i * B + B] for i, lo in enumerate(kept)], spec.name
    assert a.boundary[0] == 40
    for m in (12, 20, 33):
        a = p.query([A[:m] + Z[:5]])
        closed = [g.rule.prefix_closed for g in LAYOUT.groups]
        reach = np.asarray(a.furthest[0])
        assert (reach[closed] == m).all() and a.boundary[0] < m
        p.release(p.start([A[:m] + Z[:5]], costs=CHEAP))


# Reads that race with eviction and with the host (K10).


@pytest.mark.parametrize("verb", ["drop", "evict", "transition"])
def test_a_batch_of_removals_skips_what_is_read_and_takes_it_once_it_is_not(p, verb):
    def remove(rows):
        if verb == "drop":
            drop(p, rows)
        elif verb == "evict":
            p.cache = lib.evict(p.cache, FULL)
        else:
            p.cache, _ = hkv.transition(p.cache, padded(rows), mask(FORMS), Life.EMPTY)

    p.store([A[:24], Z[:24]])
    before = free(p)
    rows = rows_of(p, A[:24]) + rows_of(p, Z[:24])
    lease = p.start([A[:16] + [3]], costs=STRICT)  # holds two segments of the six
    held = np.asarray(lease.rows)[0, :2].tolist()
    assert held == rows[:2]
    remove(rows)
    kept = [r for r in rows if np.asarray(p.cache.table.form)[r]]
    assert kept == held
    for i in range(3):  # others take what was given back
        p.store([text(20, 50 + i), text(20, 60 + i)])
        assert reads(p, lease, [A[:16] + [3]]) == [True]
    invariants(p.cache, [lease])
    p.release(lease)
    remove(held)
    assert not np.asarray(p.cache.table.form)[held].any()
    p.cache = lib.evict(p.cache, FULL)
    assert free(p) == np.asarray(FULL).tolist() != before


def aligned(values, dtype=np.int32):
    """An array that the device could take over without a copy."""
    values = np.asarray(values, dtype)
    raw = np.zeros(values.nbytes + 64, np.uint8)
    at = -raw.ctypes.data % 64
    out = raw[at : at + values.nbytes].view(dtype).reshape(values.shape)
    out[...] = values
    return out


def test_host_arrays_may_be_reused_as_soon_as_a_call_returns(p):
    """A table that is still on its way to the device must not change with its source."""
    prompt = aligned(A[:40])
    tokens, length = hkv.pad_batch(LAYOUT, [prompt, prompt])
    media = aligned(np.arange(2 * 8 * 4).reshape(2, 8, 4), np.uint32)
    abi, codes = aligned(LAYOUT.abi, np.uint32), aligned(hkv.byte_codes(p.cache), np.uint32)
    need = hkv.need(p.cache, requests=2, media=media, abi=abi, codes=codes)
    manager = hkv.Manager(LAYOUT)
    request = manager.admit(prompt, 40)
    for a in (prompt, media, abi, codes):
        a[...] = 1
    assert np.asarray(tokens)[:, :40].tolist() == [A[:40]] * 2
    assert np.asarray(request.tokens)[0, :40].tolist() == A[:40]
    np.testing.assert_array_equal(need.media, np.arange(64).reshape(2, 8, 4))
    np.testing.assert_array_equal(need.abi[0], LAYOUT.abi)
    assert np.asarray(need.codes).all() and (np.asarray(need.codes) != 1).all()


# Pages given back while something still reads them (K11).


def test_trimming_frees_what_the_settled_length_no_longer_needs_and_not_a_page_more(p):
    """One token at a time, and every freed page is somebody else's at once."""
    lease, others = p.start([A[:40]]), []
    for n in range(1, 41):
        lease = p.advance(lease, [A[:40]], [n])
        p.cache, lease = lib.trim(p.cache, lease)
        for g, spec in enumerate(LAYOUT.groups):
            pages = np.asarray(lease.pages[g])[0, : 5 * PER[g]]
            first = 0 if spec.rule.prefix_closed else needed(spec.rule, n)[0]
            gone = first * spec.rule.unit // (spec.rows_per_page * spec.rule.unit)
            assert (pages[:gone] == 0).all() and (pages[gone:] > 0).all(), (n, spec.name)
        if n % 5 == 0 and len(others) < 5:
            others.append(p.advance(p.start([text(8, n)]), [text(8, n)]))
        assert reads(p, lease, [A[:40]]) == [True]
    invariants(p.cache, [lease, *others])


@pytest.mark.parametrize("settled", [-3, 0, 7, 8, 15, 16, 20, 21, 64])
def test_only_settled_tokens_are_published(p, settled):
    lease = p.advance(p.start([A[:30]]), [A[:30]], [20])
    lease, n = p.publish(lease, [A[:30]], [settled], partial=False)
    done = settled if 0 <= settled <= 20 else 0  # what the lease has not reached is refused
    assert n[0] == (done // B if done == settled else -1)
    assert p.boundary([A[:30]]) == [done // B * B]
    lease = p.advance(lease, [A[:30]])  # the rest goes on
    p.check_rows(lease, [A[:30]])


@pytest.mark.parametrize("at", [0, 1, 7, 8, 13, 16, 24, 26])
def test_who_is_preempted_goes_on_from_what_it_had_published_or_from_nothing(p, at):
    p.store([A[:5]])
    lease = p.advance(p.start([A[:26]]), [A[:26]], [max(at, 5)])
    if at:
        lease, _ = p.publish(lease, [A[:26]])
    p.release(lease)
    _, n = p.publish(lease, [A[:26]])
    assert n[0] == -1  # nothing is handed over that is no longer held
    p.store([text(30, 8), text(30, 9)])
    lease = p.start([A[:26]])
    assert lease.length[0] == min(max(at, 5), 25)
    p.check_rows(p.advance(lease, [A[:26]]), [A[:26]])


# Ownership of pages (K12).


def test_a_page_that_left_a_segment_is_not_found_through_it_again(p):
    """Its window gone and the pages somebody else's, the segment is written over by its prefix."""
    p.store([A[:24]])
    rows = rows_of(p, A[:24])
    was = [np.asarray(p.cache.table.pages[g])[rows].reshape(-1) for g in range(len(NAMES))]
    drop(p, rows, {Form.WINDOW, Form.TAIL})
    theirs = p.advance(p.start([Z[:24]]), [Z[:24]])
    taken = [np.isin(np.asarray(theirs.pages[g])[0], was[g][was[g] > 0]).any() for g in (2, 3, 4)]
    assert all(taken)
    for _ in range(2):  # the second time the rows are there already
        lease = p.advance(p.start([A[:24] + [7]], costs=CHEAP), [A[:24] + [7]])
        invariants(p.cache, [lease, theirs])
        lease, _ = p.publish(lease, [A[:24] + [7]])
        invariants(p.cache, [lease, theirs])
        p.release(lease)
        invariants(p.cache, [theirs])
        assert reads(p, theirs, [Z[:24]]) == [True]
    assert p.boundary([A[:24] + [7]]) == [24]
    drop(p, rows)
    invariants(p.cache, [theirs])
    assert reads(p, theirs, [Z[:24]]) == [True]


ORDERS = [o for o in itertools.permutations("PpRr") if o.index("P") < o.index("R")
          and o.index("p") < o.index("r")]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS, ids="".join)
def test_of_two_who_ran_the_same_tokens_one_copy_stays_with_one_owner(p, order):
    prompt = A[:21]
    leases = {k: p.advance(p.start([prompt]), [prompt]) for k in "Rr"}
    for what in order:
        k = "R" if what.isupper() else "r"
        if what in "Pp":
            leases[k], _ = p.publish(leases[k], [prompt])
        else:
            p.release(leases.pop(k))
        invariants(p.cache, list(leases.values()))
        for lease in leases.values():
            assert reads(p, lease, [prompt]) == [True]
    stored = np.asarray(p.cache.table.length)
    assert sorted(stored[stored > 0].tolist()) == [5, 8, 8]
    assert free(p) == [f - 3 * k for f, k in zip(np.asarray(FULL).tolist(), PER, strict=True)]
    p.start([prompt + [7]])


def test_requests_that_end_anywhere_on_the_way_leave_nothing_behind(p):
    """80 requests over 12 prefixes: cut off after any action, ended twice, ended late."""
    rng = np.random.default_rng(0)
    late = []
    for i in range(80):
        prompt = A[: 8 * rng.integers(0, 3)] + text(int(rng.integers(1, 20)), int(rng.integers(4)))
        plan = p.plan([prompt], p.need(salts=str(i % 2)), CHEAP)
        lease, answer = p.admit(plan, [len(prompt) + 2])
        assert answer.verdict[0] == Verdict.ADMIT
        last = rng.integers(0, 5)
        if last > 0:
            lease, _ = p.recover(lease, plan, [prompt], [str(i % 2)])
        if last > 1:
            n = len(prompt) - int(rng.integers(2))
            lease = p.advance(lease, [prompt], [max(n, int(lease.length[0]))], [str(i % 2)])
        if last > 2:
            lease, _ = p.publish(lease, [prompt], partial=bool(rng.integers(2)))
        if last > 3:
            p.cache, lease = lib.trim(p.cache, lease)
        late.append(lease)
        if len(late) > 3 or rng.integers(2):
            p.release(late.pop(int(rng.integers(len(late)))))
        if i % 8 == 0:
            invariants(p.cache, late)
    for ended in [*late, *late, lease]:
        p.release(ended)
    assert not np.asarray(p.cache.table.pins).any()
    invariants(p.cache, [])
    p.cache = lib.evict(p.cache, FULL)
    assert free(p) == np.asarray(FULL).tolist()


def test_what_was_taken_for_a_tenant_is_given_back_without_naming_him(p):
    for salt in ("a", "b"):
        p.store([A[:20]], p.need(salts=salt), [salt])
    lease = p.start([A[:20] + [7]] * 2, need=p.need(salts=["a", "b"]), seeds=["a", "b"])
    assert np.asarray(p.cache.table.pins).sum() == 2 * 3  # two shared, one of its own each
    p.release(lease)
    assert not np.asarray(p.cache.table.pins).any()
    p.cache = lib.evict(p.cache, FULL)
    assert free(p) == np.asarray(FULL).tolist()


# Admission that counts everything at once (K13).


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("total", [16, 17, 40])
def test_a_request_fits_exactly_or_is_refused_and_leaves_every_bit(p, name, total):
    pages = -(-total // B) * PER[NAMES.index(name)]
    plan = p.plan([A[:12]])
    p.cache = hkv.set_caps(p.cache, {name: pages - 1})
    before = host(p)
    lease, answer = p.admit(plan, [total])
    assert answer.verdict[0] == Verdict.REFUSE and answer.blocker[0] == Blocker.CAP
    k = cap_names(LAYOUT).index((name, "pages"))
    numbers = (x[0, 0, k] for x in (answer.cap_need, answer.cap_used, answer.cap))
    assert [int(x) for x in numbers] == [pages, 0, pages - 1]
    same([before.table, before.pools, before.serials, before.free_rows],
         [host(p).table, host(p).pools, host(p).serials, host(p).free_rows])  # fmt: skip
    p.cache = hkv.set_caps(p.cache, {name: pages})
    lease, answer = p.admit(plan, [total])
    assert answer.verdict[0] == Verdict.ADMIT
    lease, _ = p.recover(lease, plan, [A[:12]])
    lease = p.advance(lease, [A[:total]])  # to its very end, and nothing more is asked for
    p.check_rows(lease, [A[:total]])
    _, ok = p.step(lease, [1], p.params([A]))
    assert not ok[0]


@pytest.mark.parametrize("name", NAMES)
def test_one_group_short_by_one_page_means_not_now_and_nothing_is_taken(p, name):
    k = PER[NAMES.index(name)]
    p.cache = hkv.set_caps(p.cache, {name: 5 * k - 1})
    first = p.start([A[:24]])
    plan, before = p.plan([Z[:12]]), host(p)
    _, answer = p.admit(plan, [16])
    assert answer.verdict[0] == Verdict.WAIT and answer.blocker[0] == Blocker.CAP
    same([before.table, before.pools], [host(p).table, host(p).pools])
    invariants(p.cache, [first])
    p.release(first)
    assert p.admit(plan, [16])[1].verdict[0] == Verdict.ADMIT


def test_growth_is_reserved_with_the_start_so_that_nobody_waits_half_way(p):
    """Room for seven segments: one request takes four and one more, the other three and one."""
    p.cache = hkv.set_caps(p.cache, {"full": 7})
    for prompt in (A[:32], Z[:24]):
        p.store([prompt])
    plans = [p.plan([A[:32] + [7]]), p.plan([Z[:24] + [7]])]
    a, answer = p.admit(plans[0], [40])
    assert answer.verdict[0] == Verdict.ADMIT
    _, answer = p.admit(plans[1], [32])
    assert answer.verdict[0] != Verdict.ADMIT
    a, why = p.recover(a, plans[0], [A[:32] + [7]])
    assert why[0] == Reason.OK
    a = p.advance(a, [A[:40]])
    p.check_rows(a, [A[:40]])
    p.release(a)
    p.cache = lib.evict(p.cache, FULL)
    plan = p.plan([Z[:25]])
    assert p.admit(plan, [32])[1].verdict[0] == Verdict.ADMIT


def test_no_more_run_at_once_than_there_are_places_and_a_place_is_free_however_it_ends(p):
    running = [p.start([text(3, i), text(3, i + 9)]) for i in range(3)]
    plan = p.plan([A[:3]])
    for i, end in enumerate(("finished", "cancelled", "stale")):
        _, answer = p.admit(plan, [3])
        assert answer.verdict[0] == Verdict.WAIT and answer.blocker[0] == Blocker.LEASES
        lease = running.pop(0)
        if end == "finished":
            prompts = [text(3, i), text(3, i + 9)]
            lease = p.advance(lease, prompts)
            lease, _ = p.publish(lease, prompts)
        elif end == "stale":
            rows = jnp.asarray(np.arange(N) == int(lease.rows[0, 0]))
            p.cache, _ = lib.invalidate(p.cache, rows)
        p.release(lease)
        for j in range(2):
            again, answer = p.admit(plan, [3])
            assert answer.verdict[0] == Verdict.ADMIT, (end, j)
            running.append(again)
    invariants(p.cache, running)


def test_asking_holds_nothing(p):
    p.store([A[:30], Z[:30]])
    before = host(p)
    for n in range(1, 31):
        lib.route(p.query([A[:n] + [7], Z[:n]]), CHEAP)
    same(before, host(p))
    p.cache = lib.evict(p.cache, FULL)
    assert free(p) == np.asarray(FULL).tolist()


@settings(max_examples=12)
@example([(2, 1, 11), (0, 1, 16), (2, 13, 12)], 3, "tail")
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 24), st.integers(0, 16)), min_size=2,
             max_size=7),
    st.sampled_from([2, 3, 5, 8]),
    st.sampled_from(NAMES),
)  # fmt: skip
def test_whoever_can_fit_alone_gets_through_and_every_tick_moves_or_says_why_not(asked, cap, name):
    """First come, first served; (text, prompt, growth) of each, and room for `cap` segments."""
    p = Payload(LAYOUT)
    p.cache = hkv.set_caps(p.cache, {name: cap * PER[NAMES.index(name)]})
    queue = [(text(64, s)[: n + more], n) for s, n, more in asked]
    running, served, refused = [], [], []

    def enter(whole, n):
        """Tries the first in line; whether something moved."""
        plan = p.plan([whole[:n]], costs=CHEAP)
        lease, answer = p.admit(plan, [len(whole)])
        verdict, blocker = Verdict(int(answer.verdict[0])), Blocker(int(answer.blocker[0]))
        if verdict is Verdict.ADMIT:
            lease, why = p.recover(lease, plan, [whole[:n]])
            assert why[0] == Reason.OK
            if LAYOUT.groups[NAMES.index(name)].rule.prefix_closed:
                assert -(-len(whole) // B) <= cap
            else:  # whoever resumes needs no windows and tails of the segments before that
                assert -(-len(whole) // B) - int(plan.resume[0]) // B <= cap
            running.append((lease, whole))
            return True
        assert blocker in (Blocker.CAP, Blocker.LEASES)
        if running:
            return False  # waits for who runs
        if plan.resume[0] > 0:  # the plan pins the very room that it needs: without it, cold
            p.cache = lib.evict(p.cache, FULL)
            return enter(whole, n)
        assert verdict is Verdict.REFUSE
        refused.append(whole)
        return True

    for _ in range(100):
        moved = bool(queue) and enter(*queue[0])
        if moved:
            queue.pop(0)
        if running:
            lease, whole = running.pop(0)
            before = int(lease.length[0])
            lease = p.advance(lease, [whole], [min(len(whole), before + 8)])
            assert lease.length[0] > before or before == len(whole)
            p.check_rows(lease, [whole])
            if lease.length[0] < len(whole):
                running.append((lease, whole))
            else:
                lease, _ = p.publish(lease, [whole])
                p.release(lease)
                served.append(whole)
            moved = True
        assert moved or not queue
        if not queue and not running:
            break
    assert len(served) + len(refused) == len(asked)
    assert all(-(-len(whole) // B) > cap for whole in refused)
    invariants(p.cache, [])


# Prefill in chunks, and what may still change (K16).


@pytest.mark.parametrize("done", [8, 16, 19])
def test_chunks_that_were_published_outlive_the_request_that_was_cut_off(p, done):
    lease = p.start([A[:32]])
    for n in range(8, done + 1, 8):
        lease = p.advance(lease, [A[:32]], [n])
        lease, _ = p.publish(lease, [A[:32]], [n], partial=False)
        invariants(p.cache, [lease])
    lease = p.advance(lease, [A[:32]], [done])
    p.release(lease)
    invariants(p.cache, [])  # nothing is listed and free at once
    assert p.boundary([A[:32]]) == [done // B * B]
    p.store([text(48, 7), text(48, 8)])  # into the pages that were given back
    assert p.boundary([A[:32]]) == [done // B * B]
    lease = p.start([A[:32]])
    p.check_rows(p.advance(lease, [A[:32]]), [A[:32]])


@pytest.mark.parametrize("n", [1, 5, 11, 15])
def test_a_segment_that_was_published_half_full_changes_no_more(p, n):
    lease = p.advance(p.start([A[:n]], [24]), [A[:n]])
    lease, listed = p.publish(lease, [A[:n]])
    assert listed[0] == -(-n // B)
    before = host(p)
    again, ok = p.step(lease, [1], p.params([A]))
    assert not ok[0] and again.length[0] == n
    _, listed = p.publish(again, [A])
    assert listed[0] == 0
    same([before.pools, before.tokens], [host(p).pools, host(p).tokens])
    more = p.advance(p.start([A[: n + 9]]), [A[: n + 9]])  # who goes on writes into a copy
    assert more.rows[0, n // B] != lease.rows[0, n // B]
    p.check_rows(more, [A[: n + 9]])
    p.release(p.start([A[:n] + Z[:3]]))
    invariants(p.cache, [lease, more])


CHUNKS = [(8,) * 5, (1,) * 37, (3, 5, 7, 1, 8, 6, 2, 5), (8, 8, 3, 8, 8, 2)]


def test_chunks_of_any_size_published_in_any_steps_store_the_same(p):
    """The same boundaries, the same rows: nothing depends on where a chunk ended."""
    answers = []
    for counts, often in itertools.product(CHUNKS, (False, True)):
        p = Payload(LAYOUT)
        lease, at = p.start([A[:37]]), 0
        for count in counts:
            at = min(at + count, 37)
            lease = p.advance(lease, [A[:37]], [at])
            if often:
                lease, _ = p.publish(lease, [A[:37]], [at], partial=False)
        assert at == 37
        lease, _ = p.publish(lease, [A[:37]])
        p.release(lease)
        a = host_answer(p, A[:37] + [7])
        answers.append(a)
        lease = p.start([A[:37] + [7]])
        assert lease.length[0] == 37
    for other in answers[1:]:
        same(answers[0], other)


def host_answer(p, prompt):
    """What is available to a prompt, but for the numbers of rows."""
    a = jax.device_get(p.query([prompt]))
    digests = np.asarray(p.cache.table.digest)[a.rows[0][a.rows[0] < N]]
    return (a.status, a.reason, a.held, a.usable, a.recoverable, a.group_ok, a.runs, digests)


# Index ranges (K18).

EDGES = [-1, -8, -9, 8, 9, 2**31 - 1, -(2**31)]


@pytest.mark.parametrize("at", EDGES)
def test_a_slot_out_of_range_is_read_as_the_fill_and_written_nowhere(at):
    a = jnp.arange(1, 9, dtype=jnp.int32)
    slots = jnp.asarray(np.array([2, at, 5, at], np.int32))
    values = jnp.asarray(np.array([10, 99, 20, 98], np.int32))
    want = np.arange(1, 9)
    want[[2, 5]] = 10, 20
    assert take(a, slots, -7).tolist() == [3, -7, 6, -7]
    assert put(a, slots, values).tolist() == want.tolist()
    assert swap(a, slots, slots, values)[1].tolist() == want.tolist()
    want[[2, 5]] = 13, 26
    assert add(a, slots, values).tolist() == want.tolist()


@pytest.mark.parametrize("written", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("name", NAMES)
def test_a_page_number_out_of_range_is_no_page(p, name, written):
    """It is not clipped to the last page, nor counted from the end."""
    g = NAMES.index(name)
    size, prompt = LAYOUT.groups[g].pages, A[:16] + [3] * 8
    p.store([A[:16]])
    p.store([text(64, 5), text(64, 6)])  # the last page is somebody's as well
    good, start = p.start([prompt]), p.cache
    for page in (size, size + 5, -1, -size, 2**31 - 1, -(2**31)):
        p.cache = jax.tree.map(jnp.copy, start)
        column = 2 * PER[g] if written else 2 * PER[g] - 1
        pages = good.pages[g].at[0, column].set(page)
        pages = tuple(pages if i == g else x for i, x in enumerate(good.pages))
        bad = dataclasses.replace(good, pages=pages)
        before = host(p)
        lease, ok = p.step(bad, [8], p.params([prompt]))
        changed = (before.pools[g].data != host(p).pools[g].data).any(axis=(0, 2, 3))
        mine = np.asarray(good.pages[g])[0, 2 * PER[g] : 3 * PER[g]]
        assert set(np.flatnonzero(changed)) <= set(mine.tolist() if written else [])
        assert not changed[[0, size - 1]].any() and ok[0] == written, page
        assert not p.rows(lease)[1][0]  # what was lost is not read
        assert p.publish(lease, [prompt])[1][0] < 1


@pytest.mark.parametrize("field", ["rows", "slot"])
@pytest.mark.parametrize("value", [-1, -N, N + 3, 2**31 - 1, -(2**31)])
def test_a_row_or_place_out_of_range_is_nobody_s(p, field, value):
    p.store([A[:16]])
    good = p.start([A[:16] + [3] * 3])
    old = getattr(good, field)
    new = old.at[(0, 1) if field == "rows" else 0].set(value)
    bad = dataclasses.replace(good, **{field: new})
    before = host(p)
    assert not p.rows(bad)[1][0]
    _, ok = p.step(bad, [3], p.params([A[:16] + [3] * 3]))
    _, n = p.publish(bad, [A[:16] + [3] * 3])
    assert not ok[0] and n[0] == -1
    same(before.pools, host(p).pools)
    assert reads(p, good, [A[:16]]) == [True]


@pytest.mark.parametrize("total", [-1, -(2**31), 15, 65, 2**31 - 1])
def test_a_total_out_of_range_is_refused_by_name(p, total):
    p.store([A[:16]])
    before = host(p)
    _, answer = p.admit(p.plan([A[:17]]), [total])
    assert answer.verdict[0] == Verdict.REFUSE and answer.blocker[0] == Blocker.LENGTH
    same(before.table, host(p).table)


def test_positions_up_to_the_last_of_int32_are_served(p):
    start = 2**31 - 64 - 1
    need = p.need(start=start)
    p.store([A[:64]], need)
    assert p.boundary([A[:64]], need) == [63]
    assert int(p.cache.table.held.max()) == 2**31 - 1
    drop(p, rows_of(p, A[:50], need)[5:7], {Form.WINDOW})
    lease = p.start([A[:50] + Z[:9]], need=need, costs=CHEAP)
    assert lease.length[0] == 50
    p.check_rows(p.advance(lease, [A[:50] + Z[:9]]), [A[:50] + Z[:9]])


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 80), st.integers(1, 2**14), st.integers(2**3, 2**26)),
             min_size=1, max_size=4),
    st.integers(1, 64),
)  # fmt: skip
def test_numbers_of_pools_of_any_size_fit_what_they_are_kept_in(sizes, rows):
    """Pools beyond 2**31 elements and bytes, described without allocating any."""
    groups = tuple(
        hkv.Group(f"g{i}", Form.COMPRESSED, hkv.history(1), tuple(range(layers)), (width,), "uint8",
                  rows_per_page=rows, pages=pages)
        for i, (layers, width, pages) in enumerate(sizes)
    )  # fmt: skip
    lay = hkv.Layout(groups, segment_tokens=rows, segments=7, buckets=(rows,))
    size = hkv.nbytes(lay)
    for g, (layers, width, pages) in zip(groups, sizes, strict=True):
        data = layers * width * pages * rows
        assert size[g.name] == data + 4 * (2 + 1 + 1) * pages + 4
    unit, weights = cap_unit(lay), cap_weights(lay).astype(object)
    pages = np.array([g.pages - 1 for g in lay.groups], object)
    most = weights @ pages
    assert max(most) < 2**31
    assert all(w * unit >= g.page_bytes for w, g in zip(weights[-1], lay.groups, strict=True))
    names = cap_names(lay)
    assert most[names.index(("COMPRESSED", "pages"))] == sum(pages)


# One program per shape (K19).


def test_a_run_over_every_edge_of_a_window_segment_and_tail_compiles_nothing(p):
    def life(counts, removed):
        at, lease = 0, p.start([A[:48]], costs=CHEAP)
        for n in itertools.cycle(counts):
            at = max(at, int(lease.length[0]))
            if at >= 48:
                break
            at = min(at + n, 48)
            lease = p.advance(lease, [A[:48]], [at])
            p.cache, lease = lib.trim(p.cache, lease)
        lease, _ = p.publish(lease, [A[:48]])
        p.release(lease)
        rows = rows_of(p, A[:48])
        drop(p, rows[:removed], {Form.WINDOW})

    life((8,), 2)
    with count_compiles() as compiles:
        life((1,), 0)
        for n in range(1, 7):
            life((n, 8), n)
    assert not compiles.names


# What goes first (K21).


def test_sessions_in_turn_find_their_last_window_while_there_is_room_for_one_each(p):
    """Three turns of four sessions: their inner windows go, the ends stay."""
    texts = [text(64, 20 + s) for s in range(4)]
    # A window of 12 reaches back into the segment before; and one request reserves all of its own.
    p.cache = hkv.set_caps(p.cache, {"w12": 4 * 2 + 4, "w5": 2 * (4 * 2 + 4)})
    hits = []
    for n in (10, 19, 28):
        for whole in texts:
            hits.append(p.boundary([whole[:n]])[0])
            lease = p.advance(p.start([whole[:n]], costs=STRICT), [whole[:n]])
            lease, _ = p.publish(lease, [whole[:n]])
            p.release(lease)
    assert hits == [0] * 4 + [10] * 4 + [19] * 4


def test_a_prefix_that_others_pushed_aside_loses_its_end_first_and_never_its_beginning(p):
    p.store([A[:48]])
    p.store([A[:24] + Z[:8]])
    want = np.asarray(FULL)
    last = [48, 32]
    for n in range(0, int(want[1]) + 1):
        p.cache = lib.evict(
            p.cache, jnp.asarray(np.where(np.arange(6) == 1, n, 0).astype(np.int32))
        )
        t = host(p).table
        stored = np.flatnonzero(t.length > 0)
        for row in stored:  # nothing stays listed behind a gap
            up = t.parent[row]
            assert up == N or (t.length[up] > 0 and t.born[up] == t.parent_born[row])
        now = [p.query([x + [7]]).matched[0] for x in (A[:48], A[:24] + Z[:8])]
        assert all(int(a) <= b for a, b in zip(now, last, strict=True))
        last = [int(a) for a in now]
        invariants(p.cache, [])
    assert last == [0, 0]


def test_another_prompt_in_between_costs_a_prompt_nothing_while_there_is_room(p):
    hits = []
    for prompt in (A[:40], A[:40], Z[:40], A[:40]):
        hits.append(p.boundary([prompt])[0])
        p.store([prompt])
    assert hits == [0, 39, 0, 39]


@pytest.mark.parametrize("every", [0, 8, 16, 24])
def test_boundaries_that_a_policy_retains_outlive_the_others(p, every):
    lease = p.advance(p.start([A[:56]]), [A[:56]])
    tokens, length = p.pad([A[:56]])
    prompt = jnp.asarray(np.array([20, 0], np.int32))
    p.cache, lease, _ = lib.publish(
        p.cache, lease, tokens, length, prompt=prompt, retention=hkv.retention(every), partial=True
    )
    p.release(lease)
    g = NAMES.index("w12")
    kept = {20, 56} | (set(range(every, 57, every)) if every else set())
    # Its last segment, and as many before it as a window of 12 may reach.
    keeps = {i for at in kept for i in range(max(0, (at - 1) // B - 2), (at - 1) // B + 1)}
    want = np.zeros(6, np.int32)
    want[g] = LAYOUT.groups[g].pages - 1 - len(keeps)
    p.cache = lib.evict(p.cache, jnp.asarray(want))
    rows = rows_of(p, A[:56])
    pages = np.asarray(p.cache.table.pages[g])[rows, 0]
    assert set(np.flatnonzero(pages > 0).tolist()) == keeps
    for at in (16, 24, 40, 56):
        whole = {t // B for t in needed(hkv.window(12), at)} <= keeps
        assert (p.boundary([A[:at] + Z[:3]])[0] == at) == whole


# Listed, but not there (K22).


def test_a_prefix_under_pressure_is_whole_partly_there_or_gone_and_never_wrong(p):
    """Again and again: stored, hit, pushed aside by others a little or altogether, asked for."""
    for i in range(5):
        p.store([A[:30]])
        assert p.boundary([A[:30]]) == [29]
        for j in range(i + 1):
            p.store([text(25, 100 + 9 * i + j), text(14, 200 + 9 * i + j)])
        if i % 2:
            p.cache = lib.evict(p.cache, FULL)
            assert p.boundary([A[:30]]) == [0]
        check_digests(p)
        lease = p.advance(p.start([A[:30]], costs=CHEAP), [A[:30]])
        p.check_rows(lease, [A[:30]])
        p.release(lease)
        invariants(p.cache, [])


@pytest.mark.parametrize("often", [False, True], ids=["at the end", "chunk by chunk"])
def test_windows_given_back_are_not_listed_whichever_way_a_prompt_came_in(p, often):
    lease = p.start([A[:40]])
    for n in range(8, 41, 8):
        lease = p.advance(lease, [A[:40]], [n])
        if often:
            p.cache, lease = lib.trim(p.cache, lease)
            lease, _ = p.publish(lease, [A[:40]], [n], partial=False)
    if not often:
        p.cache, lease = lib.trim(p.cache, lease)
        lease, _ = p.publish(lease, [A[:40]])
    p.release(lease)
    invariants(p.cache, [])
    for n in (4, 12, 17, 24, 31, 36, 39, 40):
        prompt = A[:n] + Z[:3]
        a = jax.device_get(p.query([prompt]))
        for at in a.positions[0][a.usable[0]]:
            for g, spec in enumerate(LAYOUT.groups):
                if spec.rule.prefix_closed:
                    continue
                for t in needed(spec.rule, int(at)):  # the table itself has a page for every row
                    row = a.rows[0, t // B]
                    lo, hi = np.asarray(p.cache.table.held)[row, g]
                    assert lo <= t < hi
                    page = np.asarray(p.cache.table.pages[g])[row, t % B // spec.rows_per_page]
                    assert page > 0
        p.release(p.start([prompt], costs=STRICT))


@pytest.mark.parametrize("shared", [0, 1, 7, 8, 20, 29])
def test_a_second_session_that_shares_a_beginning_gets_just_that(p, shared):
    p.store([A[:30]])
    prompt = A[:shared] + Z[:10]
    a = p.query([prompt])
    assert a.matched[0] == shared == a.boundary[0]
    assert np.asarray(a.furthest[0]).tolist() == [shared] * len(NAMES)
    lease = p.start([prompt])
    out, _ = p.rows(lease)
    for spec in LAYOUT.groups:
        for layer in spec.layers:
            assert out[spec.name, layer][1][0, shared // spec.rule.unit :].sum() == 0
    lease = p.advance(lease, [prompt])
    p.check_rows(lease, [prompt])


@pytest.mark.parametrize("length", [-1, -(2**31), 65, 2**31 - 1])
def test_a_length_that_cannot_be_reuses_nothing(p, length):
    p.store([A[:30]])
    tokens, _ = p.pad([A[:30]])
    a = lib.query(p.cache, tokens, jnp.asarray(np.array([length, 0], np.int32)), p.need())
    assert a.boundary[0] == 0 and (np.asarray(a.reason[0]) == Reason.LENGTH).all()
    plan = lib.route(a, CHEAP)
    assert plan.resume[0] == 0 and (np.asarray(plan.rows) == N).all()
