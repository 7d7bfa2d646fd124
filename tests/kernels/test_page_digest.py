"""The page digest against its definition in Python integers, and fixed vectors."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels as pk

L, P, R, ROW = 2, 6, 4, (2, 3)
Q, C = 2, 3
WORD = 2**32 - 1

digest = jax.jit(pk.digest_pages)


def i32(values):
    return jnp.asarray(values, jnp.int32)


def fmix(x, m1, m2):
    x = (x ^ x >> 16) * m1 & WORD
    x = (x ^ x >> 13) * m2 & WORD
    return x ^ x >> 16


def oracle(data, pages, lo, hi):
    """The definition, one element at a time."""
    layers, count, rows = data.shape[:3]
    lanes = (0x5BD1E995, 0x85EBCA6B, 0xC2B2AE35), (0x27D4EB2F, 0x7FEB352D, 0x846CA68B)
    word = {1: np.uint8, 2: np.uint16}.get(data.dtype.itemsize, np.uint32)
    out = []
    for q in range(len(pages)):
        sums = [0, 0]
        for layer in range(layers):
            for n in range(max(0, lo[q]), min(hi[q], len(pages[q]) * rows)):
                page = pages[q][n // rows]
                for lane, (seed, m1, m2) in enumerate(lanes):
                    key = fmix((seed + layer * 0x9E3779B1) & WORD, m1, m2)
                    key = fmix((key + n * 0x85EBCA77) & WORD, m1, m2)
                    if not 1 <= page < count:
                        sums[lane] += key
                        continue
                    row = np.ascontiguousarray(data[layer, page, n % rows]).reshape(-1)
                    for e, bits in enumerate(row.view(word).tolist()):
                        sums[lane] += fmix(bits ^ (key + e * 0xC2B2AE3D & WORD), m1, m2)
        out.append([total & WORD for total in sums])
    return np.asarray(out, np.uint32)


def pool(seed=0, dtype=np.float32):
    bits = np.random.default_rng(seed).normal(size=(L, P, R, *ROW)) * 50
    return bits.astype(dtype)


PAGES = np.asarray([[3, 1, 5], [2, 4, 1]], np.int32)
ALL = np.asarray([0, 0], np.int32), np.asarray([C * R] * 2, np.int32)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from([-1, 0, 1, 2, 3, 4, 5, P, 2**31 - 1]), min_size=6, max_size=6),
    st.lists(st.integers(-3, C * R + 3), min_size=2, max_size=2),
    st.lists(st.integers(-3, C * R + 3), min_size=2, max_size=2),
)
def test_equals_the_definition_for_any_range_and_page(pages, lo, hi):
    pages = np.asarray(pages, np.int32).reshape(Q, C)
    np.testing.assert_array_equal(
        digest(pool(), pages, i32(lo), i32(hi)), oracle(pool(), pages, lo, hi)
    )


@pytest.mark.parametrize(
    "dtype",
    [ml_dtypes.bfloat16, np.float16, np.uint8, np.int32, ml_dtypes.float8_e4m3fn, bool],
)
def test_every_dtype_is_digested_by_its_bits(dtype):
    data = pool().astype(dtype)
    np.testing.assert_array_equal(digest(data, PAGES, *ALL), oracle(data, PAGES, *ALL))


def test_eight_byte_elements_give_two_words_low_half_first():
    with jax.enable_x64(True):
        data = pool(dtype=np.float64)
        np.testing.assert_array_equal(pk.digest_pages(data, PAGES, *ALL), oracle(data, PAGES, *ALL))


def test_fixed_vectors():
    # Stored digests outlive a build: a change here is a new contract version.
    data = np.asarray([9, 9, 5, 6], np.uint8).reshape(1, 2, 2, 1)
    one = pk.digest_pages(data, i32([[1]]), i32([0]), i32([2]))
    assert np.asarray(one).tolist() == [[0xE31947E3, 0xB488C4D4]]
    data = np.arange(L * P * R * 6, dtype=np.float32).reshape(L, P, R, *ROW)
    assert np.asarray(digest(data, PAGES, *ALL)).tolist() == VECTORS
    assert pk.ABI["page_digest"] == 1


VECTORS = [[0xEFBF37E2, 0x4919ED66], [0xCA7DEDA4, 0x8F929435]]


@pytest.mark.parametrize("place", [(0, 3, 0, 0, 0), (1, 1, 3, 1, 2), (1, 5, 3, 1, 2)])
def test_one_bit_anywhere_changes_both_lanes(place):
    data = pool()
    changed = data.copy()
    changed[place] = -changed[place]
    before, after = (np.asarray(digest(each, PAGES, *ALL))[0] for each in (data, changed))
    assert (before != after).all()


def test_the_two_zeros_differ():
    zeros = np.zeros((L, P, R, *ROW), np.float32)
    assert (np.asarray(digest(zeros, PAGES, *ALL)) != digest(-zeros, PAGES, *ALL)).all()


def test_rows_that_change_places_change_the_digest():
    data = pool()
    for swap in [np.s_[:, 3, ::-1], np.s_[::-1, 3], np.s_[:, 3, :, ::-1]]:
        moved = data.copy()
        moved[:, 3] = data[swap]
        assert (np.asarray(digest(moved, PAGES, *ALL))[0] != digest(data, PAGES, *ALL)[0]).all()


def test_page_ids_do_not_matter():
    data, order = pool(), np.asarray([0, 4, 5, 2, 1, 3])
    moved = np.empty_like(data)
    moved[:, order] = data
    np.testing.assert_array_equal(
        digest(data, PAGES, *ALL), digest(moved, order[PAGES].astype(np.int32), *ALL)
    )


def test_ranges_add_up_and_an_empty_one_is_zero():
    data = pool()
    cut = i32([5, 9])
    parts = digest(data, PAGES, ALL[0], cut) + digest(data, PAGES, cut, ALL[1])
    np.testing.assert_array_equal(parts, digest(data, PAGES, *ALL))
    assert not digest(data, PAGES, cut, cut).any()
    assert not digest(data, PAGES, cut, i32([3, -1])).any()


def test_rows_outside_the_range_may_hold_anything():
    data = pool()
    dirty = data.copy()
    dirty[:, 0] = dirty[:, 1:, 3] = np.nan
    dirty[:, [5, 1, 4]] = np.inf
    lo, hi = i32([0, 1]), i32([3, 3])
    np.testing.assert_array_equal(digest(data, PAGES, lo, hi), digest(dirty, PAGES, lo, hi))


def test_a_missing_page_is_not_a_page_of_zeros():
    zeros = np.zeros((L, P, R, *ROW), np.float32)
    there = np.asarray(digest(zeros, PAGES, *ALL))
    for page in (0, P, -1):
        assert (np.asarray(digest(zeros, PAGES * 0 + page, *ALL)) != there).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.uint8, jnp.float8_e4m3fn])
def test_memory_is_a_page_per_request_whatever_the_table_size(dtype):
    shape = jax.ShapeDtypeStruct
    data, bound = shape((2, 513, 8, 64), dtype), shape((2,), jnp.int32)
    pages = shape((2, 64), jnp.int32)
    stats = jax.jit(pk.digest_pages).lower(data, pages, bound, bound).compile().memory_analysis()
    one = 4 * 2 * 2 * 8 * 64
    assert stats.temp_size_in_bytes < 4 * one < data.size * data.dtype.itemsize


def test_wrong_arguments_are_named():
    data, pages, ends = pool(), i32(PAGES), i32([0, 0])
    with pytest.raises(ValueError, match="`lo` of digest_pages has shape"):
        pk.digest_pages(data, pages, ends[:1], ends)
    with pytest.raises(ValueError, match="`hi` of digest_pages has dtype"):
        pk.digest_pages(data, pages, ends, ends.astype(jnp.float32))
    for dtype in (np.complex64, ml_dtypes.int4):
        with pytest.raises(ValueError, match="`data` of digest_pages has dtype"):
            pk.digest_pages(jnp.zeros(data.shape, dtype), pages, ends, ends)
