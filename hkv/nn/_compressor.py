"""The learned compressor: `m` tokens become one history entry, with optional overlap.

Each token gives a value row and a gate row. An entry is the per-channel softmax-weighted sum of
the rows it folds. With overlap every row has two halves: the first half of the channels is used by
the next entry, the second by the token's own entry, so an entry folds `2 * m` rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from hkv.nn._linear import linear
from hkv.nn._norm import RMSNorm
from hkv.nn._rotary import Rotary, rotate
from hkv.nn._view import CacheView, read_rows
from hkv.nn._weights import Weights, widen
from pallas_kernels import compress


class Compressor(nnx.Module):
    """Projects tokens to tail rows and folds complete windows into normed, rotated entries.

    Attributes:
        tail: name of the group that holds the open rows, `(2, C)` each: value, and gate without
            its bias, in float32 or wider because a softmax over many gates follows.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        hidden: int,
        size: int,
        ratio: int,
        overlap: bool,
        rotary: Rotary,
        eps: float,
        tail: str,
        layer: int,
    ):
        channels = 2 * size if overlap else size
        self.wkv = weights.matrix("wkv.weight", channels, hidden)
        self.wgate = weights.matrix("wgate.weight", channels, hidden)
        self.ape = weights.wide("ape", ratio, channels)
        self.norm = RMSNorm(weights, "norm", size, eps)
        self.ratio, self.overlap, self.rotary = ratio, overlap, rotary
        self.tail, self.layer = tail, layer

    def __call__(self, x: jax.Array, view: CacheView) -> tuple[jax.Array, CacheView]:
        """The entries this chunk may complete.

        Args:
            x: `[Q, T, d]`, the layer's input.
            view: the cache; the new tail rows are written to it.

        Returns:
            Entries `[Q, T // m + 1, D]` in the dtype of `x`, the first with number
            `position // m`, and the view. An entry whose window is still open is zeros, and never
            valid in a view.
        """
        m, before = self.ratio, int(self.overlap)
        entries = x.shape[1] // m + 1
        wide = widen(x.dtype)
        new = jnp.stack([linear(x, self.wkv, wide), linear(x, self.wgate, wide)], axis=2)
        first = view.position // m
        start = (first - before) * m
        index = start[:, None] + jnp.arange((entries + before) * m, dtype=jnp.int32)[None]
        rows, valid = read_rows(view, self.tail, self.layer, index, new)
        # An entry needs its whole window, and the window before it whole or not at all.
        whole = valid.reshape(valid.shape[0], -1, m).all(axis=-1)
        folded = compress(
            rows[:, :, 0], rows[:, :, 1], whole, self.ape[...], ratio=m, overlap=self.overlap
        )
        at = (first[:, None] + jnp.arange(entries, dtype=jnp.int32)[None]) * m
        entry = rotate(self.norm(folded.astype(x.dtype)), at, self.rotary)
        return entry, view.write(self.tail, self.layer, new)
