"""Contract of paged rows: the layout of a pool, and what is read, written, dropped or refused.

Letters: L layers of the group, P pages, R rows per page, `*row` the shape of one row, Q requests,
C columns of a block table, K rows read or written per request.

A pool is `data [L, P, R, *row]` with one stamp per page, `stamp u32[P, 2]`, the words (segment,
version) of what was last written there. Page 0 is the null page: never read, never written. A
request's block table `pages i32[Q, C]` lists its pages in order, so row number n of a request
lives at page `pages[q, n // R]`, row `n % R`. A column without a page holds P or 0.

Example: P = 5, R = 4, a request with pages (3, 1, 5) in C = 3 columns. Row numbers 0..3 are rows
0..3 of page 3, row number 6 is row 2 of page 1, row numbers 8..11 have no page (5 is P), and
row numbers -1 and 12 are outside the table. If the request expects stamps (7, 1), (7, 2) in its
first two columns and page 1 now holds stamp (9, 1), row numbers 4..7 are refused and 0..3 are not.

`layer` counts in the group's own layer axis, not in the model. The pool's rows are addressed by
layer, page and row separately, so int32 indices suffice for pools of more than 2**31 elements.
"""

from typing import Final

import jax
import jax.numpy as jnp

from pallas_kernels._check import Shapes
from pallas_kernels._dispatch import choose
from pallas_kernels.paged_rows import xla

ABI: Final = 1


def gather_rows(
    data: jax.Array,
    stamp: jax.Array,
    layer: int | jax.Array,
    pages: jax.Array,
    index: jax.Array,
    expect: jax.Array,
    keep: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Reads rows of one layer through block tables.

    A row is ok if it is kept, its number lies in `[0, C * R)`, its page in `[1, P)`, and both
    words of the page's stamp are the expected ones. Rows that are not ok are zeros.
    The pool is not copied, also not one layer of it.

    Args:
      data: pool `[L, P, R, *row]`.
      stamp: stamps of its pages, u32 `[P, 2]`.
      layer: index into L, a Python integer or an i32 scalar; an array outside `[0, L)` makes no
        row ok.
      pages: block tables, i32 `[Q, C]`.
      index: row numbers, i32 `[Q, K]`.
      expect: stamps the caller has verified, u32 `[Q, C, 2]`.
      keep: rows wanted, bool `[Q, K]`.
      implementation: "xla", or None for the preferred one.

    Returns:
      rows: `[Q, K, *row]` in the dtype of `data`.
      ok: bool `[Q, K]`.

    Raises:
      ValueError: shapes or dtypes disagree, a Python `layer` is outside `[0, L)`, or
        `implementation` is unknown.
    """
    run = choose("gather_rows", implementation, {"xla": xla.gather_rows})
    shapes = _bind("gather_rows", data, stamp, pages, index, expect, keep)
    if isinstance(layer, int):
        if not 0 <= layer < shapes["L"]:
            raise ValueError(f"`layer` of gather_rows is {layer}, expected [0, {shapes['L']}).")
    number = jnp.int32(layer) if isinstance(layer, int) else layer
    shapes.bind("layer", number, "", jnp.int32)
    return run(data, stamp, number, pages, index, expect, keep)


def scatter_rows(
    data: jax.Array,
    stamp: jax.Array,
    pages: jax.Array,
    index: jax.Array,
    rows: jax.Array,
    expect: jax.Array,
    keep: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes rows of all layers, and the stamps of the pages they go to, in one program.

    In place if the caller's outermost jit donates `data` and `stamp`. Dropped: rows that are not
    kept, with a number outside `[0, C * R)`, or with a page outside `[1, P)`. A page that
    receives no row keeps its stamp. No two kept rows may go to the same row of a page, and two
    requests that write to one page must expect the same stamp: which one wins is not defined.

    Args:
      data: pool `[L, P, R, *row]`.
      stamp: stamps of its pages, u32 `[P, 2]`.
      pages: block tables, i32 `[Q, C]`.
      index: row numbers, i32 `[Q, K]`.
      rows: new rows `[L, Q, K, *row]` in the dtype of `data`.
      expect: stamps that pages written to get, u32 `[Q, C, 2]`.
      keep: rows to write, bool `[Q, K]`.
      implementation: "xla", or None for the preferred one.

    Returns:
      data and stamp after the write.

    Raises:
      ValueError: shapes or dtypes disagree, or `implementation` is unknown.
    """
    run = choose("scatter_rows", implementation, {"xla": xla.scatter_rows})
    shapes = _bind("scatter_rows", data, stamp, pages, index, expect, keep)
    shapes.bind("rows", rows, "L Q K *row", jnp.result_type(data))
    return run(data, stamp, pages, index, rows, expect, keep)


def copy_pages(
    data: jax.Array,
    stamp: jax.Array,
    src: jax.Array,
    dst: jax.Array,
    expect: jax.Array,
    *,
    src_expect: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Copies pages of all layers (copy on write) and stamps the copies.

    All sources are read before a copy is written. In place if the caller's outermost jit donates
    `data` and `stamp`, with room for K pages beside the pool. Dropped: copies whose `src` or
    `dst` lies outside `[1, P)`, or whose source does not carry the stamp in `src_expect`; their
    `dst` keeps its content and its stamp. No two copies kept may have the same `dst`.

    Args:
      data: pool `[L, P, R, *row]`.
      stamp: stamps of its pages, u32 `[P, 2]`.
      src: pages to copy, i32 `[K]`.
      dst: pages that receive them, i32 `[K]`; P or 0 for none.
      expect: stamps that the copies get, u32 `[K, 2]`.
      src_expect: stamps the caller has verified on the sources, u32 `[K, 2]`; None to copy
        unchecked.
      implementation: "xla", or None for the preferred one.

    Returns:
      data and stamp after the copies.

    Raises:
      ValueError: shapes or dtypes disagree, or `implementation` is unknown.
    """
    run = choose("copy_pages", implementation, {"xla": xla.copy_pages})
    shapes = Shapes("copy_pages")
    shapes.bind("data", data, "L P R *row")
    shapes.bind("stamp", stamp, "P 2", jnp.uint32)
    shapes.bind("src", src, "K", jnp.int32)
    shapes.bind("dst", dst, "K", jnp.int32)
    shapes.bind("expect", expect, "K 2", jnp.uint32)
    if src_expect is not None:
        shapes.bind("src_expect", src_expect, "K 2", jnp.uint32)
    return run(data, stamp, src, dst, expect, src_expect)


def _bind(operation, data, stamp, pages, index, expect, keep) -> Shapes:
    shapes = Shapes(operation)
    shapes.bind("data", data, "L P R *row")
    shapes.bind("stamp", stamp, "P 2", jnp.uint32)
    shapes.bind("pages", pages, "Q C", jnp.int32)
    shapes.bind("index", index, "Q K", jnp.int32)
    shapes.bind("expect", expect, "Q C 2", jnp.uint32)
    shapes.bind("keep", keep, "Q K", jnp.bool_)
    if shapes["C"] * shapes["R"] >= 2**31:
        raise ValueError(
            f"`pages` of {operation} has {shapes['C']} columns of {shapes['R']} rows, "
            "more row numbers than int32 can tell apart."
        )
    return shapes
