"""Rows that norm what a layer gives: beside what it reads (Gemma 2 and 3, GLM-4), or in its place (OLMo 2, EXAONE 4).

Gemma 1 stands here for its successors' sake, though it norms what layers read alone.
Invariants: pure; a setting that changes the result is read or refused.
Knows nothing of tensors beyond their names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker_runtime.models.architectures.llama import GLM_DEFAULTS, read_glm
from stoker_runtime.models.architectures.reading import (
    FULL,
    SLIDING,
    by_layer_type,
    every,
    read_base,
    read_layer_types,
    refuse,
)
from stoker_runtime.models.architectures.row import LAYER_NAMES, MERGED_GATE_UP, Architecture, one
from stoker_runtime.models.rope_config import read_rope
from stoker_runtime.models.spec import ModelSpec, QkNorm


def _gemma(config: Mapping[str, Any]) -> ModelSpec:
    refuse(config, "use_bidirectional_attention", "a decoder sees what came before")
    # The first configurations say gelu, and were trained with its tanh form.
    activation = config.get("hidden_activation") or config.get("hidden_act")
    known = {**config, "hidden_act": "gelu_pytorch_tanh" if activation == "gelu" else activation}
    spec, bias = read_base(known), bool(config.get("attention_bias", False))
    return replace(spec, embedding_multiplier=math.sqrt(spec.hidden), norm_offset=1.0, qkv_bias=bias, output_bias=bias)


def _sandwiched(config: Mapping[str, Any], period: int) -> ModelSpec:
    """Gemma 2 and 3: norms on both sides, windows in all but each `period`-th layer, soft-caps."""
    spec = _gemma(config)
    slides = read_layer_types(config, spec.num_layers, every(period, spec.num_layers))
    window = int(config.get("sliding_window") or 0)
    return replace(
        spec,
        post_norms=True,
        windows=tuple(window if each else 0 for each in slides),
        attention_multiplier=float(config["query_pre_attn_scalar"]) ** -0.5,
        attention_softcap=float(config.get("attn_logit_softcapping") or 0.0),
        logit_softcap=float(config.get("final_logit_softcapping") or 0.0),
    )


def _gemma2(config: Mapping[str, Any]) -> ModelSpec:
    return _sandwiched(config, 2)


def _gemma3(config: Mapping[str, Any]) -> ModelSpec:
    """Sliding layers rotate by a base of their own and without scaling; the length given is the stretched one."""
    spec = _sandwiched(by_layer_type(config, FULL, 1e6), int(config["sliding_window_pattern"]))
    local = {**config, "rope_theta": config.get("rope_local_base_freq"), "rope_scaling": None}
    return replace(
        spec,
        qk_norm=QkNorm.HEAD,
        local_rope=read_rope(by_layer_type(local, SLIDING, 1e4), spec.head_dim),
        max_position=int(config["max_position_embeddings"]),
    )


def _gemma3_text(config: Mapping[str, Any]) -> ModelSpec:
    """The text model of one that reads images, which are no part of it."""
    text = {**GEMMA3_DEFAULTS, **config["text_config"], "architectures": config["architectures"]}
    return _gemma3({"dtype": config.get("dtype") or config.get("torch_dtype"), **text})


def _olmo2(config: Mapping[str, Any]) -> ModelSpec:
    spec, bias = read_base(config), bool(config.get("attention_bias", False))
    return replace(spec, pre_norms=False, post_norms=True, qk_norm=QkNorm.WHOLE, qkv_bias=bias, output_bias=bias)


def _olmo3(config: Mapping[str, Any]) -> ModelSpec:
    spec = _olmo2(by_layer_type(config, FULL, 5e5))
    slides = read_layer_types(config, spec.num_layers, every(4, spec.num_layers))
    window = int(config.get("sliding_window") or 0)
    local = by_layer_type({**config, "rope_scaling": None}, SLIDING, 5e5)
    return replace(
        spec,
        windows=tuple(window if each else 0 for each in slides),
        local_rope=read_rope(local, spec.head_dim),
    )


def _exaone4(config: Mapping[str, Any]) -> ModelSpec:
    """With windows, the layers that see everything do not rotate."""
    spec, window = read_base(config), int(config.get("sliding_window") or 0)
    period = _pattern(config.get("sliding_window_pattern")) if window else 0
    slides = read_layer_types(config, spec.num_layers, every(period, spec.num_layers))
    return replace(
        spec,
        pre_norms=False,
        post_norms=True,
        qk_norm=QkNorm.HEAD,
        windows=tuple(window if each else 0 for each in slides),
        unrotated=frozenset(layer for layer, each in enumerate(slides) if window and not each),
    )


def _pattern(value: Any) -> int:
    """The period of layers that see everything, which may stand as letters: LLLG is 4."""
    return len(value) if isinstance(value, str) else int(value or 0)


def _glm4(config: Mapping[str, Any]) -> ModelSpec:
    return replace(read_glm(config), post_norms=True)


_SANDWICH = {
    **LAYER_NAMES,
    "attention_post_norm": one("post_attention_layernorm.weight", "post_attention_norm.weight"),
    "ffn_norm": one("pre_feedforward_layernorm.weight", "ffn_norm.weight"),
    "ffn_post_norm": one("post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
}
_GLM4_NAMES = {
    **LAYER_NAMES,
    **MERGED_GATE_UP,
    "attention_post_norm": one("post_self_attn_layernorm.weight", "post_attention_norm.weight"),
    "ffn_post_norm": one("post_mlp_layernorm.weight", "post_ffw_norm.weight"),
}
_GEMMA_DEFAULTS = {"max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True}
_GEMMA2_DEFAULTS = _GEMMA_DEFAULTS | {
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA3_DEFAULTS = _GEMMA2_DEFAULTS | {
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
}

POST_NORM_ROWS: dict[str, Architecture] = {
    "GemmaForCausalLM": Architecture(_gemma, _GEMMA_DEFAULTS | {"hidden_act": "gelu_pytorch_tanh"}),
    "Gemma2ForCausalLM": Architecture(
        _gemma2,
        _GEMMA2_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        layer_names=_SANDWICH,
    ),
    "Gemma3ForCausalLM": Architecture(
        _gemma3,
        _GEMMA2_DEFAULTS | {"max_position_embeddings": 131072, "sliding_window_pattern": 6},
        layer_names=_SANDWICH,
    ),
    "Gemma3ForConditionalGeneration": Architecture(
        _gemma3_text,
        top_names={
            "embed": one("language_model.model.embed_tokens.weight"),
            "final_norm": one("language_model.model.norm.weight"),
            "head": one("language_model.lm_head.weight"),
        },
        layer_names=_SANDWICH,
        base="language_model.",
        layers="language_model.model.layers.",
        ignored=r"(vision_tower|multi_modal_projector)\..*",
    ),
    "Olmo2ForCausalLM": Architecture(
        _olmo2, {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}, layer_names=_SANDWICH
    ),
    "Olmo3ForCausalLM": Architecture(
        _olmo3,
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096},
        layer_names=_SANDWICH,
    ),
    "Exaone4ForCausalLM": Architecture(
        _exaone4,
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        layer_names=_SANDWICH,
    ),
    "Glm4ForCausalLM": Architecture(_glm4, GLM_DEFAULTS, layer_names=_GLM4_NAMES),
}
