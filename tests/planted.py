"""A segment table written by hand, row by row, and the answers that follow from its rules.

Nothing here runs the library's query: rows are placed with numpy, and `Oracle` answers a prompt
with Python sets of row numbers, straight from what each rule requires. Only the proposing indexes
are filled by the library's own functions, since they prove nothing.
"""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import hkv
from hkv import Form, Kind, Life, Reason, Status
from hkv._cache import openings_of
from hkv._identity import block_keys
from hkv._publish import list_rows

ZERO = np.zeros(4, np.uint32)
FIRST_SERIAL = 7


def group(name, rule, layers=(0,), form=None, rows_per_page=0, **more):
    """A group of one-number rows; the form follows from the rule unless given."""
    usual = {
        Kind.HISTORY: Form.COMPRESSED, Kind.INDEXER: Form.INDEXER, Kind.WINDOW: Form.WINDOW,
        Kind.CHUNK: Form.WINDOW, Kind.TAIL: Form.TAIL, Kind.STATE: Form.TAIL,
    }  # fmt: skip
    return hkv.Group(
        name=name, form=usual[rule.kind] if form is None else form, rule=rule, layers=layers,
        row=(1,), rows_per_page=rows_per_page, **more,
    )  # fmt: skip


def layout(*groups, B=12, segments=24, S=4, **more):
    more = {"buckets": (S * B,), "leases": 4, **more}
    return hkv.Layout(groups=groups, segment_tokens=B, segments=segments, **more)


@functools.lru_cache
def empty(lay):
    return hkv.init(lay)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What one request needs, as plain values."""

    identity: tuple = (1, 2, 3, 4)
    start: int = 0
    media: tuple = ()  # of segments by number; text where there is none
    epoch: int = 5
    indexer_version: int = 6
    provenance: int = 0

    def media_of(self, s):
        return tuple(self.media[s]) if s < len(self.media) else (0, 0, 0, 0)


class Store:
    """The table of a cache as numpy arrays, to be written freely."""

    def __init__(self, lay):
        self.layout = lay
        cache = empty(lay)
        self.table = {
            f.name: np.array(getattr(cache.table, f.name))
            for f in dataclasses.fields(cache.table)
            if f.name != "pages"
        }
        self.table["pages"] = [np.array(p) for p in cache.table.pages]
        self.tokens = np.array(cache.tokens)
        self.stamps = [np.array(p.stamp) for p in cache.pools]
        self.next_page = [1] * len(lay.groups)
        self.codes = hkv.byte_codes(cache)
        self.prefix = {}  # per row (identity, start, media per block, tokens): of the whole prefix
        self.listed = []
        self.indexes = None

    def place(self, tokens, parent=None, asked=None, row=None, *, listed=True, padding=0):
        """Stores `tokens` (at most B) behind `parent` (a row, or None), every form complete."""
        lay, t = self.layout, self.table
        asked = Asked() if asked is None else asked
        B, N = lay.segment_tokens, lay.segments
        row = len(self.prefix) * 7 % N if row is None else row
        assert row not in self.prefix and 0 < len(tokens) <= B
        before = (
            self.prefix[parent] if parent is not None else (asked.identity, asked.start, (), ())
        )
        i = len(before[2])
        media = asked.media_of(i)
        self.prefix[row] = (*before[:2], (*before[2], media), (*before[3], *tokens))
        self.tokens[row] = padding
        self.tokens[row, : len(tokens)] = tokens
        start = asked.start + i * B
        t["key"][row], t["before"][row] = self._keys(row)
        t["version"][row] = t["born"][row] = 10 + row
        t["form"][row] = sum(1 << f for f in {g.form for g in lay.groups})
        for g in lay.groups:
            t["life"][row, g.form] = Life.READY
        t["parent"][row] = N if parent is None else parent
        t["parent_born"][row] = 0 if parent is None else t["born"][parent]
        t["start"][row], t["length"][row] = start, len(tokens)
        t["identity"][row], t["media"][row] = asked.identity, media
        t["epoch"][row], t["indexer_version"][row] = asked.epoch, asked.indexer_version
        t["abi"][row], t["codes"][row] = lay.abi, self.codes
        t["digest"][row] = 1 + row
        for g, spec in enumerate(lay.groups):
            n = lay.segment_pages(spec)
            pages = np.arange(self.next_page[g], self.next_page[g] + n)
            self.next_page[g] += n
            t["pages"][g][row] = pages
            t["written"][row, g] = 100 + row
            self.stamps[g][pages] = (row, 100 + row)
            whole = len(tokens) // spec.rule.unit * spec.rule.unit
            t["held"][row, g] = (start, start + whole)
        if listed:
            self.listed.append(row)
        self.indexes = None
        return row

    def chain(self, tokens, parent=None, asked=None, **more):
        """Places `tokens` as segments one behind the other; their rows."""
        B, rows = self.layout.segment_tokens, []
        for at in range(0, len(tokens), B):
            parent = self.place(tokens[at : at + B], parent, asked, **more)
            rows.append(parent)
        return rows

    def _keys(self, row):
        lay = self.layout
        S, B = lay.max_segments, lay.segment_tokens
        identity, start, media, tokens = self.prefix[row]
        blocks = np.zeros((S * B,), np.int32)
        blocks[: len(tokens)] = tokens
        words = np.zeros((S, 4), np.uint32)
        words[: len(media)] = media
        after, before = _block_keys(
            blocks.reshape(S, B), np.array(identity, np.uint32), np.int32(start), words
        )
        i = len(media) - 1
        return np.asarray(after)[i], np.asarray(before)[i]

    def _index(self):
        """Lists rows one after the other, by the library's own function."""
        lay = self.layout
        plain = empty(_plain(lay.segment_tokens, lay.segments, lay.max_segments))
        now = (plain.index, plain.tags, plain.openings)
        for row in self.listed:
            now = _enter(
                plain, now, self.table["key"][row], self.table["before"][row], self.tokens[row],
                np.int32(row), np.int32(self.table["length"][row]),
            )  # fmt: skip
        return tuple(np.asarray(x) for x in now)

    def proposes_all(self):
        """Whether no listed row was pushed out of the index of openings by others."""
        lay = self.layout
        openings = (self.indexes or self._index())[2]
        lengths = openings_of(lay)
        return all(
            (openings == row).sum() >= len({n for n in lengths if n <= self.table["length"][row]})
            for row in self.listed
        )

    def cache(self):
        """The whole as a cache."""
        base = empty(self.layout)
        self.indexes = self.indexes or self._index()
        table = {k: v for k, v in self.table.items() if k != "pages"}
        pages = tuple(self.table["pages"])
        index, tags, openings = self.indexes
        taken = sorted(self.prefix)
        free = [r for r in range(self.layout.segments) if r not in self.prefix]
        rows = np.array(free + taken, np.int32)
        arrays = (table, pages, self.tokens, self.stamps, index, tags, openings)
        arrays = jax.device_put(jax.tree.map(np.copy, arrays))  # the store may be changed later
        table, pages, tokens, stamps, index, tags, openings = arrays
        pools = []
        for g, pool in enumerate(base.pools):
            owner = np.full(pool.owner.shape, self.layout.segments, np.int32)
            for row in taken:
                mine = self.table["pages"][g][row]
                owner[mine[mine > 0]] = row
            idle = [p for p in range(1, len(owner)) if owner[p] == self.layout.segments]
            stack = np.zeros(owner.shape, np.int32)
            stack[: len(idle)] = idle
            pools.append(
                dataclasses.replace(
                    pool,
                    stamp=stamps[g],
                    owner=jnp.asarray(owner),
                    free=jnp.asarray(stack),
                    n_free=jnp.asarray(np.int32(len(idle))),
                )  # fmt: skip
            )
        return dataclasses.replace(
            base, table=dataclasses.replace(base.table, pages=pages, **table), tokens=tokens,
            index=index, tags=tags, openings=openings, pools=tuple(pools),
            free_rows=jnp.asarray(rows), n_free_rows=jnp.asarray(np.int32(len(free))),
        )  # fmt: skip

    def need(self, asked, bucket=None):
        """The `hkv.Need` of a batch."""
        lay = self.layout
        S = (bucket or lay.buckets[-1]) // lay.segment_tokens
        media = np.array([[a.media_of(s) for s in range(S)] for a in asked], np.uint32)
        return hkv.Need(
            identity=jnp.asarray(np.array([a.identity for a in asked], np.uint32)),
            start=jnp.asarray(np.array([a.start for a in asked], np.int32)),
            media=jnp.asarray(media),
            epoch=jnp.asarray(np.array([a.epoch for a in asked], np.uint32)),
            indexer_version=jnp.asarray(np.array([a.indexer_version for a in asked], np.uint32)),
            provenance=jnp.asarray(np.array([a.provenance for a in asked], np.uint8)),
            abi=jnp.asarray(np.repeat(lay.abi[None], len(asked), 0)),
            codes=jnp.asarray(np.repeat(self.codes[None], len(asked), 0)),
            tenant=jnp.zeros(len(asked), jnp.uint32),
        )  # fmt: skip


@functools.lru_cache
def _plain(B, segments, S):
    return layout(group("plain", hkv.history(1)), B=B, segments=segments, S=S)


_block_keys = jax.jit(lambda *args: block_keys(*args))


@jax.jit
def _enter(plain, now, key, before, tokens, row, n):
    index, tags, openings = now
    t = plain.table
    cache = dataclasses.replace(
        plain, index=index, tags=tags, openings=openings,
        tokens=plain.tokens.at[row].set(tokens),
        table=dataclasses.replace(
            t, key=t.key.at[row].set(key), before=t.before.at[row].set(before)
        ),
    )  # fmt: skip
    cache = list_rows(cache, row[None], jnp.ones(1, bool), n[None])
    return cache.index, cache.tags, cache.openings


def needed(rule, p):
    """Row numbers that a resume at `p` must find, from the table of rules."""
    n = rule.size
    match rule.kind:
        case Kind.HISTORY | Kind.INDEXER:
            return set(range(p // n))
        case Kind.WINDOW:
            return {j for j in range(p) if p - j < n}
        case Kind.CHUNK:
            return {j for j in range(p) if j // n == p // n}
        case Kind.TAIL:
            first = p - p % n - (n if rule.overlap else 0)
            return {j for j in range(p) if j >= first}
        case Kind.STATE:
            return {p} if p else set()


def seen(rule, x):
    """Positions before `x` whose rows the token at `x` attends to, of rolling attention."""
    if rule.kind is Kind.WINDOW:
        return {j for j in range(x) if x - j < rule.size}
    if rule.kind is Kind.CHUNK:
        return {j for j in range(x) if j // rule.size == x // rule.size}
    return set()


def replay_from(lay, end, lost, kept):
    """First position of a replay up to `end` that makes the rows `lost` exactly.

    `lost` gives for a group the first position to make anew, `kept` from where on pages hold the
    rows of a rolling group up to `end`. The set of positions at which each layer's input must be
    exact, from the top layer down.
    """
    exact = set()
    for layer in reversed(lay.layers):
        mine = set(exact)
        for g, rule in layer:
            mine |= set(range(lost.get(g, end), end))
            if rule.kind is Kind.STATE and (exact or g in lost and lost[g] < end):
                mine |= set(range(end))
            for x in exact:
                mine |= {j for j in seen(rule, x) if j < kept.get(g, end)}
        exact = mine
    return min(exact, default=end)


class Oracle:
    """The answer to one prompt, by sets."""

    def __init__(self, store, prompt, asked=None, pick=None):
        self.store, self.layout = store, store.layout
        self.prompt, self.asked = list(prompt), Asked() if asked is None else asked
        lay = self.layout
        self.B, self.S, self.N = lay.segment_tokens, lay.max_segments, lay.segments
        self.by_key = [self._by_key(s) for s in range(self.S)]
        self._follow()
        self.best = self._best_partial()
        self._finish(self.best[0] if pick is None and self.best else pick)

    # The chain.

    def _prefix(self, n, blocks):
        a = self.asked
        media = tuple(a.media_of(s) for s in range(blocks))
        return (tuple(a.identity), a.start, media, tuple(self.prompt[:n]))

    def _by_key(self, s):
        end = (s + 1) * self.B
        if end > len(self.prompt):
            return None
        want, found = self._prefix(end, s + 1), None
        for row in self.store.listed:
            if self.store.prefix[row] == want and self.store.table["length"][row] == self.B:
                found = row if found is None else found
        return found

    def _shared(self, row, s, most):
        block = self.prompt[s * self.B : (s + 1) * self.B]
        n = 0
        for a, b in zip(self.store.tokens[row], block, strict=False):
            if a != b or n == most:
                break
            n += 1
        return n

    def link_fault(self, row, s, parent, shared):
        """Why this is not the segment asked for, or None."""
        t, a = self.store.table, self.asked
        if tuple(t["identity"][row]) != tuple(a.identity):
            return Reason.IDENTITY
        if tuple(t["media"][row]) != a.media_of(s):
            return Reason.IDENTITY
        if t["start"][row] != a.start + s * self.B:
            return Reason.START
        if t["parent"][row] != (self.N if parent is None else parent):
            return Reason.PARENT
        if t["parent_born"][row] != (0 if parent is None else t["born"][parent]):
            return Reason.PARENT
        if shared == 0:
            return Reason.TOKENS
        return None

    def fault(self, row, s, parent, shared, g):
        """The first of the four levels' checks that fails for one group, or OK."""
        t, spec = self.store.table, self.layout.groups[g]
        link = self.link_fault(row, s, parent, shared)
        if link is not None:
            return link
        if t["life"][row, spec.form] != Life.READY:
            return Reason.LIFECYCLE
        start, length = int(t["start"][row]), int(t["length"][row])
        lo, hi = (int(x) - start for x in t["held"][row, g])
        if spec.rule.kind in (Kind.HISTORY, Kind.INDEXER):
            if lo != 0 or hi // spec.rule.size * spec.rule.size != hi:
                return Reason.ROWS
            if not hi <= length < hi + spec.rule.size:
                return Reason.ROWS
        elif not 0 <= lo <= hi <= length:
            return Reason.ROWS
        used = set(range(lo // spec.rule.unit, hi // spec.rule.unit))
        if spec.rule.kind is Kind.STATE:
            used = {0} if hi > 0 else set()
        pages = {r // spec.rows_per_page for r in used}
        ids = [int(t["pages"][g][row, i]) for i in sorted(pages)]
        if not all(ids):
            return Reason.PAGE_MISSING
        if any(tuple(self.store.stamps[g][i]) != (row, t["written"][row, g]) for i in ids):
            return Reason.STAMP
        if not t["digest"][row, g].any():
            return Reason.DIGEST
        if self.meaning_fault(row, g) is not Reason.OK:
            return self.meaning_fault(row, g)
        if not t["codes"][row, g].all():
            return Reason.SHARD
        if (t["codes"][row, g] != self.store.codes[g]).any():
            return Reason.BYTES
        return Reason.OK

    def meaning_fault(self, row, g):
        """The first check of what the bytes mean that fails, or OK."""
        t, a, spec = self.store.table, self.asked, self.layout.groups[g]
        if t["abi"][row, g] != self.layout.abi[g]:
            return Reason.ABI
        if t["epoch"][row] != a.epoch:
            return Reason.EPOCH
        if spec.form is Form.INDEXER and t["indexer_version"][row] != a.indexer_version:
            return Reason.INDEXER_VERSION
        if t["provenance"][row] > a.provenance:
            return Reason.PROVENANCE
        return Reason.OK

    def copy_of(self, row, g):
        """The positions that can be fetched of one group, absolute, as a range; None for none."""
        t, spec = self.store.table, self.layout.groups[g]
        if not self.layout.disk or t["life"][row, Form.DISK] != Life.ON_DISK:
            return None
        if t["life"][row, spec.form] not in (Life.EMPTY, Life.ON_DISK):
            return None
        if self.meaning_fault(row, g) is not Reason.OK or spec.rule.kind is Kind.STATE:
            return None
        start, length = int(t["start"][row]), int(t["length"][row])
        lo, hi = (int(x) for x in t["copied"][row, g])
        whole = length // spec.rule.unit * spec.rule.unit
        if self.closed(g) and (lo, hi) != (start, start + whole):
            return None
        return (lo, hi) if start <= lo < hi <= start + length else None

    def _follow(self):
        self.limit = max(len(self.prompt) - 1, 0)
        parent, n = None, 0
        for s, row in enumerate(self.by_key):
            if row is None or (s + 1) * self.B > self.limit:
                break
            if self._shared(row, s, self.B) < self.B:
                break
            if self.link_fault(row, s, parent, self.B) is not None:
                break
            parent, n = row, n + 1
        self.whole, self.base = n, n * self.B

    def _best_partial(self):
        """The stored segments that a resume can best go on with, past the whole ones."""
        s = self.whole
        if s == self.S:
            return []
        parent = self.by_key[s - 1] if s else None
        scores = {}
        for row in self.store.listed:
            most = min(int(self.store.table["length"][row]), self.limit - self.base, self.B - 1)
            shared = self._shared(row, s, most)
            if shared and self.link_fault(row, s, parent, shared) is None:
                self._finish(row)
                fine = all(self.group_ok(g, self.base + shared) for g in range(self.G))
                scores[row] = (fine, shared)
        return [row for row, x in scores.items() if x == max(scores.values())]

    # What each group holds.

    @property
    def G(self):
        return len(self.layout.groups)

    def _finish(self, pick):
        self.pick, self.partial = pick, 0
        t, parent = self.store.table, None
        self.rows, self.reasons, self.held, self.copies = [], [], [], []
        for s in range(self.S):
            row = self.by_key[s]
            if s < self.whole:
                self._add(row, [self.fault(row, s, parent, self.B, g) for g in range(self.G)])
            elif s == self.whole and pick is not None:
                most = min(int(t["length"][pick]), self.limit - self.base, self.B - 1)
                self.partial = self._shared(pick, s, most)
                why = [self.fault(pick, s, parent, self.partial, g) for g in range(self.G)]
                self._add(pick, why)
            elif row is None:
                self._add(None, [Reason.NOT_FOUND] * self.G)
            else:
                other = Reason.PARENT if s > self.whole else Reason.NOT_FOUND
                shared = self._shared(row, s, self.B)
                why = [self.fault(row, s, parent, shared, g) for g in range(self.G)]
                self._add(None, [w or other for w in why])
            parent = row
        self.matched = self.base + self.partial
        self.positions = sorted(
            {s * self.B for s in range(self.whole + 1)}
            | set(range(self.base, self.base + self.partial + 1))
        )

    def _add(self, row, why):
        zero = [(0, 0)] * self.G
        held = zero if row is None else self.store.table["held"][row] - self.asked.start
        self.rows.append(row)
        self.reasons.append(why)
        self.held.append([tuple(int(x) for x in h) for h in held])
        copies = [None if row is None else self.copy_of(row, g) for g in range(self.G)]
        start = self.asked.start
        self.copies.append([c and (c[0] - start, c[1] - start) for c in copies])

    def group_rows(self, g, fetched=False):
        """Row numbers of one group that verified segments hold along the prompt.

        With `fetched` as it would be once all copies that there are had been fetched.
        """
        rule, out = self.layout.groups[g].rule, set()
        tokens = set()
        for s, row in enumerate(self.rows):
            other = self.copies[s][g] if fetched else None
            if row is None or (self.reasons[s][g] is not Reason.OK and other is None):
                continue
            lo, hi = other or self.held[s][g]
            if rule.kind is Kind.STATE:
                out |= {hi} if hi > s * self.B else set()
            tokens |= set(range(max(lo, s * self.B), min(hi, (s + 1) * self.B)))
        if rule.kind in (Kind.HISTORY, Kind.INDEXER):
            m = rule.size
            return {e for e in range(self.S * self.B // m)
                    if tokens >= set(range(e * m, e * m + m))}  # fmt: skip
        return out if rule.kind is Kind.STATE else tokens

    def group_ok(self, g, p):
        return needed(self.layout.groups[g].rule, p) <= self.group_rows(g)

    def sets(self, fetched=False):
        """Per group the set of its own boundaries."""
        out = []
        for g, spec in enumerate(self.layout.groups):
            rows = self.group_rows(g, fetched)
            out.append({p for p in self.positions if needed(spec.rule, p) <= rows})
        return out

    def run(self, g, p):
        """How many rows of a rolling group lie before `p` without a gap."""
        rows, n = self.group_rows(g), 0
        while p - n - 1 in rows:
            n += 1
        return n

    # The answer.

    def usable(self):
        return set.intersection(*self.sets())

    def closed(self, g):
        return self.layout.groups[g].rule.kind in (Kind.HISTORY, Kind.INDEXER)

    def replayable(self):
        return not any(g.rule.kind is Kind.STATE for g in self.layout.groups)

    def recoverable(self):
        sets = self.sets(fetched=True)
        bound = [x for g, x in enumerate(sets) if self.closed(g) or not self.replayable()]
        return set(self.positions).intersection(*bound)

    def group_status(self):
        """Per segment and group (status, reason) for a resume at `matched`."""
        sets, p = self.sets(fetched=True), self.matched
        history = all(p in sets[g] for g in range(self.G) if self.closed(g))
        out = []
        for s in range(self.S):
            begin, line = s * self.B, []
            for g, spec in enumerate(self.layout.groups):
                u = spec.rule.unit
                want = needed(spec.rule, p)
                if spec.rule.kind is Kind.STATE:
                    mine = {r for r in want if begin < r <= begin + self.B}
                    have = {self.held[s][g][1]}
                else:
                    mine = {r for r in want if begin <= r * u < begin + self.B}
                    lo, hi = self.held[s][g]
                    have = {r for r in mine if lo <= r * u and r * u + u <= hi}
                why = self.reasons[s][g]
                if begin >= p and begin < len(self.prompt):
                    status = Status.RECOMPUTE
                elif not mine:
                    status = Status.NOT_NEEDED
                elif why is Reason.OK and mine <= have:
                    status = Status.REUSE
                elif history and self.replayable() and not self.closed(g):
                    status = Status.RECOVER
                else:
                    status = Status.RECOMPUTE
                if status < Status.RECOVER:
                    why = Reason.OK
                elif why is Reason.OK:
                    why = Reason.RANGE
                line.append((status, why))
            out.append(line)
        return out

    def fetched(self, groups):
        """As it would be once the copies of these groups had been fetched."""
        o = copy.copy(self)
        o.reasons, o.held = ([list(line) for line in x] for x in (self.reasons, self.held))
        for s in range(self.S):
            for g in groups:
                if self.copies[s][g]:
                    o.reasons[s][g], o.held[s][g] = Reason.OK, self.copies[s][g]
        return o

    def to_fetch(self, s):
        """Groups that lack rows of a segment for a resume at `matched`, all of which a copy has."""
        out = []
        for g, (status, _) in enumerate(self.group_status()[s]):
            u, held = self.layout.groups[g].rule.unit, self.copies[s][g]
            want = needed(self.layout.groups[g].rule, self.matched)
            mine = {r * u for r in want if s * self.B <= r * u < (s + 1) * self.B}
            if status >= Status.RECOVER and held and mine:
                if held[0] <= min(mine) and max(mine) + u <= held[1]:
                    out.append(g)
        return out

    def replay_tokens(self, p):
        """Tokens of the replay that restores every rolling group at `p`."""
        sets = self.sets()
        lost, kept = {}, {}
        for g, spec in enumerate(self.layout.groups):
            if self.closed(g):
                continue
            kept[g] = p - self.run(g, p)
            if p not in sets[g]:
                lost[g] = min(needed(spec.rule, p))
        return p - replay_from(self.layout, p, lost, kept)

    def form_status(self):
        """Per segment and form (status, reason, tokens, place)."""
        t, groups = self.store.table, self.group_status()
        replay, out = self.replay_tokens(self.matched), []
        for s in range(self.S):
            line = {}
            for f in Form:
                mine = [groups[s][g] for g in self.layout.form_groups(f)]
                worst = max((x[0] for x in mine), default=Status.NOT_NEEDED)
                why = next((x[1] for x in mine if x[0] == worst), Reason.OK)
                left = min(max(len(self.prompt) - s * self.B, 0), self.B)
                tokens = {Status.RECOMPUTE: left, Status.RECOVER: replay}.get(worst, 0)
                place = hkv.Place.DEVICE if worst is Status.REUSE else hkv.Place.NONE
                line[f] = (worst, why, tokens, place)
            row = self.rows[s]
            life = Life.EMPTY if row is None else Life(t["life"][row, Form.DISK])
            lacking = any(x[0] >= Status.RECOVER for x in line.values())
            line[Form.DISK] = (Status.NOT_NEEDED, Reason.OK, 0, hkv.Place.NONE)
            if not self.layout.disk:
                pass
            elif life is Life.ON_DISK:
                status = Status.RECOVER if self.to_fetch(s) else Status.NOT_NEEDED
                place = hkv.Place(t["place"][row]) if any(self.copies[s]) else hkv.Place.NONE
                line[Form.DISK] = (status, Reason.OK, 0, place)
            elif life is Life.STALE and lacking:
                line[Form.DISK] = (Status.RECOMPUTE, Reason.LIFECYCLE, 0, hkv.Place.NONE)
            out.append(line)
        return out
