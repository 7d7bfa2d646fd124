"""Indexer scores and the choice of entries against loops and a stable sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels as pk

index_scores = jax.jit(pk.index_scores)
index_topk = jax.jit(pk.index_topk, static_argnames="k")


def make(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def topk_oracle(row, k):
    """Indices of the best scores by a stable sort, without -inf and NaN."""
    real = [n for n in range(len(row)) if row[n] > -np.inf]
    best = sorted(real, key=lambda n: -row[n])[:k]
    index = best + [len(row)] * (k - len(best))
    return index, [n < len(row) for n in index]


@pytest.mark.parametrize("scale", [None, 0.25])
def test_scores_equal_loops_over_heads(scale):
    q, k, w = make(0, 2, 3, 4, 5), make(1, 2, 6, 5), make(2, 2, 3, 4)
    mask = np.random.default_rng(3).random((2, 3, 6)) < 0.7
    # Masked keys that no query sees hold NaN.
    dirty = jnp.where(jnp.asarray(mask.any(axis=1))[..., None], k, jnp.nan)
    dirty = dirty.at[0, 5].set(jnp.nan)
    mask[0, :, 5] = False
    got = index_scores(q, dirty, w, jnp.asarray(mask), scale)
    want = np.full((2, 3, 6), -np.inf)
    for r, t, n in zip(*np.nonzero(mask), strict=True):
        products = [max(0.0, float(np.dot(q[r, t, h], k[r, n]))) for h in range(4)]
        total = sum(float(w[r, t, h]) * products[h] for h in range(4))
        want[r, t, n] = total * (20**-0.5 if scale is None else scale)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_broken_key_reaches_only_the_queries_that_see_it():
    q, k, w = make(0, 1, 2, 2, 3), make(1, 1, 4, 3).at[0, 3].set(jnp.nan), make(2, 1, 2, 2)
    mask = jnp.ones((1, 2, 4), bool).at[0, 0, 3].set(False)
    scores = index_scores(q, k, w, mask)
    assert np.isfinite(scores[0, :, :3]).all()
    assert scores[0, 0, 3] == -jnp.inf and np.isnan(scores[0, 1, 3])


def test_the_example_of_the_contract():
    scores = index_scores(
        jnp.asarray([[[[1.0], [-1.0]]]]),
        jnp.asarray([[[2.0], [-2.0], [0.0]]]),
        jnp.asarray([[[3.0, 5.0]]]),
        jnp.asarray([[[True, True, False]]]),
        1.0,
    )
    np.testing.assert_array_equal(scores, [[[6.0, 10.0, -np.inf]]])
    index, valid = index_topk(scores, 4)
    np.testing.assert_array_equal(index, [[[1, 0, 3, 3]]])
    np.testing.assert_array_equal(valid, [[[True, True, False, False]]])
    assert index.dtype == jnp.int32


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, np.inf, -np.inf, np.nan]),
        min_size=6,
        max_size=6,
    ),
    st.integers(1, 9),
)
def test_topk_is_a_stable_sort(row, k):
    index, valid = index_topk(jnp.asarray(row, jnp.float32)[None, None], k)
    want_index, want_valid = topk_oracle(row, k)
    np.testing.assert_array_equal(index[0, 0], want_index)
    np.testing.assert_array_equal(valid[0, 0], want_valid)


def test_the_lowest_index_wins_ties_also_among_many():
    scores = jnp.asarray(np.random.default_rng(0).integers(0, 3, (2, 3, 500)), jnp.float32)
    index, valid = index_topk(scores, 300)
    for r, t in np.ndindex(2, 3):
        np.testing.assert_array_equal(index[r, t], topk_oracle(np.asarray(scores[r, t]), 300)[0])
    assert valid.all()


@pytest.mark.parametrize("rows", [0, 1])
def test_fewer_entries_than_k(rows):
    index, valid = index_topk(jnp.zeros((1, 2, rows), jnp.float32), 3)
    want = [0] * rows + [rows] * (3 - rows)
    np.testing.assert_array_equal(index, [[want, want]])
    np.testing.assert_array_equal(valid[0, 0], [n < rows for n in want])


def test_scores_accumulate_in_float32():
    q = jnp.ones((1, 1, 512, 1), jnp.bfloat16)
    k, w = jnp.ones((1, 1, 1), jnp.bfloat16), jnp.ones((1, 1, 512), jnp.bfloat16)
    scores = index_scores(q, k, w, jnp.ones((1, 1, 1), bool), 1.0)
    assert scores.dtype == jnp.float32 and scores[0, 0, 0] == 512


def test_wrong_arguments_are_named():
    q, k, w = make(0, 1, 2, 2, 3), make(1, 1, 4, 3), make(2, 1, 2, 2)
    mask = jnp.ones((1, 2, 4), bool)
    with pytest.raises(ValueError, match="`k` of index_scores has shape"):
        index_scores(q, k[..., :2], w, mask)
    with pytest.raises(ValueError, match="`w` of index_scores has shape"):
        index_scores(q, k, w[..., :1], mask)
    with pytest.raises(ValueError, match="`mask` of index_scores has shape"):
        index_scores(q, k, w, mask[..., :3])
    with pytest.raises(ValueError, match="`k` of index_topk is 0"):
        index_topk(make(0, 1, 1, 3), 0)
    with pytest.raises(ValueError, match="`scores` of index_topk has shape"):
        index_topk(make(0, 3), 1)
