"""The lifecycle: one table for the code, the README and these tests; what a lease allows."""

import ast
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from payload import Payload
from test_stateful import SMALL

import hkv
import hkv.testing
from hkv import Blocker, Form, Life, Refusal, Verdict
from hkv._lifecycle import DISK_TRANSITIONS, TRANSITIONS

ROOT = pathlib.Path(__file__).parents[1]
N, F = SMALL.segments, len(Form)
PROMPT = list(range(20))  # two whole segments and half of one
DEVICE = [f is not Form.DISK for f in Form]


def listed(form, old, new):
    """The table again, in words."""
    on_device = form is not Form.DISK
    match old, new:
        case (Life.EMPTY | Life.ON_DISK, Life.LOADING):
            return on_device or old is Life.ON_DISK
        case (Life.EMPTY, Life.WRITING):
            return True
        case (Life.WRITING | Life.LOADING | Life.OFFLOADING, Life.READY):
            return on_device
        case (Life.READY, Life.OFFLOADING):
            return on_device
        case (Life.OFFLOADING | Life.LOADING | Life.WRITING, Life.ON_DISK):
            return on_device == (old is Life.OFFLOADING) or old is Life.LOADING
        case (Life.EMPTY | Life.STALE, _):
            return old is Life.STALE and new is Life.EMPTY
        case (_, Life.EMPTY | Life.STALE):
            return on_device or old not in (Life.READY, Life.OFFLOADING)
    return False


def rows(*numbers):
    return jnp.asarray(np.array(numbers, np.int32))


def forms(*chosen):
    return jnp.asarray(np.array([f in chosen for f in Form]))


ALL = forms(*Form)
ON_DEVICE = forms(*(f for f in Form if DEVICE[f]))


@pytest.fixture(scope="module")
def stored():
    """A cache with one prompt in it, and its host loop; each test takes a copy."""
    p = Payload(dataclasses.replace(SMALL, disk=True))
    p.store([PROMPT])
    return p


@pytest.fixture
def life(stored):
    """That host loop again, with a cache of its own."""
    p = Payload.__new__(Payload)
    vars(p).update(vars(stored))
    p.cache = jax.tree.map(jnp.copy, stored.cache)
    return p


def move(p, at, which, to):
    p.cache, report = hkv.transition(p.cache, at, which, to)
    return report


def where(p):
    """Rows of the stored segments, in order."""
    start, length = np.asarray(p.cache.table.start), np.asarray(p.cache.table.length)
    return sorted(np.flatnonzero(length > 0).tolist(), key=lambda r: start[r])


def with_states(cache, states, pins=0):
    """A cache in whose every row a segment stands with these states of its forms."""
    t = cache.table
    table = dataclasses.replace(
        t, life=jnp.asarray(states, jnp.uint8), length=jnp.full(N, SMALL.segment_tokens, jnp.int32),
        pins=jnp.full(N, pins, jnp.int32),
    )  # fmt: skip
    return dataclasses.replace(cache, table=table)


def test_the_readme_shows_the_table_of_the_code():
    text = (ROOT / "README.md").read_text()
    section = text.split("### Lifecycle\n")[1].split("\n#")[0]
    got = [line for line in section.splitlines() if line.startswith("|")]
    want = ["| state | meaning | a device form goes to | DISK goes to |", "|---|---|---|---|"]
    for a in Life:
        names = (", ".join(b.name for b in t[a]) or "-" for t in (TRANSITIONS, DISK_TRANSITIONS))
        want.append(f"| {a.name} | {a.meaning} | {' | '.join(names)} |")
    assert got == want


def test_the_table_names_every_state_and_lets_each_form_become_empty_again():
    for table in (TRANSITIONS, DISK_TRANSITIONS):
        assert list(table) == list(Life)
        reached, todo = set(), [Life.EMPTY]
        while todo:
            state = todo.pop()
            if state not in reached:
                reached.add(state)
                todo += table[state]
        for state in reached - {Life.EMPTY}:
            assert Life.EMPTY in table[state]
        assert all(len(set(to)) == len(to) and state not in to for state, to in table.items())
    for form in Form:
        table = DISK_TRANSITIONS if form is Form.DISK else TRANSITIONS
        for old in Life:
            assert set(table[old]) == {new for new in Life if listed(form, old, new)}, (form, old)


@pytest.mark.parametrize("to", list(Life), ids=lambda x: x.name)
def test_only_listed_transitions_move_and_every_other_form_stays_as_it_was(stored, to):
    for shift in range(len(Life)):  # with the rows' numbers, every state meets every form
        states = (np.arange(N)[:, None] + shift * np.arange(F)) % len(Life)
        before = with_states(jax.tree.map(jnp.copy, stored.cache), states)
        old = jax.device_get(before)
        cache, report = hkv.transition(before, jnp.arange(N, dtype=jnp.int32), ALL, to)
        new, report = jax.device_get((cache, report))
        legal = np.array([[listed(f, Life(s[f]), to) for f in Form] for s in states])
        np.testing.assert_array_equal(report.moved, legal)
        np.testing.assert_array_equal(report.refusal, np.where(legal, 0, Refusal.ILLEGAL))
        np.testing.assert_array_equal(report.old, states)
        np.testing.assert_array_equal(new.table.life, np.where(legal, to, states))
        bits = (new.table.life == Life.READY) @ np.array([1, 2, 4, 8, 0])
        moved = legal.any(1)
        np.testing.assert_array_equal(new.table.form, np.where(moved, bits, old.table.form))
        rose = new.table.version > old.table.version
        np.testing.assert_array_equal(rose, moved)
        same = jax.tree.map(lambda a, b, m=moved: (a[~m] == b[~m]).all(), old.table, new.table)
        assert all(jax.tree.leaves(same))


def test_a_report_names_both_states_and_the_reason(life):
    first = where(life)[0]
    report = move(life, rows(first, N - 1), forms(Form.WINDOW, Form.DISK), Life.LOADING)
    text = repr(report)
    assert "0 moved, 4 refused" in text
    assert f"segment {first}, WINDOW: READY -> LOADING: {Refusal.ILLEGAL.sentence}" in text
    assert f"segment {first}, DISK: EMPTY -> LOADING: {Refusal.ILLEGAL.sentence}" in text
    assert f"segment {N - 1}, WINDOW: EMPTY -> LOADING: {Refusal.ABSENT.sentence}" in text
    assert "Transition(traced)" in repr(jax.eval_shape(lambda r: r, report))


def test_a_refused_transition_leaves_every_bit_as_it_was(life):
    before = jax.device_get(life.cache)
    for to in (Life.READY, Life.ON_DISK, Life.LOADING, Life.WRITING):
        report = move(life, jnp.arange(N, dtype=jnp.int32), ON_DEVICE, to)
        assert not np.asarray(report.moved).any()
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(life.cache))


def test_rows_out_of_range_and_repeats_are_skipped(life):
    first = where(life)[0]
    report = move(life, rows(N, first, -1, first), forms(Form.WINDOW), Life.STALE)
    assert np.asarray(report.moved[:, Form.WINDOW]).tolist() == [False, True, False, False]
    assert not np.asarray(report.refusal).any()


def test_a_form_that_leaves_the_device_gives_its_pages_back(life):
    at = rows(*where(life))
    free = [int(p.n_free) for p in life.cache.pools]
    assert np.asarray(move(life, at, forms(Form.WINDOW), Life.OFFLOADING).moved).sum() == 3
    assert [int(p.n_free) for p in life.cache.pools] == free
    hkv.testing.invariants(life.cache, [])
    move(life, at, forms(Form.WINDOW), Life.ON_DISK)
    move(life, at, forms(Form.TAIL), Life.EMPTY)
    hkv.testing.invariants(life.cache, [])
    for g, spec in enumerate(SMALL.groups):
        gone = spec.form in (Form.WINDOW, Form.TAIL)
        assert (int(life.cache.pools[g].n_free) > free[g]) == gone
    assert life.boundary([PROMPT]) == [0]


def test_only_a_ready_form_is_reused(life):
    assert life.boundary([PROMPT]) == [19]
    move(life, rows(*where(life)), forms(Form.INDEXER), Life.OFFLOADING)
    assert life.boundary([PROMPT]) == [0]
    move(life, rows(*where(life)), forms(Form.INDEXER), Life.READY)
    assert life.boundary([PROMPT]) == [19]
    move(life, rows(*where(life)), forms(Form.INDEXER), Life.STALE)
    assert life.boundary([PROMPT]) == [0]
    report = move(life, rows(*where(life)), forms(Form.INDEXER), Life.READY)
    assert not np.asarray(report.moved).any()


def test_a_lease_reads_on_while_forms_are_copied_out_and_refuses_that_they_go(life):
    at = rows(*where(life)[:2])
    lease = life.start([PROMPT[:17]])
    assert np.asarray(move(life, at, ON_DEVICE, Life.OFFLOADING).moved).sum() == 8
    life.check_rows(lease, [PROMPT[:17]])
    for to in (Life.ON_DISK, Life.EMPTY):
        report = move(life, at, ON_DEVICE, to)
        assert (np.asarray(report.refusal)[:, DEVICE] == Refusal.LEASED).all()
    assert "READY" not in repr(report) and "OFFLOADING -> EMPTY: a lease holds" in repr(report)
    move(life, at, ON_DEVICE, Life.READY)
    life.check_rows(lease, [PROMPT[:17]])
    # The disk copy comes and goes beside it.
    for to in (Life.WRITING, Life.ON_DISK, Life.LOADING, Life.ON_DISK, Life.STALE, Life.EMPTY):
        assert np.asarray(move(life, at, forms(Form.DISK), to).moved).sum() == 2
    life.check_rows(lease, [PROMPT[:17]])
    hkv.testing.invariants(life.cache, [lease])
    life.release(lease)
    assert np.asarray(move(life, at, ON_DEVICE, Life.EMPTY).moved).sum() == 8
    hkv.testing.invariants(life.cache, [])


def test_a_stale_form_ends_leases_and_plans_but_one_that_comes_and_goes_elsewhere_does_not(life):
    first = rows(where(life)[0])
    plan = life.plan([PROMPT])
    lease = life.start([PROMPT[:17]])
    move(life, first, forms(Form.DISK), Life.WRITING)
    move(life, first, forms(Form.DISK), Life.ON_DISK)
    other, answer = life.admit(plan, [20])
    assert Verdict(int(answer.verdict[0])) is Verdict.ADMIT
    assert np.asarray(hkv.check_lease(life.cache, lease))[0]
    move(life, first, forms(Form.WINDOW), Life.STALE)
    assert not np.asarray(hkv.check_lease(life.cache, lease))[0]
    assert not np.asarray(hkv.check_lease(life.cache, other))[0]
    late, answer = life.admit(plan, [20])
    assert Blocker(int(answer.blocker[0])) is Blocker.CHANGED
    out, ok = life.rows(lease)
    assert not ok[0] and not any(valid[0].any() for _, valid in out.values())
    for x in (lease, other, late):
        life.release(x)
    hkv.testing.invariants(life.cache, [])


def test_moving_a_form_to_any_state_is_one_program(life):
    at = rows(*where(life))
    move(life, at, forms(Form.WINDOW), Life.OFFLOADING)
    with hkv.testing.count_compiles() as compiles:
        for to in Life:
            move(life, at, forms(Form.WINDOW), to)
    assert not compiles.names


@pytest.mark.parametrize(
    ("args", "error", "name"),
    [
        ((np.array([0]), ALL, Life.STALE), TypeError, "`rows`"),
        ((rows(0), ALL[:3], Life.STALE), ValueError, "`forms`"),
        ((rows(0), ALL, 6), TypeError, "`life`"),
    ],
    ids=["rows", "forms", "life"],
)
def test_wrong_arguments_are_named(life, args, error, name):
    with pytest.raises(error, match=name):
        hkv.transition(life.cache, *args)


def test_every_state_that_is_written_comes_from_the_table():
    writers = set()
    for path in sorted((ROOT / "hkv").rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or function.name == "_make":
                continue
            calls = [n for n in ast.walk(function) if isinstance(n, ast.Call)]
            names = {c.func.id for c in calls if isinstance(c.func, ast.Name)}
            writes = any(
                k.arg == "life" and isinstance(c.func, ast.Attribute) and c.func.attr == "replace"
                for c in calls for k in c.keywords
            )  # fmt: skip
            if writes and "move" not in names:
                writers.add(function.name)
    assert not writers
