"""The one pair of gather and scatter that is safe at the edges.

An index below zero or past the end reads the fill value and writes nothing. JAX alone would wrap
-1 to the last element in both, also with `mode="drop"`, and clamp a read past the end.
"""

import jax
import jax.numpy as jnp


def take(array: jax.Array, index, fill: int | bool) -> jax.Array:
    """`array[index]` with `fill` wherever the index is outside."""
    return (
        jnp.asarray(array).at[index].get(mode="fill", fill_value=fill, wrap_negative_indices=False)
    )


def put(array: jax.Array, index, values: jax.Array) -> jax.Array:
    """`array` with `values` written at `index`; outside indices are dropped.

    Where an index occurs twice with different values, either may win.
    """
    return jnp.asarray(array).at[index].set(values, mode="drop", wrap_negative_indices=False)
