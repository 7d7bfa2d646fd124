"""Manifold-constrained hyper-connections: several residual streams, mixed around each block.

Source: DeepSeek-V4 report, https://arxiv.org/abs/2606.19348, section 2.2.
"""

from __future__ import annotations

import jax
from flax import nnx

from hkv.nn._linear import contract, expand
from hkv.nn._norm import rms_norm
from hkv.nn._weights import Weights


def _mix(streams: jax.Array, fn: jax.Array, eps: float) -> jax.Array:
    """Mixing logits `[Q, T, out]` of streams `[Q, T, n, d]`."""
    flat = streams.reshape(*streams.shape[:2], -1).astype(fn.dtype)
    return contract("qti,oi->qto", rms_norm(flat, eps), fn)


def _collapse(streams: jax.Array, weight: jax.Array) -> jax.Array:
    wide = streams.astype(weight.dtype)
    return contract("qtn,qtnd->qtd", weight, wide).astype(streams.dtype)


class HyperConnection(nnx.Module):
    """Collapses `n` streams to a block's input and spreads its output over them again."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        *,
        streams: int,
        hidden: int,
        iterations: int,
        floor: float,
        eps: float,
    ):
        n = streams
        self.fn = weights.wide(f"{name}_fn", (2 + n) * n, n * hidden)
        self.base = weights.wide(f"{name}_base", (2 + n) * n)
        self.scale = weights.wide(f"{name}_scale", 3)
        self.streams, self.iterations, self.floor, self.eps = n, iterations, floor, eps

    def enter(self, streams: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What the block gets, and how to leave it.

        Args:
            streams: `[Q, T, n, d]`.

        Returns:
            The block's input `[Q, T, d]`, the spread `[Q, T, n]` of its output, and the mix
            `[Q, T, n, n]` of the streams (from, to), nearly doubly stochastic.
        """
        n, floor = self.streams, self.floor
        logits = _mix(streams, self.fn[...], self.eps)
        scale, base = self.scale[...], expand(self.base[...], 3)
        pre = jax.nn.sigmoid(logits[..., :n] * scale[0] + base[..., :n]) + floor
        post = 2.0 * jax.nn.sigmoid(logits[..., n : 2 * n] * scale[1] + base[..., n : 2 * n])
        mix = logits[..., 2 * n :] * scale[2] + base[..., 2 * n :]
        mix = jax.nn.softmax(mix.reshape(*mix.shape[:2], n, n), axis=-1) + floor
        mix = mix / (mix.sum(axis=-2, keepdims=True) + floor)
        for _ in range(self.iterations - 1):
            mix = mix / (mix.sum(axis=-1, keepdims=True) + floor)
            mix = mix / (mix.sum(axis=-2, keepdims=True) + floor)
        return _collapse(streams, pre), post, mix

    def leave(
        self, streams: jax.Array, output: jax.Array, post: jax.Array, mix: jax.Array
    ) -> jax.Array:
        """The streams `[Q, T, n, d]` after a block whose output is `[Q, T, d]`."""
        dtype = streams.dtype
        spread = post.astype(dtype)[..., None] * output[:, :, None]
        return spread + contract("qtfn,qtfd->qtnd", mix.astype(dtype), streams)


class HyperHead(nnx.Module):
    """Collapses the streams after the last block."""

    def __init__(
        self, weights: Weights, name: str, *, streams: int, hidden: int, floor: float, eps: float
    ):
        self.fn = weights.wide(f"{name}_fn", streams, streams * hidden)
        self.base = weights.wide(f"{name}_base", streams)
        self.scale = weights.wide(f"{name}_scale", 1)
        self.floor, self.eps = floor, eps

    def __call__(self, streams: jax.Array) -> jax.Array:
        """`[Q, T, n, d]` to `[Q, T, d]`."""
        logits = _mix(streams, self.fn[...], self.eps)
        weight = logits * self.scale[...][0] + expand(self.base[...], 3)
        return _collapse(streams, jax.nn.sigmoid(weight) + self.floor)
