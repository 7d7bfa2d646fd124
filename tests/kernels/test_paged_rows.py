"""Paged reads, writes and page copies against loops over rows; edges of K17 and K18."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels as pk
from pallas_kernels import Part

L, P, R, ROW = 2, 6, 4, (3,)
Q, C, K = 2, 3, 5

gather = jax.jit(pk.gather_rows)
scatter = jax.jit(pk.scatter_rows)
copy = jax.jit(pk.copy_pages)


def i32(values):
    return jnp.asarray(values, jnp.int32)


def u32(values):
    return jnp.asarray(values, jnp.uint32)


def pool(seed=0, dtype=np.float32):
    """A pool of distinct values and stamps; the null page is zero."""
    rng = np.random.default_rng(seed)
    data = rng.permutation(L * P * R * 3).reshape(L, P, R, *ROW).astype(dtype)
    data[:, 0] = 0
    return data, rng.integers(0, 2**32, (P, 2), dtype=np.uint32)


def stamps_of(stamp, pages):
    """The stamps a caller has verified for its block tables."""
    held = [[stamp[p] if 0 < p < P else (0, 0) for p in row] for row in pages]
    return np.asarray(held, np.uint32)


def place(pages, expect, q, n):
    """Page, row and stamp of row number n of request q; None if it has no page."""
    if not 0 <= n < C * R:
        return None
    page = pages[q][n // R]
    return (page, n % R, tuple(expect[q][n // R])) if 1 <= page < P else None


def gather_oracle(data, stamp, layer, pages, index, expect, keep):
    rows, ok = np.zeros((Q, K, *ROW), data.dtype), np.zeros((Q, K), bool)
    for q, k in np.ndindex(Q, K):
        found = place(pages, expect, q, int(index[q][k]))
        if keep[q][k] and found and tuple(stamp[found[0]]) == found[2] and 0 <= layer < L:
            rows[q, k], ok[q, k] = data[layer, found[0], found[1]], True
    return rows, ok


def scatter_oracle(data, stamp, pages, index, rows, expect, keep):
    data, stamp = data.copy(), stamp.copy()
    for q, k in np.ndindex(Q, K):
        found = place(pages, expect, q, int(index[q][k]))
        if keep[q][k] and found:
            data[:, found[0], found[1]] = rows[:, q, k]
            stamp[found[0]] = found[2]
    return data, stamp


def same(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


page_ids = st.sampled_from([-(2**31), -1, 0, 1, 2, 3, 4, 5, P, P + 1, 2**31 - 1])
row_numbers = st.one_of(st.integers(-2, C * R + 1), st.sampled_from([-(2**31), -C * R, 2**31 - 1]))


@st.composite
def tables(draw):
    def table(values, *shape):
        size = int(np.prod(shape))
        flat = draw(st.lists(values, min_size=size, max_size=size))
        return np.asarray(flat).reshape(shape)

    return (
        table(page_ids, Q, C).astype(np.int32),
        table(row_numbers, Q, K).astype(np.int32),
        table(st.booleans(), Q, K),
        table(st.sampled_from([0, 0, 0, 1, 2]), Q, C),
    )


@settings(max_examples=60, deadline=None)
@given(tables(), st.integers(-1, L))
def test_gather_equals_a_loop_for_any_index(table, layer):
    pages, index, keep, stale = table
    data, stamp = pool()
    expect = stamps_of(stamp, pages)
    # One word at a time: either alone must be enough to refuse the page.
    expect[..., 0] ^= (stale == 1).astype(np.uint32)
    expect[..., 1] ^= (stale == 2).astype(np.uint32)
    got = gather(data, stamp, i32(layer), pages, index, expect, keep)
    same(got, gather_oracle(data, stamp, layer, pages, index, expect, keep))


@settings(max_examples=60, deadline=None)
@given(tables())
def test_scatter_equals_a_loop_for_any_index(table):
    pages, index, keep, _ = table
    data, stamp = pool()
    seen = set()
    for q, k in np.ndindex(Q, K):
        # The contract leaves two writes to one place, or two stamps for one page, open.
        found = place(pages, np.zeros((Q, C, 2)), q, int(index[q][k]))
        keep[q, k] &= found is None or found[:2] not in seen
        seen.add(found and found[:2])
    expect = np.stack([pages, pages ^ 77], axis=-1).astype(np.uint32)
    rows = -np.arange(1, L * Q * K * 3 + 1, dtype=np.float32).reshape(L, Q, K, *ROW)
    got = scatter(data, stamp, pages, index, rows, expect, keep)
    same(got, scatter_oracle(data, stamp, pages, index, rows, expect, keep))


def test_the_example_of_the_contract():
    data = np.arange(5 * 4, dtype=np.float32).reshape(1, 5, 4)
    stamp = u32([[0, 0], [9, 1], [0, 0], [7, 1], [0, 0]])
    index = i32([[0, 3, 6, 8, -1, 12]])
    expect = u32([[[7, 1], [7, 2], [0, 0]]])
    keep = jnp.ones((1, 6), bool)
    rows, ok = pk.gather_rows(data, stamp, 0, i32([[3, 1, 5]]), index, expect, keep)
    np.testing.assert_array_equal(ok, [[True, True, False, False, False, False]])
    np.testing.assert_array_equal(rows, [[12, 15, 0, 0, 0, 0]])
    rows, ok = pk.gather_rows(
        data, stamp.at[1].set(u32([7, 2])), 0, i32([[3, 1, 5]]), index, expect, keep
    )
    np.testing.assert_array_equal(rows, [[12, 15, 6, 0, 0, 0]])


@pytest.mark.parametrize("layer", [0, 1])
def test_layers_are_read_one_by_one_and_a_python_layer_equals_an_array(layer):
    data, stamp = pool()
    pages = np.asarray([[1, 2, 3], [4, 5, 0]], np.int32)
    args = pages, i32([range(5)] * 2), stamps_of(stamp, pages), np.ones((Q, K), bool)
    same(pk.gather_rows(data, stamp, layer, *args), gather(data, stamp, i32(layer), *args))


def test_a_page_filled_again_at_the_same_address_is_refused():
    data, stamp = pool()
    pages = np.asarray([[1, 2, 3], [4, 5, 0]], np.int32)
    expect, keep = stamps_of(stamp, pages), np.ones((Q, K), bool)
    index = i32([[0, 1, 2, 3, 4]] * 2)
    newer = expect.copy()
    newer[0, 0] = stamp[1] + np.asarray([0, 1], np.uint32)
    only_first = keep & (np.arange(K) == 0) & (np.arange(Q) == 0)[:, None]
    rows = np.ones((L, Q, K, *ROW), np.float32)
    data, stamp = scatter(data, stamp, pages, index, rows, newer, only_first)
    _, ok = gather(data, stamp, i32(0), pages, index, expect, keep)
    np.testing.assert_array_equal(ok, [[False] * 4 + [True], [True] * 5])


def test_padding_rows_do_not_reach_the_last_slot():
    # B135, B151: 64 live rows and 64 padding rows at -1, at N, and mixed.
    data = jnp.zeros((1, 6, 16), jnp.float32).at[0, 5, 15].set(9.0)
    stamp = jnp.zeros((6, 2), jnp.uint32)
    pages, expect = i32([[1, 2, 3, 4, 5]]), jnp.ones((1, 5, 2), jnp.uint32)
    live = np.arange(64)
    rows = jnp.arange(1, 129, dtype=jnp.float32)[None, None]
    for pads in ([-1] * 64, [80] * 64, list(range(80, 144)), [-1, 80, -80, -81] * 16):
        index = i32(np.concatenate([live, pads])[None])
        out, stamped = scatter(data, stamp, pages, index, rows, expect, jnp.ones((1, 128), bool))
        assert out[0, 5, 15] == 9 and not out[0, 0].any()
        np.testing.assert_array_equal(np.asarray(out)[0, 1:5].reshape(-1), live + 1)
        # A page that no row went to keeps its stamp.
        np.testing.assert_array_equal(stamped[:, 0], [0, 1, 1, 1, 1, 0])


def test_padding_between_live_rows_drops_in_any_order():
    # B151: pads first and last, as unsorted duplicates.
    data, stamp = jnp.zeros((1, 3, 4), jnp.float32), jnp.zeros((3, 2), jnp.uint32)
    out, _ = scatter(
        data,
        stamp,
        i32([[1, 2]]),
        i32([[-1, -1, 0, 1, 2, 3, -1, -1]]),
        jnp.arange(1, 9, dtype=jnp.float32)[None, None],
        jnp.zeros((1, 2, 2), jnp.uint32),
        jnp.ones((1, 8), bool),
    )
    np.testing.assert_array_equal(out[0], [[0] * 4, [3, 4, 5, 6], [0] * 4])


def test_page_ids_past_the_pool_are_not_clipped_to_its_last_page():
    # B149: a form with 9 pages gets page ids of a larger pool.
    data = jnp.arange(9 * 2, dtype=jnp.float32).reshape(1, 9, 2)
    stamp = jnp.zeros((9, 2), jnp.uint32)
    pages, index = i32([[20], [25]]), i32([[0, 1], [0, 1]])
    expect, keep = jnp.zeros((2, 1, 2), jnp.uint32), jnp.ones((2, 2), bool)
    rows, ok = gather(data, stamp, i32(0), pages, index, expect, keep)
    assert not rows.any() and not ok.any()
    ones = jnp.ones((1, 2, 2), jnp.float32)
    written = scatter(data, stamp, pages, index, ones, expect, keep)
    same(written, (data, stamp))


@pytest.mark.parametrize("length", range(17))
def test_attention_does_not_depend_on_what_unused_rows_hold(length):
    # B136, B140, B143: null page, rest of the last page and foreign pages hold NaN.
    clean = _decode(0.0, length)
    same(_decode(np.nan, length), clean)
    assert np.isfinite(clean[0]).all() and clean[0].any() == (length > 0)


@jax.jit
def _paged_decode(data, stamp, pages, expect, length):
    count = pages.shape[1] * data.shape[2]
    index = jnp.arange(count, dtype=jnp.int32)[None]
    rows, ok = pk.gather_rows(data, stamp, 0, pages, index, expect, index < length)
    mask = pk.full_mask(length.reshape(1, 1) - 1, index, ok)
    rows = rows[:, :, None]
    q = jnp.ones((1, 1, 2, 4), jnp.float32)
    return pk.attention(q, [Part(rows, rows, mask)])


def _decode(dirt, length):
    data = np.full((1, 8, 4, 4), dirt, np.float32)
    pages = np.zeros((1, 4), np.int32)
    for n in range(length):
        pages[0, n // 4] = 2 + n // 4
        data[0, 2 + n // 4, n % 4] = np.random.default_rng(n).normal(size=4)
    stamp = np.arange(16, dtype=np.uint32).reshape(8, 2)
    return _paged_decode(data, stamp, pages, stamp[pages], i32(length))


def test_a_hole_that_points_to_a_stale_page_with_nan_is_not_read():
    # B142: pages before the window point to page 1, now another request's and full of NaN.
    data = np.random.default_rng(0).normal(size=(1, 6, 4, 4)).astype(np.float32)
    data[0, 1] = np.nan
    stamp = np.arange(12, dtype=np.uint32).reshape(6, 2)
    pages = np.asarray([[1, 1, 2, 3, 4]], np.int32)
    expect = stamp[pages]
    expect[0, :2] += 1
    index = np.arange(20, dtype=np.int32)[None]
    rows, ok = gather(data, stamp, i32(0), pages, index, expect, np.ones((1, 20), bool))
    mask = pk.window_mask(i32([[17]]), index, ok, 8)
    assert np.flatnonzero(mask[0, 0]).tolist() == list(range(10, 18))
    q = jnp.ones((1, 1, 1, 4), jnp.float32)
    out, _ = jax.jit(pk.attention)(q, [Part(rows[:, :, None], rows[:, :, None], mask)])
    held = data[0, 2:5].reshape(-1, 4)[2:10].astype(np.float64)
    weights = np.exp(held.sum(axis=1) * 0.5)
    np.testing.assert_allclose(out[0, 0, 0], weights @ held / weights.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    "dtype",
    [np.float32, ml_dtypes.bfloat16, np.float16, np.uint8, ml_dtypes.float8_e4m3fn, bool, np.int8],
)
def test_every_dtype_comes_back_bit_for_bit(dtype):
    bits = np.random.default_rng(0).integers(0, 2 if dtype is bool else 256, (1, 1, 4, 8))
    if dtype in (np.uint8, np.int8, bool, ml_dtypes.float8_e4m3fn):
        rows = bits.astype(np.uint8).view(dtype)
    else:
        rows = (bits - 128.0).astype(dtype)
        rows[..., 0, :3] = [np.nan, -np.inf, -0.0]
    data, stamp = np.zeros((1, 3, 4, 8), dtype), np.zeros((3, 2), np.uint32)
    args = i32([[2]]), i32([[0, 1, 2, 3]])
    expect, keep = u32([[[1, 2]]]), np.ones((1, 4), bool)
    data, stamp = scatter(data, stamp, *args, rows, expect, keep)
    back, ok = gather(data, stamp, i32(0), *args, expect, keep)
    assert ok.all() and back.dtype == dtype
    np.testing.assert_array_equal(
        np.asarray(back)[0].view(np.uint8), np.asarray(rows)[0, 0].view(np.uint8)
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(page_ids, min_size=4, max_size=4),
    st.lists(page_ids, min_size=4, max_size=4, unique=True),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.booleans(),
)
def test_copies_equal_a_loop_and_read_before_they_write(src, dst, stale, checked):
    data, stamp = pool()
    expect = np.arange(100, 108, dtype=np.uint32).reshape(4, 2)
    held = stamps_of(stamp, [src])[0]
    held[:, 1] += np.asarray(stale, np.uint32)
    want_data, want_stamp = data.copy(), stamp.copy()
    for n in range(4):
        if 1 <= src[n] < P and 1 <= dst[n] < P and not (checked and stale[n]):
            want_data[:, dst[n]], want_stamp[dst[n]] = data[:, src[n]], expect[n]
    got = copy(data, stamp, i32(src), i32(dst), expect, src_expect=held if checked else None)
    same(got, (want_data, want_stamp))


@pytest.mark.parametrize("operation", ["scatter_rows", "copy_pages"])
def test_donated_pools_are_written_in_place(operation):
    # Only float32 and integers: XLA on a CPU widens a bfloat16 (jax 0.10.2, not 0.12) or float8
    # (both) pool around a scatter, to float32 or float16, which costs twice the pool's bytes.
    # A pool that stores such rows as uint16 or uint8 is written in place there as well.
    sizes = {}
    for dtype in (jnp.float32, jnp.uint16, jnp.uint8):
        data = jax.ShapeDtypeStruct((4, 257, 16, 128), dtype)
        stats = _memory(operation, data)
        pool_bytes = data.size * data.dtype.itemsize + 257 * 8
        assert stats.alias_size_in_bytes == pool_bytes
        sizes[dtype] = stats.temp_size_in_bytes
        # Room for the rows moved, not for the pool.
        assert stats.temp_size_in_bytes < pool_bytes // 50, sizes


def _memory(operation, data):
    shape, pages = jax.ShapeDtypeStruct, data.shape[1]
    stamp = shape((pages, 2), jnp.uint32)
    if operation == "copy_pages":
        two = shape((2,), jnp.int32)
        args = data, stamp, two, two, shape((2, 2), jnp.uint32)
    else:
        args = (
            data,
            stamp,
            shape((2, 8), jnp.int32),
            shape((2, 16), jnp.int32),
            shape((data.shape[0], 2, 16, *data.shape[3:]), data.dtype),
            shape((2, 8, 2), jnp.uint32),
            shape((2, 16), jnp.bool_),
        )
    jitted = jax.jit(getattr(pk, operation), donate_argnums=(0, 1))
    return jitted.lower(*args).compile().memory_analysis()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_a_read_copies_neither_the_pool_nor_a_layer(dtype):
    shape = jax.ShapeDtypeStruct
    compiled = (
        jax.jit(pk.gather_rows)
        .lower(
            shape((4, 257, 16, 128), dtype),
            shape((257, 2), jnp.uint32),
            shape((), jnp.int32),
            shape((2, 8), jnp.int32),
            shape((2, 16), jnp.int32),
            shape((2, 8, 2), jnp.uint32),
            shape((2, 16), jnp.bool_),
        )
        .compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 4096


def test_no_write_has_a_start_that_could_be_shifted():
    # B153: a slice update past the end is moved onto valid rows, or written out of bounds.
    data, stamp = pool()
    one = i32([0])
    text = str(jax.make_jaxpr(pk.copy_pages)(data, stamp, one, one, u32([[0, 0]])))
    args = i32([[1]]), i32([[0]]), np.zeros((L, 1, 1, *ROW), np.float32)
    keep = np.ones((1, 1), bool)
    text += str(jax.make_jaxpr(pk.scatter_rows)(data, stamp, *args, u32([[[0, 0]]]), keep))
    assert "scatter" in text and "dynamic_update_slice" not in text


def test_more_row_numbers_than_int32_are_refused():
    # B145: the check is on shapes, so nothing is allocated.
    shape = jax.ShapeDtypeStruct
    run = partial(jax.eval_shape, pk.gather_rows)
    data, stamp = shape((1, 4, 2**16), jnp.uint8), shape((4, 2), jnp.uint32)
    rest = shape((1, 4), jnp.int32)
    layer, keep = shape((), jnp.int32), shape((1, 4), jnp.bool_)
    with pytest.raises(ValueError, match="`pages` of gather_rows has 32768 columns"):
        run(
            data,
            stamp,
            layer,
            shape((1, 2**15), jnp.int32),
            rest,
            shape((1, 2**15, 2), jnp.uint32),
            keep,
        )


def test_wrong_arguments_are_named():
    data, stamp = pool()
    pages, index = i32([[1, 2, 3]]), i32([[0, 1]])
    expect, keep = u32([[[0, 0]] * 3]), np.ones((1, 2), bool)
    read, write = partial(pk.gather_rows, data), partial(pk.scatter_rows, data, stamp)
    for layer in (-1, L):
        with pytest.raises(ValueError, match="`layer` of gather_rows is"):
            read(stamp, layer, pages, index, expect, keep)
    with pytest.raises(ValueError, match="`stamp` of gather_rows has dtype int32"):
        read(stamp.view(np.int32), 0, pages, index, expect, keep)
    with pytest.raises(ValueError, match="`stamp` of gather_rows has shape"):
        read(stamp[1:], 0, pages, index, expect, keep)
    with pytest.raises(ValueError, match="`index` of gather_rows has dtype"):
        read(stamp, 0, pages, index.astype(jnp.int16), expect, keep)
    with pytest.raises(ValueError, match="`expect` of gather_rows has shape"):
        read(stamp, 0, pages, index, expect[:, :1], keep)
    with pytest.raises(ValueError, match="`keep` of gather_rows has shape"):
        read(stamp, 0, pages, index, expect, keep[:, :1])
    rows = np.zeros((L, 1, 2, *ROW), np.float32)
    with pytest.raises(ValueError, match="`rows` of scatter_rows has dtype float16"):
        write(pages, index, rows.astype(np.float16), expect, keep)
    with pytest.raises(ValueError, match=r"`rows` of scatter_rows has shape .* row=\(3,\)"):
        write(pages, index, rows[..., :2], expect, keep)
    with pytest.raises(ValueError, match="`dst` of copy_pages has shape"):
        pk.copy_pages(data, stamp, i32([1, 2]), i32([1]), u32([[0, 0]] * 2))
