"""Visibility rules against a loop over positions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels as pk

LAST = 2**31 - 1


def i32(values):
    return jnp.asarray(values, jnp.int32)


def sees(rule, size, query, key):
    """Whether the query sees the key, from the words of each rule."""
    if key < 0:
        return False
    if rule == "full":
        return key <= query
    if rule == "window":
        return key in range(max(0, query - size + 1), query + 1)
    if rule == "chunk":
        return key in range(query - query % size, query + 1)
    last_token = (key + 1) * size - 1
    return last_token <= query if rule == "history" else last_token < query


@partial(jax.jit, static_argnums=(0, 1))
def mask(rule, size, q_pos, k_pos, valid):
    if rule == "full":
        return pk.full_mask(q_pos, k_pos, valid)
    if rule == "window":
        return pk.window_mask(q_pos, k_pos, valid, size)
    if rule == "chunk":
        return pk.chunk_mask(q_pos, k_pos, valid, size)
    return pk.history_mask(q_pos, k_pos, size, valid, closing=rule == "history")


RULES = ["full", "window", "chunk", "history", "history_open"]


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("rule", RULES)
def test_every_pair_of_positions_follows_the_rule(rule, size):
    positions = np.arange(-1, 14)
    got = mask(rule, size, i32(positions[None, 1:]), i32(positions[None]), jnp.ones((1, 15), bool))
    want = [[sees(rule, size, query, key) for key in positions] for query in positions[1:]]
    np.testing.assert_array_equal(np.asarray(got)[0], want)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(RULES),
    st.sampled_from([1, 2, 3, 2**16, LAST]),
    st.lists(st.integers(0, LAST), min_size=3, max_size=3),
    st.lists(st.integers(-(2**31), LAST), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_no_position_overflows(rule, size, queries, keys, valid):
    got = mask(rule, size, i32([queries]), i32([keys]), jnp.asarray([valid]))
    want = [
        [held and sees(rule, size, query, key) for key, held in zip(keys, valid, strict=True)]
        for query in queries
    ]
    np.testing.assert_array_equal(np.asarray(got)[0], want)


@pytest.mark.parametrize("rule", RULES)
def test_the_last_position_sees_what_the_rule_says(rule):
    keys = [LAST, LAST - 1, LAST - 2, 0, -1]
    got = mask(rule, 2, i32([[LAST]]), i32([keys]), jnp.ones((1, 5), bool))
    np.testing.assert_array_equal(np.asarray(got)[0, 0], [sees(rule, 2, LAST, key) for key in keys])


def test_a_window_counts_the_query_itself():
    keys = i32([np.arange(10)])
    got = pk.window_mask(i32([[6]]), keys, jnp.ones((1, 10), bool), 3)
    assert np.flatnonzero(np.asarray(got)[0, 0]).tolist() == [4, 5, 6]


def test_the_closing_token_sees_its_entry_only_with_closing():
    entries, valid = i32([np.arange(3)]), jnp.ones((1, 3), bool)
    for token, closed, opened in [(2, 0, 0), (3, 1, 0), (4, 1, 1), (7, 2, 1), (8, 2, 2)]:
        assert pk.history_mask(i32([[token]]), entries, 4, valid).sum() == closed
        assert pk.history_mask(i32([[token]]), entries, 4, valid, closing=False).sum() == opened


def test_ratio_one_is_the_full_rule():
    positions = i32([np.arange(9)])
    valid = jnp.ones((1, 9), bool)
    np.testing.assert_array_equal(
        pk.history_mask(positions, positions, 1, valid), pk.full_mask(positions, positions, valid)
    )


@pytest.mark.parametrize("rule", RULES)
def test_keys_of_their_own_per_query_equal_shared_keys(rule):
    queries, keys = i32([[3, 9]]), i32([np.arange(8)])
    valid = jnp.asarray([[True] * 6 + [False] * 2])
    own = jnp.broadcast_to(keys[:, None], (1, 2, 8)), jnp.broadcast_to(valid[:, None], (1, 2, 8))
    np.testing.assert_array_equal(mask(rule, 4, queries, keys, valid), mask(rule, 4, queries, *own))


@pytest.mark.parametrize("size", [0, -1, 2**31, 2.0, True])
def test_a_size_that_is_not_a_positive_integer_is_refused(size):
    one = i32([[0]]), i32([[0]]), jnp.ones((1, 1), bool)
    with pytest.raises(ValueError, match="`window` of window_mask"):
        pk.window_mask(*one, size)
    with pytest.raises(ValueError, match="`chunk` of chunk_mask"):
        pk.chunk_mask(*one, size)
    with pytest.raises(ValueError, match="`ratio` of history_mask"):
        pk.history_mask(one[0], one[1], size, one[2])


def test_wrong_shapes_and_dtypes_name_the_argument():
    queries, keys, valid = i32([[0]]), i32([[0, 1]]), jnp.ones((1, 2), bool)
    with pytest.raises(ValueError, match="`valid` of full_mask has shape"):
        pk.full_mask(queries, keys, valid[:, :1])
    with pytest.raises(ValueError, match="`q_pos` of full_mask has dtype float32"):
        pk.full_mask(queries.astype(jnp.float32), keys, valid)
    with pytest.raises(ValueError, match="`entry` of history_mask has shape"):
        pk.history_mask(queries, keys[0], 2, valid)
