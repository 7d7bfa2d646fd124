"""Reads and checks a DeepSeek-V4 `config.json`, in both of the styles in circulation.

The newer style names `layer_types`, `compress_rates` and nested `rope_parameters`; published
checkpoints give `compress_ratios`, `num_hash_layers` and a flat `rope_scaling`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from hkv._arguments import check_type
from hkv.nn import Rotary, Yarn
from hkv.nn._moe import SCORES

SLIDING = "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
_KINDS = (SLIDING, CSA, HCA)
_CSA_RATIO = 4  # what a `compress_ratios` list means by CSA; other ratios are HCA
_HASHED = "hash_moe"

# Settings with one supported value: another would change the arithmetic unnoticed.
_FIXED = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


@dataclasses.dataclass(frozen=True)
class DeepseekV4Config:
    """Everything a DeepSeek-V4 is built from.

    Attributes:
        layers: kind of attention per layer: "sliding_attention", "compressed_sparse_attention" or
            "heavily_compressed_attention".
        hashed: per layer, whether token ids choose the experts.
        csa_ratio: tokens per CSA entry, m.
        hca_ratio: tokens per HCA entry, m'.
        rotary: rotation in sliding layers.
        rotary_c: rotation in CSA and HCA layers and in the indexer.
        dtype: dtype of the weight matrices; norms, softmax and running states are float32 or wider.

    Raises:
        ValueError: a number that makes no sense, alone or beside the others.
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    layers: tuple[str, ...]
    hashed: tuple[bool, ...]
    csa_ratio: int
    hca_ratio: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rotary: Rotary
    rotary_c: Rotary
    n_routed_experts: int
    num_experts_per_tok: int
    scoring_func: str = "sqrtsoftplus"
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    dtype: str = "float32"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                _integer(field.name, value)
            elif field.type == "float":
                _number(field.name, value)
        if not self.layers or any(kind not in _KINDS for kind in self.layers):
            raise ValueError(f"`layers` is {self.layers}; name one of {_KINDS} per layer")
        if len(self.hashed) != len(self.layers):
            raise ValueError(
                f"`hashed` has {len(self.hashed)} entries for {len(self.layers)} layers; "
                "give one per layer"
            )
        if self.num_attention_heads * self.head_dim % self.o_groups:
            raise ValueError(
                f"`o_groups` is {self.o_groups}, which does not divide num_attention_heads * "
                f"head_dim = {self.num_attention_heads * self.head_dim}; use a divisor"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"`num_experts_per_tok` is {self.num_experts_per_tok}, more than "
                f"n_routed_experts {self.n_routed_experts}; choose at most all of them"
            )
        if not isinstance(self.scoring_func, str) or self.scoring_func not in SCORES:
            raise ValueError(f"`scoring_func` is {self.scoring_func!r}; use one of {list(SCORES)}")
        for name in ("rotary", "rotary_c"):
            size, theta = getattr(self, name).size, getattr(self, name).theta
            _number(f"{name} theta", theta)
            most = self.head_dim
            if name == "rotary_c" and CSA in self.layers:
                most = min(most, self.index_head_dim)
            if size < 2 or size % 2 or size > most:
                raise ValueError(
                    f"`{name}` turns {size} channels; give an even number from 2 to {most}, the "
                    "smaller of head_dim and index_head_dim"
                )
        if not jnp.issubdtype(_dtype(self.dtype), jnp.floating):
            raise ValueError(f"`dtype` is {self.dtype!r}; use a floating dtype such as 'float32'")

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DeepseekV4Config:
        """From the contents of `config.json`.

        Raises:
            ValueError: another model's file, a missing or unsupported setting.
        """
        check_type("raw", raw, Mapping)
        if raw.get("model_type") != "deepseek_v4":
            raise ValueError(
                f"`model_type` is {raw.get('model_type')!r}; this loader reads 'deepseek_v4'"
            )
        if raw.get("quantization_config"):
            raise ValueError(
                f"`quantization_config` is {raw['quantization_config']!r}; dequantise the "
                "checkpoint to a float dtype first"
            )
        for name, only in _FIXED.items():
            if raw.get(name, only) != only:
                raise ValueError(f"`{name}` is {raw[name]!r}; only {only!r} is supported")
        count = _integer("num_hidden_layers", _need(raw, "num_hidden_layers"))
        layers, csa, hca = _layers(raw, count)
        rotary, rotary_c = _rotaries(raw)
        given: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            name = field.name
            if name in _DERIVED:
                continue
            if field.default is dataclasses.MISSING:
                _need(raw, name)
            if name in raw:
                whole = field.type == "float" and _is_number(raw[name])
                given[name] = float(raw[name]) if whole else raw[name]
        return cls(
            **given,
            layers=layers,
            hashed=_hashed(raw, count),
            csa_ratio=csa,
            hca_ratio=hca,
            rotary=rotary,
            rotary_c=rotary_c,
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        )


_DERIVED = {"layers", "hashed", "csa_ratio", "hca_ratio", "rotary", "rotary_c", "dtype"}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _need(raw: Mapping[str, Any], name: str) -> Any:
    if raw.get(name) is None:
        raise ValueError(f"`{name}` is missing from the config; add it")
    return raw[name]


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`{name}` is {value!r}; give an int of 1 or more")
    return value


def _number(name: str, value: Any) -> float:
    if not _is_number(value) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"`{name}` is {value!r}; give a finite number above 0")
    return float(value)


def _dtype(name: str) -> Any:
    try:
        check_type("dtype", name, str)
        return jnp.dtype(name)
    except TypeError:
        raise ValueError(f"`dtype` is {name!r}; use a dtype such as 'float32'") from None


def _layers(raw: Mapping[str, Any], count: int) -> tuple[tuple[str, ...], int, int]:
    """Kinds of attention per layer, and the two ratios."""
    rates = raw.get("compress_rates") or {}
    check_type("compress_rates", rates, Mapping)
    csa = rates.get(CSA, raw.get("compress_rate_csa", _CSA_RATIO))
    hca = rates.get(HCA, raw.get("compress_rate_hca", 128))
    if raw.get("layer_types") is not None:
        kinds = tuple(raw["layer_types"])
    else:
        # The list goes on over the blocks of multi-token prediction, which are not loaded.
        ratios = list(_need(raw, "compress_ratios"))
        extra = int(raw.get("num_nextn_predict_layers") or 0)
        if not count <= len(ratios) <= count + extra:
            raise ValueError(
                f"`compress_ratios` has {len(ratios)} entries for {count} layers and {extra} of "
                "multi-token prediction; give one per layer"
            )
        ratios = ratios[:count]
        coarse = sorted({r for r in ratios if r not in (0, csa)})
        if len(coarse) > 1:
            raise ValueError(
                f"`compress_ratios` mixes {coarse} beside 0 and {csa}; one HCA ratio is supported"
            )
        hca = coarse[0] if coarse else hca
        kinds = tuple(SLIDING if r == 0 else CSA if r == csa else HCA for r in ratios)
    if len(kinds) != count:
        raise ValueError(
            f"`layer_types` has {len(kinds)} entries for num_hidden_layers {count}; make them equal"
        )
    return kinds, _integer("compress_rates of CSA", csa), _integer("compress_rates of HCA", hca)


def _hashed(raw: Mapping[str, Any], count: int) -> tuple[bool, ...]:
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        first = int(raw.get("num_hash_layers", 3))
        return tuple(i < first for i in range(count))
    if len(kinds) != count or any(kind not in (_HASHED, "moe") for kind in kinds):
        raise ValueError(
            f"`mlp_layer_types` is {kinds}; give {count} entries of {_HASHED!r} or 'moe'"
        )
    return tuple(kind == _HASHED for kind in kinds)


def _rotaries(raw: Mapping[str, Any]) -> tuple[Rotary, Rotary]:
    """The rotations of sliding layers and of layers with a history."""
    head = _integer("head_dim", _need(raw, "head_dim"))
    share = raw.get("partial_rotary_factor")
    if share is None:
        share = _integer("qk_rope_head_dim", raw.get("qk_rope_head_dim", 64)) / head
    params = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    check_type("rope_parameters", params, Mapping)
    if isinstance(params.get("main"), Mapping) and isinstance(params.get("compress"), Mapping):
        # Here a YaRN without its attention factor would mean a factor of 1.28 to one reader and
        # 1 to another.
        main, compress, need_factor = params["main"], params["compress"], True
    else:
        main, need_factor = {"rope_theta": raw.get("rope_theta", 10000.0)}, False
        compress = {**params, "rope_theta": raw.get("compress_rope_theta", 160000.0)}
    return _rotary("main", main, head, share, True), _rotary(
        "compress", compress, head, share, need_factor
    )


def _rotary(
    name: str, params: Mapping[str, Any], head: int, share: float, need_factor: bool
) -> Rotary:
    size = int(head * _number("partial_rotary_factor", params.get("partial_rotary_factor", share)))
    theta = _number(f"rope_theta of {name}", _need(params, "rope_theta"))
    kind = params.get("rope_type", params.get("type", "default"))
    if kind == "default":
        return Rotary(size, theta)
    if kind != "yarn":
        raise ValueError(f"`rope_type` of {name} is {kind!r}; use 'default' or 'yarn'")
    if need_factor:
        _need(params, "attention_factor")
    return Rotary(
        size,
        theta,
        Yarn(
            factor=_number("factor", _need(params, "factor")),
            original_length=_integer(
                "original_max_position_embeddings",
                _need(params, "original_max_position_embeddings"),
            ),
            beta_fast=_number("beta_fast", params.get("beta_fast") or 32.0),
            beta_slow=_number("beta_slow", params.get("beta_slow") or 1.0),
            attention_factor=_number("attention_factor", params.get("attention_factor") or 1.0),
        ),
    )
