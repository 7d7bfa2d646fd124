"""Every interleaving of two requests on a cache of three segments, breadth first.

Actions run on hundreds of states at once; states that differ only in the names of pages and in
clock values count once. See `exhaustive_states` for what is done and `exhaustive_invariants` for
what must hold.

    python tests/exhaustive.py [SECONDS]
"""

# ruff: noqa: E402, the path must be set first where the package is not installed
import dataclasses
import functools
import pathlib
import sys
import time

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])]

import conftest  # noqa: F401  strict promotion and the store of compiled programs
import jax
import numpy as np
from exhaustive_invariants import PROMISED, SEEN, STATE, STEP
from exhaustive_states import (
    ACTIONS,
    ADMITTED,
    ASKED,
    FAILED,
    IDLE,
    LAYOUT,
    PLANNED,
    PROGRAMS,
    B,
    Columns,
    N,
    enabled,
    first,
    program,
    take_at,
)

from hkv import Form, Life

# States that differ only in names and clocks are one.


def _ranks(x, equal_only):
    """Values `[n, k]` by the first place of an equal one, or by how many are smaller."""
    if equal_only:
        return np.argmax(x[:, :, None] == x[:, None, :], axis=2)
    return np.sum(x[:, None, :] < x[:, :, None], axis=2)


def canonical(c):
    """`u32[n, k]`: what tells states apart."""
    n = len(c.words)
    t = {k: c[f".cache.table.{k}"] for k in (
        "version life form parent parent_born born start length used pins children held digest "
        "provenance worth key written").split()}  # fmt: skip
    stored, phase = t["length"] > 0, c[".phase"]
    taken = stored | (t["pins"] > 0)
    planned, leased = (phase == PLANNED) | (phase == ADMITTED), phase >= ADMITTED
    out = []

    def add(x, mask=None):
        x = np.asarray(x)
        if mask is not None:
            x = np.where(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), x, 0)
        x = np.ascontiguousarray(x.reshape(n, -1))
        out.append(x.view(np.uint32) if x.dtype.itemsize == 4 else x.astype(np.uint32))

    add(phase)
    add(c[".who"], phase > IDLE)
    add(c[".spoilt"], leased)
    for name in ("life", "form", "pins"):
        add(t[name])
    for name in ("parent", "start", "length", "held", "digest", "key"):
        add(t[name], stored)
    add(c[".cache.tokens"], stored)
    add(t["children"], taken)
    add(t["provenance"], taken)
    add(t["worth"], taken)
    add(take_at(t["born"], t["parent"]) == t["parent_born"], stored)
    used = t["used"][:, :, [Form.COMPRESSED, Form.WINDOW]]
    add(_ranks(np.where(stored[..., None], used, 0).reshape(n, -1), False))
    add(c[".cache.index"])
    add(c[".cache.tags"], c[".cache.index"] < N)
    add(c[".cache.openings"])
    free = np.arange(N)[None] < c[".cache.n_free_rows"][:, None]
    add(c[".cache.free_rows"], free)
    add(c[".cache.n_free_rows"])
    serials = c[".cache.serials"]
    add(serials[..., 0] > 0)
    add(c[".cache.reached"], serials[..., 0] > 0)
    for name in "rows resume fill fill_start fill_groups replay replay_groups have".split():
        add(c[f".plan.{name}"], planned)
    for name in "slot rows own private length total have write".split():
        add(c[f".lease.{name}"], leased)
    add(np.all(take_at(serials, c[".lease.slot"]) == c[".lease.serial"], -1), leased)
    for name, mask in (("plan", planned), ("lease", leased)):
        rows = c[f".{name}.rows"]
        fresh = take_at(t["version"], rows) >> 8 == c[f".{name}.version"] >> 8
        add(fresh, mask[..., None] & (rows < N))
    for g, spec in enumerate(LAYOUT.groups):
        pool, P = f".cache.pools[{g}]", spec.pages
        mine, theirs = c[f".cache.table.pages[{g}]"], c[f".lease.pages[{g}]"]
        theirs = np.where(leased[..., None], theirs, 0)
        refs = np.concatenate([mine.reshape(n, -1), theirs.reshape(n, -1)], 1)
        K = refs.shape[1]
        stack = np.where(np.arange(P)[None] < c[f"{pool}.n_free"][:, None], c[f"{pool}.free"], 0)
        seen = np.concatenate([np.zeros((n, 1), int), refs, stack], 1)
        hit = seen[:, None, :] == np.arange(P)[None, :, None]
        label = np.where(hit.any(2), np.argmax(hit, 2), K + P + 1 + np.arange(P))
        order = np.argsort(label, axis=1, kind="stable")
        name = np.argsort(order, axis=1)
        known = np.take_along_axis(label, order, 1) <= K
        add(take_at(name, refs))
        add(take_at(name, stack))
        add(c[f"{pool}.n_free"])
        add(take_at(c[f"{pool}.owner"], order))
        add(take_at(c[f"{pool}.data"][:, 0], order), known)
        stamp = take_at(c[f"{pool}.stamp"], order)
        add(stamp[..., 0], known)
        words_of = np.concatenate([
            np.where(taken, t["written"][..., g], 0), np.where(known, stamp[..., 1], 0),
            np.where(leased[..., None], c[".lease.written"][:, :, g], 0).reshape(n, -1),
        ], 1)  # fmt: skip
        add(_ranks(words_of, True))
    return np.concatenate(out, 1)


@functools.cache
def _mix(k):
    return np.random.default_rng(0).integers(2**64, size=(2, k), dtype=np.uint64) | np.uint64(1)


def keys_of(words):
    """`u64[n]`: one number per state, equal for equal ones."""
    x = canonical(Columns(words))
    a, b = _mix(x.shape[1])
    x = (x.astype(np.uint64) + a) * b
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xD6E8FEB86659FD93)
    x ^= x >> np.uint64(29)
    return np.sum(x * b, axis=1, dtype=np.uint64)


def met(c):
    """Marks of what a search should have met, to show that it gets anywhere: `bool[n]` each."""
    phase, who, length = c[".phase"], c[".who"], c[".lease.length"]
    leased = phase >= ADMITTED
    life, stored = c[".cache.table.life"], c[".cache.table.length"]
    both = leased.all(1)
    return {
        "two at once": both,
        "a branch": both & (who[:, 0] == who[:, 1]),
        "restored rows": (leased & c[".lease.private"].any((2, 3))).any(1),
        "to be recovered": (phase == ADMITTED).any(1),
        "a copied segment": (leased & (length % B > 0) & (length < ASKED[who])).any(1),
        "a shared segment": (c[".cache.table.pins"] > 1).any(1),
        "a reader told to go": (leased & c[".spoilt"]).any(1),
        "a refused step": (phase == FAILED).any(1),
        "a partial segment": ((stored > 0) & (stored < B)).any(1),
        "a stale form": (life == Life.STALE).any((1, 2)),
        "a lost form": ((stored > 0) & (life[..., Form.WINDOW] == Life.EMPTY)).any(1),
        "three stored": (stored > 0).all(1),
    }


# The search.


@dataclasses.dataclass
class Result:
    """What a search found."""

    states: int = 0
    steps: int = 0
    seconds: float = 0.0
    levels: list = dataclasses.field(default_factory=list)  # new states at each depth
    broken: dict = dataclasses.field(default_factory=dict)  # invariant -> shortest way there
    front: np.ndarray | None = None  # the states of the last level
    seen: dict = dataclasses.field(default_factory=dict)  # marks of `met` -> states

    @property
    def depth(self):
        return len(self.levels)

    def __str__(self):
        rate = self.states / max(self.seconds, 1e-9)
        lines = [f"depth {self.depth}: {self.states} states, {self.steps} steps in "
                 f"{self.seconds:.1f} s, {rate:.0f} states/s", f"met {self.seen}"]  # fmt: skip
        return "\n".join(lines + [f"BROKEN {k}: {v}" for k, v in self.broken.items()])


class Search:
    """Breadth first over all interleavings.

    Args:
        batch: states per dispatch.
        programs: compiled ones by name; those that are missing are made now.
    """

    def __init__(self, batch=512, programs=None):
        self.batch = batch
        self.programs = dict(programs or {})
        for name in PROGRAMS:
            if name not in self.programs:
                self.programs[name] = program(name, batch)

    def without(self, *names):
        """This search with some programs made anew, of the library as it is now."""
        kept = {k: v for k, v in self.programs.items() if k not in names}
        return Search(self.batch, kept)

    def do(self, name, words, *numbers):
        """A program over any number of states, in batches of one shape."""
        fn, n, b = self.programs[name], len(words), self.batch
        out = []
        for i in range(0, n, b):
            piece = [a[i : i + b] for a in (words, *numbers)]
            pad = b - len(piece[0])
            piece = [np.concatenate([x, np.repeat(x[:1], pad, 0)]) if pad else x for x in piece]
            done = jax.tree.map(np.asarray, fn(*piece))
            out.append(jax.tree.map(lambda x, m=b - pad: x[:m], done))
        return jax.tree.map(lambda *x: np.concatenate(x), *out)

    def play(self, text, words=None):
        """The state after actions written as `plan(0) admit(0) step(0)`."""
        words = first() if words is None else words
        for action in text.split():
            name, number = action[:-1].split("(")
            number = np.full(len(words), int(number), np.int32)
            assert enabled(name, Columns(words))[0, number[0]], action
            words, _ = self.do(name, words, number)
        return words

    def run(self, depth, *, seconds=float("inf"), start="", only=tuple(ACTIONS), stop=True):
        """All interleavings of actions to a depth.

        Args:
            depth: actions in a row.
            seconds: no new level is begun after these.
            start: actions that come before all others.
            only: names of the actions that are taken.
            stop: end with the first level on which an invariant is broken.
        """
        began = time.perf_counter()
        found = Result(front=self.play(start))
        visited = keys_of(found.front)
        codes = [(name, i) for name in only for i in range(ACTIONS[name][1])]
        code_of = {c: i for i, c in enumerate(codes)}
        ways = []  # per level, of each state the one before it and the action

        def report(name, bad, at, last=None):
            if bad.any() and name not in found.broken:
                k = int(np.argmax(bad))
                i, way = int(at[k]), [last(k)] if last else []
                for up, code in reversed(ways):
                    way.append("{}({})".format(*codes[code[i]]))
                    i = up[i]
                found.broken[name] = " ".join([*start.split(), *way[::-1]])

        while found.depth < depth and len(found.front) and time.perf_counter() - began < seconds:
            front, parts = found.front, []
            for name in only:
                at, number = np.nonzero(enabled(name, Columns(front)))
                found.steps += len(at)
                for i in range(0, len(at), 8 * self.batch):
                    up = at[i : i + 8 * self.batch]
                    num = number[i : i + 8 * self.batch].astype(np.int32)
                    old = front[up]
                    new, wrong = self.do(name, old, num)

                    def last(k, name=name, num=num):
                        return f"{name}({num[k]})"

                    if name in PROMISED:
                        report(PROMISED[name], wrong, up, last)
                    for f in STEP:
                        report(f.__name__, f(Columns(old), Columns(new)), up, last)
                    keys, one = np.unique(keys_of(new), return_index=True)
                    spot = np.minimum(np.searchsorted(visited, keys), len(visited) - 1)
                    fresh = visited[spot] != keys
                    keys, one = keys[fresh], one[fresh]
                    code = np.array([code_of[name, k] for k in num[one].tolist()], int)
                    parts.append((keys, new[one], up[one], code))
            keys, words, up, code = (np.concatenate(x) for x in zip(*parts, strict=True))
            keys, one = np.unique(keys, return_index=True)
            found.front = words[one]
            ways.append((up[one], code[one]))
            visited = np.sort(np.concatenate([visited, keys]))
            found.states += len(one)
            found.levels.append(len(one))
            self.check(found.front, report)
            for mark, there in met(Columns(found.front)).items():
                found.seen[mark] = found.seen.get(mark, 0) + int(there.sum())
            found.seconds = time.perf_counter() - began
            if found.broken and stop:
                break
        return found

    def check(self, words, report):
        """Calls `report(invariant, broken, at)` for pieces of many states."""
        for i in range(0, len(words), 8 * self.batch):
            piece = words[i : i + 8 * self.batch]
            c, at = Columns(piece), np.arange(i, i + len(piece))
            for f in STATE:
                report(f.__name__, f(c), at)
            seen = self.do("look", piece)
            for f in SEEN:
                report(f.__name__, f(c, seen), at)


if __name__ == "__main__":
    print(Search().run(99, seconds=float([*sys.argv, "60"][1]), stop=False))
