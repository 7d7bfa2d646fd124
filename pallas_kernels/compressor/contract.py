"""Contract of the compressor: softmax pooling of m token rows into one entry, per channel.

Covers what lies between the projections and the norm; rotation and quantisation come after.
Letters: Q requests, E entries made, m tokens per entry, D channels of an entry, C channels of a
token row (D, or 2 * D with overlap), N = E windows, or E + 1 with overlap.

Without overlap entry i pools the m rows of window i. With overlap the input starts one window
earlier and entry i pools 2 * m rows: channels [:D] of window i (the one before its own) and
channels [D:] of window i + 1 (its own). So a token serves its own window by the upper half and the
next window by the lower half.

Example: m = 2, D = 1, overlap, E = 1, gates and bias zero, kv rows (1, 10), (2, 20), (3, 30),
(4, 40). The entry is the mean of 1, 2 (lower half, previous window) and 30, 40 (upper half, own
window), 18.25. With the previous window not valid, as at the start of a sequence, it is 35.

Source: DeepSeek-V4 report (arXiv 2606.19348, 2.3.1, 2.3.2); the halves are ordered as in its
released code, which is the reverse of the report's letters a and b.
"""

from typing import Final

import jax
import jax.numpy as jnp

from pallas_kernels._check import Shapes, positive
from pallas_kernels._dispatch import choose
from pallas_kernels.compressor import xla

ABI: Final = 1


def compress(
    kv: jax.Array,
    gate: jax.Array,
    valid: jax.Array,
    bias: jax.Array | None,
    *,
    ratio: int,
    overlap: bool,
    implementation: str | None = None,
) -> jax.Array:
    """Pools token rows into entries.

    Args:
      kv: token rows `[Q, N * m, C]`, in order, the first at the start of a window.
      gate: logits of the rows, shaped like `kv`.
      valid: complete windows, bool `[Q, N]`. Rows of a window that is not valid take no part,
        whatever they hold; an entry whose own window is not valid is zeros.
      bias: added to the gates by place in the window, `[m, C]`; None if the gates contain it.
      ratio: m, tokens per entry.
      overlap: whether an entry pools the previous window too; then N is E + 1.
      implementation: "xla", or None for the preferred one.

    Returns:
      Entries `[Q, E, D]`, float32, or float64 if an input is.

    Raises:
      ValueError: shapes disagree or `implementation` is unknown.
    """
    run = choose("compress", implementation, {"xla": xla.compress})
    ratio = positive("compress", "ratio", ratio)
    shapes = Shapes("compress")
    shapes.bind("kv", kv, "Q rows C")
    shapes.bind("gate", gate, "Q rows C")
    if shapes["rows"] % ratio:
        raise ValueError(
            f"`kv` of compress has {shapes['rows']} rows, expected a multiple of `ratio` {ratio}."
        )
    windows = shapes["rows"] // ratio
    if overlap and windows == 0:
        raise ValueError("`kv` of compress is empty, expected one window more than entries.")
    if overlap and shapes["C"] % 2:
        raise ValueError(
            f"`kv` of compress has {shapes['C']} channels, expected two halves with `overlap`."
        )
    shapes.bind("valid", valid, f"Q {windows}", jnp.bool_)
    if bias is not None:
        shapes.bind("bias", bias, f"{ratio} C")
    return run(kv, gate, valid, bias, ratio, overlap)
