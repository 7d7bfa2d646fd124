"""Contract of the indexer: score compressed entries for a query, keep the best k.

Letters: Q requests, T tokens of the chunk, Hi indexer heads, Di their size, K entries scored.

Example: one token, Hi = 2, Di = 1, q = (1, -1), w = (3, 5), scale 1, keys 2, -2, 0, the last
masked. Scores are 3 * relu(2) + 5 * relu(-2) = 6, 3 * relu(-2) + 5 * relu(2) = 10 and -inf. The
best k = 4 are indices 1, 0, 3, 3 with valid True, True, False, False: K = 3 stands for "none".

Source: DeepSeek-V4 report (arXiv 2606.19348, 2.3.1).
"""

from typing import Final

import jax
import jax.numpy as jnp

from pallas_kernels._check import Shapes, positive
from pallas_kernels._dispatch import choose
from pallas_kernels.indexer import xla

ABI: Final = 1


def index_scores(
    q: jax.Array,
    k: jax.Array,
    w: jax.Array,
    mask: jax.Array,
    scale: float | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Weighted sum over heads of the positive parts of the products.

    The reference holds `Q * T * Hi * K` values of the accumulator's dtype.

    Args:
      q: indexer queries `[Q, T, Hi, Di]`.
      k: indexer keys `[Q, K, Di]`, one head; masked ones may hold anything, NaN included.
      w: weights of the heads `[Q, T, Hi]`.
      mask: entries the query may see, bool `[Q, T, K]`.
      scale: factor of the scores, `(Di * Hi) ** -0.5` if None.
      implementation: "xla", or None for the preferred one.

    Returns:
      Scores `[Q, T, K]`, -inf where masked; float32, or float64 if an input is.

    Raises:
      ValueError: shapes or dtypes disagree, or `implementation` is unknown.
    """
    run = choose("index_scores", implementation, {"xla": xla.index_scores})
    shapes = Shapes("index_scores")
    shapes.bind("q", q, "Q T Hi Di")
    shapes.bind("k", k, "Q K Di")
    shapes.bind("w", w, "Q T Hi")
    shapes.bind("mask", mask, "Q T K", jnp.bool_)
    scale = (shapes["Di"] * shapes["Hi"]) ** -0.5 if scale is None else scale
    return run(q, k, w, mask, scale)


def index_topk(
    scores: jax.Array, k: int, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """The `k` entries with the highest scores, the highest first.

    Among equal scores the lowest index comes first; +0 and -0 are equal. Scores of -inf and NaN
    are never chosen. `k` may exceed K.

    Args:
      scores: `[Q, T, K]`.
      k: entries to keep.
      implementation: "xla", or None for the preferred one.

    Returns:
      index: i32 `[Q, T, k]`, K where there is no entry left.
      valid: bool `[Q, T, k]`.

    Raises:
      ValueError: `scores` has another rank, `k` is below one, or `implementation` is unknown.
    """
    run = choose("index_topk", implementation, {"xla": xla.index_topk})
    Shapes("index_topk").bind("scores", scores, "Q T K")
    return run(scores, positive("index_topk", "k", k))
