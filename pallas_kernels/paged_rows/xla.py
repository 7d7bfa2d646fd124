"""Paged rows in plain XLA: the reference for every kernel of this operation."""

import jax
import jax.numpy as jnp

from pallas_kernels._index import put, take


def gather_rows(data, stamp, layer, pages, index, expect, keep):
    """See `contract.gather_rows`; arguments are checked."""
    layers, count, rows_per_page = data.shape[:3]
    held = take(stamp, pages, 0)
    fresh = _real(pages, count) & jnp.all(held == expect, axis=-1)
    request, column, row = _locate(index, pages.shape[1], rows_per_page)
    ok = keep & take(fresh, (request, column), False) & (0 <= layer) & (layer < layers)
    page = jnp.where(ok, take(pages, (request, column), count), count)
    # One gather over three axes: `data[layer]` first would copy a layer of the pool.
    layer = jnp.broadcast_to(layer, page.shape)
    return take(data, (layer, page, row), 0), ok


def scatter_rows(data, stamp, pages, index, rows, expect, keep):
    """See `contract.scatter_rows`; arguments are checked."""
    count, rows_per_page = data.shape[1:3]
    request, column, row = _locate(index, pages.shape[1], rows_per_page)
    page = take(pages, (request, column), count)
    page = jnp.where(keep & _real(page, count), page, count)
    written = take(expect, (request, column), 0)
    return put(data, (slice(None), page, row), rows), put(stamp, page, written)


def copy_pages(data, stamp, src, dst, expect, src_expect):
    """See `contract.copy_pages`; arguments are checked."""
    count = data.shape[1]
    held = _real(src, count) & _real(dst, count)
    if src_expect is not None:
        held = held & jnp.all(take(stamp, src, 0) == src_expect, axis=-1)
    dst = jnp.where(held, dst, count)
    copies = take(data, (slice(None), src), 0)
    return put(data, (slice(None), dst), copies), put(stamp, dst, expect)


def _real(page, count):
    """Pages that hold rows: not the null page, not outside the pool."""
    return (page > 0) & (page < count)


def _locate(index, columns, rows_per_page):
    """Request, column and row of row numbers, all `[Q, K]`; column C if outside the table."""
    request = jax.lax.broadcasted_iota(jnp.int32, index.shape, 0)
    inside = (index >= 0) & (index < columns * rows_per_page)
    column = jnp.where(inside, index // rows_per_page, columns)
    return request, column, index % rows_per_page
