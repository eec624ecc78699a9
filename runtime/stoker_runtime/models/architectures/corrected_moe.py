"""Rows of mixtures whose choice, and not its weights, a learnt bias corrects: ERNIE 4.5, MiniMax-M2, dots.llm1.

Invariants: pure; a setting that changes the result is read or refused. What a mixture is, `models/moe_spec.py` says.
Knows nothing of tensors beyond their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures.moe import (
    DEEPSEEK_NAMES,
    GGUF_CORRECTION,
    NUMBERED,
    corrected_mixture,
    mixture,
)
from stoker_runtime.models.architectures.reading import FULL, SLIDING, read_base, read_layer_types, refuse
from stoker_runtime.models.architectures.row import LAYER_NAMES, Architecture, one
from stoker_runtime.models.spec import ModelSpec, QkNorm

# The smallest sum that the weights of ERNIE's experts are divided by; what is less than this is never met.
_LEAST = 1e-6


def _must_be(config: Mapping[str, Any], key: str, *known: Any) -> None:
    """Raises ModelError where `key` is there, and none of `known`."""
    if config.get(key) is not None and config[key] not in known:
        words = " or ".join(repr(each) for each in known)
        raise ModelError(f"{key} is {config[key]!r}, which is not supported; it must be {words}.", param=key)


def _ernie(config: Mapping[str, Any]) -> ModelSpec:
    """ERNIE 4.5: softmax over all experts, each `moe_layer_interval`-th layer from the first to the last that has one.

    The layer that its checkpoints have for the token after the next is left out.
    """
    refuse(config, "use_bias", "its experts have no biases")
    _must_be(config, "moe_gate", "topk")
    _must_be(config, "moe_use_aux_free", True)
    if float(config["moe_norm_min"]) > _LEAST:
        raise ModelError(f"moe_norm_min is {config['moe_norm_min']!r}; it must be 1e-6 or less.", param="moe_norm_min")
    layers = int(config["num_hidden_layers"])
    first, last, step = (int(config[f"moe_layer_{key}"]) for key in ("start_index", "end_index", "interval"))
    last = layers - 1 if last == -1 else last
    moe = mixture(
        {**config, "num_experts": config["moe_num_experts"], "num_experts_per_tok": config["moe_k"]},
        "moe_intermediate_size",
        layers=frozenset(layer for layer in range(first, last + 1) if (layer + 1) % step == 0),
        correction_bias=True,
        renormalize=True,
        shared_ffn=int(config["moe_intermediate_size"]) * int(config["moe_num_shared_experts"] or 0),
    )
    spec = read_base(config)
    return replace(spec, rope=replace(spec.rope, interleaved=True), moe=moe)


def _minimax(config: Mapping[str, Any]) -> ModelSpec:
    """MiniMax-M2: every layer attends, and norms all queries together, and all keys, before a part of each rotates."""
    _must_be(config, "scoring_func", "sigmoid")
    _must_be(config, "qk_norm_type", "per_layer")
    _must_be(config, "use_qk_norm", True)
    _must_be(config, "use_routing_bias", True)
    refuse(config, "shared_intermediate_size", "its experts are all chosen")
    for kind in config.get("attn_type_list") or ():
        _must_be({"attn_type_list": kind}, "attn_type_list", 1)
    if config.get("rotary_dim"):
        partial = int(config["rotary_dim"]) / int(config["head_dim"])
        config = {"partial_rotary_factor": partial, **config}
    moe = mixture(config, "intermediate_size", scoring="sigmoid", correction_bias=True, renormalize=True)
    behind = int(config.get("num_mtp_modules") or 0) * int(config.get("mtp_transformer_layers") or 1)
    return replace(read_base(config), qk_norm=QkNorm.WHOLE, draft_layers=behind, moe=moe)


def _dots(config: Mapping[str, Any]) -> ModelSpec:
    _must_be(config, "scoring_func", "sigmoid", "noaux_tc")
    spec, bias = read_base(config), bool(config.get("attention_bias", False))
    layers, first = spec.num_layers, int(config.get("first_k_dense_replace") or 0)
    moe = corrected_mixture(
        config,
        layers=frozenset(range(first, layers)),
        shared_ffn=int(config["moe_intermediate_size"]) * int(config.get("n_shared_experts") or 0),
    )
    window, full = int(config.get("sliding_window") or 0), int(config["max_window_layers"])
    slides = read_layer_types(
        config, layers, [SLIDING if window and layer >= full else FULL for layer in range(layers)]
    )
    windows = tuple(window if each else 0 for each in slides)
    return replace(spec, qkv_bias=bias, output_bias=bias, qk_norm=QkNorm.HEAD, windows=windows, moe=moe)


_MINIMAX = {
    **LAYER_NAMES,
    **NUMBERED,
    "correction_bias": one("block_sparse_moe.e_score_correction_bias", GGUF_CORRECTION),
}
_ERNIE = {
    **LAYER_NAMES,
    **DEEPSEEK_NAMES,
    "correction_bias": one("mlp.moe_statics.e_score_correction_bias", GGUF_CORRECTION),
}

CORRECTED_ROWS: dict[str, Architecture] = {
    "Ernie4_5_MoeForCausalLM": Architecture(
        _ernie,
        {"max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
        | {"moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_norm_min": 1e-12}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
        layer_names=_ERNIE,
        ignored=r"model\.mtp_.*",
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        _minimax,
        {"max_position_embeddings": 196608, "rope_theta": 5000000.0, "head_dim": 128, "num_local_experts": 256}
        | {"num_experts_per_tok": 8},
        layer_names=_MINIMAX,
    ),
    "Dots1ForCausalLM": Architecture(
        _dots,
        {"max_position_embeddings": 2048, "sliding_window": 4096, "max_window_layers": 62, "norm_topk_prob": False},
        layer_names={**LAYER_NAMES, **DEEPSEEK_NAMES},
    ),
}
