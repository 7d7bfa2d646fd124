"""Two requests on a cache of three segments: the states, and the actions that lead on.

A state is one cache with both requests, packed into one row of words; an action is one call of
the library, run on hundreds of states at once by `jax.vmap`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from payload import QUICK

import hkv
from hkv import Form, Life

LAYOUT = hkv.Layout(
    groups=(
        hkv.Group("keys", Form.COMPRESSED, hkv.history(2), (1,), (1,), rows_per_page=2),
        hkv.Group("win", Form.WINDOW, hkv.window(3), (0,), (1,), rows_per_page=2),
    ),
    segment_tokens=4, segments=3, buckets=(8,), leases=2, disk=True,
)  # fmt: skip
N, B, S, R, T, CHUNK = 3, 4, 2, 2, 8, 4
# The second prompt parts from the first inside of its second segment. The third has that segment's
# tokens below another first one. The last fits beside the first even where nothing is shared.
PROMPTS = np.array([
    [1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 2, 3, 3, 3], [1, 1, 1, 3, 2, 2, 2, 2],
    [1, 1, 1, 1, 2, 2, 2, 2],
], np.int32)  # fmt: skip
ASKED = np.array([7, 7, 7, 4], np.int32)  # tokens of the prompt; up to `TOTAL` they are decoded
TOTAL = np.array([8, 8, 8, 4], np.int32)
OF = (0, 1, 1, 1)  # whose prompt each is
IDLE, PLANNED, ADMITTED, RUNNING, FAILED = range(5)


# The model: a window layer below a layer that reads all of a history compressed two to one.


def windowed(word, before, before2):
    return 9 * word + 3 * before + before2


def cold(tokens):
    """Window rows `[8]`, history rows `[4]` and outputs `[8]` of a run without any cache."""
    p = np.arange(len(tokens))
    word = 1 + tokens + 5 * p
    padded = np.concatenate([[0, 0], word])
    mixed = windowed(padded[2:], padded[1:-1], padded[:-2])
    entries = mixed[1::2]
    weight = 2 * np.arange(len(entries)) + 3
    seen = np.array([np.sum((weight * entries)[: (q + 1) // 2]) for q in p])
    return word.astype(np.float32), entries.astype(np.float32), (mixed + seen).astype(np.float32)


WINDOW, ENTRIES, OUTPUT = (np.stack(x) for x in zip(*map(cold, PROMPTS), strict=True))


def model(params, tokens, view):
    """One chunk, reading through the view; returns it with what was made, and the outputs."""
    del params
    q, E = tokens.shape
    at = view.position[:, None] + jnp.arange(E, dtype=jnp.int32)[None]
    made = (1 + tokens + 5 * at).astype(jnp.float32)[..., None]
    back = at[:, :, None] - jnp.arange(3, dtype=jnp.int32)[None, None]
    rows, valid = view.read("win", 0, back.reshape(q, -1), made)
    rows = jnp.where(valid, rows[..., 0], 0).reshape(q, E, 3)
    mixed = windowed(rows[..., 0], rows[..., 1], rows[..., 2])
    view = view.write("win", 0, made)
    # Entry i closes with token 2 i + 1, which is in this chunk for `E // 2 + 1` entries at most.
    first = view.position // 2
    close = 2 * (first[:, None] + jnp.arange(E // 2 + 1, dtype=jnp.int32)[None]) + 1
    spot = jnp.clip(close - view.position[:, None], 0, E - 1)
    entries = jnp.take_along_axis(mixed, spot, axis=1)[..., None]
    index = jnp.broadcast_to(jnp.arange(T // 2, dtype=jnp.int32)[None], (q, T // 2))
    keys, there = view.read("keys", 1, index, entries)
    weight = jnp.where(there, (2 * index + 3).astype(jnp.float32), 0) * keys[..., 0]
    seen = (2 * index + 1)[:, None] <= at[..., None]
    out = mixed + jnp.sum(jnp.where(seen, weight[:, None], 0), -1)
    return view.write("keys", 1, entries), out


def replay(params, tokens, view):
    return model(params, tokens, view)[0]


# States.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """A cache and two requests."""

    cache: hkv.Cache
    plan: hkv.Plan  # of both, where PLANNED
    lease: hkv.Lease  # of both, from ADMITTED on
    phase: jax.Array  # i32[R]
    who: jax.Array  # i32[R], which prompt
    spoilt: jax.Array  # bool[R], a segment of the lease was invalidated


@functools.cache
def need(requests):
    codes = np.ones((len(LAYOUT.groups), 1), np.uint32)
    return jax.device_get(hkv.need(hkv.init(LAYOUT), requests=requests, codes=codes))


def _bare(state):
    """Without what is the same in all states."""
    return dataclasses.replace(
        state, plan=dataclasses.replace(state.plan, need=None),
        lease=dataclasses.replace(state.lease, need=None),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where each array of a state stands in a row of words."""

    tree: object
    paths: list
    shapes: list
    offsets: np.ndarray

    @property
    def words(self):
        return int(self.offsets[-1])


@functools.cache
def packing():
    def start(cache, need):
        tokens, none = jnp.zeros((R, T), jnp.int32), jnp.zeros(R, jnp.int32)
        plan = hkv.route(hkv.query(cache, tokens, none, need), hkv.costs())
        _, lease, _ = hkv.admit(cache, plan, none)
        return _bare(State(cache, plan, lease, none, none, jnp.zeros(R, bool)))

    for n in (1, R, len(PROMPTS)):
        need(n)  # made here, outside of any trace
    state = jax.eval_shape(start, hkv.abstract(LAYOUT), need(R))
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    shapes = [(x.shape, np.dtype(x.dtype)) for _, x in leaves]
    return Packing(
        tree, [jax.tree_util.keystr(path) for path, _ in leaves], shapes,
        np.cumsum([0, *(int(np.prod(shape)) for shape, _ in shapes)]),
    )  # fmt: skip


def pack(state):
    """A state as `u32[words]`."""
    out = []
    for x in jax.tree.leaves(_bare(state)):
        wide = x.dtype.itemsize == 4
        words = jax.lax.bitcast_convert_type(x, jnp.uint32) if wide else x.astype(jnp.uint32)
        out.append(words.reshape(-1))
    return jnp.concatenate(out)


def unpack(words):
    """The state again."""
    p, leaves = packing(), []
    for at, (shape, dtype) in zip(p.offsets, p.shapes, strict=False):
        x = jax.lax.slice_in_dim(words, int(at), int(at) + int(np.prod(shape))).reshape(shape)
        wide = dtype.itemsize == 4
        leaves.append(jax.lax.bitcast_convert_type(x, dtype) if wide else x.astype(dtype))
    state = jax.tree.unflatten(p.tree, leaves)
    both = jax.tree.map(jnp.asarray, need(R))
    return dataclasses.replace(
        state, plan=dataclasses.replace(state.plan, need=both),
        lease=dataclasses.replace(state.lease, need=both),
    )  # fmt: skip


@functools.cache
def first():
    """The empty cache with two idle requests, `u32[1, words]`."""

    p = packing()

    def empty(cache):
        leaves = [jnp.zeros(shape, dtype) for shape, dtype in p.shapes]
        return pack(dataclasses.replace(jax.tree.unflatten(p.tree, leaves), cache=cache))[None]

    return np.asarray(jax.jit(empty)(hkv.init(LAYOUT)))


class Columns:
    """Packed states `u32[n, words]` as NumPy arrays by path, such as `.cache.table.pins`."""

    def __init__(self, words):
        self.words = words
        self.read = set()  # paths

    def __getitem__(self, path):
        self.read.add(path)
        p = packing()
        i = p.paths.index(path)
        (shape, dtype), at = p.shapes[i], p.offsets[i]
        x = self.words[:, at : p.offsets[i + 1]].reshape(len(self.words), *shape)
        return x.view(dtype) if dtype.itemsize == 4 else x.astype(dtype)

    def state(self, i=0):
        """One of them as the library's own pytrees, of NumPy arrays."""
        one = Columns(self.words[i : i + 1])
        state = jax.tree.unflatten(packing().tree, [one[path][0] for path in packing().paths])
        return dataclasses.replace(state, lease=dataclasses.replace(state.lease, need=need(R)))


def take_at(a, index, fill=0):
    """`a[i, index[i]]` along the second axis; out of range gives `fill`."""
    n = a.shape[1]
    inside = (index >= 0) & (index < n)
    got = a[np.arange(len(a))[:, None], np.where(inside, index, 0).reshape(len(a), -1)]
    got = got.reshape(*index.shape, *a.shape[2:])
    return np.where(inside.reshape(*index.shape, *[1] * (a.ndim - 2)), got, fill)


def _pick(tree, r):
    return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, r, 1), tree)


def _place(tree, r, new):
    return jax.tree.map(
        lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b.astype(a.dtype), r, 0), tree, new
    )


# Actions: state and number in, state out and whether something promised was not kept.


def _phase(state, r, phase, **changes):
    phase = state.phase.at[r].set(jnp.asarray(phase, jnp.int32).reshape(()))
    return dataclasses.replace(state, phase=phase, **changes)


def _tokens(state, r):
    return jnp.asarray(PROMPTS)[state.who[r]][None]


def _most(lengths, state, r):
    return jnp.asarray(lengths)[state.who[r]][None]


def plan(state, prompt):
    r = jnp.asarray(OF, jnp.int32)[prompt]
    state = dataclasses.replace(state, who=state.who.at[r].set(prompt))
    length = jnp.asarray(ASKED)[prompt][None]
    new = hkv.route(hkv.query(state.cache, _tokens(state, r), length, need(1)), hkv.costs())
    return _phase(state, r, PLANNED, plan=_place(state.plan, r, new)), False


def admit(state, r):
    mine = _pick(state.plan, r)
    cache, lease, answer = hkv.admit(state.cache, mine, _most(TOTAL, state, r))
    got = answer.verdict[0] == hkv.Verdict.ADMIT
    later = (mine.replay[:, 0] < mine.replay[:, 1]) | (mine.fill[:, 0] < mine.fill[:, 1])
    # Alone, nothing is to be waited for but a new query.
    alone = state.phase[1 - r] < ADMITTED
    wrong = alone & (answer.verdict[0] == hkv.Verdict.WAIT)
    wrong &= answer.blocker[0] != hkv.Blocker.CHANGED
    state = _phase(
        state, r, jnp.where(got, jnp.where(later, ADMITTED, RUNNING), IDLE), cache=cache,
        lease=_place(state.lease, r, lease), spoilt=state.spoilt.at[r].set(False),
    )  # fmt: skip
    return state, wrong


def recover(state, r):
    cache, lease, why = hkv.recover(
        replay, (), state.cache, _pick(state.lease, r), _pick(state.plan, r), _tokens(state, r),
        chunk=CHUNK,
    )  # fmt: skip
    wrong = ~state.spoilt[r] & (why[0] != 0)
    state = _phase(
        state, r, jnp.where(why == 0, RUNNING, FAILED), cache=cache,
        lease=_place(state.lease, r, lease),
    )  # fmt: skip
    return state, wrong


def step(state, r):
    lease = _pick(state.lease, r)
    at = lease.length
    asked, total = _most(ASKED, state, r), _most(TOTAL, state, r)
    count = jnp.minimum(jnp.where(at < asked, asked, total) - at, CHUNK)
    spot = jnp.minimum(at[:, None] + jnp.arange(CHUNK, dtype=jnp.int32)[None], T - 1)
    tokens = jnp.take_along_axis(_tokens(state, r), spot, axis=1)
    done, out = model((), tokens, hkv.view(state.cache, lease, count))
    cache, lease, ok = hkv.append(done, after=out)
    right = jnp.asarray(OUTPUT)[state.who[r]][spot] == out
    ran = jnp.arange(CHUNK, dtype=jnp.int32)[None] < count[:, None]
    wrong = ok[0] & jnp.any(ran & ~right)
    state = _phase(
        state, r, jnp.where(ok, RUNNING, FAILED), cache=cache, lease=_place(state.lease, r, lease)
    )
    return state, wrong


def _changed(state, r, cache, lease):
    """With the lease as it is now; wrong if the one before, which could be read, still holds."""
    before = _pick(state.lease, r)
    could = hkv.view(state.cache, before, jnp.zeros(1, jnp.int32)).ok
    wrong = could & hkv.check_lease(cache, before)
    state = dataclasses.replace(state, cache=cache, lease=_place(state.lease, r, lease))
    return state, wrong


def publish(state, r):
    lease = _pick(state.lease, r)
    cache, lease, _ = hkv.publish(state.cache, lease, _tokens(state, r), lease.length, partial=True)
    return _changed(state, r, cache, lease)


def release(state, r):
    lease = _pick(state.lease, r)
    cache = hkv.release(state.cache, lease)
    twice = hkv.release(cache, lease)
    twice = dataclasses.replace(twice, clock=cache.clock)
    same = jax.tree.map(lambda a, b: jnp.all(a == b), cache, twice)
    wrong = hkv.check_lease(cache, lease)[0] | ~jnp.all(jnp.stack(jax.tree.leaves(same)))
    return _phase(state, r, IDLE, cache=cache), wrong


def trim(state, r):
    return _changed(state, r, *hkv.trim(state.cache, _pick(state.lease, r)))


def fork(state, r):
    cache, lease, answer = hkv.fork(state.cache, _pick(state.lease, r), _most(TOTAL, state, r))
    got = answer.verdict == hkv.Verdict.ADMIT
    state = dataclasses.replace(
        state, who=state.who.at[1 - r].set(state.who[r]),
        spoilt=state.spoilt.at[1 - r].set(False),
    )  # fmt: skip
    state = _phase(
        state, 1 - r, jnp.where(got, RUNNING, IDLE), cache=cache,
        lease=_place(state.lease, 1 - r, lease),
    )  # fmt: skip
    return state, got[0] & state.spoilt[r]


def drop(state, at):
    forms = jnp.arange(len(Form), dtype=jnp.int32) == jnp.asarray(
        [Form.COMPRESSED, Form.WINDOW], jnp.int32)[at % 2]  # fmt: skip
    cache, _ = hkv.drop(state.cache, (at // 2)[None], forms)
    return dataclasses.replace(state, cache=cache), False


def invalidate(state, row):
    cache, n = hkv.invalidate(state.cache, jnp.arange(N, dtype=jnp.int32) == row)
    holds = jnp.any(state.lease.rows == row, axis=1) & (state.phase >= ADMITTED) & (n > 0)
    return dataclasses.replace(state, cache=cache, spoilt=state.spoilt | holds), False


def evict(state, _):
    pages = jnp.asarray([g.pages - 1 for g in LAYOUT.groups], jnp.int32)
    return dataclasses.replace(state, cache=hkv.evict(state.cache, pages)), False


def transition(state, number):
    """Any form of any row to any state; what comes back second is whether it says it moved."""
    at, life = number // len(Life), number % len(Life)
    row, forms = at // len(Form), jnp.arange(len(Form), dtype=jnp.int32) == at % len(Form)
    old = state.cache.table.life[row, at % len(Form)]
    there = (old == Life.WRITING) | (old == Life.READY) | (old == Life.OFFLOADING)
    there &= at % len(Form) != Form.DISK
    cache, report = hkv.transition(state.cache, row[None], forms, life.astype(jnp.uint8))
    moved = jnp.any(report.moved)
    holds = jnp.any(state.lease.rows == row, axis=1) & (state.phase >= ADMITTED)
    spoilt = state.spoilt | (holds & moved & there & (life == Life.STALE))
    return dataclasses.replace(state, cache=cache, spoilt=spoilt), moved


ACTIONS = {
    f.__name__: (f, n)
    for f, n in (
        (plan, len(OF)), (admit, R), (recover, R), (step, R), (publish, R), (release, R), (trim, R),
        (fork, R), (drop, 2 * N), (invalidate, N), (evict, 1),
    )
}  # fmt: skip


def enabled(name, c):
    """`bool[n, numbers]`: where an action is taken at all."""
    phase, length = c[".phase"], c[".lease.length"]
    if name in ("drop", "invalidate"):
        there = (c[".cache.table.length"] > 0) | (c[".cache.table.pins"] > 0)
        return np.repeat(there, 2, axis=1) if name == "drop" else there
    if name == "evict":
        return np.any(c[".cache.table.length"] > 0, axis=1, keepdims=True)
    at = {
        "plan": phase[:, OF] == IDLE, "admit": phase == PLANNED, "recover": phase == ADMITTED,
        "step": (phase == RUNNING) & (length < TOTAL[c[".who"]]),
        "publish": (phase >= RUNNING) & (length > 0), "release": phase >= ADMITTED,
        "trim": (phase == RUNNING) & (length > 0),
        "fork": (phase == RUNNING) & (phase[:, ::-1] == IDLE),
    }  # fmt: skip
    return at[name]


def look(words):
    """What both leases would read now, and what a query of each prompt answers."""
    state = unpack(words)
    seen = hkv.view(state.cache, state.lease, jnp.zeros(R, jnp.int32))
    out = {"ok": seen.ok, "held": hkv.check_lease(state.cache, state.lease)}
    for name, layer, n in (("win", 0, T), ("keys", 1, T // 2)):
        index = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None], (R, n))
        new = jnp.full((R, 1, 1), -1.0)
        rows, out[f"{name} valid"] = seen.read(name, layer, index, new)
        out[name] = rows[..., 0]
    n = len(PROMPTS)
    a = hkv.query(state.cache, jnp.asarray(PROMPTS), jnp.full(n, T, jnp.int32), need(n))
    return {**out, "usable": a.usable, "positions": a.positions, "rows": a.rows}


PROGRAMS = (*ACTIONS, "transition", "look")


def program(name, batch):
    """An action on a batch of packed states with their numbers, or `look`, compiled."""

    def one(words, number):
        state, wrong = {**ACTIONS, "transition": (transition, 0)}[name][0](unpack(words), number)
        return pack(state), jnp.asarray(wrong, bool).reshape(())

    states = jax.ShapeDtypeStruct((batch, packing().words), np.uint32)
    numbers = jax.ShapeDtypeStruct((batch,), np.int32)
    fn, args = (look, (states,)) if name == "look" else (one, (states, numbers))
    return jax.jit(jax.vmap(fn), compiler_options=QUICK).lower(*args).compile()
