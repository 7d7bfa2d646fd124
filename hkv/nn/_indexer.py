"""The indexer: scores history entries by keys of its own and picks the best per query."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from hkv.nn._compressor import Compressor
from hkv.nn._linear import linear
from hkv.nn._rotary import Rotary, rotate
from hkv.nn._view import CacheView, positions, read_rows
from hkv.nn._weights import Weights, widen
from pallas_kernels import history_mask, index_scores, index_topk


def choose(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The `k` best entries per query, and how narrow the choice was.

    Args:
        scores: `[Q, T, N]`, -inf for what may not be chosen.

    Returns:
        Entry numbers `i32[Q, T, min(k, N)]`, `N` where fewer may be chosen, and the margin
        `[Q, T]`: the score of the last chosen minus that of the first rejected entry, infinite if
        none was rejected.
    """
    count = scores.shape[-1]
    k = min(k, count)
    if k == count:
        best = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[None, None], scores.shape)
        margin = jnp.full(scores.shape[:2], jnp.inf, scores.dtype)
        return jnp.where(scores > -jnp.inf, best, count), margin
    best, found = index_topk(scores, k + 1)
    edge = jnp.take_along_axis(scores, best[..., k - 1 :], axis=-1, mode="clip")
    margin = jnp.where(found[..., k], edge[..., 0] - edge[..., 1], jnp.inf)
    return best[..., :k], margin


class Indexer(nnx.Module):
    """Keys from a compressor of its own, queries from the shared low-rank query."""

    def __init__(
        self,
        weights: Weights,
        *,
        hidden: int,
        rank: int,
        heads: int,
        size: int,
        topk: int,
        ratio: int,
        rotary: Rotary,
        eps: float,
        group: str,
        layer: int,
    ):
        self.wq_b = weights.matrix("wq_b.weight", heads * size, rank)
        self.weights_proj = weights.matrix("weights_proj.weight", heads, hidden)
        self.compressor = Compressor(
            weights.at("compressor"), hidden=hidden, size=size, ratio=ratio, overlap=True,
            rotary=rotary, eps=eps, tail=f"{group}_tail", layer=layer,
        )  # fmt: skip
        self.heads, self.size, self.topk, self.ratio = heads, size, topk, ratio
        self.rotary, self.group, self.layer = rotary, group, layer

    def __call__(
        self, x: jax.Array, latent: jax.Array, view: CacheView
    ) -> tuple[jax.Array, jax.Array, CacheView]:
        """Chooses history entries for every query of the chunk.

        Args:
            x: `[Q, T, d]`, the layer's input.
            latent: `[Q, T, rank]`, the normed low-rank query.
            view: the cache; keys and tail rows are written to it.

        Returns:
            Entry numbers and margin as in `choose`, and the view.
        """
        keys, view = self.compressor(x, view)
        at = positions(view, x.shape[1])
        entries = view.length // self.ratio
        index = jnp.broadcast_to(jnp.arange(entries, dtype=jnp.int32)[None], (x.shape[0], entries))
        wide = widen(x.dtype)
        rows, valid = read_rows(view, self.group, self.layer, index, keys)
        query = linear(latent, self.wq_b).reshape(*x.shape[:2], self.heads, self.size)
        query = rotate(query, at[..., None], self.rotary)
        weight = linear(x, self.weights_proj, wide)
        seen = history_mask(at, index, self.ratio, valid)
        chosen, margin = choose(index_scores(query, rows, weight, seen), self.topk)
        return chosen, margin, view.write(self.group, self.layer, keys)
