"""Candidates for each block of a prompt: by hash, then exact tokens and the chain of parents."""

import jax
import jax.numpy as jnp

from hkv._cache import PROBE, Cache, openings_of
from hkv._identity import opening_slots
from hkv._slots import take

MATCHES = 2  # index entries with the same tag that are looked at


def index_base(cache: Cache, key: jax.Array) -> jax.Array:
    """`i32[]`: first of the PROBE index slots in which a key `u32[2]` may stand."""
    H = cache.index.shape[0] - PROBE
    return (key[0] & jnp.uint32(H - 1)).astype(jnp.int32)


def by_key(cache: Cache, key: jax.Array, epoch: jax.Array) -> jax.Array:
    """The stored whole segment that a key proposes.

    Of several with one key, the one of this epoch is proposed, then the newest slot.

    Args:
        cache: the cache.
        key: `u32[2]`.
        epoch: `u32[]`.

    Returns:
        `i32[]` row, N for none.
    """
    N = cache.layout.segments
    base = index_base(cache, key)
    hit = jax.lax.dynamic_slice(cache.tags, (base,), (PROBE,)) == key[1]
    best, score = jnp.int32(N), jnp.int32(0)
    for _ in range(MATCHES):
        first = jnp.argmax(hit).astype(jnp.int32)
        row = jnp.where(jnp.any(hit), take(cache.index, base + first, N), N)
        same = (row < N) & jnp.all(take(cache.table.key, row, 0) == key)
        current = take(cache.table.epoch, row, 0) == epoch
        now = same.astype(jnp.int32) * (1 + current.astype(jnp.int32))
        best, score = jnp.where(now > score, row, best), jnp.maximum(now, score)
        hit &= jnp.arange(PROBE, dtype=jnp.int32) != first
    return best


def by_opening(cache: Cache, before: jax.Array, tokens: jax.Array) -> jax.Array:
    """Stored segments that may share the first tokens of a block, longest opening first.

    Args:
        cache: the cache.
        before: `u32[2]` key of the prefix before the block.
        tokens: `i32[B]`.

    Returns:
        `i32[C]` rows, N for none; repeats are possible.
    """
    lengths = openings_of(cache.layout)[::-1]
    slots = opening_slots(cache, before, tokens, lengths)
    return take(cache.openings, slots, cache.layout.segments).reshape(-1)


def leading_equal(stored: jax.Array, asked: jax.Array) -> jax.Array:
    """`i32[]`: how many leading tokens of two `i32[B]` are equal."""
    B = stored.shape[0]
    return jnp.min(jnp.where(stored == asked, B, jnp.arange(B, dtype=jnp.int32)))
