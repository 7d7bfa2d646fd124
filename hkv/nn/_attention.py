"""DeepSeek-V4's three attentions over one shared key-value head: sliding, CSA and HCA.

All three attend to a sliding window. CSA adds the history entries that an indexer picks, HCA adds
all entries of a coarser history. One softmax with a sink spans both parts. Keys are also values.
Source: DeepSeek-V4 report, https://arxiv.org/abs/2606.19348, section 2.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hkv.nn._compressor import Compressor
from hkv.nn._indexer import Indexer
from hkv.nn._linear import contract, linear
from hkv.nn._norm import RMSNorm, rms_norm
from hkv.nn._rotary import Rotary, rotate
from hkv.nn._view import CacheView, positions, read_rows
from hkv.nn._weights import Weights
from pallas_kernels import Part, attention, history_mask, window_mask


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Sizes of an attention layer.

    Attributes:
        rotary: rotation of queries, window rows and entries of this layer.
        window: positions a token sees, itself included.
    """

    hidden: int
    heads: int
    head_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    rotary: Rotary
    eps: float


def _part(rows: jax.Array, seen: jax.Array) -> Part:
    """Rows `[..., K, D]` as the one key head and its values; `seen` is `bool[Q, T, K]`."""
    rows = rows[..., None, :]
    return Part(rows, rows, seen)


class SlidingAttention(nnx.Module):
    """Attention to the last `window` tokens; the base of the two that add a history."""

    def __init__(
        self, weights: Weights, shape: AttentionShape, *, layer: int, group: str = "window"
    ):
        s = shape
        self.wq_a = weights.matrix("wq_a.weight", s.q_rank, s.hidden)
        self.q_norm = RMSNorm(weights, "q_norm", s.q_rank, s.eps)
        self.wq_b = weights.matrix("wq_b.weight", s.heads * s.head_dim, s.q_rank)
        self.wkv = weights.matrix("wkv.weight", s.head_dim, s.hidden)
        self.kv_norm = RMSNorm(weights, "norm", s.head_dim, s.eps)
        self.wo_a = weights.matrix(
            "wo_a.weight", s.o_groups * s.o_rank, s.heads * s.head_dim // s.o_groups
        )
        self.wo_b = weights.matrix("wo_b.weight", s.hidden, s.o_groups * s.o_rank)
        self.sink = weights.wide("attn_sink", s.heads)
        self.shape, self.layer, self.group = s, layer, group

    def __call__(self, x: jax.Array, view: CacheView) -> tuple[jax.Array, CacheView]:
        """Attends; `x` and the result are `[Q, T, d]`."""
        query, _ = self._query(x, view)
        part, view = self._window(x, view)
        return self._output(query, [part], view), view

    def _query(self, x: jax.Array, view: CacheView) -> tuple[jax.Array, jax.Array]:
        """Rotated queries `[Q, T, H, D]` and the low-rank query `[Q, T, rank]`."""
        s = self.shape
        latent = self.q_norm(linear(x, self.wq_a))
        query = linear(latent, self.wq_b).reshape(*x.shape[:2], s.heads, s.head_dim)
        query = rms_norm(query, s.eps).astype(x.dtype)
        at = positions(view, x.shape[1])
        return rotate(query, at[..., None], s.rotary), latent

    def _window(self, x: jax.Array, view: CacheView) -> tuple[Part, CacheView]:
        """The window's rows `[Q, W - 1 + T, D]` with what each query sees of them."""
        at = positions(view, x.shape[1])
        new = rotate(self.kv_norm(linear(x, self.wkv)), at, self.shape.rotary)
        back = self.shape.window - 1
        reach = jnp.arange(back + x.shape[1], dtype=jnp.int32) - back
        index = view.position[:, None] + reach[None]
        rows, valid = read_rows(view, self.group, self.layer, index, new)
        seen = window_mask(at, index, valid, self.shape.window)
        return _part(rows, seen), view.write(self.group, self.layer, new)

    def _output(
        self,
        query: jax.Array,
        parts: Sequence[Part],
        view: CacheView,
    ) -> jax.Array:
        """Attention over the parts, rotated back, through the grouped projection: `[Q, T, d]`."""
        s = self.shape
        mixed, _ = attention(query, parts, self.sink[...])
        at = positions(view, query.shape[1])
        mixed = rotate(mixed, at[..., None], s.rotary, inverse=True)
        mixed = mixed.reshape(*mixed.shape[:2], s.o_groups, -1)
        down = self.wo_a[...].reshape(s.o_groups, s.o_rank, -1)
        low = contract("qtgi,goi->qtgo", mixed, down)
        return linear(low.reshape(*low.shape[:2], -1), self.wo_b)


class CompressedSparseAttention(SlidingAttention):
    """CSA: the window, and the `topk` history entries an indexer picks for each query."""

    def __init__(
        self,
        weights: Weights,
        shape: AttentionShape,
        *,
        layer: int,
        ratio: int,
        index_heads: int,
        index_dim: int,
        topk: int,
        group: str = "window_c",
        history: str = "csa",
    ):
        super().__init__(weights, shape, layer=layer, group=group)
        common: dict[str, Any] = dict(
            hidden=shape.hidden, ratio=ratio, rotary=shape.rotary, eps=shape.eps, layer=layer
        )
        self.compressor = Compressor(
            weights.at("compressor"), size=shape.head_dim, overlap=True, tail=f"{history}_tail",
            **common,
        )  # fmt: skip
        self.indexer = Indexer(
            weights.at("indexer"), rank=shape.q_rank, heads=index_heads, size=index_dim, topk=topk,
            group=f"{history}_index", **common,
        )  # fmt: skip
        self.ratio, self.history = ratio, history

    def __call__(
        self, x: jax.Array, view: CacheView, selection: jax.Array | None = None
    ) -> tuple[jax.Array, CacheView]:
        """Attends; `x` and the result are `[Q, T, d]`, `selection` as in `attend_chosen`."""
        y, view, _, _ = self.attend_chosen(x, view, selection)
        return y, view

    def attend_chosen(
        self, x: jax.Array, view: CacheView, selection: jax.Array | None = None
    ) -> tuple[jax.Array, CacheView, jax.Array, jax.Array]:
        """Attends and also tells which entries were chosen, and how narrowly.

        Args:
            selection: `i32[Q, T, K]` entry numbers to use in place of the indexer's choice, so
                that two runs can be compared with the same choice. What is not visible is masked.

        Returns:
            `y` `[Q, T, d]`, the view, the chosen entry numbers `i32[Q, T, K]`, and the indexer's
            margin `[Q, T]`.
        """
        query, latent = self._query(x, view)
        part, view = self._window(x, view)
        entries, view = self.compressor(x, view)
        chosen, margin, view = self.indexer(x, latent, view)
        if selection is not None:
            chosen = selection.astype(jnp.int32)
        parts = [part]
        if chosen.shape[-1]:
            flat = chosen.reshape(chosen.shape[0], -1)
            rows, valid = read_rows(view, self.history, self.layer, flat, entries)
            at = positions(view, x.shape[1])
            seen = history_mask(at, chosen, self.ratio, valid.reshape(chosen.shape))
            parts.append(_part(rows.reshape(*chosen.shape, -1), seen))
        view = view.write(self.history, self.layer, entries)
        return self._output(query, parts, view), view, chosen, margin


class HeavilyCompressedAttention(SlidingAttention):
    """HCA: the window, and every entry of a coarse history without overlap."""

    def __init__(
        self,
        weights: Weights,
        shape: AttentionShape,
        *,
        layer: int,
        ratio: int,
        group: str = "window_c",
        history: str = "hca",
    ):
        super().__init__(weights, shape, layer=layer, group=group)
        self.compressor = Compressor(
            weights.at("compressor"), hidden=shape.hidden, size=shape.head_dim, ratio=ratio,
            overlap=False, rotary=shape.rotary, eps=shape.eps, tail=f"{history}_tail", layer=layer,
        )  # fmt: skip
        self.ratio, self.history = ratio, history

    def __call__(self, x: jax.Array, view: CacheView) -> tuple[jax.Array, CacheView]:
        """Attends; `x` and the result are `[Q, T, d]`."""
        query, _ = self._query(x, view)
        part, view = self._window(x, view)
        entries, view = self.compressor(x, view)
        parts, count = [part], view.length // self.ratio
        if count:
            index = jnp.arange(count, dtype=jnp.int32)[None]
            index = jnp.broadcast_to(index, (x.shape[0], count))
            rows, valid = read_rows(view, self.history, self.layer, index, entries)
            at = positions(view, x.shape[1])
            parts.append(_part(rows, history_mask(at, index, self.ratio, valid)))
        view = view.write(self.history, self.layer, entries)
        return self._output(query, parts, view), view
