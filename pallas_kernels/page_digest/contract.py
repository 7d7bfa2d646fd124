"""Contract of the page digest: 64 bits that tell whether cached rows still hold the same bits.

Letters as in `paged_rows`: L layers, P pages, R rows per page, Q requests, C columns. A check
against accidents (a lost write, a bad copy, a wrong restore), not against an adversary.

The digest of a range of rows is, for each of two lanes, the sum modulo 2**32 of one uint32 term
per element:

    row_key = fmix(fmix(seed + layer * 0x9E3779B1) + n * 0x85EBCA77)
    term    = fmix(word ^ (row_key + e * 0xC2B2AE3D))
    fmix(x) : x ^= x >> 16; x *= m1; x ^= x >> 13; x *= m2; x ^= x >> 16

with n the row number relative to the block table and e the element's index in its row. `word` is
the element's bits, zero-extended; an 8-byte element gives two words, low half first, with indices
2 e and 2 e + 1. `(seed, m1, m2)` is (0x5BD1E995, 0x85EBCA6B, 0xC2B2AE35) in the first lane and
(0x27D4EB2F, 0x7FEB352D, 0x846CA68B) in the second.

So the digest depends on bits (+0 and -0 differ), layer, row number and element, and not on which
pages hold the rows. It is additive: the digests of [a, b) and [b, c) sum to that of [a, c), and
an empty range gives 0. A row in the range without a page in `[1, P)` adds, instead of its
elements, one term that rows of zeros do not have: `row_key` itself.

Example: uint8, L = 1, R = 2, rows of one element, a request whose only page holds 5 and 6, the
range [0, 2). In the first lane the row keys are fmix(fmix(0x5BD1E995)) and
fmix(fmix(0x5BD1E995) + 0x85EBCA77), the terms fmix(5 ^ first key) and fmix(6 ^ second key).
The digest is (0xE31947E3, 0xB488C4D4).

Source: fmix is the finaliser of MurmurHash3 (Austin Appleby, public domain); the second lane's
multipliers are those of "lowbias32" (Chris Wellons, public domain).
"""

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._check import Shapes
from pallas_kernels._dispatch import choose
from pallas_kernels.page_digest import xla

ABI: Final = 1


def digest_pages(
    data: jax.Array,
    pages: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Digest of the rows with a number in `[lo, hi)`, over all layers.

    Rows outside the range may hold anything. Row numbers outside `[0, C * R)` do not exist and
    add nothing. The reference works through the columns from the first to the last that a
    request needs and holds one page per request and layer at a time: up to three uint32 arrays of
    `L * Q * R` rows (six for 8-byte elements), whatever C is.

    Args:
      data: pool `[L, P, R, *row]`; elements of 1, 2, 4 or 8 bytes.
      pages: block tables, i32 `[Q, C]`.
      lo: first row number, i32 `[Q]`.
      hi: row number after the last, i32 `[Q]`.
      implementation: "xla", or None for the preferred one.

    Returns:
      u32 `[Q, 2]`.

    Raises:
      ValueError: shapes or dtypes disagree, elements are complex or smaller than a byte, or
        `implementation` is unknown.
    """
    run = choose("digest_pages", implementation, {"xla": xla.digest_pages})
    shapes = Shapes("digest_pages")
    shapes.bind("data", data, "L P R *row")
    shapes.bind("pages", pages, "Q C", jnp.int32)
    shapes.bind("lo", lo, "Q", jnp.int32)
    shapes.bind("hi", hi, "Q", jnp.int32)
    dtype = jnp.result_type(data)
    if jnp.issubdtype(dtype, np.complexfloating) or jnp.dtype(dtype).name in _BELOW_A_BYTE:
        raise ValueError(
            f"`data` of digest_pages has dtype {dtype}, expected elements of 1, 2, 4 or 8 bytes: "
            "view it as uint8 before the call."
        )
    if shapes["C"] * shapes["R"] >= 2**31:
        raise ValueError(
            f"`pages` of digest_pages has {shapes['C']} columns of {shapes['R']} rows, "
            "more row numbers than int32 can tell apart."
        )
    return run(data, pages, lo, hi)


# NumPy stores these one to a byte, XLA packs them.
_BELOW_A_BYTE = ("int1", "uint1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn")
