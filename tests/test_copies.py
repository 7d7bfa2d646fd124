"""Copies outside of device memory: what is taken, listed and loaded back is what was published.

The copies lie in a dictionary here. Rows are known rows (see `payload`).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from payload import QUICK, Payload, expected, group

import hkv
from hkv import Blocker, Form, Life, Place, Status, Verdict
from hkv.testing import count_compiles, invariants

B, N, T, K = 8, 24, 72, 3
LAYOUT = hkv.Layout(
    groups=(
        group("full", Form.COMPRESSED, hkv.history(1), (0,), 4),
        group("c4", Form.COMPRESSED, hkv.history(4), (1,), 1),
        group("tail", Form.TAIL, hkv.tail(4, overlap=True), (1,), 4),
        group("w5", Form.WINDOW, hkv.window(5), (0, 2), 4),
        group("w12", Form.WINDOW, hkv.window(12), (2,), 8),
        group("idx", Form.INDEXER, hkv.indexer(4), (1,), 2),
    ),
    segment_tokens=B, segments=N, buckets=(T,), leases=4, disk=True,
)  # fmt: skip
S, G = T // B, len(LAYOUT.groups)
SIZES = [LAYOUT.segment_pages(g) * g.page_bytes for g in LAYOUT.groups]
KEPT = (Form.COMPRESSED, Form.TAIL, Form.WINDOW, Form.INDEXER)
ROLLING = (Form.TAIL, Form.WINDOW)


def _quick(name, static=()):
    return jax.jit(
        getattr(hkv, name), static_argnames=static, donate_argnames=("cache",),
        compiler_options=QUICK,
    )  # fmt: skip


offload, adopt, begin_load = _quick("offload"), _quick("adopt"), _quick("begin_load")
load, end_load, offloaded = _quick("load"), _quick("end_load"), _quick("offloaded", ("keep",))


def text(n, seed=0):
    return np.random.default_rng(seed).integers(1, 200, n).tolist()


def bits(*forms):
    return np.array([f in forms for f in Form])


class Shelf(Payload):
    """A cache of known rows beside a shelf of copies by prefix, one request at a time."""

    def __init__(self, layout=LAYOUT, shelf=None):
        super().__init__(layout, requests=1)
        self.shelf = {} if shelf is None else shelf

    def chain(self, prompt):
        """Rows of the whole segments that are in the table."""
        found = jax.device_get(self.query([[*prompt, 0][:T]]))
        return found.rows[0, : found.matched[0] // B]

    def begin_offload(self, prompt, forms=KEPT):
        """Copies of the whole segments of a prompt on their way, K at a time."""
        rows, out = self.chain(prompt), []
        for at in range(0, len(rows), K):
            some = np.full(K, N, np.int32)
            some[: len(rows[at : at + K])] = rows[at : at + K]
            which = jnp.asarray(np.repeat(bits(*forms)[None], K, 0))
            self.cache, copies = offload(self.cache, jnp.asarray(some), which)
            out.append((at, copies))
        return out

    def shelve(self, prompt, under_way, keep=True, place=Place.LOCAL_DISK):
        for at, copies in under_way:
            c = jax.device_get(copies)
            for k in np.flatnonzero(c.forms.any(axis=1)):
                s, seg = at + k, jax.tree.map(lambda a, k=k: a[k], c.segments)
                kept = self.shelf.setdefault(tuple(prompt[: (s + 1) * B]), {})
                for g, spec in enumerate(self.layout.groups):
                    held = seg.held[g] - seg.start
                    if c.forms[k, spec.form] and held[1] > held[0]:
                        kept[g] = c.payload[g][k].copy(), held, seg.digest[g]
            word = jnp.uint8(place)
            self.cache = offloaded(self.cache, copies, copies.forms, word, keep=keep)

    def put_away(self, prompt, forms=KEPT, keep=True):
        self.shelve(prompt, self.begin_offload(prompt, forms), keep)

    def find(self, prompt):
        """Enters what the shelf has of a prompt."""
        copied = np.zeros((S, G, 2), np.int32)
        for s in range(len(prompt) // B):
            for g, (_, held, _) in self.shelf.get(tuple(prompt[: (s + 1) * B]), {}).items():
                copied[s, g] = held
        tokens, _ = self.pad([prompt])
        place = jnp.full(S, Place.LOCAL_DISK, jnp.uint8)
        self.cache, n = adopt(
            self.cache, self.need(), tokens, jnp.asarray(copied), place, jnp.zeros(S, jnp.uint8)
        )
        return int(n)

    def read(self, prompt, which):
        """Payload and digests of K columns."""
        payload = [
            np.full((K, len(g.layers), LAYOUT.segment_pages(g), g.rows_per_page, *g.row), np.nan,
                    np.float32) for g in LAYOUT.groups
        ]  # fmt: skip
        digest = np.zeros((K, G, 2), np.uint32)
        for k, s in enumerate(which):
            for g, (rows, _, word) in self.shelf.get(tuple(prompt[: (s + 1) * B]), {}).items():
                payload[g][k], digest[k, g] = rows, word
        return tuple(map(jnp.asarray, payload)), jnp.asarray(digest)

    def load_all(self, prompt, loading):
        """Loads what is to be loaded, K columns at a time; whether all was right."""
        columns = np.flatnonzero(np.asarray(loading.forms).any(axis=1))
        right = True
        for at in range(0, len(columns), K):
            which = np.full(K, S, np.int32)
            which[: len(columns[at : at + K])] = columns[at : at + K]
            payload, digest = self.read(prompt, which)
            self.cache, ok = load(self.cache, loading, jnp.asarray(which), payload, digest)
            right &= bool(np.asarray(ok)[which < S].all())
        self.cache = end_load(self.cache, loading)
        return right

    def fetch(self, prompt, costs=None):
        """Loads what plans for a prompt want until one wants nothing; whether all was right."""
        right = True
        for _ in range(2 * S):
            plan = self.plan([prompt], costs=costs)
            if not np.asarray(plan.fetch).any():
                return right
            self.cache, loading, answer = begin_load(self.cache, plan)
            assert np.asarray(answer.verdict)[0] == Verdict.ADMIT, answer
            right &= self.load_all(prompt, loading)
            invariants(self.cache)
        raise AssertionError("it does not end")

    def clear(self, forms=KEPT):
        """Everything goes from the device, rows stay."""
        rows = jnp.arange(N, dtype=jnp.int32)
        self.cache, _ = hkv.drop(self.cache, rows, jnp.asarray(bits(*forms)))

    def life(self, prompt, form):
        return [Life(x) for x in np.asarray(self.cache.table.life)[self.chain(prompt), form]]


def stored(prompt, layout=LAYOUT):
    p = Shelf(layout)
    p.store([prompt])
    return p


PROMPT = text(5 * B + 3, 1)
ASK = PROMPT[: 5 * B] + text(4, 2)


def test_what_comes_back_is_what_was_published():
    p = stored(PROMPT)
    before = p.boundary([ASK])
    assert before == [5 * B]
    p.put_away(PROMPT, keep=False)
    assert p.life(PROMPT, Form.COMPRESSED) == [Life.ON_DISK] * 5
    assert p.boundary([ASK]) == [0]
    found = jax.device_get(p.query([ASK]))
    assert (found.status[0, :5, Form.DISK] == Status.RECOVER).all()
    assert (found.place[0, :5, Form.DISK] == Place.LOCAL_DISK).all()
    assert max(found.positions[0][found.recoverable[0]]) == 5 * B
    # Of 40 tokens, 11 back: history everywhere, the long window in two segments, others in one.
    history = [SIZES[0] + SIZES[1] + SIZES[5]] * 5
    rolling = [0, 0, 0, SIZES[4], SIZES[2] + SIZES[3] + SIZES[4]]
    assert found.bytes[0, :5].tolist() == [a + b for a, b in zip(history, rolling, strict=True)]
    plan = jax.device_get(p.plan([ASK]))
    assert plan.resume[0] == 5 * B
    assert plan.fetch_bytes[0] == found.bytes.sum() + SIZES[3]  # forms go whole
    _, answer = p.admit(plan, [len(ASK)])
    assert np.asarray(answer.blocker)[0] == Blocker.FETCH
    assert p.fetch(ASK)
    assert p.boundary([ASK]) == before
    assert p.life(PROMPT, Form.COMPRESSED) == [Life.READY] * 5
    p.store([ASK])


def test_another_cache_resumes_from_what_the_first_put_away():
    p = stored(PROMPT)
    p.put_away(PROMPT)
    assert p.life(PROMPT, Form.WINDOW) == [Life.READY] * 5
    q = Shelf(shelf=p.shelf)
    assert q.find(ASK) == 5
    assert q.find(ASK) == 5  # which changes nothing
    invariants(q.cache)
    assert q.fetch(ASK)
    assert q.boundary([ASK]) == [5 * B]
    q.store([ASK])
    other = q.plan([ASK], need=q.need(salts="another"))
    assert np.asarray(other.resume).tolist() == [0]


def test_windows_that_were_not_put_away_are_replayed():
    p = stored(PROMPT)
    p.put_away(PROMPT, forms=(Form.COMPRESSED, Form.INDEXER), keep=False)
    p.clear()
    plan = jax.device_get(p.plan([ASK], costs=hkv.costs(replay=0.5)))
    assert plan.resume[0] == 5 * B and not plan.fetch[0][:, list(ROLLING)].any()
    assert plan.replay[0, 0] < 5 * B and plan.replay_groups[0].tolist() == [0, 0, 1, 1, 1, 0]
    assert p.fetch(ASK, hkv.costs(replay=0.5))
    p.store([ASK])


@pytest.mark.parametrize("keep", [True, False])
def test_prices_decide_between_fetching_replaying_and_prefilling(keep):
    p = stored(PROMPT)
    p.put_away(PROMPT)
    p.clear(ROLLING if keep else KEPT)
    cases = ((dict(), True), (dict(disk=1e6), False), (dict(disk=np.inf), False))
    for prices, fetches in cases:
        plan = jax.device_get(p.plan([ASK], costs=hkv.costs(**prices)))
        assert plan.fetch.any() == fetches
        assert plan.resume[0] == (5 * B if keep or fetches else 0)


@pytest.mark.parametrize("where", ["payload", "digest"])
@pytest.mark.parametrize("s", [0, 2, 4])
def test_one_wrong_byte_is_never_served(where, s):
    p = stored(PROMPT)
    p.put_away(PROMPT, keep=False)
    kept = p.shelf[tuple(PROMPT[: (s + 1) * B])]
    rows, held, word = kept[0]
    if where == "payload":
        rows = rows.copy()
        rows.view(np.uint8).reshape(-1)[37] ^= 4
    else:
        word = word ^ np.uint32(1)
    kept[0] = rows, held, word
    assert not p.fetch(ASK)
    life = np.asarray(p.cache.table.life)[p.chain(PROMPT)]
    assert [Life(x) for x in life[:, Form.DISK]] == [
        Life.STALE if i == s else Life.ON_DISK for i in range(5)
    ]
    assert life[s, Form.COMPRESSED] == Life.EMPTY and p.boundary([ASK])[0] <= s * B
    p.store([ASK])
    invariants(p.cache)


def test_a_form_that_was_spoilt_is_put_away_again_once_it_was_made_again():
    p = stored(PROMPT)
    p.put_away(PROMPT)
    p.cache, _ = hkv.transition(
        p.cache, jnp.asarray(p.chain(PROMPT)), jnp.asarray(bits(Form.DISK)), Life.STALE
    )
    p.put_away(PROMPT)
    assert p.life(PROMPT, Form.DISK) == [Life.ON_DISK] * 5


def test_a_payload_that_is_no_longer_what_was_published_is_not_put_away():
    p = stored(PROMPT)
    page = int(np.asarray(p.cache.table.pages[0])[p.chain(PROMPT)[1], 0])
    pool = p.cache.pools[0]
    pool = dataclasses.replace(pool, data=pool.data.at[0, page, 0, 0].add(1.0))
    p.cache = dataclasses.replace(p.cache, pools=(pool, *p.cache.pools[1:]))
    p.put_away(PROMPT)
    assert 0 not in p.shelf[tuple(PROMPT[: 2 * B])] and 2 in p.shelf[tuple(PROMPT[: 2 * B])]


def test_what_was_invalidated_or_replaced_on_the_way_out_gets_no_copy():
    p = stored(PROMPT)
    under_way = p.begin_offload(PROMPT)
    assert p.boundary([ASK]) == [0]  # OFFLOADING is not reused by queries
    rows = p.chain(PROMPT)
    p.cache, _ = hkv.invalidate(p.cache, jnp.arange(N, dtype=jnp.int32) == int(rows[2]))
    p.shelve(PROMPT, under_way)
    life = np.asarray(p.cache.table.life)
    assert (life[rows[2]][list(KEPT)] == Life.STALE).all()
    assert life[rows[2], Form.DISK] == Life.STALE
    invariants(p.cache)
    p = stored(PROMPT)
    under_way = p.begin_offload(PROMPT)
    every = jnp.asarray(np.array([g.pages - 1 for g in LAYOUT.groups], np.int32))
    p.cache = hkv.evict(p.cache, every)
    other = text(5 * B, 9)
    p.store([other])
    p.shelve(PROMPT, under_way)
    assert p.life(other, Form.DISK) == [Life.EMPTY] * 5
    assert p.boundary([[*other, 1]]) == [5 * B]
    invariants(p.cache)


def rewrite(p, prompt, version):
    """Other indexer rows for a stored prompt; which of its segments took them."""
    spec, rows = LAYOUT.groups[5], p.chain(prompt)
    keys = expected(LAYOUT, 5, 1, prompt, version=version)[: len(rows) * B // 4]
    keys = jnp.asarray(keys.reshape(1, len(rows), LAYOUT.segment_rows(spec), 3))
    p.cache, done = hkv.update_indexer(
        p.cache, jnp.asarray(rows), {"idx": keys}, jnp.uint32(version)
    )
    return np.asarray(done).tolist()


def test_a_copy_is_not_taken_for_what_an_indexer_wrote_later():
    p = stored(PROMPT)
    p.put_away(PROMPT)
    assert rewrite(p, PROMPT, 1) == [True] * 5
    new = p.need(version=1)
    assert p.boundary([ASK], new) == [5 * B]
    p.clear((Form.INDEXER,))
    found = jax.device_get(p.query([ASK], new))
    assert not found.bytes.any() and not np.asarray(p.plan([ASK], new).fetch).any()
    assert (found.copied[0, :5, 5] == 0).all()
    p.store([ASK], need=new, version=1)


@pytest.mark.parametrize("life", [Life.OFFLOADING, Life.LOADING, Life.STALE, Life.ON_DISK])
def test_an_indexer_rewrites_only_what_is_ready(life):
    p = stored(PROMPT)
    under_way = p.begin_offload(PROMPT) if life is Life.OFFLOADING else []
    if life in (Life.LOADING, Life.ON_DISK):
        p.put_away(PROMPT, keep=False)
    if life is Life.LOADING:
        p.cache, loading, _ = begin_load(p.cache, p.plan([ASK]))
    if life is Life.STALE:
        every = jnp.asarray(p.chain(PROMPT)), jnp.asarray(bits(Form.INDEXER)), Life.STALE
        p.cache, _ = hkv.transition(p.cache, *every)
    assert p.life(PROMPT, Form.INDEXER) == [life] * 5
    before = jax.device_get(p.cache)
    assert rewrite(p, PROMPT, 1) == [False] * 5
    jax.tree.map(np.testing.assert_array_equal, before.table, jax.device_get(p.cache.table))
    if life is Life.LOADING:
        assert p.load_all(ASK, loading)
    p.shelve(PROMPT, under_way)
    invariants(p.cache)
    if life is not Life.STALE:
        p.fetch(ASK)
        assert p.boundary([ASK]) == [5 * B]


def test_what_was_rewritten_on_the_way_out_gets_no_copy():
    p = stored(PROMPT)
    under_way = p.begin_offload(PROMPT)
    every = jnp.asarray(p.chain(PROMPT)), jnp.asarray(bits(Form.INDEXER)), Life.READY
    p.cache, _ = hkv.transition(p.cache, *every)
    assert rewrite(p, PROMPT, 1) == [True] * 5
    p.shelve(PROMPT, under_way)
    p.clear((Form.INDEXER,))
    assert not np.asarray(p.plan([ASK], p.need(version=1)).fetch).any()
    p.store([ASK], need=p.need(version=1), version=1)


def other_kernels(p, *names):
    """What a build asks with whose kernels of some groups mean other bytes."""
    layout = LAYOUT
    for name in names:
        layout = layout.with_abi(name, version=2)
    return p.need(abi=layout.abi)


def test_a_copy_is_not_taken_for_what_other_kernels_made_again():
    p = stored(PROMPT)
    p.put_away(PROMPT)
    new, cheap = other_kernels(p, "w5", "w12"), hkv.costs(replay=0.125)
    lease = p.start([ASK], need=new, costs=cheap)
    assert np.asarray(lease.length)[0] == 5 * B
    lease, _ = p.publish(lease, [ASK])
    p.release(lease)
    assert p.boundary([ASK], new) == [5 * B]
    p.clear((Form.WINDOW,))
    invariants(p.cache)
    copied = np.asarray(p.cache.table.copied)[p.chain(PROMPT)]
    assert not copied[4, 3:5].any() and not copied[3, 4].any() and (copied[:, 0, 1] > 0).all()
    assert not np.asarray(p.plan([ASK], new).fetch).any()


@pytest.mark.parametrize("anew", [False, True])
def test_what_lies_on_disk_alone_can_be_made_again_without_a_fetch(anew):
    p = stored(PROMPT)
    p.put_away(PROMPT, ROLLING, keep=False)
    assert p.life(PROMPT, Form.WINDOW) == [Life.ON_DISK] * 5
    need = other_kernels(p, "w5", "w12") if anew else p.need()
    lease = p.start([ASK], need=need, costs=hkv.costs(replay=0.125, disk=math.inf))
    assert np.asarray(lease.length)[0] == 5 * B
    lease, _ = p.publish(lease, [ASK])
    p.release(lease)
    invariants(p.cache)
    assert p.boundary([ASK], need) == [5 * B]
    assert p.life(PROMPT, Form.WINDOW) == [Life.ON_DISK] * 3 + [Life.READY] * 2


def test_what_is_being_loaded_is_not_made_again_in_its_place():
    p = stored(PROMPT)
    p.put_away(PROMPT, ROLLING, keep=False)
    new = other_kernels(p, "w5", "w12")
    lease = p.start([ASK], need=new, costs=hkv.costs(replay=0.125))
    p.cache, loading, _ = begin_load(p.cache, p.plan([ASK]))
    assert np.asarray(loading.forms).any()
    lease, _ = p.publish(lease, [ASK])
    p.release(lease)
    invariants(p.cache)
    assert p.load_all(ASK, loading)
    assert p.boundary([ASK]) == [5 * B] and p.boundary([ASK], new) == [0]
    p.store([ASK])


def test_what_is_being_loaded_stays_and_what_went_meanwhile_is_left_alone():
    p = stored(PROMPT)
    p.put_away(PROMPT, keep=False)
    p.cache, loading, _ = begin_load(p.cache, p.plan([ASK]))
    every = jnp.asarray(np.array([g.pages - 1 for g in LAYOUT.groups], np.int32))
    p.cache = hkv.evict(p.cache, every)
    assert p.life(PROMPT, Form.COMPRESSED) == [Life.LOADING] * 5
    rows = p.chain(PROMPT)
    p.cache, _ = hkv.invalidate(p.cache, jnp.arange(N, dtype=jnp.int32) == int(rows[1]))
    assert p.boundary([ASK]) == [0]
    p.load_all(ASK, loading)
    assert p.fetch(ASK) and p.boundary([ASK])[0] <= B
    p.cache = end_load(p.cache, loading)  # a second time
    invariants(p.cache)
    p.store([ASK])


def test_a_load_that_ends_early_leaves_everything_as_it_was():
    p = stored(PROMPT)
    p.put_away(PROMPT, keep=False)
    free = np.asarray(hkv.occupancy(p.cache)["free"]).tolist()
    p.cache, loading, _ = begin_load(p.cache, p.plan([ASK]))
    p.cache = end_load(p.cache, loading)
    assert p.life(PROMPT, Form.WINDOW) == [Life.ON_DISK] * 5
    assert np.asarray(hkv.occupancy(p.cache)["free"]).tolist() == free
    assert p.fetch(ASK) and p.boundary([ASK]) == [5 * B]


def test_a_plan_out_of_date_loads_nothing():
    p = stored(PROMPT)
    p.put_away(PROMPT, keep=False)
    plan = p.plan([ASK])
    assert p.fetch(ASK)
    p.cache, loading, answer = begin_load(p.cache, plan)
    assert np.asarray(answer.blocker)[0] == Blocker.CHANGED
    assert not np.asarray(loading.forms).any()


def test_a_load_that_a_cap_forbids_is_refused_with_the_numbers():
    p = stored(PROMPT)
    p.put_away(PROMPT, keep=False)
    p.cache = hkv.set_caps(p.cache, {"full": 4})
    p.cache, loading, answer = begin_load(p.cache, p.plan([ASK]))
    assert np.asarray(answer.verdict)[0] == Verdict.REFUSE
    assert np.asarray(answer.need)[0, 0] == 5 * LAYOUT.segment_pages(LAYOUT.groups[0])
    assert not np.asarray(loading.forms).any()
    invariants(p.cache)


@settings(max_examples=30)
@given(st.randoms(use_true_random=False))
def test_whatever_goes_out_and_comes_back_a_request_reads_its_own_rows(r):
    p = Shelf()
    prompts = [text(r.randint(9, T - 1), 1)]
    prompts.append(prompts[0][: r.randint(0, len(prompts[0]))] + text(r.randint(1, 12), 2))
    prompts[1] = prompts[1][: T - 1]
    for _ in range(r.randint(4, 10)):
        prompt = r.choice(prompts)
        forms = r.sample(KEPT, r.randint(1, 4))
        match r.choice(("store", "away", "away", "clear", "evict", "spoil", "anew", "fetch")):
            case "store":
                p.find(prompt)
                p.fetch(prompt)
                p.store([prompt])
            case "away":
                p.put_away(prompt, forms, keep=r.random() < 0.5)
            case "clear":
                p.clear(forms)
            case "evict":
                some = [r.randint(0, g.pages - 1) for g in LAYOUT.groups]
                p.cache = hkv.evict(p.cache, jnp.asarray(np.array(some, np.int32)))
            case "spoil" if p.shelf:
                kept = p.shelf[r.choice(sorted(p.shelf))]
                for g in sorted(kept)[:1]:
                    rows = kept[g][0].copy()
                    rows[tuple(r.randrange(n) for n in rows.shape)] += 1
                    kept[g] = rows, *kept[g][1:]
            case "anew":
                p.cache = Shelf().cache
            case "fetch":
                p.find(prompt)
                p.fetch(prompt)
        invariants(p.cache)
    for prompt in prompts:
        p.find(prompt)
        p.fetch(prompt)
        p.store([prompt])
        invariants(p.cache)


def test_nothing_compiles_twice():
    p = stored(PROMPT)

    def round_trip():
        p.put_away(PROMPT, keep=False)
        p.find(ASK)
        assert p.fetch(ASK)

    round_trip()
    with count_compiles() as compiles:
        round_trip()
    assert not compiles.names


@pytest.mark.parametrize("name", ["offload", "adopt", "begin_load"])
def test_a_layout_without_the_form_refuses(name):
    p = Payload(dataclasses.replace(LAYOUT, disk=False), requests=1)
    call = {
        "offload": lambda: hkv.offload(p.cache, jnp.zeros(1, jnp.int32), jnp.zeros((1, 5), bool)),
        "adopt": lambda: hkv.adopt(
            p.cache, p.need(), p.pad([PROMPT])[0], jnp.zeros((S, G, 2), jnp.int32),
            jnp.zeros(S, jnp.uint8), jnp.zeros(S, jnp.uint8),
        ),
        "begin_load": lambda: hkv.begin_load(p.cache, p.plan([PROMPT])),
    }[name]  # fmt: skip
    with pytest.raises(ValueError, match="disk=True"):
        call()
