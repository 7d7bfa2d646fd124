"""What every state of the search, and every step between two, must fulfil; without the library.

Each invariant takes many states at once, as NumPy arrays by path, and says where it is broken.
"""

import numpy as np
from exhaustive_states import (
    ADMITTED,
    ENTRIES,
    LAYOUT,
    PROMPTS,
    RUNNING,
    WINDOW,
    B,
    N,
    R,
    S,
    T,
    take_at,
    windowed,
)

from hkv import Form, Life
from hkv._lifecycle import DISK_TRANSITIONS, TRANSITIONS

FORMS = tuple(g.form for g in LAYOUT.groups)


def _times(x, size):
    """`int[n, size]`: how often each number occurs in `x[n, k]`; others are not counted."""
    return np.sum(x[:, :, None] == np.arange(size), axis=1)


def _all(x):
    return x.reshape(len(x), -1).all(1)


def _held(c):
    """`bool[n, R]`: leases that are held, by the words of their slots."""
    phase, serials = c[".phase"], c[".cache.serials"]
    same = np.all(take_at(serials, c[".lease.slot"]) == c[".lease.serial"], -1)
    return (phase >= ADMITTED) & same & (c[".lease.serial"][..., 0] > 0)


def pages_are_conserved(c):
    """Each page but the null page is free once, or named once by its one owner."""
    good, held = True, _held(c)
    taken = (c[".cache.table.length"] > 0) | (c[".cache.table.pins"] > 0)
    for g, spec in enumerate(LAYOUT.groups):
        P, pool = spec.pages, f".cache.pools[{g}]"
        count = c[f"{pool}.n_free"]
        live = np.arange(P)[None] < count[:, None]
        free = _times(np.where(live, c[f"{pool}.free"], -1), P)
        pages = np.where(taken[..., None], c[f".cache.table.pages[{g}]"], 0)
        rows = [_times(pages[:, i], P) for i in range(N)]
        for r in range(R):
            mine = np.repeat(c[".lease.private"][:, r, g], LAYOUT.segment_pages(spec), axis=1)
            mine &= held[:, r, None]
            rows.append(_times(np.where(mine, c[f".lease.pages[{g}]"][:, r], -1), P))
        owner = c[f"{pool}.owner"]
        names = [owner == i for i in range(N)]
        slot = N + 1 + np.where(held, c[".lease.slot"], N)
        names += [owner == slot[:, r, None] for r in range(R)]
        for mine, named in zip(rows, names, strict=True):
            good &= _all((mine == named)[:, 1:])
        good &= _all((free + sum(rows))[:, 1:] == 1) & (free[:, 0] == 0) & (count >= 0)
        good &= _all((owner == N) == (free > 0) | (np.arange(P) == 0)[None])
    return ~good


def the_null_page_is_zero(c):
    """It holds zeros, carries no stamp and belongs to nobody."""
    good = True
    for g in range(len(LAYOUT.groups)):
        pool = f".cache.pools[{g}]"
        good &= _all(c[f"{pool}.data"][:, :, 0] == 0) & _all(c[f"{pool}.stamp"][:, 0] == N)
        good &= c[f"{pool}.owner"][:, 0] == N
    return ~good


def rows_are_conserved(c):
    """Each row is free once and empty, or stored, or held by a lease."""
    live = np.arange(N)[None] < c[".cache.n_free_rows"][:, None]
    free = _times(np.where(live, c[".cache.free_rows"], -1), N)
    length, pins = c[".cache.table.length"], c[".cache.table.pins"]
    empty = (length == 0) & (pins == 0)
    empty &= (c[".cache.table.life"] == Life.EMPTY).all(2)
    inside = (length >= 0) & (length <= B)
    return ~_all((free <= 1) & ((free == 1) == empty) & inside)


def pins_are_the_leases(c):
    """A row is pinned once by each lease that is held, a slot taken by one; otherwise none is."""
    held, slots = _held(c), c[".cache.serials"][..., 0] > 0
    rows = np.where(held[..., None], c[".lease.rows"], N).reshape(len(held), -1)
    taken = _times(np.where(held, c[".lease.slot"], -1), LAYOUT.leases)
    lost = (c[".phase"] >= ADMITTED) & ~held
    return ~(_all(c[".cache.table.pins"] == _times(rows, N)) & _all(taken == slots) & ~lost.any(1))


def what_is_listed_can_be_found(c):
    """Both indexes hold stored rows, a prefix is listed once, and its parent is alive."""
    index, openings = c[".cache.index"], c[".cache.openings"].reshape(len(c.words), -1)
    length, key = c[".cache.table.length"], c[".cache.table.key"]
    times = _times(index, N)
    twins = np.all(key[:, :, None] == key[:, None], -1) & (times > 0)[:, :, None]
    twins &= (times > 0)[:, None] & ~np.eye(N, dtype=bool)
    shown = (times > 0) | (_times(openings, N) > 0)
    parent = c[".cache.table.parent"]
    alive = take_at(c[".cache.table.born"], parent) == c[".cache.table.parent_born"]
    alive &= take_at(length, parent) > 0
    good = _all(times <= 1) & _all((times == 0) | (length == B)) & ~twins.any((1, 2))
    good &= _all(~shown | (length > 0)) & _all(~shown | (parent == N) | alive)
    tags = take_at(key, index)[..., 1] == c[".cache.tags"]
    return ~(good & _all((index == N) | tags))


def children_are_counted(c):
    """`children` is the number of stored rows that name the row as their parent."""
    stored, parent = c[".cache.table.length"] > 0, c[".cache.table.parent"]
    alive = take_at(c[".cache.table.born"], parent) == c[".cache.table.parent_born"]
    count = _times(np.where(stored & alive, parent, N), N)
    return ~_all(~stored | (c[".cache.table.children"] == count))


def ready_rows_are_what_their_tokens_say(c):
    """What a stored segment holds READY has its pages, stamps and the payload of a cold run."""
    t = {k: c[f".cache.table.{k}"] for k in (
        "length start parent parent_born born held written life digest form".split())}  # fmt: skip
    tokens = c[".cache.tokens"]
    n = len(tokens)
    alive = (t["parent"] < N) & (take_at(t["born"], t["parent"]) == t["parent_born"])
    first = t["start"] == 0
    before = np.where(alive[..., None], take_at(tokens, t["parent"]), 0)
    at = t["start"][..., None] + np.arange(-2, B)
    word = np.where(at >= 0, 1 + np.concatenate([before[..., 2:], tokens], 2) + 5 * at, 0)
    mixed = windowed(word[..., 2:], word[..., 1:-1], word[..., :-2])
    right = {"win": word[..., 2:], "keys": mixed[..., 1::2]}
    good = _all(t["form"] == sum(
        (t["life"][..., f] == Life.READY) * (1 << f) for f in range(4)))  # fmt: skip
    for g, spec in enumerate(LAYOUT.groups):
        u, pool = spec.rule.unit, f".cache.pools[{g}]"
        ready = (t["length"] > 0) & (t["life"][..., spec.form] == Life.READY)
        lo, hi = ((t["held"][:, :, g, i] - t["start"])[..., None] // u for i in (0, 1))
        row = np.arange(B // u)
        held = ready[..., None] & (row >= lo) & (row < hi)
        page = np.repeat(c[f".cache.table.pages[{g}]"], spec.rows_per_page, axis=2)
        flat = page.reshape(n, -1)
        stamp = take_at(c[f"{pool}.stamp"], flat).reshape(*page.shape, 2)
        own = (stamp[..., 0] == np.arange(N)[:, None]) & (page > 0)
        own &= stamp[..., 1] == t["written"][:, :, g, None]
        data = c[f"{pool}.data"][:, 0, :, :, 0]
        value = np.take_along_axis(
            data.reshape(n, -1), flat * spec.rows_per_page + np.tile(row, N) % spec.rows_per_page, 1
        ).reshape(page.shape)
        known = (first | alive)[..., None] | (spec.name == "win")
        good &= _all(~held | (own & ((value == right[spec.name]) | ~known)))
        good &= _all(~held.any(2) | t["digest"][:, :, g].any(2))
        if spec.rule.prefix_closed:
            whole = (lo[..., 0] == 0) & (hi[..., 0] == t["length"] // u)
            good &= _all(~ready | whole)
    return ~good


STATE = (
    pages_are_conserved, the_null_page_is_zero, rows_are_conserved, pins_are_the_leases,
    what_is_listed_can_be_found, children_are_counted, ready_rows_are_what_their_tokens_say,
)  # fmt: skip


# What queries and readers see: what `look` returned goes along.


def _needs(p):
    """Rows `[lo, hi)` of both groups to resume at `p`."""
    return {"win": (np.maximum(p - 2, 0), p), "keys": (p * 0, p // 2)}


RIGHT = {"win": WINDOW, "keys": ENTRIES}


def readers_get_what_was_verified(c, seen):
    """A lease that may be read has all it needs, and every valid row is a cold run's."""
    leased, length = c[".phase"] >= ADMITTED, c[".lease.length"]
    bad = seen["ok"] & ~leased
    for name, (lo, hi) in _needs(length).items():
        want, valid = RIGHT[name][c[".who"]], seen[f"{name} valid"]
        at = np.arange(want.shape[2])
        must = (at >= lo[..., None]) & (at < hi[..., None])
        wrong = np.where(valid, (seen[name] != want) | (at >= hi[..., None]), must)
        bad |= seen["ok"] & wrong.any(2)
    return bad.any(1)


def leases_last(c, seen):
    """What a lease holds stays readable until it is released, unless it was invalidated."""
    phase, spoilt = c[".phase"], c[".spoilt"]
    lost = (phase >= ADMITTED) & ~spoilt & ~seen["held"]
    return (lost | ((phase == RUNNING) & ~spoilt & ~seen["ok"])).any(1)


def the_invalidated_is_not_read(c, seen):
    """No lease on an invalidated segment is read any more."""
    return (c[".spoilt"] & (c[".phase"] >= ADMITTED) & (seen["ok"] | seen["held"])).any(1)


def usable_is_right(c, seen):
    """Every usable boundary has what it requires, READY and equal to a cold run's rows."""
    p, rows = seen["positions"], seen["rows"]
    life = take_at(c[".cache.table.life"], rows)
    bad = seen["usable"] & (p > T - 1)
    for g, spec in enumerate(LAYOUT.groups):
        lo, hi = _needs(p)[spec.name]
        per = B // spec.rule.unit
        page = np.repeat(take_at(c[f".cache.table.pages[{g}]"], rows), spec.rows_per_page, axis=3)
        place = page.reshape(len(p), len(PROMPTS), -1) * spec.rows_per_page
        place += np.arange(S * per) % spec.rows_per_page
        data = c[f".cache.pools[{g}].data"][:, 0, :, :, 0].reshape(len(p), -1)
        value = np.take_along_axis(data, place.reshape(len(p), -1), 1).reshape(place.shape)
        fine = (value == RIGHT[spec.name]) & (place >= spec.rows_per_page)
        fine &= np.repeat(life[..., spec.form] == Life.READY, per, axis=2)
        at = np.arange(S * per)
        must = (at >= lo[..., None]) & (at < hi[..., None])
        bad |= seen["usable"] & (must & ~fine[:, :, None]).any(3)
    return bad.any((1, 2))


SEEN = (
    readers_get_what_was_verified, leases_last, the_invalidated_is_not_read, usable_is_right,
)  # fmt: skip


# One step.


def versions_never_go_down(old, new):
    """A version rises where a lifecycle state changes, and never falls."""
    a, b = (c[".cache.table.version"].astype(np.int64) for c in (old, new))
    moved = (old[".cache.table.life"] != new[".cache.table.life"]).any(2)
    return ~_all((b >= a) & (~moved | (b > a)))


STEP = (versions_never_go_down,)
PROMISED = {
    "admit": "alone_a_request_does_not_wait", "recover": "what_was_planned_can_be_recovered",
    "step": "outputs_are_a_cold_runs", "release": "released_is_released",
    "fork": "no_branch_of_the_invalidated", "publish": "a_changed_lease_ends_the_one_before",
    "trim": "a_changed_lease_ends_the_one_before",
}  # fmt: skip


# One transition by hand, of any form of any row to any state.

_TABLE = np.array([
    [[b in (DISK_TRANSITIONS if f is Form.DISK else TRANSITIONS)[a] for b in Life] for a in Life]
    for f in Form
])  # fmt: skip


def transitions_are_the_listed(old, new, number, moved):
    """What is listed moves, unless pages under a lease would go; all else changes no bit."""
    at, to = np.divmod(number, len(Life))
    row, form = np.divmod(at, len(Form))
    every = np.arange(len(number))
    life, changed = old[".cache.table.life"], new[".cache.table.life"]
    pins, length = (old[f".cache.table.{k}"][every, row] for k in ("pins", "length"))
    state, kept = life[every, row, form], np.isin(form, [*FORMS, Form.DISK])
    goes = np.isin(state, [Life.WRITING, Life.READY, Life.OFFLOADING, Life.STALE])
    goes &= np.isin(to, [Life.EMPTY, Life.ON_DISK]) & (form != Form.DISK)
    may = kept & ((pins > 0) | (length > 0)) & _TABLE[form, state, to] & ~((pins > 0) & goes)
    want = life.copy()
    want[every, row, form] = to
    rose = new[".cache.table.version"][every, row] > old[".cache.table.version"][every, row]
    done = (changed == want).all((1, 2)) & rose
    return (moved != may) | np.where(moved, ~done, (old.words != new.words).any(1))


INVARIANTS = [
    *(f.__name__ for f in (*STATE, *SEEN, *STEP, transitions_are_the_listed)),
    *sorted({*PROMISED.values()}),
]  # fmt: skip
