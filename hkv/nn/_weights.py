"""Where layers get their weights: one constructor serves loading, random models and checking.

A layer asks for each tensor by its checkpoint name and shape. The source behind the request may
read a file, draw random numbers, or only record what was asked for.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Request:
    """One tensor a layer asks for."""

    name: str
    shape: tuple[int, ...]
    kind: str  # "matrix" in the model's dtype, "wide" and "norm" at least float32, "ids" integers
    high: int = 0  # ids lie in [0, high)


@dataclasses.dataclass(frozen=True)
class Weights:
    """A source of tensors under a name prefix."""

    source: Callable[[Request], jax.Array | jax.ShapeDtypeStruct]
    prefix: str = ""

    def at(self, name: str) -> Weights:
        """The same source, below `name`."""
        return Weights(self.source, f"{self.prefix}{name}.")

    def matrix(self, name: str, *shape: int) -> nnx.Param:
        """A matrix `[out, in]` in the model's dtype."""
        return nnx.Param(self.source(Request(self.prefix + name, shape, "matrix")))

    def wide(self, name: str, *shape: int) -> nnx.Param:
        """A tensor kept in float32 or wider: biases, sinks, mixing coefficients."""
        return nnx.Param(self.source(Request(self.prefix + name, shape, "wide")))

    def norm(self, name: str, size: int) -> nnx.Param:
        """The gain of a norm, kept in float32 or wider."""
        return nnx.Param(self.source(Request(self.prefix + name, (size,), "norm")))

    def ids(self, name: str, *shape: int, high: int) -> nnx.Variable:
        """An `i32` table with values in `[0, high)`."""
        return nnx.Variable(self.source(Request(self.prefix + name, shape, "ids", high)))

    def stack(self, name: str, count: int, *shape: int) -> nnx.Param:
        """Matrices `name.format(0..count-1)`, stacked to `[count, *shape]`."""
        parts = [
            self.source(Request(self.prefix + name.format(i), shape, "matrix"))
            for i in range(count)
        ]
        if isinstance(parts[0], jax.ShapeDtypeStruct):
            return nnx.Param(jax.ShapeDtypeStruct((count, *shape), parts[0].dtype))
        return nnx.Param(jnp.stack(cast(list[jax.Array], parts)))


def widen(dtype: jax.typing.DTypeLike) -> np.dtype:
    """The dtype for norms, softmax and running states: `dtype`, but at least float32."""
    dtype = jnp.dtype(dtype)
    return dtype if dtype.itemsize > 4 else jnp.dtype(jnp.float32)


def random_weights(
    key: jax.Array, scale: float = 0.2, dtype: jax.typing.DTypeLike = jnp.float32
) -> Weights:
    """Normal weights of standard deviation `scale`; gains near 1; ids uniform.

    Drawn per name on the host and rounded to float32, then cast, so that the same key gives the
    same model in every dtype and adding a layer changes no other.

    Args:
        key: a PRNG key, typed or raw.
        scale: standard deviation. At 0.02 most errors hide in rounding; 0.15 to 0.3 shows them.
        dtype: dtype of the matrices; everything else is at least float32.
    """
    data = key if jnp.issubdtype(key.dtype, jnp.integer) else jax.random.key_data(key)
    seed = [int(word) for word in np.asarray(data).ravel()]

    def source(request: Request) -> jax.Array:
        rng = np.random.default_rng([*seed, zlib.crc32(request.name.encode())])
        if request.kind == "ids":
            return jnp.asarray(rng.integers(0, request.high, request.shape), jnp.int32)
        value = rng.normal(0.0, scale, request.shape)
        if request.kind == "norm":
            value = 1.0 + value
        kept = dtype if request.kind == "matrix" else widen(dtype)
        return jnp.asarray(value.astype(np.float32), kept)

    return Weights(source)


def bind(model: nnx.Module) -> tuple[list[jax.Array], Callable[[list[jax.Array]], nnx.Module]]:
    """A model as a flat list of arrays and the function that rebuilds it, for fast dispatch.

    `jax.jit` takes a module as an argument, but walks it in Python on every call (2 to 3
    microseconds a tensor). Flattened once, a step costs what its arrays cost:

        weights, build = bind(model)
        step = jax.jit(lambda weights, tokens, view: build(weights)(tokens, view))
    """
    leaves, tree = jax.tree.flatten(model)
    return leaves, lambda leaves: jax.tree.unflatten(tree, leaves)
