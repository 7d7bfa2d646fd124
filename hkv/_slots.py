"""Gather and scatter that are safe at the edges; see `pallas_kernels` for the first two.

JAX clamps an out-of-range read and wraps a negative index even where a write says "drop", so all
bookkeeping goes through these. A slot number out of `[0, size)` reads the fill, writes nothing.
"""

import jax
import jax.numpy as jnp

from pallas_kernels._index import put as put
from pallas_kernels._index import take as take


def add(a: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    """`a` with `values` added at `slots`; out-of-range slots are dropped, repeats add up."""
    return a.at[slots].add(values, mode="drop", wrap_negative_indices=False)


def first_of(slots: jax.Array, size: int) -> jax.Array:
    """`bool[K]`: slots `i32[K]` in `[0, size)` that did not occur before; so each counts once."""
    turn = jnp.arange(slots.shape[0], dtype=jnp.int32)
    first = jnp.full(size, slots.shape[0], jnp.int32)
    first = first.at[slots].min(turn, mode="drop", wrap_negative_indices=False)
    return take(first, slots, -1) == turn


def swap(a: jax.Array, rows: jax.Array, at: jax.Array, values) -> tuple[jax.Array, jax.Array]:
    """`a` (numbers of 0 or more) as it is at `rows`, and with `values` at the slots `at`.

    The write waits for the read as a matter of data, or XLA for a CPU copies `a` to read it later.
    """
    old = take(a, rows, 0)
    at = jnp.where(jnp.any(old < 0), a.shape[0], at)  # which never is
    return old, put(a, at, values)
