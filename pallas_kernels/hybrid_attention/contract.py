"""Contract of attention over parts: one softmax over the rows of all parts.

A part is what one cache form contributes: window rows, compressed history, rows picked by an
indexer, rows of the chunk itself. Knows nothing of where the rows were stored.

Letters: Q requests, T tokens of the chunk, H query heads, D head size of queries and keys, Dv head
size of values, K rows of a part, G key/value heads of a part (H is a multiple of G; query head h
reads head h // (H / G)).

Example: H = 4, G = 2, parts of K = 3 and K = 2 rows. Query heads 0 and 1 read key head 0, heads 2
and 3 read key head 1, and each softmax has 5 terms, 6 with a sink. With logits log(1), log(2),
log(3) in the first part, log(4) in the second, its last row masked, and a sink of log(5), the
weights are 1/15, 2/15, 3/15, 4/15 and 0, and `lse` is log(15): the sink takes 5/15 and adds
nothing to the output.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels._check import Shapes
from pallas_kernels._dispatch import choose
from pallas_kernels.hybrid_attention import xla

ABI: Final = 1


class Part(NamedTuple):
    """Rows that one cache form contributes to the softmax."""

    k: jax.Array  # [Q, K, G, D] shared by the chunk's queries, or [Q, T, K, G, D]
    v: jax.Array  # [Q, K, G, Dv] or [Q, T, K, G, Dv], of the same kind as k
    mask: jax.Array  # bool[Q, T, K], True where the query may see the row


def attention(
    q: jax.Array,
    parts: Sequence[Part],
    sinks: jax.Array | None = None,
    scale: float | None = None,
    *,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention over the rows of all parts together.

    A row that is masked for a query has no influence on that query, whatever its k and v hold,
    NaN and infinities included. A visible row with a value that is not finite makes `out` and
    `lse` NaN for the queries and heads that see it. A query that sees no row gets zeros.
    The reference holds the logits, `Q * T * H * sum(K)` values of the accumulator's dtype.

    Args:
      q: queries `[Q, T, H, D]`.
      parts: at least one `Part`; sizes K and G may differ between parts.
      sinks: one logit per query head `[H]`, added to the softmax's denominator only.
      scale: factor of the logits, `D ** -0.5` if None.
      out_dtype: dtype of `out`, that of `q` if None.
      implementation: "xla", or None for the preferred one.

    Returns:
      out: `[Q, T, H, Dv]`.
      lse: `[Q, T, H]`, logarithm of the softmax's denominator with the sink, -inf where it is
        zero; float32, or float64 if an input is.

    Raises:
      ValueError: shapes or dtypes disagree, `parts` is empty, or `implementation` is unknown.

    Source: sinks as in DeepSeek-V4 (arXiv 2606.19348, 2.3.3).
    """
    run = choose("attention", implementation, {"xla": xla.attention})
    shapes = Shapes("attention")
    shapes.bind("q", q, "Q T H D")
    if sinks is not None:
        shapes.bind("sinks", sinks, "H")
    if not parts:
        raise ValueError("`parts` of attention is empty, expected at least one Part.")
    for number, part in enumerate(parts):
        prefix = "Q T" if jnp.ndim(part.k) == 5 else "Q"
        rows, heads = f"K{number}", f"G{number}"
        shapes.bind(f"parts[{number}].k", part.k, f"{prefix} {rows} {heads} D")
        shapes.bind(f"parts[{number}].v", part.v, f"{prefix} {rows} {heads} Dv")
        shapes.bind(f"parts[{number}].mask", part.mask, f"Q T {rows}", jnp.bool_)
        if shapes[heads] == 0 or shapes["H"] % shapes[heads]:
            raise ValueError(
                f"`parts[{number}].k` of attention has {shapes[heads]} heads, "
                f"which do not divide the {shapes['H']} heads of `q`."
            )
    scale = shapes["D"] ** -0.5 if scale is None else scale
    out_dtype = jnp.result_type(q) if out_dtype is None else out_dtype
    return run(q, tuple(parts), sinks, scale, out_dtype)


def merge(outs: Sequence[jax.Array], lses: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Joins attention results over disjoint sets of rows as if there had been one softmax.

    At most one of the results may have been computed with sinks, or they count more than once.

    Args:
      outs: `[Q, T, H, Dv]` each.
      lses: `[Q, T, H]` each. Where one is -inf, its `out` is ignored, whatever it holds.

    Returns:
      out: `[Q, T, H, Dv]` in the dtype of `outs[0]`.
      lse: `[Q, T, H]`, float32, or float64 if an input is.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"`outs` of merge has {len(outs)} and `lses` {len(lses)} arrays, "
            "expected the same number, at least one."
        )
    shapes = Shapes("merge")
    for number, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        shapes.bind(f"outs[{number}]", out, "Q T H Dv")
        shapes.bind(f"lses[{number}]", lse, "Q T H")
    return xla.merge(tuple(outs), tuple(lses))
