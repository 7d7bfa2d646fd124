"""Checks for the tests of programs that use the library: compiles, structure, memory, bookkeeping.

`import hkv` does not import this. Failed checks raise `AssertionError` and say what differs where.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np

from hkv._cache import PROBE, Cache
from hkv._layout import DEVICE_FORMS
from hkv._lease import Lease
from hkv._lifecycle import Life
from hkv._rules import Kind

_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class Compiles:
    """What was compiled while a `count_compiles` block ran; readable inside it and after."""

    names: list[str] = dataclasses.field(default_factory=list)  # as `jit(name)`, in order
    seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.names)


@contextlib.contextmanager
def count_compiles() -> Iterator[Compiles]:
    """Counts the programs that JAX compiles or loads in a block, in all threads.

        with hkv.testing.count_compiles() as compiles:
            serve(requests)
        assert not compiles.names

    A program found in JAX's persistent compilation cache counts too: the call still waited for
    it. Operations outside of `jax.jit` are programs of their own, named after the primitive.
    """
    found = Compiles()

    def listen(event: str, duration_secs: float, **facts: str | int) -> None:
        if event == _COMPILED:
            found.names.append(str(facts.get("fun_name", "")))
            found.seconds += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def same_structure(a: Any, b: Any) -> None:
    """Checks that a compiled program that takes one of two pytrees takes the other.

    Compared are the tree itself with its static parts and, leaf by leaf, shape, dtype, weak type
    and, where both have them, sharding with memory kind, and whether the array is committed to
    its devices. Values are not.

    Args:
        a: a pytree of arrays or `jax.ShapeDtypeStruct`.
        b: another.

    Raises:
        AssertionError: with the path of every leaf that differs.
    """
    (left, tree), (right, other) = (jax.tree_util.tree_flatten_with_path(x) for x in (a, b))
    paths = [[jax.tree_util.keystr(path) for path, _ in leaves] for leaves in (left, right)]
    only = sorted(set(paths[0]) ^ set(paths[1]))
    if only:
        raise AssertionError(f"only one of the trees has {', '.join(only)}")
    if cast(Any, tree) != cast(Any, other):
        raise AssertionError(f"same leaves, but a static part differs:\n  {tree}\n  {other}")
    wrong = []
    for path, (_, x), (_, y) in zip(paths[0], left, right, strict=True):
        for name, p, q in zip(("shape", "dtype", "weak type"), _facts(x), _facts(y), strict=True):
            if p != q:
                wrong.append(f"{path}: {name} {p} against {q}")
        p, q = (getattr(a, "sharding", None) for a in (x, y))
        if p is not None and q is not None and not p.is_equivalent_to(q, np.ndim(x)):
            wrong.append(f"{path}: sharding {p} against {q}")
        p, q = (getattr(a, "committed", None) for a in (x, y))
        if p is not None and q is not None and p != q:
            wrong.append(f"{path}: committed {p} against {q}")
    if wrong:
        raise AssertionError("\n".join(wrong))


def _facts(x: Any) -> tuple:
    kind = jax.typeof(x)
    return kind.shape, kind.dtype, getattr(kind, "weak_type", False)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one compiled program, per device."""

    arguments: int
    outputs: int
    alias: int  # outputs that take the place of donated arguments
    temp: int  # scratch beside arguments and outputs


def aliasing(fn: Callable, *args: Any, **kwargs: Any) -> Memory:
    """How much memory a program takes, and how much of it is updated in place.

        step = jax.jit(step, donate_argnames=("cache",))
        memory = hkv.testing.aliasing(step, weights, cache, lease, tokens)
        assert memory.alias >= sum(hkv.nbytes(layout).values())

    Nothing runs and nothing is donated. That a program copies a pool shows as `temp` of the
    size of that pool, whatever `alias` says.

    Args:
        fn: what `jax.jit` returned. A plain function is compiled with its first argument donated.
        args: its arguments, arrays or `jax.ShapeDtypeStruct`.
        kwargs: likewise.
    """
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn, donate_argnums=0)
    m = jitted.lower(*args, **kwargs).compile().memory_analysis()
    return Memory(
        arguments=m.argument_size_in_bytes,
        outputs=m.output_size_in_bytes,
        alias=m.alias_size_in_bytes,
        temp=m.temp_size_in_bytes,
    )


def invariants(cache: Cache, leases: Sequence[Lease] | None = None) -> None:
    """Checks the bookkeeping of a cache, on the host.

    Pages and rows are handed out once each and add up to the capacity, null pages are zero,
    owners agree with the table and with the free lists, counts are what they count, both indexes
    point at stored segments, and pages in use carry their segment's stamps.

    Args:
        cache: the cache; nothing in it changes.
        leases: every lease that was taken and not released (released ones may be among them).
            With them, pins and private pages are checked to be exactly theirs.

    Raises:
        AssertionError: with one line for each thing that is wrong.
    """
    c, held = jax.device_get((cache, leases))
    found = _Problems()
    _check_rows(c, found)
    _check_index(c, found)
    for g in range(len(c.pools)):
        _check_pool(c, g, found)
    if held is None:
        found.unless(c.serials.any() | (c.table.pins == 0), "row {} is pinned, but no lease is out")
    else:
        _check_leases(c, held, found)
    if found.lines:
        raise AssertionError("\n".join(found.lines))


class _Problems:
    """Collects what is wrong, each kind with the first few places where it is."""

    def __init__(self):
        self.lines: list[str] = []

    def unless(self, right: Any, text: str, group: str = "") -> None:
        places = np.argwhere(~np.atleast_1d(right))
        if len(places):
            first = ", ".join(",".join(map(str, p)) for p in places[:8])
            more = f" and {len(places) - 8} more" if len(places) > 8 else ""
            self.lines.append(f"{group and group + ': '}{text.format(first + more)}")


def _check_rows(c: Any, found: _Problems) -> None:
    t, N, B = c.table, c.layout.segments, c.layout.segment_tokens
    stack = c.free_rows[: max(int(c.n_free_rows), 0)]
    found.unless(0 <= c.n_free_rows <= N, f"`n_free_rows` is {c.n_free_rows}, of {N}")
    found.unless((stack >= 0) & (stack < N), "`free_rows` is out of range at {}")
    times = np.bincount(stack[(stack >= 0) & (stack < N)], minlength=N)
    found.unless(times <= 1, "row {} is free more than once")
    free = times > 0
    empty = (t.length == 0) & (t.pins == 0) & (t.life == Life.EMPTY).all(1)
    found.unless(~free | empty, "row {} is free, but not empty")
    found.unless(free | (t.length > 0) | (t.pins > 0), "row {} is neither free nor held by anyone")
    found.unless((t.length >= 0) & (t.length <= B), "row {} has a length out of range")
    found.unless(t.pins >= 0, "row {} has negative pins")
    found.unless(t.life < len(Life), "row and form {} have an unknown lifecycle state")
    bits = sum((t.life[:, f] == Life.READY).astype(np.uint8) << f for f in DEVICE_FORMS)
    found.unless(t.form == bits, "row {} has `form` bits that are not its lifecycle's")
    lo, hi = t.held[..., 0], t.held[..., 1]
    begin, end = t.start[:, None], (t.start + t.length)[:, None]
    inside = (begin <= lo) & (lo <= hi) & (hi <= end)
    found.unless(inside | (t.length == 0)[:, None], "row and group {} hold rows outside of the row")
    up = t.parent
    found.unless((up >= 0) & (up <= N), "row {} has a parent out of range")
    real = (t.length > 0) & (up >= 0) & (up < N)
    real &= t.born[np.clip(up, 0, N - 1)] == t.parent_born
    count = np.bincount(up[real], minlength=N)
    found.unless(free | (t.children == count), "row {} has a wrong count of `children`")


def _check_index(c: Any, found: _Problems) -> None:
    t, N, B = c.table, c.layout.segments, c.layout.segment_tokens
    for name, a in (("index", c.index), ("openings", c.openings)):
        found.unless((a >= 0) & (a <= N), f"`{name}` is out of range at {{}}")
    slot = np.flatnonzero((c.index >= 0) & (c.index < N))
    row = c.index[slot]
    found.unless(np.bincount(row, minlength=N) <= 1, "row {} is in `index` more than once")
    key = t.key[row]
    near = slot - (key[:, 0] & (len(c.index) - PROBE - 1)).astype(np.int64)
    right = (t.length[row] == B) & (c.tags[slot] == key[:, 1]) & (near >= 0) & (near < PROBE)
    wrong = np.ones(len(c.index), bool)
    wrong[slot] = right
    found.unless(wrong, "`index` has at {} a row that is not whole, or under another key")
    opened = (c.openings >= 0) & (c.openings < N)
    stored = t.length[np.where(opened, c.openings, 0)] > 0
    found.unless(~opened | stored, "`openings` has at {} a row that is not stored")


def _check_pool(c: Any, g: int, found: _Problems) -> None:
    lay, t, pool = c.layout, c.table, c.pools[g]
    N, M, P = lay.segments, lay.leases, lay.groups[g].pages
    spec, name = lay.groups[g], lay.groups[g].name
    found.unless(not np.any(pool.data[:, 0]), "the null page is not zero", name)
    found.unless(bool((pool.stamp[0] == N).all()), "the null page carries a stamp", name)
    found.unless(0 <= pool.n_free < P, f"`n_free` is {pool.n_free}, of {P - 1}", name)
    stack = pool.free[: max(int(pool.n_free), 0)]
    found.unless((stack > 0) & (stack < P), "`free` is out of range at {}", name)
    times = np.bincount(stack[(stack > 0) & (stack < P)], minlength=P)
    found.unless(times <= 1, "page {} is free more than once", name)
    found.unless(((times > 0) == (pool.owner == N)) | (np.arange(P) == 0),
                 "page {} is free with an owner, or taken without one", name)  # fmt: skip
    found.unless(pool.owner[:1] == N, "the null page has an owner", name)
    leased = np.clip(pool.owner - N - 1, 0, M - 1)
    known = (pool.owner >= 0) & (pool.owner <= N + M)
    found.unless(known, "the owner of page {} is out of range", name)
    found.unless(~known | (pool.owner <= N) | (c.serials[leased, 0] > 0),
                 "page {} belongs to a lease slot that is free", name)  # fmt: skip
    live, pinned = pool.owner[1:] < N, pool.owner[1:] > N
    pinned |= live & (t.pins[np.clip(pool.owner[1:], 0, N - 1)] > 0)
    total = int(pool.n_free) + int((live & ~pinned).sum()) + int(pinned.sum())
    found.unless(total == P - 1, f"free + live + pinned is {total}, not {P - 1}", name)

    pages = t.pages[g]
    found.unless((pages >= 0) & (pages < P), "row and column {} name a page out of range", name)
    pages = np.where((pages >= 0) & (pages < P), pages, 0)
    held = (t.length > 0) | (t.pins > 0)
    found.unless(held[:, None] | (pages == 0), "row and column {} name a page, but the row is free",
                 name)  # fmt: skip
    times = np.bincount(pages.reshape(-1), minlength=P)
    times[0] = 0  # which stands for no page
    found.unless(times <= 1, "page {} is in the table more than once", name)
    row = np.broadcast_to(np.arange(N)[:, None], pages.shape)
    found.unless((pages == 0) | (pool.owner[pages] == row),
                 "row and column {} name a page of another owner", name)  # fmt: skip
    found.unless((pool.owner >= N) | (times > 0),
                 "page {} belongs to a row that does not name it", name)  # fmt: skip

    lo, hi = (t.held[:, g, i, None] - t.start[:, None] for i in (0, 1))
    first = np.arange(pages.shape[1])[None] * spec.rows_per_page * spec.rule.unit
    used = (first < hi) & (first + spec.rows_per_page * spec.rule.unit > lo)
    if spec.rule.kind is Kind.STATE:
        used = hi > 0
    used = used & (lo < hi) & ((t.length > 0) & (t.life[:, spec.form] == Life.READY))[:, None]
    found.unless(~used | (pages > 0), "row and column {} are READY without a page", name)
    stamp = pool.stamp[pages]
    right = (stamp[..., 0] == row) & (stamp[..., 1] == t.written[:, g, None])
    found.unless(~used | (pages == 0) | right, "row and column {} are READY, but the page carries "
                 "another stamp", name)  # fmt: skip


def _check_leases(c: Any, leases: Sequence[Any], found: _Problems) -> None:
    lay, t = c.layout, c.table
    N, M = lay.segments, lay.leases
    pins, slots = np.zeros(N, int), np.zeros(M, int)
    private = [np.full(g.pages, N, int) for g in lay.groups]
    for x in leases:
        for q, slot in enumerate(x.slot):
            if not (
                0 <= slot < M and x.serial[q, 0] and (c.serials[slot] == x.serial[q])[:2].all()
            ):
                continue
            slots[slot] += 1
            np.add.at(pins, x.rows[q][x.rows[q] < N], 1)
            for g, pages in enumerate(x.pages):
                mine = np.repeat(x.private[q, g], lay.segment_pages(lay.groups[g]))
                private[g][pages[q][mine & (pages[q] > 0)]] = N + 1 + slot
    found.unless(slots == (c.serials[:, 0] > 0), "lease slot {} is not held by exactly one lease")
    found.unless(t.pins == pins, "row {} has another number of pins than leases that hold it")
    for g, spec in enumerate(lay.groups):
        owner = c.pools[g].owner
        found.unless(np.where(owner > N, owner, N) == private[g],
                     "page {} is not private to the lease that holds it", spec.name)  # fmt: skip
