"""Interleaved rotary position embedding of the last channels, with optional YaRN scaling."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from hkv.nn._linear import expand
from hkv.nn._weights import widen


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN: slow frequencies are divided by `factor`, fast ones kept, with a ramp between.

    Source: Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.2.
    """

    factor: float
    original_length: int  # tokens of context the frequencies were trained for
    beta_fast: float = 32.0  # rotations over the original length above which nothing changes
    beta_slow: float = 1.0  # rotations below which a frequency is fully interpolated
    attention_factor: float = 1.0  # multiplies cosine and sine


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotation of the last `size` channels, in neighbouring pairs."""

    size: int
    theta: float
    yarn: Yarn | None = None

    def frequencies(self) -> np.ndarray:
        """Radians per position and pair, `f64[size // 2]`."""
        pair = np.arange(0, self.size, 2, dtype=np.float64)
        plain = self.theta ** (-pair / self.size)
        yarn = self.yarn
        if yarn is None:
            return plain

        def channel(rotations: float) -> float:
            turns = yarn.original_length / (rotations * 2 * math.pi)
            return self.size * math.log(turns) / (2 * math.log(self.theta))

        low = max(math.floor(channel(yarn.beta_fast)), 0)
        high = min(math.ceil(channel(yarn.beta_slow)), self.size - 1)
        ramp = (np.arange(self.size // 2) - low) / max(high - low, 1e-3)
        ramp = np.clip(ramp, 0.0, 1.0)
        return plain / yarn.factor * ramp + plain * (1.0 - ramp)


def rotate(
    x: jax.Array, position: jax.Array, rotary: Rotary, *, inverse: bool = False
) -> jax.Array:
    """Rotates the last `rotary.size` channels of `x` by its position.

    Args:
        x: `[..., C]`.
        position: `i32[...]`, one axis fewer than `x`; axes of size 1 broadcast.
        inverse: rotate back. Where keys are also values, an attention output carries the rotation
            of its keys, and turning it back at the query leaves only relative distances.
    """
    wide = widen(x.dtype)
    angle = position[..., None].astype(wide)
    angle = angle * expand(jnp.asarray(rotary.frequencies(), wide), angle.ndim)
    scale = 1.0 if rotary.yarn is None else rotary.yarn.attention_factor
    cos, sin = jnp.cos(angle) * scale, jnp.sin(angle) * (-scale if inverse else scale)
    kept, turned = x[..., : -rotary.size], x[..., -rotary.size :].astype(wide)
    pairs = turned.reshape(*turned.shape[:-1], rotary.size // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    turned = turned.reshape(*x.shape[:-1], rotary.size).astype(x.dtype)
    return jnp.concatenate([kept, turned], axis=-1)
