"""Which boundaries are worth the windows and tails that they need: a policy, as data."""

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np

from hkv._arguments import check_int
from hkv._cache import Cache
from hkv._layout import Layout


class Worth(enum.IntEnum):
    """What the windows and tails of a segment are kept for; the least goes first."""

    NONE = 0  # no boundary that is retained needs them
    BOUNDARY = 1  # one of the policy's boundaries does
    END = 2  # the end of a prompt or of an answer does, or a place where prompts part


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """A policy: which boundaries, beside ends of prompts and answers and branch points."""

    every: jax.Array  # i32[], a boundary each so many tokens; 0 for no others


def retention(every: int) -> Retention:
    """A policy for windows and tails in the prefix cache.

    It decides what goes first under pressure; with room enough, all is kept.

    Args:
        every: 0 retains the ends of prompts and answers and the places where prompts part;
            more than a segment, a boundary each so many tokens as well, which goes before those.
            Up to `layout.segment_tokens` it retains all boundaries alike, and age alone decides.

    Raises:
        TypeError, ValueError: no int of 0 or more.
    """
    check_int("every", every, 0)
    return Retention(every=jax.device_put(np.int32(every)))


def worth(
    cache: Cache, rows: jax.Array, length: jax.Array, prompt: jax.Array, every: jax.Array
) -> jax.Array:
    """`u8[S]`: the worth of the windows and tails of one request's segments.

    Args:
        cache: for the children of the segments.
        rows: `i32[S]`.
        length: `i32[]` tokens of the request, the end of its answer; 0 before that is reached.
        prompt: `i32[]` tokens of its prompt; 0 if unknown.
        every: `i32[]` of the policy.
    """
    B = cache.layout.segment_tokens
    begin = jnp.arange(rows.shape[0], dtype=jnp.int32) * B
    end = begin + B

    def inside(p):
        return (begin < p) & (p <= end)

    ends = inside(length) | inside(prompt)
    N = cache.layout.segments
    children = cache.table.children[jnp.clip(rows, 0, N - 1)]
    ends |= (rows < N) & (children > 1)
    step = jnp.maximum(every, 1)
    regular = (every > 0) & (end // step > begin // step)
    some = jnp.where(every <= B, jnp.uint8(Worth.END), jnp.uint8(Worth.BOUNDARY))
    own = jnp.where(ends, jnp.uint8(Worth.END), jnp.where(regular, some, jnp.uint8(Worth.NONE)))
    # A boundary also needs the windows of the segments before it that its rules reach.
    pad = jnp.zeros(_reach(cache.layout), jnp.uint8)
    later = jnp.concatenate([own, pad])
    each = [later[d : d + own.shape[0]] for d in range(len(pad) + 1)]
    return functools.reduce(jnp.maximum, each)


def _reach(layout: Layout) -> int:
    """How many segments before its own a boundary may need windows or tails of."""
    most = max(g.rule.span or 0 for g in layout.groups)
    return min(-(-most // layout.segment_tokens), layout.max_segments - 1)
