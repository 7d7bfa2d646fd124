"""DeepSeek-V4: the whole model, its cache groups, and loading from a Hugging Face folder.

    model = DeepseekV4.load("examples/checkpoints/dsv4")
    logits, view = model(tokens, view)

The model holds weights only. What it knows of the past comes through `view`, and what it adds goes
into the view it returns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from hkv import _rules as rules
from hkv._layout import Form, Group
from hkv.models._checkpoint import Checkpoint, read_json
from hkv.models._deepseek_v4_config import CSA, HCA, SLIDING
from hkv.models._deepseek_v4_config import DeepseekV4Config as DeepseekV4Config
from hkv.nn import (
    AttentionShape,
    CacheView,
    CompressedSparseAttention,
    HeavilyCompressedAttention,
    HyperConnection,
    HyperHead,
    MoE,
    MoEShape,
    RMSNorm,
    Rotary,
    SlidingAttention,
    Weights,
    random_weights,
)
from hkv.nn._linear import linear
from hkv.nn._weights import Request, widen

Selection = Mapping[str, Mapping[int, jax.Array]]


class Block(nnx.Module):
    """One layer: attention and experts, each between hyper-connections."""

    def __init__(self, weights: Weights, config: DeepseekV4Config, layer: int):
        c = config
        hyper: dict[str, Any] = dict(
            streams=c.hc_mult, hidden=c.hidden_size, iterations=c.hc_sinkhorn_iters,
            floor=c.hc_eps, eps=c.rms_norm_eps,
        )  # fmt: skip
        self.attn_norm = RMSNorm(weights, "attn_norm", c.hidden_size, c.rms_norm_eps)
        self.ffn_norm = RMSNorm(weights, "ffn_norm", c.hidden_size, c.rms_norm_eps)
        self.attn_hyper = HyperConnection(weights, "hc_attn", **hyper)
        self.ffn_hyper = HyperConnection(weights, "hc_ffn", **hyper)
        self.attn = _attention(weights.at("attn"), c, layer)
        self.ffn = MoE(weights.at("ffn"), _moe_shape(c, layer))
        self.layer = layer

    def __call__(
        self,
        streams: jax.Array,
        tokens: jax.Array,
        view: CacheView,
        selection: Selection,
    ) -> tuple[jax.Array, CacheView, dict[str, Any]]:
        """Streams `[Q, T, n, d]` through the layer, the view, and what it chose."""
        notes: dict[str, Any] = {"margin": [], "index": {}, "expert": {}}
        x, post, mix = self.attn_hyper.enter(streams)
        x = self.attn_norm(x)
        if isinstance(self.attn, CompressedSparseAttention):
            forced = selection.get("index", {}).get(self.layer)
            y, view, chosen, margin = self.attn.attend_chosen(x, view, forced)
            notes["index"][self.layer] = chosen
            notes["margin"].append(margin)
        else:
            y, view = self.attn(x, view)
        streams = self.attn_hyper.leave(streams, y, post, mix)
        x, post, mix = self.ffn_hyper.enter(streams)
        forced = selection.get("expert", {}).get(self.layer)
        y, chosen, margin = self.ffn(self.ffn_norm(x), tokens, forced)
        notes["expert"][self.layer] = chosen
        notes["margin"].append(margin)
        return self.ffn_hyper.leave(streams, y, post, mix), view, notes


class DeepseekV4(nnx.Module):
    """The model. A pytree, so it can be an argument of `jax.jit`; see `hkv.nn.bind`."""

    def __init__(self, config: DeepseekV4Config, weights: Weights):
        c = config
        if jax.dtypes.canonicalize_dtype(c.dtype) != jnp.dtype(c.dtype):
            raise ValueError(f"`dtype` is {c.dtype!r}, which needs `jax.enable_x64(True)`")
        self.embed = weights.matrix("embed.weight", c.vocab_size, c.hidden_size)
        self.blocks = nnx.List(
            [Block(weights.at(f"layers.{i}"), c, i) for i in range(len(c.layers))]
        )
        self.hyper_head = HyperHead(
            weights, "hc_head", streams=c.hc_mult, hidden=c.hidden_size, floor=c.hc_eps,
            eps=c.rms_norm_eps,
        )  # fmt: skip
        self.norm = RMSNorm(weights, "norm", c.hidden_size, c.rms_norm_eps)
        self.head = weights.matrix("head.weight", c.vocab_size, c.hidden_size)
        self.config = c

    @classmethod
    def random(cls, config: DeepseekV4Config, key: jax.Array, scale: float = 0.2) -> Self:
        """A model with random weights in the config's dtype; see `hkv.nn.random_weights`."""
        return cls(config, random_weights(key, scale, config.dtype))

    @classmethod
    def load(cls, folder: str | Path, *, dtype: str | None = None) -> Self:
        """A model from a Hugging Face folder: `config.json` and safetensors, whole or sharded.

        Everything is checked before anything is built.

        Args:
            folder: the folder.
            dtype: dtype of the weight matrices in place of the config's; float64 needs x64 mode.

        Raises:
            FileNotFoundError: no folder, or a file missing in it.
            ValueError: another model's config, or tensors that do not fit it.
        """
        folder = Path(folder)
        raw = read_json(folder, "config.json")
        config = DeepseekV4Config.from_dict({**raw, "dtype": dtype} if dtype else raw)
        requests: list[Request] = []

        def record(request: Request) -> jax.ShapeDtypeStruct:
            requests.append(request)
            return jax.ShapeDtypeStruct(request.shape, jnp.float32)

        cls(config, Weights(record))
        checkpoint = Checkpoint(folder, _canonical)
        checkpoint.check(requests)
        return cls(config, Weights(checkpoint.source(config.dtype)))

    def __call__(
        self,
        tokens: jax.Array,
        view: CacheView,
        *,
        selection: Selection | None = None,
        aux: bool = False,
    ) -> tuple[jax.Array, CacheView] | tuple[jax.Array, CacheView, dict[str, Any]]:
        """Runs a chunk of tokens per request.

        Args:
            tokens: `i32[Q, T]`; from `view.count` on they are padding and their logits mean
                nothing.
            view: the cache at `view.position`.
            selection: choices to force, so that runs whose scores differ in rounding can be
                compared: `{"index": {layer: i32[Q, T, K]}, "expert": {layer: i32[Q, T, k]}}`,
                as `aux` returns them. A token's choices must differ, since one named twice
                counts twice. What is left out is chosen as usual.
            aux: also return `{"margin", "index", "expert"}`: the choices made, and per token the
                narrowest one, `[Q, T]`: the smallest difference over all layers between the score
                of the last chosen and of the first rejected index entry or expert.

        Returns:
            Logits `[Q, T, vocabulary]` in float32 or wider, the view with this chunk's rows
            written, and with `aux` its dictionary.
        """
        if unknown := set(selection or {}) - {"index", "expert"}:
            raise ValueError(f"`selection` has {sorted(unknown)}; give 'index' and 'expert' only")
        embed = self.embed[...]
        # An id that the model does not know gives NaN for its request, not another id's answer.
        x = embed.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        streams = jnp.broadcast_to(x[:, :, None], (*x.shape[:2], self.config.hc_mult, x.shape[-1]))
        chosen: dict[str, Any] = {"margin": [], "index": {}, "expert": {}}
        for block in self.blocks:
            streams, view, notes = block(streams, tokens, view, selection or {})
            chosen["margin"] += notes["margin"]
            chosen["index"] |= notes["index"]
            chosen["expert"] |= notes["expert"]
        x = self.norm(self.hyper_head(streams))
        logits = linear(x, self.head, widen(x.dtype))
        if not aux:
            return logits, view
        chosen["margin"] = jnp.stack(chosen["margin"]).min(axis=0)
        return logits, view, chosen


def groups(config: DeepseekV4Config) -> tuple[Group, ...]:
    """What the model keeps, for `hkv.Layout`: windows, histories, tails and indexer keys.

    The model's dtype for what attention reads; float32 or wider for tails, whose gates go through
    a softmax later.
    """
    c = config
    at = {kind: tuple(i for i, k in enumerate(c.layers) if k == kind) for kind in (CSA, HCA)}
    sliding = tuple(i for i, k in enumerate(c.layers) if k == SLIDING)
    dtype, wide = str(jnp.dtype(c.dtype)), str(widen(c.dtype))
    entry = {**_rope(c.rotary_c), "visible": "floor((t+1)/m)", "key_is_value": True}
    raw = {"columns": "value,gate", "bias_added": False}
    halves = {**raw, "halves": "next,own"}
    m, m2, D, D2 = c.csa_ratio, c.hca_ratio, c.head_dim, c.index_head_dim
    key = {**_rope(c.rotary_c), "visible": entry["visible"]}
    every = [
        _group("window", Form.WINDOW, rules.window(c.sliding_window), sliding, (D,), dtype,
               {**_rope(c.rotary), "key_is_value": True}),
        _group("window_c", Form.WINDOW, rules.window(c.sliding_window),
               tuple(sorted(at[CSA] + at[HCA])), (D,), dtype,
               {**_rope(c.rotary_c), "key_is_value": True}),
        _group("csa", Form.COMPRESSED, rules.history(m), at[CSA], (D,), dtype,
               {**entry, "overlap": True}),
        _group("csa_tail", Form.TAIL, rules.tail(m, overlap=True), at[CSA], (2, 2 * D), wide,
               halves),
        _group("csa_index", Form.INDEXER, rules.indexer(m), at[CSA], (D2,), dtype,
               {**key, "overlap": True}),
        _group("csa_index_tail", Form.INDEXER, rules.tail(m, overlap=True), at[CSA], (2, 2 * D2),
               wide, halves),
        _group("hca", Form.COMPRESSED, rules.history(m2), at[HCA], (D,), dtype,
               {**entry, "overlap": False}),
        _group("hca_tail", Form.TAIL, rules.tail(m2), at[HCA], (2, D), wide, raw),
    ]  # fmt: skip
    return tuple(group for group in every if group.layers)


def _group(name, form, rule, layers, row, dtype, meaning) -> Group:
    return Group(name, form, rule, layers, row, dtype, abi=tuple(sorted(meaning.items())))


def _rope(rotary: Rotary) -> dict[str, str | int | float | bool]:
    """What a rotated row means, for its fingerprint."""
    return {"rope": repr(rotary), "rope_at": "last channels, interleaved"}


def _attention(weights: Weights, c: DeepseekV4Config, layer: int) -> SlidingAttention:
    kind = c.layers[layer]
    shape = AttentionShape(
        hidden=c.hidden_size,
        heads=c.num_attention_heads,
        head_dim=c.head_dim,
        q_rank=c.q_lora_rank,
        o_groups=c.o_groups,
        o_rank=c.o_lora_rank,
        window=c.sliding_window,
        rotary=c.rotary if kind == SLIDING else c.rotary_c,
        eps=c.rms_norm_eps,
    )
    if kind == SLIDING:
        return SlidingAttention(weights, shape, layer=layer)
    if kind == HCA:
        return HeavilyCompressedAttention(weights, shape, layer=layer, ratio=c.hca_ratio)
    return CompressedSparseAttention(
        weights, shape, layer=layer, ratio=c.csa_ratio, index_heads=c.index_n_heads,
        index_dim=c.index_head_dim, topk=c.index_topk,
    )  # fmt: skip


def _moe_shape(c: DeepseekV4Config, layer: int) -> MoEShape:
    return MoEShape(
        hidden=c.hidden_size,
        inner=c.moe_intermediate_size,
        experts=c.n_routed_experts,
        topk=c.num_experts_per_tok,
        score=c.scoring_func,
        scaling=c.routed_scaling_factor,
        limit=c.swiglu_limit,
        hashed=c.vocab_size if c.hashed[layer] else 0,
    )


def _canonical(name: str) -> str | None:
    """The published name of a tensor; None for multi-token prediction, which is not loaded."""
    name = name.removeprefix("model.")
    if name.startswith("mtp."):
        return None
    name = re.sub(r"^embed_tokens\.", "embed.", name)
    return re.sub(r"^hc_head\.hc_", "hc_head_", name)


def mini_config(
    hca_ratio: int = 8, *, repeats: int = 1, dtype: str = "float32"
) -> DeepseekV4Config:
    """A six-layer model of every kind of layer, small enough to test with random weights.

    Ratio 8 equals the window, so replaying a window also covers every tail; with 16 it does not.

    Args:
        hca_ratio: tokens per HCA entry.
        repeats: how often the four layers with a history are repeated.
        dtype: dtype of the weight matrices.
    """
    return DeepseekV4Config(
        vocab_size=256, hidden_size=48, moe_intermediate_size=32, num_attention_heads=2,
        head_dim=64, q_lora_rank=32, o_groups=2, o_lora_rank=16,
        layers=(SLIDING, SLIDING, *(CSA, HCA, CSA, HCA) * repeats),
        hashed=(True, *(False,) * (1 + 4 * repeats)),
        csa_ratio=4, hca_ratio=hca_ratio, sliding_window=8,
        index_n_heads=16, index_head_dim=16, index_topk=4,
        rotary=Rotary(16, 10000.0), rotary_c=Rotary(16, 160000.0),
        n_routed_experts=4, num_experts_per_tok=2, hc_mult=2, hc_sinkhorn_iters=2, dtype=dtype,
    )  # fmt: skip
