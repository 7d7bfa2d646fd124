"""A plain Python model of the cache: prefixes are token tuples, what is held is sets of positions.

It knows nothing of pages by number, hashes or arrays. What the library may choose freely (which
row, which page, whom to evict) is told to it; whether the choice was allowed, it checks.
"""

import dataclasses
import itertools

from hkv import Form, Kind


@dataclasses.dataclass
class Segment:
    """One published segment."""

    uid: int
    row: int
    prefix: tuple  # all tokens through its end
    owner: tuple  # (salt, ...): whose it is
    epoch: int
    version: int  # of the indexer
    length: int
    parent: int | None  # uid
    held: dict  # group name -> set of positions
    ready: set  # forms
    listed: bool = True


@dataclasses.dataclass
class Request:
    """One request of a lease."""

    prompt: tuple  # as many tokens as may ever be run
    owner: tuple
    epoch: int
    version: int
    rows: list  # segment rows held, None past the end
    own: set  # columns it writes itself
    length: int
    total: int
    kept: dict  # rolling group -> first position whose row it has
    valid: bool = True


def needed(rule, p):
    """Positions whose rows must be held to resume at `p`; a state is `{p}`."""
    m = rule.size
    match rule.kind:
        case Kind.HISTORY | Kind.INDEXER:
            return set(range(p - p % m))
        case Kind.WINDOW:
            return set(range(max(0, p - m + 1), p))
        case Kind.CHUNK:
            return set(range(p - p % m, p))
        case Kind.TAIL:
            return set(range(max(0, p - p % m - (m if rule.overlap else 0)), p))
        case Kind.STATE:
            return {p} if p else set()


class ModelCache:
    """Stored segments and what follows from them."""

    def __init__(self, layout):
        self.B = layout.segment_tokens
        self.groups = layout.groups
        self.segs = {}  # uid -> Segment
        self.uids = itertools.count()

    def at(self, row):
        """The segment stored in a row, or None."""
        return next((s for s in self.segs.values() if s.row == row), None)

    def children(self, uid):
        return [s for s in self.segs.values() if s.parent == uid]

    def good(self, seg, spec, epoch, version):
        """Whether a group of a segment can be read at all."""
        fits = spec.form is not Form.INDEXER or seg.version == version
        return spec.form in seg.ready and seg.epoch == epoch and fits

    def under(self, prefix, owner, epoch):
        """Listed whole segments that end a prefix, those of this epoch before others."""
        found = [
            s for s in self.segs.values()
            if s.listed and s.prefix == prefix and s.owner == owner and s.length == self.B
        ]  # fmt: skip
        return sorted(found, key=lambda s: s.epoch != epoch)

    def step(self, parent, prefix, owner, epoch):
        """The one of them that a query is shown, if it is a child of `parent`."""
        found = self.under(prefix, owner, epoch)
        return found[0] if found and found[0].parent == parent else None

    def chain(self, prompt, owner, epoch):
        """Whole stored segments along a prompt."""
        out, parent = [], None
        while True:
            prefix = tuple(prompt[: (len(out) + 1) * self.B])
            if len(prefix) < (len(out) + 1) * self.B:
                return out
            seg = self.step(parent, prefix, owner, epoch)
            if seg is None:
                return out
            out.append(seg)
            parent = seg.uid

    def branches(self, parent, prompt, base, owner):
        """Segments after `parent` with how many tokens after `base` they share, if any."""
        out = []
        for s in self.segs.values():
            if s.listed and s.parent == parent and s.owner == owner:
                mine = s.prefix[base:]
                if len(s.prefix) - s.length != base:
                    continue
                n = 0
                while n < min(len(mine), len(prompt) - base) and mine[n] == prompt[base + n]:
                    n += 1
                if n:
                    out.append((s, n))
        return out

    def enough(self, segs, p, epoch, version):
        """Per group: whether these segments, in order, let a run resume at `p`."""
        out = []
        for spec in self.groups:
            want = needed(spec.rule, p)
            have = set()
            for s in segs:
                if self.good(s, spec, epoch, version):
                    have |= s.held[spec.name]
            out.append(want <= have)
        return out

    def usable(self, prompt, owner, epoch, version):
        """All positions up to N - 1 at which a run can resume, and those at segment boundaries."""
        chain = self.chain(prompt, owner, epoch)
        whole = [s for s in chain if len(s.prefix) <= len(prompt) - 1]
        every, aligned = set(), set()
        for k in range(len(whole) + 1):
            p = k * self.B
            if all(self.enough(whole[:k], p, epoch, version)):
                every.add(p)
                aligned.add(p)
            parent = whole[k - 1].uid if k else None
            for s, n in self.branches(parent, prompt, p, owner):
                for q in range(p + 1, p + min(n, self.B - 1) + 1):
                    if q < len(prompt) and all(self.enough([*whole[:k], s], q, epoch, version)):
                        every.add(q)
        return every, aligned

    def publish(self, request, settled, partial):
        """Which columns become listed: (must, may), and what was there already."""
        B, prompt = self.B, request.prompt
        n = [min(max(settled - i * B, 0), B) for i in range(len(request.rows))]
        must, may = set(), set()
        parent, sure = None, True
        for i, row in enumerate(request.rows):
            if row is None or n[i] == 0:
                break
            stored = self.at(row)
            if stored is not None:
                if not stored.listed:
                    break  # hidden by another: nothing below it could be found
                parent = stored.uid
                continue
            if n[i] < B and (not partial or i not in request.own):
                break
            prefix = tuple(prompt[: i * B + n[i]])
            there = self.step(parent, prefix, request.owner, request.epoch) if n[i] == B else None
            if there is not None and self.history(there, request):
                parent = there.uid
                continue
            similar = n[i] < B and any(
                share >= n[i] and self.history(s, request)
                for s, share in self.branches(parent, prefix, i * B, request.owner)
            )
            (may if similar or not sure else must).add(i)
            parent = ("new", i)
        return must, may

    def history(self, seg, request):
        """Whether all history of a segment can be read by a request."""
        end = len(seg.prefix)
        return all(
            self.good(seg, g, request.epoch, request.version)
            and set(range(end - seg.length, end - end % g.rule.unit)) <= seg.held[g.name]
            for g in self.groups if g.rule.prefix_closed
        )  # fmt: skip
