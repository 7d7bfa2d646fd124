"""Ways to lose or spoil what a cache holds, each with what a query must then say.

A `Story` is kept by hand beside the cache: which segments a request should meet, which rows they
hold and the first check that should fail. Verdicts and plans follow from it by loops over tokens
and by the recovery formulas, without a look at the library's own answers.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import hkv
from hkv import Form, Kind, Reason, Status

OTHER = 0x5EED  # a code, version or digest that nothing has by chance
CHEAP = 0.125  # price of a replayed token where recovery shall win; exact in binary


@dataclasses.dataclass
class Story:
    """What one request should meet. S segments, G groups; positions from its start, in tokens."""

    p: int  # tokens it shares with the stored run
    rows: np.ndarray  # i32[S] stored segments, N for none
    reason: np.ndarray  # u8[S, G] the first check that should fail
    held: np.ndarray  # i32[S, G, 2] positions whose rows are there
    matched: int = 0
    past: dict = dataclasses.field(default_factory=dict)  # segment: reason, of those not reached
    B: int = 16

    def pick(self, where: str) -> list[int]:
        """Numbers of segments: first, middle, last or all of those that it shares."""
        n = -(-self.p // self.B)
        if n == 0:
            return []
        return {"first": [0], "middle": [n // 2], "last": [n - 1], "all": list(range(n))}[where]

    def break_at(self, s: int, why: Reason):
        """Segment `s` turns out to be another one: nothing from there on is reached."""
        whole = self.p // self.B
        self.past = {i: Reason.PARENT for i in range(s + 1, whole)}
        if s < whole:
            self.past[s] = why
        self.matched = s * self.B


@dataclasses.dataclass
class World:
    """A cache to be spoiled, the stories told about it, and the query's own changes."""

    cache: hkv.Cache
    stories: list[Story]
    lib: object
    need: dict = dataclasses.field(default_factory=dict)  # arguments of `hkv.need`
    prices: dict = dataclasses.field(default_factory=dict)  # arguments of `hkv.costs`

    @property
    def layout(self) -> hkv.Layout:
        return self.cache.layout

    def segments(self, where: str):
        """(story, segment number, row) for each segment meant."""
        return [(x, s, x.rows[s]) for x in self.stories for s in x.pick(where)]

    def padded(self, rows) -> jax.Array:
        """`i32[Q * S]`, so that one program serves every choice of rows."""
        out = np.full(len(self.stories) * len(self.stories[0].rows), self.layout.segments, np.int32)
        out[: len(rows)] = rows
        return jnp.asarray(out)

    def write(self, **columns):
        """Replaces columns of the table."""
        new = {k: jax.tree.map(jnp.asarray, v) for k, v in columns.items()}
        self.cache = dataclasses.replace(
            self.cache, table=dataclasses.replace(self.cache.table, **new)
        )

    def column(self, name: str) -> np.ndarray:
        """A column of the table as an array that may be changed."""
        return np.array(getattr(self.cache.table, name))

    def overwrite(self, g: int, page: int):
        """What another owner does to a page: its payload and its stamp."""
        pool = self.cache.pools[g]
        data, stamp = np.array(pool.data), np.array(pool.stamp)
        data[:, page], stamp[page] = 7, (self.layout.segments - 1, OTHER)
        pool = dataclasses.replace(pool, data=jnp.asarray(data), stamp=jnp.asarray(stamp))
        pools = (*self.cache.pools[:g], pool, *self.cache.pools[g + 1 :])
        self.cache = dataclasses.replace(self.cache, pools=pools)

    def groups(self, *names_or_forms) -> list[int]:
        return [g for g, x in enumerate(self.layout.groups)
                if x.name in names_or_forms or x.form in names_or_forms]  # fmt: skip


Spoil = Callable[[World], None]


def nothing(w: World):
    """The run is there as it was stored."""


def drop(*forms: Form, where: str = "all") -> Spoil:
    """The library itself drops forms, as an eviction would."""

    def spoil(w: World):
        hit = w.segments(where)
        which = jnp.asarray([f in forms for f in Form])
        w.cache, _ = w.lib.drop(w.cache, w.padded([row for *_, row in hit]), which)
        for x, s, _ in hit:
            for g in w.groups(*forms):
                x.reason[s, g], x.held[s, g] = Reason.LIFECYCLE, s * x.B

    return spoil


def _uses_page(w: World, x: Story, s: int, g: int, entry: int) -> bool:
    spec = w.layout.groups[g]
    lo, hi = (x.held[s, g] - s * x.B) // spec.rule.unit
    first = entry * spec.rows_per_page
    return lo < hi and first < hi and first + spec.rows_per_page > lo


def page_gone(*names: str, where: str = "all", entry: int = 0) -> Spoil:
    """A page of each of these groups is no longer in the table."""

    def spoil(w: World):
        for g in w.groups(*names):
            pages = [np.array(a) for a in w.cache.table.pages]
            for x, s, row in w.segments(where):
                pages[g][row, entry] = 0
                if _uses_page(w, x, s, g, entry):
                    x.reason[s, g] = Reason.PAGE_MISSING
            w.write(pages=tuple(pages))

    return spoil


def page_overwritten(*names: str, where: str = "all", entry: int = 0) -> Spoil:
    """Another owner wrote over a page of each of these groups."""

    def spoil(w: World):
        for g in w.groups(*names):
            for x, s, row in w.segments(where):
                if _uses_page(w, x, s, g, entry):
                    w.overwrite(g, int(w.cache.table.pages[g][row, entry]))
                    x.reason[s, g] = Reason.STAMP

    return spoil


def in_table(column: str, value, why: Reason, *names, where: str = "all") -> Spoil:
    """A column says something else about these groups, or, without names, about the segment."""

    def spoil(w: World):
        groups = w.groups(*names) if names else range(len(w.layout.groups))
        a = w.column(column)
        for x, s, row in w.segments(where):
            for g in groups:
                if a.ndim == 1:
                    a[row] = value
                else:
                    a[row, g] = value
                if not x.reason[s, g]:
                    x.reason[s, g] = why
        w.write(**{column: a})

    return spoil


def older_indexer(where: str) -> Spoil:
    """Some segments were written by another version of the indexer."""

    def spoil(w: World):
        a = w.column("indexer_version")
        for x, s, row in w.segments(where):
            a[row] = OTHER
            x.reason[s, w.groups(Form.INDEXER)] = Reason.INDEXER_VERSION
        w.write(indexer_version=a)

    return spoil


def fewer_rows(name: str, where: str) -> Spoil:
    """The first half of a segment's rolling rows is no longer held."""

    def spoil(w: World):
        (g,), a = w.groups(name), w.column("held")
        for x, s, row in w.segments(where):
            lo, hi = x.held[s, g]
            x.held[s, g, 0] = a[row, g, 0] = lo + (hi - lo + 1) // 2
        w.write(held=a)

    return spoil


def wrong_count(name: str, where: str) -> Spoil:
    """A history that no longer adds up to the tokens it stands for."""

    def spoil(w: World):
        (g,), a = w.groups(name), w.column("held")
        for x, s, row in w.segments(where):
            a[row, g, 1] += 1
            x.reason[s, g] = Reason.ROWS
        w.write(held=a)

    return spoil


def need_abi(name: str) -> Spoil:
    """This build's kernels of one group read another ABI."""

    def spoil(w: World):
        (g,), abi = w.groups(name), w.layout.abi.copy()
        abi[g] ^= OTHER
        w.need["abi"] = abi
        for x in w.stories:
            x.reason[:, g] = Reason.ABI

    return spoil


def need_codes(name: str) -> Spoil:
    """One group's pool lies in memory in another way: the same bytes as integers."""

    def spoil(w: World):
        (g,) = w.groups(name)
        pool = w.cache.pools[g]
        pool = dataclasses.replace(pool, data=pool.data.view(jnp.uint32))
        pools = (*w.cache.pools[:g], pool, *w.cache.pools[g + 1 :])
        as_integers = hkv.byte_codes(dataclasses.replace(w.cache, pools=pools))[g]
        w.need["codes"] = hkv.byte_codes(w.cache)
        assert (as_integers != w.need["codes"][g]).all()
        w.need["codes"][g] = as_integers
        for x in w.stories:
            x.reason[:, g] = Reason.BYTES

    return spoil


def need_version(field: str, why: Reason, *forms: Form) -> Spoil:
    """The query asks for other weights, or for another indexer."""

    def spoil(w: World):
        w.need[field] = 1
        for x in w.stories:
            x.reason[:, w.groups(*forms)] = why

    return spoil


def need_identity(**changes) -> Spoil:
    """The query comes from another tenant, adapter or position."""

    def spoil(w: World):
        w.need |= {k: [v(i) for i in range(len(w.stories))] for k, v in changes.items()}
        for x in w.stories:
            x.matched = 0

    return spoil


def another_segment(column: str, why: Reason, where: str) -> Spoil:
    """A stored segment is not the one that its key proposes."""

    def spoil(w: World):
        a = w.column(column)
        for x, s, row in w.segments(where):
            a[row] += 1
            x.break_at(s, why)
        w.write(**{column: a})

    return spoil


def other_parent(where: str) -> Spoil:
    """The row of a parent was used again since: its child belongs to the segment before."""

    def spoil(w: World):
        a = w.column("born")
        for x, s, row in w.segments(where):
            a[row] += 1
            if s + 1 < -(-x.p // x.B):
                x.break_at(s + 1, Reason.PARENT)
        w.write(born=a)

    return spoil


def other_tokens(where: str, at: int = 3) -> Spoil:
    """The stored tokens differ from a segment's token `at` on, which is shared so far."""

    def spoil(w: World):
        tokens = np.array(w.cache.tokens)
        for x, s, row in w.segments(where):
            tokens[row, at] += 1
            if s * x.B + at < x.p:
                x.break_at(s, Reason.OK)
                x.matched = s * x.B + at
        w.cache = dataclasses.replace(w.cache, tokens=jnp.asarray(tokens))

    return spoil


def stale(where: str) -> Spoil:
    """Segments were invalidated."""

    def spoil(w: World):
        mask = np.zeros(w.layout.segments, bool)
        for x, s, row in w.segments(where):
            mask[row] = True
            x.reason[s] = Reason.LIFECYCLE
        w.cache, _ = w.lib.invalidate(w.cache, jnp.asarray(mask))

    return spoil


def updated_indexer(where: str, *, same: bool = False, asked: int = 0) -> Spoil:
    """The indexer of whole segments was updated to version 1, with other rows or the `same`."""

    def spoil(w: World):
        hit = [(x, s, row) for x, s, row in w.segments(where) if s < x.p // x.B]
        rows = w.padded([row for *_, row in hit])
        at = np.minimum(np.asarray(rows), w.layout.segments - 1)
        entries = {}
        for g in w.groups(Form.INDEXER):
            spec = w.layout.groups[g]
            data = np.asarray(w.cache.pools[g].data)[:, np.asarray(w.cache.table.pages[g])[at]]
            data = data.reshape(len(spec.layers), len(at), -1, *spec.row)
            entries[spec.name] = jnp.asarray(data if same else data[:, ::-1] * 3 + 1)
        w.cache, done = w.lib.update_indexer(w.cache, rows, entries, jnp.uint32(1))
        assert np.asarray(done)[: len(hit)].all()
        w.need["indexer_version"] = asked
        new = {(id(x), s) for x, s, _ in hit}
        for x in w.stories:
            for s in range(len(x.rows)):
                if ((id(x), s) in new) != bool(asked):
                    x.reason[s, w.groups(Form.INDEXER)] = Reason.INDEXER_VERSION

    return spoil


def rolling_and_hole(*names: str) -> Spoil:
    """Windows and tails are gone, and of these groups the pages of the middle segment."""

    def spoil(w: World):
        drop(Form.WINDOW, Form.TAIL)(w)
        page_gone(*names, where="middle")(w)

    return spoil


def cheaply(spoil: Spoil) -> Spoil:
    """The same, where a replayed token costs little, so that holes are filled."""

    def dear(w: World):
        spoil(w)
        w.prices["replay"] = CHEAP

    return dear


# The expected verdict and plan, from a story.


def required_rows(rule: hkv.Rule, p: int) -> tuple[int, int]:
    """Tokens `[lo, hi)` whose rows must be there to resume at `p`, written down once more."""
    m = rule.size
    match rule.kind:
        case Kind.HISTORY | Kind.INDEXER:
            return 0, p // m * m
        case Kind.WINDOW:
            return max(0, p - m + 1), p
        case Kind.TAIL:
            return max(0, p - p % m - (m if rule.overlap else 0)), p
    raise NotImplementedError(rule)


class Expected:
    """What a query and a route must say about one story, of a prompt of `length` tokens."""

    def __init__(self, layout: hkv.Layout, x: Story, length: int):
        self.layout, self.x, self.length = layout, x, length
        self.B, self.target = layout.segment_tokens, x.matched
        self.whole = self.target // self.B
        # Of each group, the tokens whose rows are there and good.
        self.there = []
        for g, _ in enumerate(layout.groups):
            here = np.zeros(self.target, bool)
            for t in range(self.target):
                lo, hi = x.held[t // self.B, g]
                here[t] = x.reason[t // self.B, g] == 0 and lo <= t < hi
            self.there.append(here)
        inside = range(self.whole * self.B + 1, self.target + 1)
        self.positions = sorted({*range(0, self.target + 1, self.B), *inside})
        self.closed = [g.rule.prefix_closed for g in layout.groups]

    def ok(self, g: int, p: int) -> bool:
        """Whether group `g` has what a resume at `p` requires."""
        lo, hi = required_rows(self.layout.groups[g].rule, p)
        return bool(self.there[g][lo:hi].all())

    def usable(self, p: int) -> bool:
        return all(self.ok(g, p) for g in range(len(self.closed)))

    def recoverable(self, p: int) -> bool:
        return all(self.ok(g, p) for g, closed in enumerate(self.closed) if closed)

    def forms(self) -> tuple[np.ndarray, np.ndarray]:
        """`u8[S, F]` status and reason."""
        S = len(self.x.rows)
        status, reason = np.zeros((S, len(Form)), np.uint8), np.zeros((S, len(Form)), np.uint8)
        can = self.recoverable(self.target)
        for s in range(S):
            for g, spec in enumerate(self.layout.groups):
                begin, f = s * self.B, spec.form
                lo, hi = required_rows(spec.rule, self.target)
                lo, hi = max(lo, begin), min(hi, begin + self.B)
                why = self.x.reason[s, g]
                if begin >= self.target and begin < self.length:
                    now = Status.RECOMPUTE, self.x.past.get(s, Reason.NOT_FOUND)
                    now = now if now[1] else (Status.RECOMPUTE, Reason.RANGE)
                elif lo >= hi:
                    now = Status.NOT_NEEDED, Reason.OK
                elif self.there[g][lo:hi].all():
                    now = Status.REUSE, Reason.OK
                else:
                    worse = Status.RECOVER if can and not self.closed[g] else Status.RECOMPUTE
                    now = worse, why or Reason.RANGE
                if now[0] > status[s, f]:
                    status[s, f], reason[s, f] = now
        return status, reason

    def replay(self, p: int) -> int:
        """Tokens to replay for a resume at `p`: from the top layer down, rows that it must make."""
        made = 0
        for groups in reversed(self.layout.layers):
            own = reach = 0
            for g, rule in groups:
                if self.closed[g]:
                    continue
                if not self.ok(g, p):
                    own = max(own, p - required_rows(rule, p)[0])
                if rule.kind is Kind.WINDOW and made:
                    back = min(p, made + rule.size - 1)
                    reach = made if self.there[g][p - back : p].all() else back
            made = min(p, max(own, reach, made))
        return made

    def hole(self, p: int):
        """History before boundary `p` to make again: range, groups, and where the run starts."""
        B, bad = self.B, {}
        for g, closed in enumerate(self.closed):
            for s in range(min(p // B, self.whole)):
                if closed and not self.there[g][s * B : (s + 1) * B].all():
                    bad.setdefault(g, []).append(s)
        if not bad:
            return None
        lo = min(map(min, bad.values())) * B
        hi = (max(map(max, bad.values())) + 1) * B
        lead = 0
        for g in bad:
            overlap = any(
                rule.overlap and rule.size == self.layout.groups[g].rule.size
                for layer in self.layout.groups[g].layers
                for _, rule in self.layout.layers[layer]
            )
            for layer in self.layout.groups[g].layers:
                before = sum(
                    max((r.size - 1 for _, r in self.layout.layers[j] if r.kind is Kind.WINDOW))
                    for j in range(layer)
                )
                lead = max(lead, before + overlap * self.layout.groups[g].rule.size)
        return lo, hi, sorted(bad), max(0, lo - lead)

    def plan(self, replay: float = 1.0):
        """The cheapest: (resume, hole or None, tokens to replay, groups that lost rolling rows)."""
        best = None
        for p in self.positions:
            beyond = self.whole * self.B
            if p > beyond and any(
                closed and not self.there[g][beyond : p // u * u].all()
                for g, closed in enumerate(self.closed)
                for u in (self.layout.groups[g].rule.unit,)
            ):
                continue
            hole, again = self.hole(p), self.replay(p)
            cost = (self.length - p) + replay * again
            cost += replay * (hole[1] - hole[3]) if hole else 0
            if p == 0:
                cost, hole, again = float(self.length), None, 0
            if best is None or cost <= best[0]:
                best = cost, p, hole, again
        _, p, hole, again = best
        gone = [g for g, c in enumerate(self.closed) if not c and not self.ok(g, p)]
        return p, hole, again, gone
