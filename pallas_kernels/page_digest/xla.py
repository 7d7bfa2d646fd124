"""The page digest in plain XLA: the reference for every kernel of this operation."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._index import take

# (seed, m1, m2) of each lane, and the steps of layer, row number and element.
_LANES = ((0x5BD1E995, 0x85EBCA6B, 0xC2B2AE35), (0x27D4EB2F, 0x7FEB352D, 0x846CA68B))
_LAYER, _ROW, _ELEMENT = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77), np.uint32(0xC2B2AE3D)


def digest_pages(data, pages, lo, hi):
    """See `contract.digest_pages`; arguments are checked."""
    layers, count, rows_per_page = data.shape[:3]
    columns = pages.shape[1]
    lo = jnp.clip(lo, 0, columns * rows_per_page)
    hi = jnp.clip(hi, 0, columns * rows_per_page)
    some = lo < hi
    first = jnp.min(jnp.where(some, lo, columns * rows_per_page) // rows_per_page, initial=columns)
    # Not ceil(hi / R) by adding R - 1, which could overflow.
    last = jnp.max(jnp.where(some, (hi - 1) // rows_per_page + 1, 0), initial=0)

    layer = jnp.arange(layers, dtype=jnp.uint32)[:, None, None]
    row = jnp.arange(rows_per_page, dtype=jnp.int32)

    def add_column(column, digest):
        page = jax.lax.dynamic_index_in_dim(pages, column, axis=1, keepdims=False)
        number = column * rows_per_page + row
        wanted = (lo[:, None] <= number[None]) & (number[None] < hi[:, None])
        held = ((page > 0) & (page < count))[:, None]
        # Tied to this step: XLA on a CPU reads some floats through a wider type, and would
        # otherwise widen the whole pool once before the loop.
        pool, page = jax.lax.optimization_barrier((data, page))
        words = _words(take(pool, (slice(None), page), 0))
        step = jnp.arange(words.shape[-1], dtype=jnp.uint32) * _ELEMENT
        sums = []
        for seed, m1, m2 in _LANES:
            key = _fmix(np.uint32(seed) + layer * _LAYER, m1, m2)
            key = _fmix(key + number.astype(jnp.uint32)[None, None] * _ROW, m1, m2)
            terms = _fmix(words ^ (key[..., None] + step[None, None, None]), m1, m2)
            total = jnp.sum(terms, axis=-1, dtype=jnp.uint32)
            total = jnp.where(held[None], total, key)
            total = jnp.where(wanted[None], total, np.uint32(0))
            sums.append(jnp.sum(total, axis=(0, 2), dtype=jnp.uint32))
        return digest + jnp.stack(sums, axis=-1)

    empty = jnp.zeros((pages.shape[0], 2), jnp.uint32)
    return jax.lax.fori_loop(first, last, add_column, empty)


def _words(pages):
    """Bits of `[L, Q, R, *row]` as u32 `[L, Q, R, elements]`, two words for 8-byte elements."""
    if pages.dtype == jnp.bool_:
        pages = pages.astype(jnp.uint8)
    size = pages.dtype.itemsize
    word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[size]
    bits = jax.lax.bitcast_convert_type(pages, word).astype(jnp.uint32)
    return bits.reshape(*pages.shape[:3], -1 if bits.size else 0)


def _fmix(x, m1, m2):
    """Bijective mix of uint32."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(m1)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(m2)
    return x ^ (x >> np.uint32(16))
