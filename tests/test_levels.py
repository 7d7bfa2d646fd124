"""The four levels of verification: each check by itself, and the order of them."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import layout as jax_layout
from planted import Asked, Store, group, layout

import hkv
from hkv import Form, Life, Reason, _verify

B, S = 8, 3
LEVELS = layout(
    group("c", hkv.history(4), rows_per_page=1),
    group("keys", hkv.indexer(4), rows_per_page=1),
    group("w", hkv.window(5), (1,), rows_per_page=4),
    B=B, S=S, segments=8, leases=2, disk=True,
)  # fmt: skip
TAILED = layout(
    group("c", hkv.history(4)), group("t", hkv.tail(4, True)), B=B, S=S, segments=8, leases=2
)
C, KEYS, WIN = range(3)
SPOT = 1  # the segment that is changed, the second of three
PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33, 34, 35, 36]
LINKS = {Reason.IDENTITY, Reason.START, Reason.PARENT, Reason.TOKENS}


@dataclasses.dataclass(frozen=True)
class Case:
    """A change to one stored segment that makes one check fail and no other."""

    name: str
    checks: str  # name of the tuple of checks
    entry: int  # which of them
    change: object  # change(store, row, g)
    group: int = KEYS
    everywhere: bool = False  # the check concerns all groups

    def reason(self):
        return getattr(_verify, self.checks)[self.entry][0]


def _add(field, per_group=False):
    def change(store, row, g):
        index = (row, g) if per_group else row
        store.table[field][index] += np.asarray(1, store.table[field].dtype)

    return change


def _start(store, row, g):
    store.table["start"][row] += 4
    store.table["held"][row] += 4


def _another_parent(store, row, g):
    other = store.place([1] * B)
    store.table["born"][other] = store.table["born"][store.table["parent"][row]]
    store.table["parent"][row] = other


def _word(field, i):
    def change(store, row, g):
        store.table[field][row, i] += np.uint32(1)

    return change


def _token(store, row, g):
    store.tokens[row, 0] += 1


def _life(life):
    def change(store, row, g):
        store.table["life"][row, store.layout.groups[g].form] = life

    return change


def _held(lo, hi):
    """The held range moved by so much at either end."""

    def change(store, row, g):
        store.table["held"][row, g] += (lo, hi)

    return change


def _no_page(store, row, g):
    store.stamps[g][0] = (row, store.table["written"][row, g])  # else the null page has no stamp
    store.table["pages"][g][row, 1] = 0


def _stamp(word):
    def change(store, row, g):
        page = store.table["pages"][g][row, 1]
        store.stamps[g][page, word] += 1

    return change


def _digest(store, row, g):
    store.table["digest"][row, g] = 0


def _codes(value):
    def change(store, row, g):
        code = store.table["codes"][row, g]
        code[0] = value if value == 0 else code[0] ^ value

    return change


BLOCK, ABI, BYTES = "BLOCK_CHECKS", "ABI_CHECKS", "BYTE_CHECKS"
CASES = [
    *(Case(f"identity word {i}", BLOCK, 0, _word("identity", i), everywhere=True) for i in (0, 3)),
    *(Case(f"media word {i}", BLOCK, 1, _word("media", i), everywhere=True) for i in (0, 3)),
    Case("start", BLOCK, 2, _start, everywhere=True),
    Case("parent", BLOCK, 3, _another_parent, everywhere=True),
    Case("parent's birth", BLOCK, 4, _add("parent_born"), everywhere=True),
    Case("tokens", BLOCK, 5, _token, everywhere=True),
    *(
        Case(f"life {x.name}", BLOCK, 6, _life(x))
        for x in Life
        if x is not Life.READY
    ),
    Case("a compressed block that lacks an entry", BLOCK, 7, _held(0, -4), C),
    Case("a compressed block that lacks its first entry", BLOCK, 7, _held(4, 0), C),
    Case("index keys that lack an entry", BLOCK, 7, _held(0, -4)),
    Case("a window that begins before its segment", BLOCK, 7, _held(-1, 0), WIN),
    Case("a window that ends past its segment", BLOCK, 7, _held(0, 1), WIN),
    Case("a window that ends before it begins", BLOCK, 7, _held(6, -4), WIN),
    Case("page dropped", BLOCK, 8, _no_page),
    Case("stamp of another segment", BLOCK, 9, _stamp(0)),
    Case("stamp of another writing", BLOCK, 9, _stamp(1)),
    Case("digest", BLOCK, 10, _digest),
    Case("abi", ABI, 0, _add("abi", per_group=True)),
    Case("epoch", ABI, 1, _add("epoch"), everywhere=True),
    Case("indexer version", ABI, 2, _add("indexer_version")),
    Case("provenance", ABI, 3, _add("provenance"), everywhere=True),
    Case("shard", BYTES, 0, _codes(0)),
    Case("bytes", BYTES, 1, _codes(8)),
]  # fmt: skip


def stored():
    """Three stored segments of which the second will be changed; its row."""
    store = Store(LEVELS)
    rows = store.chain(PROMPT, padding=9)
    return store, rows


def question(store, rows, s=SPOT):
    """What a prompt asks of the segment at place `s`."""
    parent = rows[s - 1] if s else LEVELS.segments
    block = np.array(PROMPT[s * B : (s + 1) * B])
    same = store.tokens[rows[s], : len(block)] == block
    matched = len(block) if same.all() else int(np.argmin(same))
    a = Asked()
    born = 0 if s == 0 else store.table["born"][parent]
    return _verify.Ask(
        row=np.int32(rows[s]), identity=np.array(a.identity, np.uint32),
        media=np.zeros(4, np.uint32), start=np.int32(s * B), parent=np.int32(parent),
        parent_born=np.uint32(born), matched=np.int32(matched),
    )  # fmt: skip


@jax.jit
def _levels(cache, seg, ask, need):
    return (
        _verify.check_block(cache, seg, ask),
        _verify.check_abi(cache.layout, seg, need),
        _verify.check_bytes(cache.layout, seg, need),
        _verify.check_segment(cache, seg, ask, need),
    )


def _segment(store, cache, row):
    return jax.tree.map(lambda a: np.asarray(a)[row], cache.table)


def answers(store, rows, s=SPOT):
    """Reasons `[4, G]`: levels 1, 2, 4 of one segment, and the first of them."""
    cache, need = store.cache(), store.need([Asked()]).request(0)
    seg = _segment(store, cache, rows[s])
    return np.array(_levels(cache, seg, question(store, rows, s), need))


def failing(store, rows, s=SPOT):
    """Every single check that fails: (tuple of checks, entry, groups)."""
    cache, need = store.cache(), store.need([Asked()]).request(0)
    seg, ask = _segment(store, cache, rows[s]), question(store, rows, s)
    page = _verify.page_facts(cache, seg, ask)
    out = []
    for name, args in (
        (BLOCK, (LEVELS, seg, ask, page)), (ABI, (LEVELS, seg, need)), (BYTES, (seg, need)),
    ):  # fmt: skip
        for entry, (_, passes) in enumerate(getattr(_verify, name)):
            ok = np.broadcast_to(np.asarray(passes(*args)), len(LEVELS.groups))
            if not ok.all():
                out.append((name, entry, tuple(np.flatnonzero(~ok).tolist())))
    return out


def ask_query(store, prompt=PROMPT):
    """The answer to one prompt, without the axis Q."""
    T = LEVELS.buckets[-1]
    tokens = np.full((1, T), 5, np.int32)
    tokens[0, : len(prompt)] = prompt
    length = np.array([len(prompt)], np.int32)
    a = hkv.query(store.cache(), tokens, length, store.need([Asked()]))
    return jax.tree.map(lambda x: np.asarray(x)[0], a)


def _expected(case):
    groups = range(len(LEVELS.groups)) if case.everywhere else (case.group,)
    return [case.reason() if g in groups else Reason.OK for g in range(len(LEVELS.groups))]


def check_level(case):
    """The level that the check belongs to gives its reason, the others pass."""
    store, rows = stored()
    case.change(store, rows[SPOT], case.group)
    got, want = answers(store, rows), _expected(case)
    for name, mine in zip((BLOCK, ABI, BYTES), got[:3], strict=True):
        assert mine.tolist() == (want if name == case.checks else [0] * len(want)), name
    assert got[3].tolist() == want


def check_query(case):
    """A query gives the reason too, and does not resume past what the segment would have held."""
    store, rows = stored()
    fine = ask_query(store)
    assert fine.usable.any() and not fine.group_reason.any() and _boundary(fine) == len(PROMPT) - 1
    case.change(store, rows[SPOT], case.group)
    a = ask_query(store)
    assert a.group_reason[SPOT].tolist() == _expected(case)
    if case.reason() in LINKS:
        assert a.matched == B
    assert a.group_reason[0].tolist() == [0] * len(LEVELS.groups)
    if case.group == WIN and case.reason() not in LINKS and not case.everywhere:
        # Only boundaries whose window reaches into the segment are lost.
        assert not any(B < p < 2 * B + 4 for p in boundaries(a)) and _boundary(a) > 2 * B
    else:
        assert _boundary(a) == B
    assert case.reason().level == {BLOCK: 1, ABI: 2, BYTES: 4}[case.checks]


def boundaries(a):
    return set(a.positions[a.usable].tolist())


def _boundary(a):
    return max(boundaries(a))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_check_that_alone_fails_is_the_reason(case):
    store, rows = stored()
    assert failing(store, rows) == []
    case.change(store, rows[SPOT], case.group)
    groups = tuple(range(len(LEVELS.groups))) if case.everywhere else (case.group,)
    assert failing(store, rows) == [(case.checks, case.entry, groups)]
    check_level(case)
    check_query(case)


def test_every_single_check_has_a_case():
    for name in (BLOCK, ABI, BYTES):
        entries = {c.entry for c in CASES if c.checks == name}
        assert entries == set(range(len(getattr(_verify, name))))


def test_levels_run_over_all_rows_at_once_as_over_each():
    for case in CASES[::4]:
        store, rows = stored()
        case.change(store, rows[SPOT], case.group)
        cache, need = store.cache(), store.need([Asked()]).request(0)
        at = rows + [LEVELS.segments - 1]  # and a row that holds nothing
        asks = [question(store, rows, s) for s in range(S)] + [question(store, rows, 0)]
        many = jax.vmap(_levels, in_axes=(None, 0, 0, None))(
            cache, jax.tree.map(lambda a, at=at: a[jnp.asarray(at)], cache.table),
            jax.tree.map(lambda *x: jnp.stack([jnp.asarray(i) for i in x]), *asks), need,
        )  # fmt: skip
        each = [answers(store, rows, s) for s in range(S)]
        np.testing.assert_array_equal(np.array(many)[:, :S].swapaxes(0, 1), each)
        assert np.array(many)[0, S].all()


def check_order(first, second):
    store, rows = stored()
    for case in (second, first):
        case.change(store, rows[SPOT], KEYS)
    assert answers(store, rows)[3, KEYS] == first.reason(), (first.name, second.name)


ORDERED = [c for c in CASES if c.group == KEYS and not c.name.startswith("life")]


def test_of_two_checks_that_fail_the_earlier_is_the_reason():
    rank = {BLOCK: 0, ABI: 1, BYTES: 2}
    for i, first in enumerate(ORDERED):
        for second in ORDERED[i + 1 :]:
            assert (rank[first.checks], first.entry) <= (rank[second.checks], second.entry)
            check_order(first, second)


@pytest.mark.parametrize("pair", [("parent", "digest"), ("digest", "abi"), ("epoch", "bytes")])
def test_a_query_names_the_earlier_of_two_levels(pair):
    store, rows = stored()
    cases = [next(c for c in CASES if c.name == name) for name in pair]
    for case in cases:
        case.change(store, rows[SPOT], KEYS)
    assert ask_query(store).group_reason[SPOT, KEYS] == cases[0].reason()


# Level 3, and where the prompt diverges.


def test_boundaries_of_all_groups_are_the_intersection_of_sets():
    rng = np.random.default_rng(0)
    for _ in range(20):
        ok = rng.random((3, 9)) < 0.6
        got = np.asarray(_verify.check_groups(jnp.asarray(ok)))
        sets = [set(np.flatnonzero(x).tolist()) for x in ok]
        assert set(np.flatnonzero(got == Reason.OK).tolist()) == set.intersection(*sets)
        assert set(got.tolist()) <= {Reason.OK, Reason.GROUPS}


def check_intersection():
    """One group lacks boundary 2, another ends in the middle of segment 3: they meet at 1."""
    store = Store(LEVELS)
    prompt = [*PROMPT, 37, 38]
    rows = store.chain(prompt)
    _no_page(store, rows[1], WIN)
    store.table["life"][rows[2], Form.INDEXER] = Life.STALE
    a = ask_query(store, prompt)
    k = a.positions.tolist().index
    ok = {g: {p for p in (0, B, 2 * B) if a.group_ok[g, k(p)]} for g in range(3)}
    assert ok == {C: {0, B, 2 * B}, KEYS: {0, B, 2 * B}, WIN: {0, B}}
    # Whole entries of 4 tokens: without those of segment 3 the keys reach 3 tokens into it.
    assert a.furthest.tolist() == [len(prompt) - 1, 2 * B + 3, len(prompt) - 1]
    assert boundaries(a) == {0, B}
    assert a.boundary_reason[k(2 * B)] == Reason.GROUPS


def test_a_prefix_is_usable_only_where_every_group_is():
    check_intersection()


def check_window_coverage():
    """A window of 5 needs the 4 rows before a boundary: 3 are too few, a fifth is not asked."""
    for lost, want in ((4, True), (5, False)):
        store, rows = stored()
        store.table["held"][rows[0], WIN, 0] += lost
        a = ask_query(store, PROMPT[:B] + [99, 99])
        assert a.matched == B
        assert (B in boundaries(a)) is want, lost
        assert a.group_reason[0, WIN] == Reason.OK
        if not want:
            assert a.reason[0, Form.WINDOW] == Reason.RANGE
            assert a.boundary_reason[a.positions.tolist().index(B)] == Reason.GROUPS


def test_a_window_must_cover_what_the_position_requires():
    check_window_coverage()


def check_divergence():
    """An entry counts only if every token it folds lies before the point of divergence."""
    store = Store(TAILED)
    rows = store.chain(PROMPT[: 2 * B])
    for shared in range(B):
        prompt = PROMPT[: B + shared] + [99] * (B - shared)
        a = hkv.query(store.cache(), *_padded(prompt), store.need([Asked()]))
        assert int(a.matched[0]) == B + shared
        assert int(a.boundary[0]) == B + shared
    # The raw rows that the last entry folds besides its own are gone from the stored tail.
    store.table["held"][rows[1], 1, 0] += 2
    a = hkv.query(store.cache(), *_padded(PROMPT[: B + 5] + [99]), store.need([Asked()]))
    usable = set(np.asarray(a.positions)[0][np.asarray(a.usable)[0]].tolist())
    assert usable == {0, B}, usable


def _padded(prompt):
    tokens = np.zeros((1, B * S), np.int32)
    tokens[0, : len(prompt)] = prompt
    return tokens, np.array([len(prompt)], np.int32)


def test_an_entry_counts_only_if_all_it_folds_lies_before_the_divergence():
    check_divergence()


def check_last_token():
    """A prompt that is stored whole reuses all of it but one token."""
    store, _ = stored()
    for n in (1, B, B + 1, len(PROMPT)):
        a = ask_query(store, PROMPT[:n])
        assert a.matched == n - 1 and _boundary(a) == n - 1, n


def test_a_prompt_stored_whole_still_runs_its_last_token():
    check_last_token()


# What the codes of levels 2 and 4 stand for.


def test_the_abi_code_says_what_the_bytes_mean():
    base = group("g", hkv.tail(4, True), (0, 2), abi=(("packing", "e4m3"), ("rope", 1e4)))
    plain = layout(base).abi
    assert plain.tolist() == layout(dataclasses.replace(base, name="other", pages=99)).abi.tolist()
    changes = [
        {"rule": hkv.tail(4)}, {"rule": hkv.tail(6, True)}, {"layers": (0, 1)}, {"layers": (0,)},
        {"row": (2,)}, {"dtype": "bfloat16"}, {"rows_per_page": 6}, {"form": Form.INDEXER},
        {"abi": (("packing", "e5m2"), ("rope", 1e4))}, {"abi": (("packing", "e4m3"),)},
        {"abi": (("packing", "e4m3"), ("rope", 1e5))},
    ]  # fmt: skip
    codes = [layout(dataclasses.replace(base, **x)).abi[0] for x in changes]
    assert len({*codes, plain[0]}) == len(changes) + 1
    assert layout(base).with_abi("g", packing="e5m2").abi[0] == codes[8]


def _code(data):
    """The byte code of a cache whose one pool holds `data`."""
    cache = hkv.init(_one_pool())
    pool = dataclasses.replace(cache.pools[0], data=data)
    (code,) = hkv.byte_codes(dataclasses.replace(cache, pools=(pool,))).ravel()
    return int(code)


def _one_pool():
    g = dataclasses.replace(group("g", hkv.history(1), (0, 1)), row=(4, 8))
    return layout(g, segments=8)


class _Moved:
    """An array that says it lies somewhere else in memory."""

    def __init__(self, array, by):
        self._array, self._by = array, by

    def __getattr__(self, name):
        return getattr(self._array, name)

    @property
    def addressable_shards(self):
        return [
            _Shard(data=_Moved(s.data, self._by), index=s.index)
            for s in self._array.addressable_shards
        ]

    def unsafe_buffer_pointer(self):
        return self._array.unsafe_buffer_pointer() + self._by


@dataclasses.dataclass
class _Shard:
    data: object
    index: object


def test_the_byte_code_comes_from_the_arrays_as_they_lie_in_memory():
    plain = jnp.zeros((2, 9, 12, 4, 8), jnp.float32)
    (device,) = plain.devices()
    code = _code(plain)
    assert code and code == _code(jnp.ones_like(plain))
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    other = jax.sharding.SingleDeviceSharding(device, memory_kind="unpinned_host")
    turned = jax_layout.Format(jax_layout.Layout((0, 1, 2, 4, 3)), plain.sharding)
    codes = [
        _code(plain.astype(jnp.bfloat16)),
        _code(plain.astype(jnp.int32)),
        _code(plain.reshape(2, 9, 12, 8, 4)),
        _code(jax.device_put(plain, host)),
        _code(jax.device_put(plain, other)),
        _code(jax.device_put(plain, turned)),
        _code(_Moved(plain, 16)),
    ]
    assert len({code, *codes}) == len(codes) + 1
    assert _code(_Moved(plain, 64)) == code


SHARDED = """
    import dataclasses, json
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    import hkv
    from hkv import Form, Reason
    from hkv._verify import check_bytes

    mesh = Mesh(np.array(jax.devices()).reshape(4), ("x",))
    def make(*spec, row=(4, 4)):
        group = hkv.Group("g", Form.COMPRESSED, hkv.history(1), (0, 1), row)
        lay = hkv.Layout((group,), segment_tokens=4, segments=4, buckets=(8,), shards=4)
        return hkv.init(lay, NamedSharding(mesh, P(None, None, None, *spec)))
    cache = make("x")
    codes = [hkv.byte_codes(c) for c in (cache, make(None, "x"), make())]
    seg = cache.segment(0)
    need = hkv.need(cache).request(0)
    out = {"codes": [c.tolist() for c in codes], "reasons": []}
    right = codes[0]
    for other in (right, codes[1], right * np.array([[1, 1, 0, 1]], np.uint32),
                  right + np.array([[0, 0, 0, 1]], np.uint32)):
        stored = dataclasses.replace(seg, codes=jnp.asarray(other))
        out["reasons"].append(np.asarray(check_bytes(cache.layout, stored, need)).tolist())
    for row, spec in (((6, 4), "x"), ((4,), (None, "x"))):
        try:
            make(*spec, row=row)
        except ValueError as error:
            out["reasons"].append(str(error))
    print(json.dumps(out))
"""


def test_every_shard_has_a_byte_code_and_a_part_of_its_own():
    root = pathlib.Path(__file__).parents[1]
    env = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(root),
    }
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SHARDED)], env=env, cwd=root, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    out = json.loads(run.stdout.splitlines()[-1])
    by_row, by_column, copies = (np.array(c) for c in out["codes"])
    assert by_row.shape == (1, 4) and by_row.all() and len(set(by_row.ravel().tolist())) == 4
    assert not set(by_row.ravel().tolist()) & set(by_column.ravel().tolist())
    assert len(set(copies.ravel().tolist())) == 1
    *reasons, uneven, deep = out["reasons"]
    assert reasons == [[Reason.OK], [Reason.BYTES], [Reason.SHARD], [Reason.BYTES]]
    for text in (uneven, deep):
        assert text.startswith("`sharding` does not divide group 'g'"), text
