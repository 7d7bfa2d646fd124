"""Which keys a query may see: one predicate per rule of a cache form.

Every function returns bool `[Q, T, K]` from absolute positions, so the same mask serves a prefill
chunk, a decode step and a resumed run. Letters: Q requests, T tokens of the chunk, K rows read.
Key positions and `valid` are `[Q, K]`, or `[Q, T, K]` where every query has rows of its own.
A key that is not `valid` or whose position is negative is never visible.

Example with window 3, chunk 4 and ratio 2, for the query at position 5: the full rule sees keys
0..5, the window rule 3, 4, 5, the chunk rule 4, 5, and the history rule entries 0, 1, 2 (entry 2
folds tokens 4 and 5, and token 5 closes it); with `closing=False` entries 0 and 1.
"""

from typing import Final

import jax
import jax.numpy as jnp

from pallas_kernels._check import Shapes, positive

ABI: Final = 1


def full_mask(q_pos: jax.Array, k_pos: jax.Array, valid: jax.Array) -> jax.Array:
    """Keys at or before the query.

    Args:
      q_pos: absolute positions of the queries, i32 `[Q, T]`.
      k_pos: absolute positions of the keys, i32 `[Q, K]` or `[Q, T, K]`.
      valid: rows that hold a key, bool, shaped like `k_pos`.
    """
    query, key, held = _aligned("full_mask", "k_pos", q_pos, k_pos, valid)
    return held & (key <= query)


def window_mask(q_pos: jax.Array, k_pos: jax.Array, valid: jax.Array, window: int) -> jax.Array:
    """The query itself and the `window - 1` positions before it; arguments as `full_mask`."""
    window = positive("window_mask", "window", window)
    query, key, held = _aligned("window_mask", "k_pos", q_pos, k_pos, valid)
    # Only a visible key's difference is used, and it lies in [0, query]: int32 can't overflow.
    return held & (key <= query) & (query - key < window)


def chunk_mask(q_pos: jax.Array, k_pos: jax.Array, valid: jax.Array, chunk: int) -> jax.Array:
    """Keys at or before the query in the same block of `chunk`; arguments as `full_mask`."""
    chunk = positive("chunk_mask", "chunk", chunk)
    query, key, held = _aligned("chunk_mask", "k_pos", q_pos, k_pos, valid)
    return held & (key <= query) & (query // chunk == key // chunk)


def history_mask(
    q_pos: jax.Array,
    entry: jax.Array,
    ratio: int,
    valid: jax.Array,
    closing: bool = True,
) -> jax.Array:
    """Compressed entries that are complete for the query.

    Entry `e` folds tokens `[e * ratio, (e + 1) * ratio)`. Ratio 1 with `closing` is `full_mask`.

    Args:
      q_pos: absolute positions of the queries, i32 `[Q, T]`.
      entry: entry numbers, i32 `[Q, K]` or `[Q, T, K]`.
      ratio: tokens per entry.
      valid: rows that hold an entry, bool, shaped like `entry`.
      closing: whether the token that closes an entry sees it: entries below
        `floor((t + 1) / ratio)`, else below `floor(t / ratio)`.

    Source: the DeepSeek-V4 report (arXiv 2606.19348) states the second, its released code does
    the first.
    """
    ratio = positive("history_mask", "ratio", ratio)
    query, number, held = _aligned("history_mask", "entry", q_pos, entry, valid)
    complete = query // ratio
    if closing:
        # floor((t + 1) / ratio), written so that t + 1 can't overflow.
        complete = complete + (query % ratio == ratio - 1).astype(jnp.int32)
    return held & (number < complete)


def _aligned(operation: str, name: str, q_pos, k_pos, valid):
    """Checks the arguments and gives query, key and validity a common `[Q, T, K]` rank."""
    shapes = Shapes(operation)
    letters = "Q T K" if jnp.ndim(k_pos) == 3 else "Q K"
    shapes.bind("q_pos", q_pos, "Q T", jnp.int32)
    shapes.bind(name, k_pos, letters, jnp.int32)
    shapes.bind("valid", valid, letters, jnp.bool_)
    if letters == "Q K":
        k_pos, valid = k_pos[:, None, :], valid[:, None, :]
    return q_pos[:, :, None], k_pos, valid & (k_pos >= 0)
