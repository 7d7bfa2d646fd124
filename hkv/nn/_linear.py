"""The matrix product the layers share, at full precision of its operands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from hkv.nn._weights import widen


def expand(value: jax.Array, rank: int) -> jax.Array:
    """`value` with leading axes of size 1 up to `rank` (rank promotion stays explicit)."""
    return value.reshape((1,) * (rank - value.ndim) + value.shape)


def contract(
    spec: str, a: jax.Array, b: jax.Array, dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """`jnp.einsum` of two arrays, accumulated in float32 or wider, as `dtype` (default: of `a`).

    Float32 operands are not rounded to the shorter mantissas that accelerators prefer, so that a
    model gives the same text on every platform.
    """
    out = a.dtype if dtype is None else dtype
    return jnp.einsum(
        spec, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=widen(out)
    ).astype(out)


def linear(x: jax.Array, weight: nnx.Param, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """`x @ weight.T` for `x` `[..., in]` and `weight` `[out, in]`, as `dtype` (default: of `x`)."""
    return contract("...i,oi->...o", x, weight[...], dtype)
