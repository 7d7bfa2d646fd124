"""The whole query against sets of positions, on tables written by hand."""

import dataclasses
import html

import jax
import jax.numpy as jnp
import numpy as np
import planted
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from planted import Asked, Oracle, Store, group, layout

import hkv
from hkv import Form, Life, Reason, Status
from hkv._identity import block_keys

history, window, chunk, tail = hkv.history, hkv.window, hkv.chunk, hkv.tail
Q = 3
LAYOUTS = {
    "full and sliding": layout(
        group("kv", history(1), rows_per_page=4), group("win", window(5), (1,), rows_per_page=3),
        buckets=(24, 48), disk=True,
    ),
    "compressed": layout(
        group("c", history(4), (1,)),
        group("t", tail(4, True), (1,), rows_per_page=6),
        group("w", window(7), (0, 1, 2), rows_per_page=4),
        disk=True,
    ),
    "compressed, indexed": layout(
        group("c", history(4), rows_per_page=1),
        group("t", tail(4, True), rows_per_page=2),
        group("keys", hkv.indexer(4)),
        group("ti", tail(4, True), form=Form.INDEXER),
        group("w", window(9), (0, 1), rows_per_page=12),
        disk=True,
    ),
    "recurrent": layout(group("kv", history(1), (1,)), group("s", hkv.state(), (0, 2)), disk=True),
    "two windows": layout(
        group("near", window(3), (0, 2), rows_per_page=2), group("far", window(30), (1,)),
        disk=True,
    ),
    "chunked": layout(
        group("kv", history(1), (3,), rows_per_page=6),
        group("ch", chunk(8), (0, 1, 2), rows_per_page=6),
        group("t", tail(6), (3,)),
    ),
    "a bit of all": layout(
        group("c", history(3)),
        group("t", tail(12, True), rows_per_page=3),
        group("keys", hkv.indexer(2), rows_per_page=2),
        group("route", hkv.state(), form=Form.INDEXER),
        group("ch", chunk(5), (1,), rows_per_page=4),
        disk=True,
    ),
    "ratio of a segment": layout(
        group("c", history(16)), group("t", tail(16)), group("w", window(1), (1,)),
        group("ch", chunk(16), (2,), rows_per_page=8), B=16,
    ),
}  # fmt: skip
ROW_DAMAGE = (
    "epoch", "indexer_version", "provenance", "life", "parent", "parent_born", "start", "identity",
    "media", "unlisted", "length", "disk", "disk", "disk",
)  # fmt: skip
GROUP_DAMAGE = (
    "held",
    "held",
    "held",
    "page",
    "owner",
    "written",
    "digest",
    "abi",
    "codes",
    "shard",
)


def _damage(r, store, row, rate):
    """Changes one stored row at random, at most once per kind."""
    t, lay = store.table, store.layout
    for g, spec in enumerate(lay.groups):
        if r.random() >= rate:
            continue
        start, length = int(t["start"][row]), int(t["length"][row])
        kind = r.choice(GROUP_DAMAGE)
        if kind == "held":
            lo = r.randint(0, length)
            hi = r.choice((length, r.randint(lo, length)))
            if spec.rule.prefix_closed:
                lo, hi = r.choice(((0, length), (1, length), (0, 0), (0, length - 1)))
            t["held"][row, g] = (start + lo, start + hi)
        elif kind in ("page", "owner", "written"):
            i = r.randrange(lay.segment_pages(spec))
            page = t["pages"][g][row, i]
            if kind == "page":
                t["pages"][g][row, i] = 0
            else:
                store.stamps[g][page, int(kind == "written")] += r.choice((1, 5))
        elif kind == "digest":
            t["digest"][row, g] = r.choice(((0, 0), (0, 1), (1, 0)))
        elif kind == "abi":
            t["abi"][row, g] ^= 1 << r.randrange(32)
        else:
            t["codes"][row, g, 0] = 0 if kind == "shard" else t["codes"][row, g, 0] ^ 4
    if r.random() >= rate:
        return
    kind = r.choice(ROW_DAMAGE)
    if kind == "unlisted":
        store.listed = [x for x in store.listed if x != row]
    elif kind == "life":
        t["life"][row, r.choice(hkv._layout.DEVICE_FORMS)] = r.choice(list(Life))
    elif kind == "disk":
        t["life"][row, Form.DISK] = r.choice((Life.ON_DISK, Life.STALE, Life.OFFLOADING))
        t["place"][row] = r.choice((hkv.Place.HOST, hkv.Place.LOCAL_DISK, hkv.Place.REMOTE))
        start, length = int(t["start"][row]), int(t["length"][row])
        for g, spec in enumerate(lay.groups):
            lo, hi = r.choice(((0, length), (0, length), (r.randint(0, length), length), (0, 0)))
            u = spec.rule.unit
            t["copied"][row, g] = (start + lo // u * u, start + hi // u * u)
            if r.random() < 0.7:
                t["life"][row, spec.form] = r.choice((Life.EMPTY, Life.ON_DISK))
    elif kind == "parent":
        t["parent"][row] = r.randrange(lay.segments + 1)
    elif kind == "length":
        # A row that says it is shorter than it was: what is listed as whole no longer is.
        t["length"][row] = r.randint(1, int(t["length"][row]))
    else:
        word = r.randrange(4) if kind in ("identity", "media") else ()
        index = (row, word) if word != () else row
        t[kind][index] = t[kind][index] + np.asarray(r.choice((1, 2)), t[kind].dtype)


def _scene(r, lay):
    """A random table and a batch of prompts that run along it."""
    B, T = lay.segment_tokens, lay.buckets[-1]
    store = Store(lay)
    asked = Asked(start=r.choice((0, 7, 24)), media=r.choice(((), ((0,) * 4, (9, 0, 0, 1)))))
    alphabet = r.choice((2, 3, 50))
    rate = r.choice((0.0, 0.1, 0.4))

    def words(n):
        return [r.randrange(alphabet) for _ in range(n)]

    paths = [words(r.choice((T, r.randint(1, T))))]
    rows = [store.chain(paths[0], asked=asked, padding=r.randrange(alphabet))]
    for _ in range(r.choice((0, 1, 1, 2))):
        k = r.randrange(len(rows))
        stem, i = paths[k], r.randrange(len(rows[k]))
        stored = dict(enumerate(rows[k]))
        keep = min(r.randint(i * B, (i + 1) * B - 1), len(stem))
        tokens = stem[:keep] + words(r.randint(1, T - keep))
        # The block that differs becomes another segment behind the same parent.
        same = i
        while same < len(rows[k]) and tokens[: (same + 1) * B] == stem[: (same + 1) * B]:
            same += 1
        if same == len(rows[k]) or len(tokens) <= same * B:
            continue
        new = store.chain(tokens[same * B :], stored[same - 1] if same else None, asked)
        paths.append(tokens)
        rows.append([stored[j] for j in range(same)] + new)
    for row in list(store.prefix):
        _damage(r, store, row, rate)
    prompts, wants, worst = [], [], r.choice((0, 0, 1))
    for _ in range(Q):
        path = r.choice(paths)
        n = r.choice((len(path), r.randint(0, len(path))))
        prompt = path[:n] + words(r.randint(0, T - n))
        prompts.append(prompt)
        other = dict(r.choice((
            *({},) * 6, {"identity": (9, 2, 3, 4)}, {"start": asked.start + B},
            {"media": ((1, 0, 0, 0),)},
        )))  # fmt: skip
        wants.append(dataclasses.replace(asked, provenance=worst, **other))
    return store, prompts, wants


def pad(lay, prompts, filler=0, bucket=None):
    """Prompts as arrays, padded with whatever `filler` is."""
    tokens = np.full((len(prompts), bucket or lay.buckets[-1]), filler, np.int32)
    for q, p in enumerate(prompts):
        tokens[q, : len(p)] = p
    return jnp.asarray(tokens), jnp.asarray(np.array([len(p) for p in prompts], np.int32))


def ask(store, prompts, wants=None, filler=0, bucket=None, cache=None):
    wants = [Asked()] * len(prompts) if wants is None else wants
    tokens, length = pad(store.layout, prompts, filler, bucket)
    cache = store.cache() if cache is None else cache
    out = hkv.query(cache, tokens, length, store.need(wants, bucket))
    return jax.device_get(out)


def one(answer, q):
    """Request `q` of an answer."""
    return jax.tree.map(lambda a: a[q], answer)


def boundaries(a, name, g=None):
    mask = getattr(a, name) if g is None else a.group_ok[g]
    return {int(p) for p, x in zip(a.positions, mask, strict=True) if x}


def compare(a, store, prompt, want):
    """One request's answer `a` against the sets."""
    o = Oracle(store, prompt, want)
    lay = store.layout
    if o.best:  # of equally good segments any may be taken
        taken = int(a.rows[o.whole])
        assert taken in o.best, (taken, o.best)
        o = Oracle(store, prompt, want, pick=taken)
    assert a.matched == o.matched and a.length == len(prompt)
    assert a.matched <= max(len(prompt) - 1, 0)
    rows = [lay.segments if r is None else r for r in o.rows]
    assert a.rows.tolist() == rows
    versions = [0 if r is None else store.table["version"][r] for r in o.rows]
    assert a.version.tolist() == versions
    assert a.held.tolist() == [[list(h) for h in line] for line in o.held]
    assert a.group_reason.tolist() == o.reasons
    assert a.copied.tolist() == [[list(c or (0, 0)) for c in line] for line in o.copies]
    sizes = [lay.segment_pages(g) * g.page_bytes for g in lay.groups]
    assert a.bytes.tolist() == [sum(sizes[g] for g in o.to_fetch(s)) for s in range(o.S)]
    sets = o.sets()
    for g, mine in enumerate(sets):
        assert boundaries(a, "group_ok", g) == mine, lay.groups[g]
        assert a.furthest[g] == max(mine, default=0)
    assert boundaries(a, "usable") == o.usable()
    assert boundaries(a, "recoverable") == o.recoverable()
    assert hkv.Availability.boundary.fget(a) == max(o.usable())
    for k, p in enumerate(a.positions.tolist()):
        reason = Reason.OK if p in o.usable() else Reason.GROUPS
        valid = p in o.positions and (p <= o.base if k <= o.S else True)
        assert a.boundary_reason[k] == (reason if valid else Reason.NOT_FOUND)
        for g, spec in enumerate(lay.groups):
            if valid and not o.closed(g) and spec.rule.kind is not hkv.Kind.STATE:
                assert a.runs[g, k] == o.run(g, p), (spec, p)
    for s, line in enumerate(o.form_status()):
        for f, (status, reason, tokens, place) in line.items():
            got = (a.status[s, f], a.reason[s, f], a.tokens[s, f], a.place[s, f])
            assert got == (status, reason, tokens, place), (s, f.name, got, line[f])


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_an_answer_is_what_the_sets_say(name, r):
    store, prompts, wants = _scene(r, LAYOUTS[name])
    assume(store.proposes_all())
    a = ask(store, prompts, wants, filler=r.randrange(3))
    for q in range(Q):
        compare(one(a, q), store, prompts[q], wants[q])


# Of a batch, a bucket and padding.


def _same(a, b, S=None, K=None):
    """Two answers to one request; `S` and `K` cut the longer one."""
    for f in dataclasses.fields(a):
        if f.name in ("layout", "need"):
            continue
        x, y = (np.asarray(getattr(z, f.name)) for z in (a, b))
        if f.name in ("positions", "usable", "recoverable", "boundary_reason"):
            x, y = x[:K], y[:K]
        elif f.name in ("group_ok", "runs"):
            x, y = x[:, :K], y[:, :K]
        elif x.ndim and x.shape[0] != y.shape[0]:
            x, y = x[:S], y[:S]
        np.testing.assert_array_equal(x, y, err_msg=f.name)


@settings(max_examples=15)
@given(st.randoms(use_true_random=False))
def test_a_batch_is_answered_as_each_request_alone_and_in_any_order(r):
    store, prompts, wants = _scene(r, LAYOUTS["compressed"])
    cache = store.cache()
    a = ask(store, prompts, wants, cache=cache)
    order = r.sample(range(Q), Q)
    b = ask(store, [prompts[q] for q in order], [wants[q] for q in order], cache=cache)
    for i, q in enumerate(order):
        _same(one(a, q), one(b, i))
        _same(one(a, q), one(ask(store, [prompts[q]], [wants[q]], cache=cache), 0))


@settings(max_examples=15)
@given(st.randoms(use_true_random=False))
def test_padding_may_hold_anything(r):
    store, prompts, wants = _scene(r, LAYOUTS["recurrent"])
    cache = store.cache()
    a = ask(store, prompts, wants, filler=0, cache=cache)
    tokens, length = pad(store.layout, prompts)
    tokens = np.array(tokens)
    for q, p in enumerate(prompts):  # what is stored, or any number at all
        stored = max(store.prefix.values(), key=lambda x: len(x[3]))[3]
        rest = [*stored, *[0] * tokens.shape[1]][len(p) : tokens.shape[1]]
        tokens[q, len(p) :] = r.choice((rest, [r.choice((-1, 2**31 - 1))] * len(rest)))
    b = jax.device_get(hkv.query(cache, jnp.asarray(tokens), length, store.need(wants)))
    for q in range(Q):
        _same(one(a, q), one(b, q))


@settings(max_examples=15)
@given(st.randoms(use_true_random=False))
def test_the_length_bucket_does_not_change_the_answer(r):
    lay = LAYOUTS["full and sliding"]
    store, prompts, wants = _scene(r, lay)
    prompts = [p[: r.randint(0, 24)] for p in prompts]
    cache = store.cache()
    a = ask(store, prompts, wants, cache=cache)
    b = ask(store, prompts, wants, bucket=24, cache=cache)
    B, short, long = lay.segment_tokens, 24 // lay.segment_tokens, lay.max_segments
    for q in range(Q):
        x, y = one(a, q), one(b, q)
        # Boundaries stand as S + 1 aligned ones and then those inside one segment.
        keep = np.r_[0 : short + 1, long + 1 : long + B]
        x = dataclasses.replace(
            x, positions=x.positions[keep], usable=x.usable[keep], runs=x.runs[:, keep],
            recoverable=x.recoverable[keep], boundary_reason=x.boundary_reason[keep],
            group_ok=x.group_ok[:, keep],
        )  # fmt: skip
        _same(x, y, S=short)


# Examples by hand.

HOLES = layout(
    group("kv", history(1)), group("w", window(9), (1,)), B=4, S=10, segments=12
)  # 8 rows before a token


def _lose(store, row, g):
    """Drops one group's pages of a segment."""
    store.table["pages"][g][row] = 0


def test_the_boundary_of_a_prefix_is_in_the_intersection_not_the_minimum_of_maxima():
    lay = LAYOUTS["two windows"]
    B = lay.segment_tokens
    store = Store(lay)
    rows = store.chain(range(4 * B))
    far = lay.group("far")  # its 29 rows reach over three segments, so cut it to the last ones
    _lose(store, rows[1], lay.group("near"))
    store.table["held"][rows[1], lay.group("near")] = (B, 2 * B)
    _lose(store, rows[2], far)
    a = one(ask(store, [list(range(3 * B + 1))] * Q), 0)
    aligned = {0, B, 2 * B, 3 * B}
    assert boundaries(a, "group_ok", lay.group("near")) & aligned == {0, B, 3 * B}
    assert boundaries(a, "group_ok", far) & aligned == {0, B, 2 * B}
    assert a.furthest.tolist() == [3 * B, 2 * B]
    assert boundaries(a, "usable") == {0, B}
    assert hkv.Availability.boundary.fget(a) == B  # not 2 * B
    k = a.positions.tolist().index(2 * B)
    assert a.boundary_reason[k] == Reason.GROUPS


def test_a_run_of_window_rows_starts_anew_at_every_hole():
    store = Store(HOLES)
    rows = store.chain(range(36))
    for s in (4, 5, 7):  # rows 16 to 23 and 28 to 31 are gone
        _lose(store, rows[s], 1)
    a = one(ask(store, [list(range(37))] * Q), 0)
    assert a.matched == 36 and a.furthest.tolist() == [36, 16]
    assert boundaries(a, "usable") == {0, 4, 8, 12, 16}
    assert boundaries(a, "recoverable") == set(range(0, 37, 4))


@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=9, max_size=9), st.integers(1, 40))
@example([True] * 4 + [False] * 2 + [True, False, True], 37)
def test_a_window_with_holes_is_held_where_its_last_rows_are_all_there(there, n):
    store = Store(HOLES)
    for row, live in zip(store.chain(range(36)), there, strict=True):
        if not live:
            _lose(store, row, 1)
    rows = {j for j in range(36) if there[j // 4]}
    a = one(ask(store, [list(range(n))] * Q), 0)
    stored = min(36, n - 1)
    points = set(range(0, stored // 4 * 4 + 1, 4)) | set(range(stored // 4 * 4, stored + 1))
    want = {e for e in points if all(j in rows for j in range(max(0, e - 8), e))}
    assert a.matched == stored
    assert boundaries(a, "group_ok", 1) == boundaries(a, "usable") == want


@pytest.mark.parametrize("n", [0, 1, 11, 12, 13, 24, 25, 47, 48])
def test_a_prompt_of_n_tokens_reuses_at_most_n_minus_one(n):
    store = Store(LAYOUTS["full and sliding"])
    store.chain([1] * 48)
    a = ask(store, [[1] * n] * Q)
    assert (a.matched == max(n - 1, 0)).all() and (a.boundary == max(n - 1, 0)).all()


@pytest.mark.parametrize("n", [12, 47, 48])
def test_a_prefix_can_be_described_up_to_the_longest_bucket(n):
    store = Store(LAYOUTS["compressed"])
    rows = store.chain([1] * 48)
    held = hkv.describe(store.cache(), [1] * n, store.need([Asked()]))
    want = [r for r in rows[: -(-n // 12)] for _ in range(5)]  # one group of three layers, two more
    assert [h.segment for h in held] == want


def test_a_segment_stored_under_two_epochs_is_found_under_each():
    store = Store(LAYOUTS["compressed"])
    old = store.chain([3] * 24, asked=Asked(epoch=1))
    new = store.chain([3] * 24, asked=Asked(epoch=2))
    for epoch, rows in ((1, old), (2, new)):
        a = ask(store, [[3] * 25] * Q, [Asked(epoch=epoch)] * Q)
        assert a.rows[0, :2].tolist() == rows and (a.boundary == 24).all()
    a = ask(store, [[3] * 25] * Q, [Asked(epoch=3)] * Q)
    assert (a.boundary == 0).all() and (a.group_reason[:, 0] == Reason.EPOCH).all()


def test_another_tenant_adapter_model_start_or_image_shares_nothing():
    store = Store(LAYOUTS["compressed"])
    mine = Asked(media=((0, 0, 0, 7),))
    store.chain([3] * 24, asked=mine)
    assert (ask(store, [[3] * 24] * Q, [mine] * Q).boundary == 23).all()
    others = [
        dataclasses.replace(mine, identity=(1, 2, 3, 5)),
        dataclasses.replace(mine, start=12),
        dataclasses.replace(mine, media=((0, 0, 0, 8),)),
    ]
    a = ask(store, [[3] * 24] * Q, others)
    assert (a.matched == 0).all() and (a.rows == store.layout.segments).all()


def test_a_length_out_of_range_and_a_negative_token_reuse_nothing():
    lay = LAYOUTS["full and sliding"]
    store = Store(lay)
    store.chain([1] * 48)
    tokens = jnp.ones((Q, 48), jnp.int32)
    length = jnp.asarray(np.array([-1, 49, 48], np.int32))
    need = store.need([Asked()] * Q)
    a = jax.device_get(hkv.query(store.cache(), tokens, length, need))
    assert a.boundary.tolist() == [0, 0, 47]
    assert (a.reason[:2] == Reason.LENGTH).all() and (a.status[:2] == Status.RECOMPUTE).all()
    for cache in (store.cache(), planted.empty(lay)):
        a = hkv.query(cache, -tokens, jnp.full(Q, 48, jnp.int32), need)
        assert (np.asarray(a.matched) == 0).all()


# The hash only proposes.


def _honest(a, store, prompt, want):
    """Whatever was proposed: what is called usable is stored, is this prompt's, and is whole."""
    o = Oracle(store, prompt, want)
    B, n = o.B, int(a.matched)
    assert n <= max(len(prompt) - 1, 0)
    o.whole, o.base, o.partial = n // B, n // B * B, n % B
    o.rows, o.reasons, o.held = [], [], []
    parent = None
    for s in range(o.S):
        shared = min(max(n - s * B, 0), B)
        row = int(a.rows[s])
        if not shared:
            assert row == o.N
            o._add(None, [Reason.NOT_FOUND] * o.G)
            continue
        assert store.tokens[row, :shared].tolist() == prompt[s * B : s * B + shared]
        assert shared <= store.table["length"][row]
        assert o.link_fault(row, s, parent, shared) is None
        o._add(row, [o.fault(row, s, parent, shared, g) for g in range(o.G)])
        parent = row
    usable = boundaries(a, "usable")
    for g, spec in enumerate(store.layout.groups):
        rows = o.group_rows(g)
        assert all(planted.needed(spec.rule, p) <= rows for p in usable)


@pytest.mark.parametrize("name", ["compressed", "a bit of all"])
@settings(max_examples=40)
@given(st.randoms(use_true_random=False))
def test_colliding_keys_never_make_a_wrong_hit(name, r):
    store, prompts, wants = _scene(r, LAYOUTS[name])
    t, rows = store.table, list(store.prefix)
    for row in rows:
        if r.random() < 0.7:
            t["key"][row] = t["key"][r.choice(rows)]
        if r.random() < 0.7:
            t["before"][row] = t["before"][r.choice(rows)]
        if r.random() < 0.2:  # even where all that a key is made of is the same but the tokens
            store.tokens[row] = store.tokens[r.choice(rows)]
    a = ask(store, prompts, wants)
    for q in range(Q):
        _honest(one(a, q), store, prompts[q], wants[q])


def test_two_segments_under_one_key_are_told_apart_by_their_tokens():
    store = Store(LAYOUTS["compressed"])
    right = store.place([1] * 12)
    wrong = store.place([2] * 12)
    for first in (right, wrong):  # whichever the probe meets first
        store.table["key"][wrong] = store.table["key"][right]
        store.listed, store.indexes = [first], None
        a = one(ask(store, [[1] * 13] * Q), 0)
        assert a.boundary_reason[0] == Reason.OK
        assert hkv.Availability.boundary.fget(a) == (12 if first == right else 0)
        if first == wrong:
            assert (a.group_reason[0] == Reason.TOKENS).all()


KEYS_AFTER = [[90575424, 750251069], [2945314581, 2313409095], [3969862144, 3726516015]]
KEYS_BEFORE = [[2773721385, 2465267343], *KEYS_AFTER[:2]]
DIGESTS = [
    [1299937297, 1673265956, 3331762931, 3708081986],
    [849573469, 4154860317, 694693703, 3582325016],
    [1449887463, 1940566092, 3260663539, 1740253200],
]


def test_keys_and_digests_are_the_same_in_every_process():
    tokens = jnp.asarray(np.arange(12, dtype=np.int32).reshape(3, 4) * 7 % 5)
    media = jnp.asarray(np.array([[0] * 4, [1, 2, 3, 4], [0] * 4], np.uint32))
    identity = jnp.asarray(np.array([1, 2, 3, 2**32 - 1], np.uint32))
    after, before = block_keys(tokens, identity, jnp.int32(9), media)
    assert after.tolist() == KEYS_AFTER
    assert before.tolist() == KEYS_BEFORE
    assert hkv.digest128().tolist() == DIGESTS[0]
    assert hkv.digest128(b"salt", b"", b"model").tolist() == DIGESTS[1]
    assert hkv.digest128(b"sal", b"t", b"model").tolist() == DIGESTS[2]


def test_a_key_depends_on_all_that_stands_before_and_inside():
    tokens = np.arange(12, dtype=np.int32).reshape(3, 4)
    identity, media = np.arange(4, dtype=np.uint32), np.zeros((3, 4), np.uint32)

    def keys(tokens=tokens, identity=identity, start=0, media=media):
        return np.asarray(block_keys(tokens, jnp.asarray(identity), jnp.int32(start), media)[0])

    plain = keys()
    for s in range(3):
        for change in ("tokens", "media"):
            x = np.array({"tokens": tokens, "media": media}[change])
            x[s, 1] += 1
            same = (keys(**{change: x}) == plain).all(axis=1).tolist()
            assert same == [i < s for i in range(3)]
    swapped = tokens[:, [1, 0, 2, 3]]
    for other in (keys(start=1), keys(identity=identity[::-1].copy()), keys(tokens=swapped)):
        assert (other != plain).all()


# What a person is told.


def _told():
    """One request that meets several reasons, in a table of three segments and more."""
    store = Store(LAYOUTS["compressed"])
    rows = store.chain([1] * 36)
    store.table["epoch"][rows[0]] = 4
    _lose(store, rows[1], 0)
    store.table["life"][rows[2], Form.DISK] = Life.ON_DISK
    store.table["place"][rows[2]] = hkv.Place.HOST
    return ask(store, [[1] * 30 + [2] * 12, [], [1] * 5])


FORMS_TOLD = ("COMPRESSED", "TAIL", "WINDOW")
NOT_FOUND_TOLD = "level 1: no stored segment has these tokens under this identity"


def test_explain_says_one_sentence_per_reason_with_counts():
    assert hkv.explain(_told()) == [
        "request 0: 42 tokens, 30 stored, usable to 0, recoverable to 0",
        f"  COMPRESSED: 1 segment RECOMPUTE, {NOT_FOUND_TOLD}",
        "  COMPRESSED: 1 segment RECOMPUTE, level 1: a page was dropped",
        "  COMPRESSED: 1 segment RECOMPUTE, level 2: computed with other weights",
        f"  TAIL: 1 segment RECOMPUTE, {NOT_FOUND_TOLD}",
        f"  WINDOW: 1 segment RECOMPUTE, {NOT_FOUND_TOLD}",
        "request 1: 0 tokens, 0 stored, usable to 0, recoverable to 0",
        "request 2: 5 tokens, 4 stored, usable to 0, recoverable to 3",
        *(f"  {f}: 1 segment RECOMPUTE, level 2: computed with other weights" for f in FORMS_TOLD),
    ]


def test_explain_counts_segments_and_names_what_can_be_recovered():
    store = Store(LAYOUTS["compressed"])
    rows = store.chain([1] * 36)
    for g in (1, 2):
        _lose(store, rows[2], g)
    lines = hkv.explain(ask(store, [[1] * 37, [2] * 40, [1] * 37]))
    assert lines[:3] == [
        "request 0: 37 tokens, 36 stored, usable to 24, recoverable to 36",
        f"  COMPRESSED: 1 segment RECOMPUTE, {NOT_FOUND_TOLD}",
        f"  TAIL: 1 segment RECOMPUTE, {NOT_FOUND_TOLD}",
    ]
    assert "  TAIL: 1 segment RECOVER, level 1: a page was dropped" in lines
    assert f"  COMPRESSED: 4 segments RECOMPUTE, {NOT_FOUND_TOLD}" in lines


def test_a_notebook_shows_a_table_of_segments_and_forms():
    a = _told()
    text = a._repr_html_()
    assert text.count("<table>") == text.count("</table>") == Q
    head = "".join(f"<th>{x}</th>" for x in ("tokens", *(f.name for f in Form)))
    assert text.count(f"<tr>{head}</tr>") == Q
    cells = [x.split("</td>")[0] for x in text.split("<table>")[1].split(">")]
    table = [x[: -len("</td")] for x in cells if x.endswith("</td")]
    assert table == [
        "0-11", "RECOMPUTE (EPOCH)", "-", "-", "-", "-",
        "12-23", "RECOMPUTE (PAGE_MISSING)", "-", "-", "-", "-",
        "24-35", "REUSE", "REUSE", "REUSE", "-", "-",
        "36-41", *["RECOMPUTE (NOT_FOUND)"] * 3, "-", "-",
    ]  # fmt: skip
    for line in hkv.explain(a):
        assert html.escape(line) in text
    assert repr(a) == "\n".join(hkv.explain(a))


def test_an_answer_inside_a_jitted_function_can_be_printed():
    seen = []

    @jax.jit
    def look(a):
        seen.append(repr(a))
        return a.matched

    look(_told())
    assert seen == ["Availability(traced)"]


def test_every_reason_has_a_level_and_a_sentence():
    for reason in Reason:
        assert reason.level in range(5) and reason.sentence
        assert (reason.level == 0) == (reason is Reason.OK)
    assert len({r.sentence for r in Reason}) == len(Reason)
