"""Gather and scatter that are safe at the edges; see `pallas_kernels` for the first two.

JAX clamps an out-of-range read and wraps a negative index even where a write says "drop", so all
bookkeeping goes through these. A slot number out of `[0, size)` reads the fill, writes nothing.
"""

import jax

from pallas_kernels._index import put as put
from pallas_kernels._index import take as take


def add(a: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    """`a` with `values` added at `slots`; out-of-range slots are dropped, repeats add up."""
    return a.at[slots].add(values, mode="drop", wrap_negative_indices=False)
