"""Making room: whom to evict, and no more of them than asked.

Windows and tails go alone, those that keep no boundary alive first, then by recency; what is
cheaper to replay per byte goes first. History goes leaf first and takes the whole segment along.
What a lease holds never goes.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from hkv._arguments import check_array
from hkv._cache import Cache, check_cache
from hkv._caps import charged, usage, weighed
from hkv._evict import drop_forms, free_segments, idle
from hkv._layout import DEVICE_FORMS, Form, Layout
from hkv._lifecycle import Life
from hkv._rules import replay_start, required
from hkv._slots import put, take

VICTIMS = 512  # most that are chosen at a time
FEW = 8  # that many are dropped at once
_AGE = 1 << 29  # ages in clock ticks are cut off here, so that a class and an age fit an i32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Lack:
    """What is missing; zero or less where there is enough."""

    rows: jax.Array  # i32[], segment rows
    pages: jax.Array  # i32[G]
    caps: jax.Array  # i32[K], units over the caps


def make_room(cache: Cache, rows: jax.Array, pages: jax.Array, tenant: jax.Array) -> Cache:
    """Evicts until so much can be had, or nothing more can go.

    Args:
        cache: the cache.
        rows: `i32[]` segment rows that must be free.
        pages: `i32[G]` pages that must be free, and fit under the caps of their forms and groups.
        tenant: `u32[]` whose caps count beside everybody's; 0 for nobody's. Over those, only the
            tenant's own segments go.
    """
    lay = cache.layout
    more, whose = weighed(cache, pages), charged(cache, tenant)

    def lacks(c: Cache) -> list[_Lack]:
        free = jnp.stack([p.n_free for p in c.pools])
        over = usage(c) + more[None] - c.caps.limit
        over = jnp.where(whose[:, None] & (more > 0)[None], over, 0)
        out = [_Lack(rows=rows - c.n_free_rows, pages=pages - free, caps=over[0])]
        if lay.tenants:
            none = _Lack(
                rows=jnp.int32(0), pages=jnp.zeros_like(pages), caps=jnp.max(over[1:], axis=0)
            )
            out.append(none)
        return out

    def body(state):
        c, _ = state
        count = n = jnp.int32(0)
        for i in range(1 + (lay.tenants > 0)):
            theirs = (c.table.tenant == tenant) | (i == 0)
            for f in _cheapest_first(lay):
                c, n = _drop_some(c, f, _unless(n == VICTIMS, lacks(c)[i]), theirs)
                count += n
            c, n = _free_some(c, _unless(n == VICTIMS, lacks(c)[i]), theirs)
            count += n
        return c, count > 0

    def go_on(state):
        c, moved = state
        short = [jnp.any(x.pages > 0) | jnp.any(x.caps > 0) | (x.rows > 0) for x in lacks(c)]
        return moved & functools.reduce(jnp.logical_or, short)

    return jax.lax.while_loop(go_on, body, (cache, jnp.bool_(True)))[0]


def _unless(more: jax.Array, lack: _Lack) -> _Lack:
    """Nothing is lacking while more could be had more cheaply."""
    return jax.tree.map(lambda a: jnp.where(more, 0, a), lack)


@functools.lru_cache
def _cheapest_first(lay: Layout) -> tuple[Form, ...]:
    """The forms that can go alone, by tokens to replay per byte that is given back."""
    p = lay.buckets[-1] - 1  # where most rows are open
    cost = {}
    for f in DEVICE_FORMS:
        mine = lay.form_groups(f)
        if not mine or lay.closed[list(mine)].any():
            continue
        with jax.ensure_compile_time_eval():
            have = jnp.asarray([[0, p]] * len(lay.groups), jnp.int32)
            lost = [
                int(required(g.rule, jnp.int32(p))[0]) * g.rule.unit if i in mine else p
                for i, g in enumerate(lay.groups)
            ]
            start = replay_start(lay.layers, jnp.int32(p), jnp.asarray(lost, jnp.int32), have)
        size = sum(lay.segment_pages(lay.groups[i]) * lay.groups[i].page_bytes for i in mine)
        cost[f] = (p - int(start)) / size
    return tuple(sorted(cost, key=cost.__getitem__))


def _score(cache: Cache, can: jax.Array, rank: jax.Array, form: Form) -> jax.Array:
    """`i32[N]`: who goes first, by rank (0 to 3) and then age; -1 for those who cannot go."""
    age = jnp.minimum(cache.clock - cache.table.used[:, form], jnp.uint32(_AGE - 1))
    stale = jnp.any(cache.table.life[:, np.array(DEVICE_FORMS)] == Life.STALE, axis=-1)
    return jnp.where(can, jnp.where(stale, 3, rank) * _AGE + age.astype(jnp.int32), -1)


def _pages_of(cache: Cache, rows: jax.Array) -> jax.Array:
    """`i32[..., G]`: pages that segments `i32[...]` hold."""
    held = [jnp.sum(take(p, rows, 0) > 0, axis=-1, dtype=jnp.int32) for p in cache.table.pages]
    return jnp.stack(held, axis=-1)


def _drop_some(cache: Cache, form: Form, lack: _Lack, theirs: jax.Array):
    """Drops one form of as many segments as it takes, VICTIMS at most; how many."""
    lay, t = cache.layout, cache.table
    life = t.life[:, form]
    can = idle(cache) & theirs & ((life == Life.READY) | (life == Life.STALE))
    rank = 2 - jnp.minimum(t.worth, jnp.uint8(2)).astype(jnp.int32)
    mine = lay.forms == form
    caps = jnp.any((cache.caps.weight > 0) & mine[None], axis=1)
    lack = dataclasses.replace(
        lack, rows=jnp.int32(0), pages=jnp.where(mine, lack.pages, 0),
        caps=jnp.where(caps, lack.caps, 0),
    )  # fmt: skip
    rows, n = _choose(cache, _score(cache, can, rank, form), lack, mine, None)
    forms = jnp.arange(len(Form)) == form
    return _each(cache, rows, n, lambda c, r, mask: drop_forms(c, r, forms, mask)[0]), n


def _free_some(cache: Cache, lack: _Lack, theirs: jax.Array):
    """Frees whole segments, the least recently used leaf first, VICTIMS at most; how many."""
    N = cache.layout.segments
    scores = _score(cache, idle(cache) & theirs, jnp.zeros(N, jnp.int32), Form.COMPRESSED)
    leaf = jnp.where(cache.table.children == 0, scores, -1)
    every = np.ones(len(cache.pools), bool)
    rows, n = _choose(cache, leaf, lack, every, scores)
    return _each(cache, rows, n, free_segments), n


def _choose(cache: Cache, first: jax.Array, lack: _Lack, mine: np.ndarray, later):
    """The best segments, one after the other until nothing is lacking.

    Args:
        cache: the cache.
        first: `i32[N]` scores of those that can go now; -1 for others.
        lack: what is lacking.
        mine: `bool[G]` groups whose pages a choice gives back.
        later: `i32[N]` scores of those that can go once their last child has; None for none.

    Returns:
        `i32[VICTIMS]` rows and `i32[]` how many.
    """
    t, N = cache.table, cache.layout.segments
    # Best of a line, best of the lines: a choice looks at two times the root of N scores.
    W = math.isqrt(N - 1) + 1
    grid = jnp.pad(first, (0, W * W - N), constant_values=-1).reshape(W, W)

    def go_on(state):
        tops, n, freed = state[1], state[2], state[4]
        short = jnp.any(lack.pages > freed) | jnp.any(lack.caps > weighed(cache, freed))
        return (short | (lack.rows > n)) & (jnp.max(tops) >= 0) & (n < VICTIMS)

    def body(state):
        grid, tops, n, out, freed, children = state
        line = jnp.argmax(tops).astype(jnp.int32)
        column = jnp.argmax(grid[line]).astype(jnp.int32)
        row = line * W + column
        grid = grid.at[line, column].set(-1)
        tops = tops.at[line].set(jnp.max(grid[line]))
        out, freed = put(out, n, row), freed + jnp.where(mine, _pages_of(cache, row), 0)
        if later is not None:
            up = take(t.parent, row, N)
            linked = take(t.born, up, 0) == take(t.parent_born, row, 0)
            left = take(children, up, 0) - 1
            children = put(children, jnp.where(linked, up, N), left)
            score = jnp.where(linked & (left == 0), take(later, up, -1), -1)
            at = jnp.where(score >= 0, up, N)
            grid = put(grid.reshape(-1), jnp.where(at < N, at, W * W), score).reshape(W, W)
            tops = put(tops, jnp.where(at < N, at // W, W), jnp.maximum(tops[at // W], score))
        return grid, tops, n + 1, out, freed, children

    start = (
        grid, jnp.max(grid, axis=1), jnp.int32(0), jnp.full(VICTIMS, N, jnp.int32),
        jnp.zeros(len(cache.pools), jnp.int32), t.children,
    )  # fmt: skip
    _, _, n, out, *_ = jax.lax.while_loop(go_on, body, start)
    return out, n


def _each(cache: Cache, rows: jax.Array, n: jax.Array, fn) -> Cache:
    """`fn(cache, rows, mask)` on the first `n` rows, a few at a time: only those cost anything."""
    few = min(FEW, VICTIMS)

    def some(i, c):
        at = jnp.minimum(i * few + jnp.arange(few, dtype=jnp.int32), VICTIMS - 1)
        return fn(c, rows[at], (i * few + jnp.arange(few, dtype=jnp.int32)) < n)

    return jax.lax.fori_loop(0, (n + few - 1) // few, some, cache)


def evict(cache: Cache, pages: jax.Array) -> Cache:
    """Evicts until each group has that many free pages, or none can go.

    Donates `cache`.

    Args:
        cache: the cache.
        pages: `i32[G]` pages that should be free.
    """
    check_cache(cache)
    check_array("pages", pages, jnp.int32, len(cache.layout.groups))
    if isinstance(pages, np.ndarray) and (pages < 0).any():
        raise ValueError(f"`pages` holds {pages.tolist()}; give 0 or more per group")
    return _evict(cache, pages)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _evict(cache: Cache, pages: jax.Array) -> Cache:
    return make_room(cache, jnp.int32(0), pages, jnp.uint32(0))
