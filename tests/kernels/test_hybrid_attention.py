"""Attention over parts against loops in float64, and its indifference to masked rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels as pk
from pallas_kernels import Part

attention, merge = jax.jit(pk.attention, static_argnames="out_dtype"), jax.jit(pk.merge)


def oracle(q, parts, sinks=None, scale=None):
    """One softmax per query and head, written as loops over the visible rows."""
    q = np.asarray(q, np.float64)
    requests, tokens, heads, size = q.shape
    scale = size**-0.5 if scale is None else scale
    out = np.zeros((requests, tokens, heads, parts[0].v.shape[-1]))
    lse = np.full((requests, tokens, heads), -np.inf)
    for r, t, h in np.ndindex(requests, tokens, heads):
        logits, rows = [], []
        for part in parts:
            group = h // (heads // part.k.shape[-2])
            for n in np.flatnonzero(np.asarray(part.mask)[r, t]):
                at = (r, t, n, group) if part.k.ndim == 5 else (r, n, group)
                logits.append(scale * np.dot(q[r, t, h], np.asarray(part.k, np.float64)[at]))
                rows.append(np.asarray(part.v, np.float64)[at])
        terms = logits + ([] if sinks is None else [float(sinks[h])])
        if terms:
            top = max(terms)
            total = sum(np.exp(term - top) for term in terms)
            lse[r, t, h] = top + np.log(total)
            for logit, row in zip(logits, rows, strict=True):
                out[r, t, h] += np.exp(logit - top) / total * row
    return out, lse


def make(seed, shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def make_part(seed, requests, tokens, rows, groups, size, out, own=False, density=0.6):
    rng = np.random.default_rng(seed)
    lead = (requests, tokens, rows, groups) if own else (requests, rows, groups)
    k, v = rng.normal(size=(*lead, size)), rng.normal(size=(*lead, out))
    mask = rng.random((requests, tokens, rows)) < density
    return Part(jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32), jnp.asarray(mask))


def check(got, want, tolerance=2e-6):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=tolerance, atol=tolerance)


def poison(part, value):
    """The part with `value` in k and v of every row that no query sees."""
    seen = np.asarray(part.mask)
    seen = seen[..., None, None] if part.k.ndim == 5 else seen.any(axis=1)[..., None, None]
    return part._replace(
        k=jnp.where(jnp.asarray(seen), part.k, value), v=jnp.where(jnp.asarray(seen), part.v, value)
    )


@pytest.mark.parametrize(
    "groups, own, sinks", [(1, False, True), (2, True, False), (2, False, False), (4, True, True)]
)
def test_equals_loops_over_visible_rows(groups, own, sinks):
    q = make(0, (2, 3, 4, 8))
    parts = [
        make_part(1, 2, 3, 5, groups, 8, 6, own),
        make_part(2, 2, 3, 7, 1, 8, 6),
        make_part(3, 2, 3, 1, 4, 8, 6),
    ]
    logits = make(4, (4,)) if sinks else None
    check(attention(q, parts, logits), oracle(q, parts, logits))


def test_the_example_of_the_contract():
    log = np.log(np.arange(1, 6))
    q = jnp.ones((1, 1, 4, 1), jnp.float32)

    def part(values, mask):
        k = jnp.asarray(np.repeat(values, 2).reshape(1, -1, 2, 1), jnp.float32)
        eye = jnp.asarray(np.ones((1, len(values), 2, 1)), jnp.float32)
        return Part(k, eye, jnp.asarray([[mask]]))

    parts = [part(log[:3], [True] * 3), part([log[3], 9.0], [True, False])]
    out, lse = attention(q, parts, jnp.full(4, log[4], jnp.float32))
    np.testing.assert_allclose(out, 10 / 15, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(15), rtol=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([np.nan, np.inf, -np.inf]),
    st.booleans(),
    st.booleans(),
)
def test_masked_rows_may_hold_anything(seed, density, value, own, sinks):
    q = make(seed, (1, 2, 2, 4))
    parts = [
        make_part(seed + 1, 1, 2, 4, 2, 4, 3, own, density),
        make_part(seed + 2, 1, 2, 3, 1, 4, 3, density=density),
    ]
    logits = make(seed + 3, (2,)) if sinks else None
    clean = attention(q, parts, logits)
    dirty = attention(q, [poison(part, value) for part in parts], logits)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a, b)
    check(clean, oracle(q, parts, logits))


@pytest.mark.parametrize("where", ["k", "v"])
def test_a_broken_row_reaches_only_the_queries_that_see_it(where):
    q = make(0, (1, 3, 2, 4))
    part = make_part(1, 1, 3, 5, 2, 4, 4, density=1.0)
    mask = np.ones((1, 3, 5), bool)
    mask[0, :2, 4] = False
    part = part._replace(mask=jnp.asarray(mask))
    broken = getattr(part, where).at[0, 4, 1, 2].set(jnp.nan)
    out, lse = attention(q, [part._replace(**{where: broken})])
    want, want_lse = oracle(q, [part])
    check((out[:, :2], lse[:, :2]), (want[:, :2], want_lse[:, :2]))
    check((out[:, 2, 0], lse[:, 2, 0]), (want[:, 2, 0], want_lse[:, 2, 0]))
    assert np.isnan(out[0, 2, 1]).all() and np.isnan(lse[0, 2, 1])


@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_that_sees_nothing_gets_zeros(sinks):
    q = make(0, (1, 2, 2, 4))
    part = make_part(1, 1, 2, 3, 1, 4, 4, density=0.0)
    logits = jnp.asarray([0.5, -jnp.inf], jnp.float32) if sinks else None
    out, lse = attention(q, [part], logits)
    np.testing.assert_array_equal(out, np.zeros((1, 2, 2, 4)))
    want = [0.5, -np.inf] if sinks else [-np.inf] * 2
    np.testing.assert_array_equal(lse, np.broadcast_to(want, (1, 2, 2)))


def test_a_part_without_rows_changes_nothing():
    q, part = make(0, (1, 2, 2, 4)), make_part(1, 1, 2, 3, 1, 4, 4)
    empty = make_part(2, 1, 2, 0, 2, 4, 4)
    for a, b in zip(attention(q, [part]), attention(q, [empty, part]), strict=True):
        np.testing.assert_array_equal(a, b)
    out, lse = attention(q, [empty])
    assert not out.any() and (lse == -jnp.inf).all()


@pytest.mark.parametrize("sizes", [(0, 2, 2, 4), (2, 0, 2, 4)])
def test_no_request_or_no_token_gives_an_empty_result(sizes):
    requests, tokens = sizes[:2]
    part = make_part(0, requests, tokens, 3, 1, 4, 5)
    out, lse = attention(jnp.zeros(sizes, jnp.float32), [part])
    assert out.shape == (*sizes[:3], 5) and lse.shape == sizes[:3]


def test_large_logits_do_not_overflow():
    q = jnp.full((1, 1, 1, 1), 1.0, jnp.float32)
    k = jnp.asarray([300.0, -300.0, 299.0], jnp.float32).reshape(1, 3, 1, 1)
    part = Part(k, k, jnp.ones((1, 1, 3), bool))
    check(attention(q, [part], jnp.full(1, -1e4, jnp.float32)), oracle(q, [part], [-1e4]), 1e-5)


@pytest.mark.parametrize("window", [4])
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5])
def test_lengths_around_the_window(length, window):
    # B139, B141: rows from `length` on are NaN in a buffer of fixed size.
    q, part = make(0, (1, 1, 2, 4)), make_part(1, 1, 1, 8, 1, 4, 4)
    positions = jnp.arange(8, dtype=jnp.int32)[None]
    query = jnp.asarray([[length - 1]], jnp.int32)
    mask = pk.window_mask(query, positions, positions < length, window)
    first = max(0, length - window)
    assert np.flatnonzero(np.asarray(mask)[0, 0]).tolist() == list(range(first, length))
    held = (positions < length)[:, :, None, None]
    dirty = Part(jnp.where(held, part.k, jnp.nan), jnp.where(held, part.v, jnp.nan), mask)
    check(attention(q, [dirty]), oracle(q, [part._replace(mask=mask)]))


def test_bfloat16_accumulates_in_float32():
    rows = 4096
    q = jnp.zeros((1, 1, 1, 2), jnp.bfloat16)
    k = jnp.zeros((1, rows, 1, 2), jnp.bfloat16)
    part = Part(k, jnp.ones_like(k), jnp.ones((1, 1, rows), bool))
    out, lse = attention(q, [part])
    # Counted in bfloat16 the denominator would stop at 256.
    np.testing.assert_array_equal(out, np.ones((1, 1, 1, 2)))
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    np.testing.assert_allclose(lse, np.log(rows), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3fn])
def test_parts_may_have_a_dtype_of_their_own(dtype):
    q, part = make(0, (1, 2, 2, 4)), make_part(1, 1, 2, 5, 1, 4, 4)
    part = part._replace(k=part.k.astype(dtype), v=part.v.astype(dtype))
    wide = part._replace(k=part.k.astype(jnp.float32), v=part.v.astype(jnp.float32))
    out, lse = attention(q, [part], out_dtype=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    check((out, lse), oracle(q, [wide]), 1e-2)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        q = make(0, (1, 2, 2, 4), np.float64)
        part = make_part(1, 1, 2, 5, 1, 4, 4)
        part = part._replace(k=part.k.astype(jnp.float64), v=part.v.astype(jnp.float64))
        out, lse = attention(q, [part])
        assert out.dtype == jnp.float64 and lse.dtype == jnp.float64
        check((out, lse), oracle(q, [part]), 1e-14)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.2, 1.0]), st.booleans())
def test_merging_parts_equals_one_softmax(seed, density, sinks):
    q = make(seed, (2, 2, 4, 4))
    parts = [make_part(seed + n, 2, 2, n + 1, 2, 4, 3, density=density) for n in range(3)]
    logits = make(seed, (4,)) if sinks else None
    results = [attention(q, [part], logits if n == 1 else None) for n, part in enumerate(parts)]
    outs, lses = zip(*results, strict=True)
    check(merge(outs, lses), attention(q, parts, logits), 1e-5)


def test_merge_ignores_the_output_of_a_side_that_saw_nothing():
    q, part = make(0, (1, 2, 2, 4)), make_part(1, 1, 2, 3, 1, 4, 4, density=1.0)
    out, lse = attention(q, [part])
    nothing = jnp.full_like(out, jnp.nan), jnp.full_like(lse, -jnp.inf)
    for got, want in zip(merge([nothing[0], out], [nothing[1], lse]), (out, lse), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    merged, total = merge([nothing[0]] * 2, [nothing[1]] * 2)
    assert not merged.any() and (total == -jnp.inf).all()


def test_more_keys_than_slots_is_refused_while_tracing():
    # B144: a kernel would run past the shorter one.
    q = jnp.zeros((1, 1, 1, 4), jnp.float32)
    k = jnp.zeros((1, 2048, 1, 4), jnp.float32)
    part = Part(k, k, jnp.ones((1, 1, 1234), bool))
    with pytest.raises(ValueError, match=r"`parts\[0\].mask` of attention has shape"):
        jax.eval_shape(pk.attention, q, [part])


def test_wrong_arguments_are_named():
    q, part = make(0, (1, 2, 4, 4)), make_part(1, 1, 2, 3, 1, 4, 4)
    with pytest.raises(ValueError, match="`parts` of attention is empty"):
        attention(q, [])
    with pytest.raises(ValueError, match="`sinks` of attention has shape"):
        attention(q, [part], jnp.zeros(3))
    with pytest.raises(ValueError, match=r"`parts\[0\].k` of attention has 3 heads"):
        attention(q, [make_part(1, 1, 2, 3, 3, 4, 4)])
    with pytest.raises(ValueError, match=r"`parts\[1\].v` of attention has shape"):
        attention(q, [part, part._replace(v=part.v[..., :2])])
    with pytest.raises(ValueError, match=r"`parts\[0\].mask` of attention has dtype"):
        attention(q, [part._replace(mask=part.mask.astype(jnp.float32))])
    with pytest.raises(ValueError, match="`outs` of merge"):
        merge([q], [])
