"""The indexer in plain XLA: the reference for every kernel of this operation."""

import jax
import jax.numpy as jnp

from pallas_kernels._check import accumulator

# Default precision may round float32 operands to 10-bit mantissas on a GPU.
_EXACT = jax.lax.Precision.HIGHEST


def index_scores(q, k, w, mask, scale):
    """See `contract.index_scores`; arguments are checked."""
    acc = accumulator(q, k, w)
    q, k, w = q.astype(acc), k.astype(acc), w.astype(acc)
    # Each product touches one key only, so a NaN key spoils its own column, which is selected.
    products = jnp.einsum("qthd,qkd->qthk", q, k, precision=_EXACT)
    scores = jnp.sum(w[..., None] * jnp.maximum(products, 0), axis=2) * scale
    return jnp.where(mask, scores, -jnp.inf)


def index_topk(scores, k):
    """See `contract.index_topk`; arguments are checked."""
    count = scores.shape[-1]
    # A total order would put -0 below +0 and NaN above all numbers.
    scores = jnp.where(scores == 0, 0, scores)
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    best, index = jax.lax.top_k(scores, min(k, count))
    valid = best > -jnp.inf
    index = jnp.where(valid, index.astype(jnp.int32), count)
    beyond = [(0, 0), (0, 0), (0, k - min(k, count))]
    return (
        jnp.pad(index, beyond, constant_values=count),
        jnp.pad(valid, beyond, constant_values=False),
    )
