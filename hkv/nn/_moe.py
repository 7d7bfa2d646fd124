"""Mixture of experts: routed by score or by token id, plus one shared expert.

Every expert runs on every token and the router's weights select, so a token's result depends on
that token alone, whatever else is in the batch: no capacity, no dropping, no sorting. The price is
`experts / topk` times the arithmetic of a sorted implementation, which suits models of up to a few
dozen experts; a larger one needs grouped matrix products here.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from hkv.nn._linear import contract, expand, linear
from hkv.nn._weights import Weights, widen

SCORES = {
    "sqrtsoftplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
    "sigmoid": jax.nn.sigmoid,
    "softmax": jax.nn.softmax,
}


@dataclasses.dataclass(frozen=True)
class MoEShape:
    """Sizes and rules of a mixture of experts.

    Attributes:
        inner: width of each expert, and of the shared one.
        score: how router logits become scores, a key of `SCORES`.
        scaling: factor on the normalised routing weights.
        limit: the gate is clipped from above and the linear part on both sides.
        hashed: vocabulary size if experts follow from the token id, else 0.
    """

    hidden: int
    inner: int
    experts: int
    topk: int
    score: str
    scaling: float
    limit: float
    hashed: int = 0


def _swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


class MoE(nnx.Module):
    """Routed experts and a shared expert."""

    def __init__(self, weights: Weights, shape: MoEShape):
        s = shape
        self.gate = weights.matrix("gate.weight", s.experts, s.hidden)
        if s.hashed:
            self.table = weights.ids("gate.tid2eid", s.hashed, s.topk, high=s.experts)
        else:
            self.bias = weights.wide("gate.bias", s.experts)
        self.w1 = weights.stack("experts.{}.w1.weight", s.experts, s.inner, s.hidden)
        self.w2 = weights.stack("experts.{}.w2.weight", s.experts, s.hidden, s.inner)
        self.w3 = weights.stack("experts.{}.w3.weight", s.experts, s.inner, s.hidden)
        self.s1 = weights.matrix("shared_experts.w1.weight", s.inner, s.hidden)
        self.s2 = weights.matrix("shared_experts.w2.weight", s.hidden, s.inner)
        self.s3 = weights.matrix("shared_experts.w3.weight", s.inner, s.hidden)
        self.shape = s

    def route(
        self, x: jax.Array, tokens: jax.Array, selection: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Which experts take each token.

        Args:
            x: `[Q, T, d]`.
            tokens: `i32[Q, T]`, used where experts follow from the token id.
            selection: `i32[Q, T, k]` experts to use in place of the router's choice.

        Returns:
            Experts `i32[Q, T, k]`, their weights `[Q, T, k]` in float32 or wider, and the margin
            `[Q, T]`: score of the last chosen minus that of the first rejected expert, bias
            included; infinite where nothing was rejected or token ids decide.
        """
        s = self.shape
        scores = SCORES[s.score](linear(x, self.gate, widen(x.dtype)))
        margin = jnp.full(tokens.shape, jnp.inf, scores.dtype)
        if s.hashed:
            chosen = jnp.take(self.table[...], tokens, axis=0, mode="clip")
        else:
            biased = scores + expand(self.bias[...], 3)
            value, chosen = jax.lax.top_k(biased, min(s.topk + 1, s.experts))
            if s.topk < s.experts:
                margin = value[..., s.topk - 1] - value[..., s.topk]
            chosen = chosen[..., : s.topk].astype(jnp.int32)
        if selection is not None:
            chosen = selection.astype(jnp.int32)
        weight = jnp.take_along_axis(scores, chosen, axis=-1, mode="clip")
        weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + 1e-20)
        return chosen, weight * s.scaling, margin

    def __call__(
        self, x: jax.Array, tokens: jax.Array, selection: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Output `[Q, T, d]`, and the chosen experts and margin as in `route`."""
        s, wide = self.shape, widen(x.dtype)
        chosen, weight, margin = self.route(x, tokens, selection)
        expert = jnp.arange(s.experts, dtype=jnp.int32)[None, None, None]
        share = jnp.where(chosen[..., None] == expert, weight[..., None], 0.0).sum(axis=2)
        gate = contract("qtd,efd->qtef", x, self.w1[...], wide)
        up = contract("qtd,efd->qtef", x, self.w3[...], wide)
        inner = _swiglu(gate, up, s.limit)
        inner = jnp.where(share[..., None] != 0, inner * share[..., None], 0.0).astype(x.dtype)
        routed = contract("qtef,edf->qtd", inner, self.w2[...], wide)
        shared = _swiglu(linear(x, self.s1, wide), linear(x, self.s3, wide), s.limit)
        shared = linear(shared.astype(x.dtype), self.s2, wide)
        return (routed + shared).astype(x.dtype), chosen, margin
