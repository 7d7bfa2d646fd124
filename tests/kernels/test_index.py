"""The pair of gather and scatter at the edges, for each index kind that JAX treats specially."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._index import put, take

N = 5
OUTSIDE = [-(2**31), -N - 1, -N, -1, N, N + 1, 2**31 - 1]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.uint32, jnp.int32, jnp.bool_, jnp.bfloat16])
def test_outside_indices_read_the_fill_value_and_write_nothing(dtype):
    # B152: -1, -N, -N-1 and N, for get and set.
    array = jnp.ones(N, dtype)
    index = jnp.asarray(OUTSIDE, jnp.int32)
    np.testing.assert_array_equal(take(array, index, 0), jnp.zeros(len(OUTSIDE), dtype))
    zeros = jnp.zeros(len(OUTSIDE), dtype)
    np.testing.assert_array_equal(jax.jit(put)(array, index, zeros), array)


def test_one_axis_outside_is_enough():
    array = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    first = jnp.asarray([0, 0, -1, 2, 1], jnp.int32)
    second = jnp.asarray([-1, 3, 1, 1, 2], jnp.int32)
    np.testing.assert_array_equal(take(array, (first, second), 9), [9, 9, 9, 9, 5])
    written = put(array, (first, second), jnp.full(5, 7, jnp.int32))
    np.testing.assert_array_equal(written, [[0, 1, 2], [3, 4, 7]])
