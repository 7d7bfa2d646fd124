"""Softmax pooling against loops over windows, rows and channels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels as pk

compress = jax.jit(pk.compress, static_argnames=("ratio", "overlap"))


def oracle(kv, gate, valid, bias, ratio, overlap):
    kv, gate = np.asarray(kv, np.float64), np.asarray(gate, np.float64)
    requests, rows, channels = kv.shape
    size = channels // 2 if overlap else channels
    out = np.zeros((requests, rows // ratio - overlap, size))
    for r, e, d in np.ndindex(*out.shape):
        # (window, channel) pairs that entry e folds; with overlap window e lies before its own.
        folded = [(e, d), (e + 1, size + d)] if overlap else [(e, d)]
        if not valid[r, folded[-1][0]]:
            continue
        terms = []
        for window, channel in folded:
            for j in range(ratio if valid[r, window] else 0):
                row = window * ratio + j
                logit = gate[r, row, channel] + (0 if bias is None else float(bias[j, channel]))
                terms.append((logit, kv[r, row, channel]))
        top = max(logit for logit, _ in terms)
        total = sum(np.exp(logit - top) for logit, _ in terms)
        out[r, e, d] = sum(np.exp(logit - top) * value for logit, value in terms) / total
    return out


def make(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 3, jnp.float32)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.booleans(),
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.sampled_from([0.0, np.nan, np.inf, -np.inf]),
)
def test_equals_loops_over_windows(seed, ratio, overlap, biased, valid, dirt):
    kv, gate = make(seed, 2, 3 * ratio, 4), make(seed + 1, 2, 3 * ratio, 4)
    bias = make(seed + 2, ratio, 4) if biased else None
    valid = np.asarray(valid).reshape(2, 3)
    held = jnp.asarray(np.repeat(valid, ratio, axis=1))[:, :, None]
    got = compress(
        jnp.where(held, kv, dirt),
        jnp.where(held, gate, dirt),
        jnp.asarray(valid),
        bias,
        ratio=ratio,
        overlap=overlap,
    )
    want = oracle(kv, gate, valid, bias, ratio, overlap)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_the_example_of_the_contract():
    kv = jnp.asarray([[[1, 10], [2, 20], [3, 30], [4, 40]]], jnp.float32)
    for first, want in [(True, 18.25), (False, 35.0)]:
        got = compress(
            kv,
            jnp.zeros_like(kv),
            jnp.asarray([[first, True]]),
            jnp.zeros((2, 2), jnp.float32),
            ratio=2,
            overlap=True,
        )
        np.testing.assert_allclose(got, [[[want]]], rtol=1e-6)


def test_the_lower_half_serves_the_next_window():
    # The half order is silent when wrong: shapes and ranges agree.
    kv = jnp.zeros((1, 4, 4), jnp.float32).at[0, 0, :2].set(8.0)
    options = {"bias": None, "ratio": 2, "overlap": True}
    valid = jnp.ones((1, 2), bool)
    np.testing.assert_allclose(compress(kv, kv * 0, valid, **options), [[[2.0, 2.0]]])
    kv = jnp.zeros((1, 4, 4), jnp.float32).at[0, 0, 2:].set(8.0)
    np.testing.assert_allclose(compress(kv, kv * 0, valid, **options), [[[0.0, 0.0]]])


def test_a_gate_that_contains_the_bias_needs_none():
    kv, gate, bias = make(0, 1, 8, 6), make(1, 1, 8, 6), make(2, 4, 6)
    valid = jnp.ones((1, 2), bool)
    added = gate + jnp.tile(bias, (2, 1))[None]
    np.testing.assert_array_equal(
        compress(kv, gate, valid, bias, ratio=4, overlap=True),
        compress(kv, added, valid, None, ratio=4, overlap=True),
    )


def test_chunks_give_the_entries_of_the_whole():
    kv, gate, bias = make(0, 1, 24, 4), make(1, 1, 24, 4), make(2, 4, 4)
    valid = jnp.asarray([[False] + [True] * 6])
    lead = jnp.full((1, 4, 4), jnp.nan)
    rows = [jnp.concatenate([lead, each], axis=1) for each in (kv, gate)]
    whole = compress(*rows, valid, bias, ratio=4, overlap=True)
    parts = [
        compress(
            rows[0][:, 4 * e : 4 * e + 8],
            rows[1][:, 4 * e : 4 * e + 8],
            valid[:, e : e + 2],
            bias,
            ratio=4,
            overlap=True,
        )
        for e in range(6)
    ]
    np.testing.assert_allclose(whole, jnp.concatenate(parts, axis=1), rtol=1e-6)


def test_bfloat16_pools_in_float32_and_float64_in_float64():
    kv = jnp.ones((1, 512, 2), jnp.bfloat16)
    valid = jnp.ones((1, 1), bool)
    got = compress(kv, jnp.zeros_like(kv), valid, None, ratio=512, overlap=False)
    # Summed in bfloat16 the denominator would stop at 256.
    assert got.dtype == jnp.float32 and (got == 1).all()
    with jax.enable_x64(True):
        wide = jnp.ones((1, 2, 2), jnp.float64)
        assert compress(wide, wide, valid, None, ratio=2, overlap=False).dtype == jnp.float64


@pytest.mark.parametrize("overlap", [False, True])
def test_no_entry_is_an_empty_result(overlap):
    kv = jnp.zeros((2, 4 * overlap, 6), jnp.float32)
    got = compress(kv, kv, jnp.ones((2, int(overlap)), bool), None, ratio=4, overlap=overlap)
    assert got.shape == (2, 0, 3 if overlap else 6)


def test_wrong_arguments_are_named():
    kv, valid = jnp.zeros((1, 8, 4), jnp.float32), jnp.ones((1, 2), bool)
    with pytest.raises(ValueError, match="`gate` of compress has shape"):
        compress(kv, kv[:, :4], valid, None, ratio=4, overlap=False)
    with pytest.raises(ValueError, match="`kv` of compress has 8 rows"):
        compress(kv, kv, valid, None, ratio=3, overlap=False)
    with pytest.raises(ValueError, match="`valid` of compress has shape"):
        compress(kv, kv, valid[:, :1], None, ratio=4, overlap=False)
    with pytest.raises(ValueError, match="`bias` of compress has shape"):
        compress(kv, kv, valid, kv[0, :3], ratio=4, overlap=False)
    with pytest.raises(ValueError, match="`kv` of compress has 3 channels"):
        compress(kv[..., :3], kv[..., :3], valid, None, ratio=4, overlap=True)
    with pytest.raises(ValueError, match="`kv` of compress is empty"):
        compress(kv[:, :0], kv[:, :0], valid[:, :0], None, ratio=4, overlap=True)
    with pytest.raises(ValueError, match="`ratio` of compress"):
        compress(kv, kv, valid, None, ratio=0, overlap=False)
