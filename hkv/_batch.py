"""The device side of serving: Q slots, and the two programs that run a model on them.

A prompt passes through `prefill` and every token of an answer through `decode`, whoever else is
in the batch. Shapes are static, and a slot that has nothing to do writes nothing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from hkv._lease import Lease
from hkv._publish import publish
from hkv._slots import put
from hkv._trim import trim
from hkv._view import append, view

IDLE, PREFILL, DECODE, DONE, FAILED = range(5)  # where a slot stands
STOPS = 8  # stop tokens of a request at most
_STATIC = ("forward", "sample", "logits")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """What the device knows of Q slots."""

    lease: Lease
    state: jax.Array  # i32[Q]
    next: jax.Array  # i32[Q], the token that was said last and has not run
    end: jax.Array  # i32[Q], tokens that run at most: all but the last of the answer
    stop: jax.Array  # i32[Q, STOPS], tokens that end the answer; -1 for none
    seed: jax.Array  # u32[Q]


def greedy(logits: jax.Array, key: jax.Array) -> jax.Array:
    """The likeliest token."""
    return jnp.argmax(logits).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames=("cache", "batch"))
def prefill(cache, params, batch: Batch, tokens, lane, count, last, *, forward, sample, logits):
    """One chunk of some prompts; behind the last chunk of a prompt, the first token of its answer.

    Donates `cache` and `batch`.

    Args:
        cache: the cache.
        params: the model's arrays.
        batch: the slots.
        tokens: `i32[P, C]`.
        lane: `i32[P]` slots; Q for none.
        count: `i32[P]` tokens that are real.
        last: `bool[P]` whether they end the prompt.
        forward: the model.
        sample: chooses the next token.
        logits: whether to return them.

    Returns:
        The cache and the batch; tokens said `i32[1, P]`, -1 for none; states `i32[P]`; how many
        tokens ran, `i32[P]`; and logits `[C, P, ...]`.
    """
    at = jnp.minimum(lane, batch.state.shape[0] - 1)
    some = jax.tree.map(lambda a: a[at], batch)
    runs = (lane == at) & (some.state == PREFILL)
    count = jnp.where(runs, count, 0)
    out, done = forward(params, tokens, view(cache, some.lease, count))
    cache, lease, ok = append(done, after=out)
    final = jax.vmap(lambda x, n: x[n])(out, jnp.maximum(count - 1, 0))
    token, state = _next(sample, some, lease.length, final, runs, ok, last)
    some = dataclasses.replace(some, lease=lease, state=state, next=token)
    batch = jax.tree.map(lambda a, new: put(a, lane, new), batch, some)
    said = jnp.where(runs & ok & last, token, -1)
    more = (jnp.swapaxes(out, 0, 1),) if logits else ()
    return cache, batch, said[None], state, jnp.where(ok, count, 0), *more


@functools.partial(jax.jit, static_argnames=(*_STATIC, "steps"), donate_argnames=("cache", "batch"))
def decode(cache, params, batch: Batch, *, forward, sample, logits, steps: int):
    """`steps` tokens of every slot that decodes, or fewer if its answer ends before.

    Donates `cache` and `batch`.

    Returns:
        As `prefill`, with `steps` in place of 1 and of C, and Q in place of P.
    """

    def one(carry, _):
        cache, b = carry
        runs = b.state == DECODE
        seen = view(cache, b.lease, runs.astype(jnp.int32))
        out, done = forward(params, b.next[:, None], seen)
        cache, lease, ok = append(done, after=out)
        token, state = _next(sample, b, lease.length, out[:, 0], runs, ok, runs)
        b = dataclasses.replace(b, lease=lease, state=state, next=jnp.where(runs, token, b.next))
        said = jnp.where(runs & ok, token, -1)
        return (cache, b), (said, runs & ok, *((out[:, 0],) if logits else ()))

    (cache, batch), (said, ran, *more) = jax.lax.scan(one, (cache, batch), length=steps)
    return cache, batch, said, batch.state, jnp.sum(ran, axis=0, dtype=jnp.int32), *more


@functools.partial(jax.jit, donate_argnames=("cache", "batch"))
def slide(cache, batch: Batch, tokens, length, prompt, retention):
    """Publishes what is complete, and hands the pages of windows on to the tokens ahead.

    Donates `cache` and `batch`.

    Args:
        cache: the cache.
        batch: the slots.
        tokens: `i32[Q, T]` that ran.
        length: `i32[Q]` how many of them are known.
        prompt: `i32[Q]` tokens of the prompts.
        retention: as `publish` takes it.
    """
    cache, lease, _ = publish(
        cache, batch.lease, tokens, length, prompt=prompt, retention=retention
    )
    cache, lease = trim(cache, lease)
    return cache, dataclasses.replace(batch, lease=lease)


def _next(sample, batch: Batch, length, logits, runs, ok, last):
    """Tokens `i32[Q]` behind the first `length`, and the states in which slots are then."""

    def one(seed, length, logits):
        return sample(logits, jax.random.fold_in(jax.random.key(seed), length))

    token = jax.vmap(one)(batch.seed, length, logits)
    over = (length >= batch.end) | jnp.any(token[:, None] == batch.stop, axis=1)
    state = jnp.where(last, jnp.where(over, DONE, DECODE), PREFILL)
    return token, jnp.where(runs, jnp.where(ok, state, FAILED), batch.state)


@functools.partial(jax.jit, static_argnames="slots")
def blank(one: Batch, slots: int) -> Batch:
    """Slots that hold nothing, of the shapes of a batch of one."""
    batch = jax.tree.map(lambda a: jnp.repeat(a, slots, axis=0), one)
    lease = dataclasses.replace(batch.lease, serial=jnp.zeros_like(batch.lease.serial))
    return dataclasses.replace(batch, lease=lease, state=jnp.full_like(batch.state, IDLE))


@functools.partial(jax.jit, donate_argnames="batch")
def insert(batch: Batch, one: Batch, slot: jax.Array) -> Batch:
    """The batch with a batch of one in a slot. Donates `batch`."""
    return jax.tree.map(lambda a, b: a.at[slot].set(b[0]), batch, one)


@jax.jit
def lease_of(batch: Batch, slot: jax.Array) -> Lease:
    """The lease in a slot, as a batch of one."""
    return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, slot, 1), batch.lease)
