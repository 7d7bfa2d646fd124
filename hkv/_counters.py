"""What a manager counts, as plain numbers, the table of them, and whether hits are possible."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from hkv._admit import Admission
from hkv._availability import Availability, Reason, Status
from hkv._cache import Caps, cap_names, cap_unit
from hkv._layout import DEVICE_FORMS, FORMS, Form, Layout
from hkv._route import Plan
from hkv._rules import Kind


@dataclasses.dataclass
class Counters:
    """Plain numbers since the manager was made."""

    queries: int = 0  # by `query` alone
    admitted: int = 0
    read_only: int = 0  # of those, leases for reading
    rerouted: int = 0  # admissions begun again, because what was to be read had changed
    cold: int = 0  # admitted without the reuse that was planned, for lack of room beside it
    refused: int = 0
    timeouts: int = 0
    cancelled: int = 0  # while waiting
    preempted: int = 0
    released: int = 0
    published: int = 0  # calls
    steps: int = 0
    failed: int = 0  # programs that raised and changed nothing
    lost: int = 0  # times the pools were lost
    tokens_reused: int = 0
    tokens_replayed: int = 0
    tokens_prefilled: int = 0
    bytes_stored: int = 0  # in the store
    segments_fetched: int = 0  # from there
    rejected: dict[str, int] = dataclasses.field(default_factory=dict)  # records, by `Problem`
    hits: dict[str, int] = dataclasses.field(default_factory=dict)  # segments per form
    refusals: dict[str, int] = dataclasses.field(default_factory=dict)  # forms per `Reason`
    evictions: dict[str, int] = dataclasses.field(default_factory=dict)  # pages per form
    waits: dict[str, int] = dataclasses.field(default_factory=dict)  # tries per `Blocker`

    def admit(self, n: "Numbers", *, cold: bool, reading: bool) -> None:
        """Counts a request that was admitted."""
        self.admitted += 1
        self.read_only += reading
        self.cold += cold
        self.tokens_reused += n.resume
        self.tokens_replayed += n.replayed
        self.tokens_prefilled += 0 if reading else n.length - n.resume
        if n.resume:
            count(self.hits, [f.name for f in Form], n.hits)
        count(self.refusals, [r.name for r in Reason][1:], n.refusals[1:])

    def copy(self) -> "Counters":
        """A copy that no longer changes."""
        return copy.deepcopy(self)


@dataclasses.dataclass(frozen=True)
class Overview:
    """How a manager stands; prints as a table."""

    version: int
    era: int  # how often the pools were made anew
    running: int
    waiting: int
    in_flight: int  # steps not known to be finished
    groups: dict[str, dict[str, int]]  # pages per group: free, live, pinned, capacity; bytes
    forms: dict[str, dict[str, int]]  # pages per form: used, cap
    counters: Counters

    def __str__(self) -> str:
        lines = [
            f"version {self.version}, era {self.era}: {self.running} running, "
            f"{self.waiting} waiting, {self.in_flight} steps in flight",
            "",
            *_table(["group", "free", "live", "pinned", "capacity", "page bytes"],
                    ([name, *row.values()] for name, row in self.groups.items())),
            "",
            *_table(["form", "pages", "cap", "hits", "evictions"], (
                [name, *row.values(), self.counters.hits.get(name, 0),
                 self.counters.evictions.get(name, 0)] for name, row in self.forms.items())),
            "",
        ]  # fmt: skip
        for f in dataclasses.fields(self.counters):
            value = getattr(self.counters, f.name)
            if not isinstance(value, dict):
                lines.append(f"{f.name:18}{value:>14,}")
        for title, counts in (("not reused", self.counters.refusals),
                              ("waits", self.counters.waits),
                              ("records", self.counters.rejected)):  # fmt: skip
            for name, n in sorted(counts.items(), key=lambda x: -x[1]):
                lines.append(f"{title + ', ' + name:32}{n:,}")
        return "\n".join(lines)

    __repr__ = __str__


def _table(head: list[str], rows) -> Iterator[str]:
    body = [[c if isinstance(c, str) else f"{c:,}" for c in row] for row in rows]
    wide = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    for row in [head, *body]:
        cells = [c.rjust(w) for c, w in zip(row[1:], wide[1:], strict=True)]
        yield "  ".join([row[0].ljust(wide[0]), *cells])


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What one try to admit came to, on the host."""

    verdict: int
    blocker: int
    length: int
    resume: int
    replayed: int  # tokens that a recovery runs
    evicted: np.ndarray  # i32[G], pages
    hits: np.ndarray  # i32[F], segments that are reused
    refusals: np.ndarray  # i32[reasons], forms of segments that are not

    @classmethod
    def of(cls, layout: Layout, a: np.ndarray) -> "Numbers":
        """Unpacks what `numbers` packed."""
        G = len(layout.groups)
        evicted, hits, refusals = np.split(a[5:], [G, G + FORMS])
        verdict, blocker, length, resume, replayed = map(int, a[:5])
        return cls(verdict, blocker, length, resume, replayed, evicted, hits, refusals)


@jax.jit
def numbers(found: Availability, plan: Plan, answer: Admission, free: tuple) -> jax.Array:
    """`i32[...]`: all that the host looks at after a try, in one array.

    Args:
        found: of one request, as the others.
        plan: likewise.
        answer: likewise.
        free: `i32[]` per group, the free pages after the try.
    """

    def span(x):
        return jnp.maximum(x[0, 1] - x[0, 0], 0)

    fill = jnp.where(span(plan.fill) > 0, plan.fill[0, 1] - plan.fill_start[0], 0)
    took = jnp.where(answer.verdict[0] == 0, answer.need[0], 0)
    status, reason = found.status[0], found.reason[0]
    refused = jnp.where(status >= Status.RECOVER, reason, jnp.uint8(0)).reshape(-1)
    counts = jnp.zeros(len(Reason), jnp.int32).at[refused.astype(jnp.int32)].add(1)
    first = (
        answer.verdict[0].astype(jnp.int32), answer.blocker[0].astype(jnp.int32),
        found.length[0], plan.resume[0], fill + span(plan.replay),
    )  # fmt: skip
    return jnp.concatenate([
        jnp.stack(first),
        jnp.stack(free) + took - answer.free[0],
        jnp.sum(status == Status.REUSE, axis=0, dtype=jnp.int32),
        counts,
    ])  # fmt: skip


def count(counts: dict[str, int], names, values) -> None:
    """Adds values above 0 to plain counts by name."""
    for name, n in zip(names, values, strict=True):
        if n > 0:
            counts[name] = counts.get(name, 0) + int(n)


def occupancy_tables(layout: Layout, pages: Mapping, caps: Caps) -> tuple[dict, dict]:
    """Pages per group and per form as plain numbers, from what `occupancy` counted."""
    groups, forms, names = {}, {}, cap_names(layout)
    for i, g in enumerate(layout.groups):
        groups[g.name] = {k: int(pages[k][i]) for k in ("free", "live", "pinned", "capacity")}
        groups[g.name]["page_bytes"] = g.page_bytes
    for f in DEVICE_FORMS:
        mine = layout.form_groups(f)
        if mine:
            used = sum(int(pages["live"][i]) + int(pages["pinned"][i]) for i in mine)
            cap = int(caps.limit[0, names.index((f.name, "pages"))])
            forms[f.name] = {"used": used, "cap": cap}
    return groups, forms


def impossible(layout: Layout, caps: Caps) -> str | None:
    """Why no long prefix can ever be reused under these caps, or None."""
    B, longest = layout.segment_tokens, layout.buckets[-1]
    # To go on behind a prefix takes the windows that it is resumed with, and one more segment.
    keep, one = np.zeros((2, len(layout.groups)), np.int64)
    for i, g in enumerate(layout.groups):
        if g.rule.kind in (Kind.WINDOW, Kind.CHUNK):
            reach = min(g.rule.size - (g.rule.kind is Kind.WINDOW), longest - 1)
            keep[i], one[i] = -(-reach // B) * layout.segment_pages(g), layout.segment_pages(g)
    for k, (name, unit) in enumerate(cap_names(layout)):
        rolling, limit = caps.weight[k] @ keep, int(caps.limit[0, k])
        if rolling and rolling + caps.weight[k] @ one > limit:
            size = cap_unit(layout) if unit == "bytes" else 1
            mine = [g for i, g in enumerate(layout.groups) if keep[i] and caps.weight[k, i]]
            return (
                f"the cap of {name} is {limit * size} {unit}, but to resume behind "
                f"{' and '.join(f'{g.name} {g.rule}' for g in mine)} takes {rolling * size}, and "
                f"{caps.weight[k] @ one * size} for new tokens: a prefix of that length can never "
                "be reused; raise the cap"
            )
    return None
