"""Switches single checks of the library off and demands that the tests notice.

    python tests/mutations.py            # all of them, with a table
    python tests/mutations.py NAME ...   # those whose name contains one of the words

Each mutation changes one thing in this process, throws the compiled programs away, and runs the
cases that are there for it. Every one of these cases must fail; without the mutation all pass.
"""

# ruff: noqa: E402, the path must be set first where the package is not installed
import contextlib
import dataclasses
import functools
import inspect
import pathlib
import sys
import textwrap
import time

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])]

import conftest  # noqa: F401  strict promotion and the store of compiled programs
import jax
import jax.numpy as jnp
import numpy as np
import test_levels as levels
from planted import Asked

import hkv
from hkv import Kind, Reason, _lease, _query, _rules, _verify, _view


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A named change, made by a context manager, and the cases that must fail under it."""

    name: str
    change: object
    cases: tuple


@contextlib.contextmanager
def replaced(old, new):
    """`new` under every name by which a module of the library knows `old`."""
    modules = [m for n, m in sys.modules.items() if n.split(".")[0] in ("hkv", "pallas_kernels")]
    places = [(m, k) for m in modules for k, v in vars(m).items() if v is old]
    assert places
    for module, name in places:
        setattr(module, name, new)
    jax.clear_caches()
    try:
        yield
    finally:
        for module, name in places:
            setattr(module, name, old)
        jax.clear_caches()


def without(checks, entry):
    """One entry of a tuple of checks passes whatever it sees."""
    old = getattr(_verify, checks)
    always = (old[entry][0], lambda *args: jnp.bool_(True))
    return replaced(old, (*old[:entry], always, *old[entry + 1 :]))


def rewritten(function, old, new):
    """`function` with a piece of its source replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise LookupError(f"{function.__name__} has {source.count(old)} of {old!r}")
    space = dict(vars(sys.modules[function.__module__]))
    exec(source.replace(old, new), space)  # noqa: S102
    return replaced(function, space[function.__name__])


def _required(rule, change):
    """`required` with the first row of one kind of rule moved."""
    right = _rules.required

    def wrong(of, p):
        lo, hi = right(of, p)
        return (jnp.clip(change(of, lo), 0, hi), hi) if of.kind is rule else (lo, hi)

    return replaced(right, wrong)


def _min_of_maxima(ok):
    last = ok.shape[1] - 1 - jnp.argmax(ok[:, ::-1], axis=1)
    within = jnp.arange(ok.shape[1]) <= jnp.min(last)
    return jnp.where(within, jnp.uint8(0), jnp.uint8(Reason.GROUPS))


def _leases_always_hold(cache, lease):
    return jnp.ones(lease.length.shape, bool)


def _stamps_always_hold(cache, lease, position):
    return jnp.ones(position.shape, bool)


# Cases about leases, which the checks at the time of reading concern.


def _lease_of(store, rows, cache):
    """What a request that holds three stored segments for reading has in hand."""
    lay = store.layout
    at = jnp.asarray(np.array([rows], np.int32))
    G, S = len(lay.groups), len(rows)
    n = jnp.asarray(np.array([len(levels.PROMPT)], np.int32))
    have = jnp.broadcast_to(jnp.asarray(np.array([0, len(levels.PROMPT)], np.int32)), (1, G, 2))
    return hkv.Lease(
        slot=jnp.zeros(1, jnp.int32), serial=jnp.full((1, 3), 7, jnp.uint32), rows=at,
        version=cache.table.version[at], own=jnp.zeros((1, S), bool),
        pages=tuple(p[at].reshape(1, -1) for p in cache.table.pages),
        written=jnp.moveaxis(cache.table.written[at], 1, 2),
        private=jnp.zeros((1, G, S), bool), length=n, total=n, have=have,
        write=jnp.broadcast_to(jnp.stack([n, n + 1], -1)[:, None], (1, G, 2)),
        need=store.need([Asked()]),
    )  # fmt: skip


@jax.jit
def _reads(cache, lease):
    ok = hkv.view(cache, lease, jnp.zeros_like(lease.length)).ok
    return ok, hkv.verify_lease(cache, lease)


def _answers(change=None):
    """Whether the lease may be read, and the reason why not, after `change(table, stamps)`."""
    store, rows = levels.stored()
    cache = store.cache()
    lease = _lease_of(store, rows, cache)
    serials = np.array(cache.serials)
    serials[0] = 7
    if change:
        change(store, rows[levels.SPOT], serials)
    now = dataclasses.replace(
        store.cache(), serials=jnp.asarray(serials),
        reached=jnp.full(lease.slot.shape, len(levels.PROMPT), jnp.int32),
    )  # fmt: skip
    ok, why = _reads(now, lease)
    return bool(ok[0]), Reason(int(why[0]))


def lease_version():
    """A lease does not hold once a segment is of another generation; a publication is none."""

    def bump(by):
        def change(store, row, serials):
            store.table["version"][row] += by

        return change

    assert _answers() == _answers(bump(1)) == (True, Reason.OK)
    assert _answers(bump(256)) == (False, Reason.LIFECYCLE)


def lease_serial():
    """A lease does not hold once its slot was given to another."""

    for word in (0, 1):

        def other(store, row, serials, word=word):
            serials[0, word] += 1

        assert _answers(other) == (False, Reason.LIFECYCLE)


def lease_newest():
    """A lease does not hold once the request has gone on with a later one."""

    def later(store, row, serials):
        serials[0, 2] += 1

    assert _answers(later) == (False, Reason.LIFECYCLE)


def lease_stamp(word):
    """A lease does not hold once a page carries another stamp."""

    def stamp(store, row, serials):
        store.stamps[levels.KEYS][store.table["pages"][levels.KEYS][row, 1], word] += 1

    assert _answers(stamp) == (False, Reason.STAMP)


LEASE_CASES = (
    lease_version,
    lease_serial,
    functools.partial(lease_stamp, 0),
    functools.partial(lease_stamp, 1),
)


def _of(checks, entry):
    return [c for c in levels.CASES if c.checks == checks and c.entry == entry]


def _named(name):
    return next(c for c in levels.CASES if c.name == name)


def _both(cases):
    return tuple(
        functools.partial(f, c) for c in cases for f in (levels.check_level, levels.check_query)
    )


def mutations():
    """All of them."""
    out = []
    for checks in ("BLOCK_CHECKS", "ABI_CHECKS", "BYTE_CHECKS"):
        for entry, (reason, _) in enumerate(getattr(_verify, checks)):
            out.append(
                Mutation(
                    f"{checks}[{entry}] {reason.name} off",
                    functools.partial(without, checks, entry),
                    _both(_of(checks, entry)),
                )
            )
    links = [c for c in levels.CASES if c.checks == "BLOCK_CHECKS" and c.entry < 5]

    def add(name, change, *cases):
        out.append(Mutation(name, change, cases))

    def source(name, function, old, new, *cases):
        add(name, functools.partial(rewritten, function, old, new), *cases)

    def swap(name, old, new, *cases):
        add(name, functools.partial(replaced, old, new), *cases)

    def require(name, kind, change, *cases):
        add(name, functools.partial(_required, kind, change), *cases)

    swap(
        "groups: minimum of maxima", _verify.check_groups, _min_of_maxima,
        levels.check_intersection,
    )  # fmt: skip
    swap(
        "chain of parents ignored", _verify.link_holds, lambda *args: jnp.bool_(True),
        *(functools.partial(levels.check_query, c) for c in links),
    )  # fmt: skip
    swap(
        "tokens not compared", _query.leading_equal, lambda a, b: jnp.int32(a.shape[0]),
        functools.partial(levels.check_query, _named("tokens")),
    )  # fmt: skip
    swap(
        "order of the levels turned round", _verify.first_reason,
        functools.partial(_last_reason, _verify.first_reason),
        *(
            functools.partial(levels.check_order, _named(a), _named(b))
            for a, b in (("digest", "abi"), ("epoch", "bytes"), ("parent", "shard"))
        ),
    )  # fmt: skip
    source(
        "N tokens reused of N", _query.find, "jnp.maximum(length - 1, 0)", "length",
        levels.check_last_token,
    )  # fmt: skip
    require("window one row short", Kind.WINDOW, lambda r, lo: lo + 1, levels.check_window_coverage)
    require("window one row long", Kind.WINDOW, lambda r, lo: lo - 1, levels.check_window_coverage)
    require("overlap of a tail forgotten", Kind.TAIL, _no_overlap, levels.check_divergence)
    stamp = "(stamps[:, 0] == ask.row.astype(jnp.uint32)) & (stamps[:, 1] == seg.written[g])"
    first, second = stamp.split(" & ")
    for name, kept, case in (
        ("stamp: only the segment", first, "stamp of another writing"),
        ("stamp: only the writing", second, "stamp of another segment"),
    ):
        source(name, _verify.page_facts, stamp, kept, *_both([_named(case)]))
    swap("lease: state pointer off", _lease.check_lease, _leases_always_hold, *LEASE_CASES[:2])
    source(
        "lease: version off", _lease.check_lease, "return held & jnp.all(same, axis=-1)",
        "return held", lease_version,
    )  # fmt: skip
    source(
        "lease: serial off", _lease.held_by,
        "(take(cache.serials, lease.slot, 0) == lease.serial)", "(lease.serial == lease.serial)",
        lease_serial,
    )  # fmt: skip
    source("lease: newest off", _lease.check_lease, " & newest &", " &", lease_newest)
    swap("lease: stamps off", _view.stamps_hold, _stamps_always_hold, *LEASE_CASES[2:])
    for word in (0, 1):
        source(
            f"lease: only word {word} of a stamp", _view.stamps_hold,
            "jnp.all(stamp == _expect(lease, g), -1)",
            f"(stamp == _expect(lease, g))[..., {word}]", LEASE_CASES[3 - word],
        )  # fmt: skip
    return out


def _last_reason(right, *reasons):
    return right(*reasons[::-1])


def _no_overlap(rule, lo):
    return lo + (rule.size if rule.overlap else 0)


def fails(case):
    """Whether a case fails; any other error than a failed assertion is one of the run itself."""
    try:
        case()
    except AssertionError:
        return True
    return False


def baseline(chosen):
    """Runs every case of these mutations on the library as it is."""
    seen = set()
    for mutation in chosen:
        for case in mutation.cases:
            name = _name(case)
            if name not in seen:
                case()
            seen.add(name)
    return len(seen)


def _name(case):
    if isinstance(case, functools.partial):
        return " ".join([case.func.__name__, *(getattr(a, "name", str(a)) for a in case.args)])
    return case.__name__


def main(words):
    chosen = [m for m in mutations() if not words or any(w in m.name for w in words)]
    if not chosen:
        print(f"no mutation is called {words}")
        return 1
    assert all(m.cases for m in chosen)
    print(f"{baseline(chosen)} cases pass on the library as it is")
    missed = 0
    for mutation in chosen:
        began = time.perf_counter()
        with mutation.change():
            survived = [_name(case) for case in mutation.cases if not fails(case)]
        missed += bool(survived)
        verdict = "caught" if not survived else f"MISSED by {'; '.join(survived)}"
        took = time.perf_counter() - began
        print(f"{mutation.name:44} {len(mutation.cases):3} cases {took:6.1f} s  {verdict}")
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
