"""RMS norms, with and without a gain."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from hkv.nn._linear import expand
from hkv.nn._weights import Weights, widen


def rms_norm(x: jax.Array, eps: float) -> jax.Array:
    """`x` divided by its root mean square over the last axis, in float32 or wider."""
    wide = x.astype(widen(x.dtype))
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """RMS norm with a gain per channel; the gain multiplies before the cast back."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float):
        self.weight = weights.norm(f"{name}.weight", size)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Norms the last axis; the result has the dtype of `x`."""
        gain = self.weight[...]
        return (rms_norm(x, self.eps).astype(gain.dtype) * expand(gain, x.ndim)).astype(x.dtype)
