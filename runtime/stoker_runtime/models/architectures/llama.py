"""Rows of Llama's kind: an RMS norm before attention and before a gated feed-forward.

Invariants: pure; a setting that changes the result is read or refused.
Knows nothing of tensors beyond their names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures.alibi import alibi_slopes
from stoker_runtime.models.architectures.reading import FULL, SLIDING, read_base, read_layer_types, refuse
from stoker_runtime.models.architectures.row import (
    LAYER_NAMES,
    MERGED_GATE_UP,
    POST_ATTENTION,
    TOP_NAMES,
    UP_ALONE,
    Architecture,
    Names,
    Stored,
    one,
)
from stoker_runtime.models.layer_specs.rope_spec import RopeSpec
from stoker_runtime.models.spec import ModelSpec, QkNorm


def _llama(config: Mapping[str, Any]) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    ffn_bias = bool(config.get("mlp_bias", False))
    return replace(read_base(config), qkv_bias=bias, output_bias=bias, ffn_bias=ffn_bias)


def windowed(config: Mapping[str, Any]) -> ModelSpec:
    """All layers look back `sliding_window` tokens, where that is set."""
    spec = read_base(config)
    return replace(spec, windows=(int(config.get("sliding_window") or 0),) * spec.num_layers)


def _qwen2(config: Mapping[str, Any]) -> ModelSpec:
    spec = read_base(config)
    return replace(spec, qkv_bias=True, windows=qwen_windows(config, spec.num_layers))


def _qwen3(config: Mapping[str, Any]) -> ModelSpec:
    spec = read_base(config)
    bias = bool(config.get("attention_bias", False))
    windows = qwen_windows(config, spec.num_layers)
    return replace(spec, qkv_bias=bias, output_bias=bias, qk_norm=QkNorm.HEAD, windows=windows)


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the text model of one that sees: beside its vision's, or in an object of their own."""
    text = config.get("text_config") or {}
    above = {key: config[key] for key in ("architectures", "tie_word_embeddings") if config.get(key) is not None}
    return {**config, **{key: value for key, value in text.items() if value is not None}, **above}


def _qwen2_vl(config: Mapping[str, Any]) -> ModelSpec:
    return _qwen2(text_of(config))


def _qwen3_vl(config: Mapping[str, Any]) -> ModelSpec:
    return _qwen3(text_of(config))


def qwen_windows(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Qwen slides only if told to, in the layers that `layer_types` names or from `max_window_layers` on."""
    if not config.get("use_sliding_window") or not config.get("sliding_window"):
        return (0,) * layers
    first = int(config.get("max_window_layers") or 0)
    default = [SLIDING if layer >= first else FULL for layer in range(layers)]
    window = int(config["sliding_window"])
    return tuple(window if slides else 0 for slides in read_layer_types(config, layers, default))


def granite(config: Mapping[str, Any]) -> ModelSpec:
    """Granite 3: four multipliers, of the embedding, the residual stream, attention and the logits."""
    return replace(
        _llama(config),
        embedding_multiplier=float(config["embedding_multiplier"]),
        residual_multiplier=float(config["residual_multiplier"]),
        attention_multiplier=float(config["attention_multiplier"]),
        logit_scale=1.0 / float(config["logits_scaling"]),
    )


def _smollm3(config: Mapping[str, Any]) -> ModelSpec:
    """`no_rope_layers` has a 1 for each layer that rotates, in spite of its name."""
    spec = _llama(config)
    layers, period = spec.num_layers, int(config["no_rope_layer_interval"])
    rotates = config.get("no_rope_layers") or [(layer + 1) % period for layer in range(layers)]
    slides = bool(config.get("use_sliding_window")) and bool(config.get("sliding_window"))
    default = [SLIDING if slides and not each else FULL for each in rotates]
    window = int(config.get("sliding_window") or 0)
    return replace(
        spec,
        unrotated=frozenset(layer for layer, each in enumerate(rotates) if not each),
        windows=tuple(window if each else 0 for each in read_layer_types(config, layers, default)),
    )


def _internlm3(config: Mapping[str, Any]) -> ModelSpec:
    bias = bool(config.get("bias", False))
    return replace(read_base(config), qkv_bias=bool(config.get("qkv_bias", False)), output_bias=bias, ffn_bias=bias)


def minicpm(config: Mapping[str, Any]) -> ModelSpec:
    """Scaled as its authors' code says: by depth, and by the width that its rates were tuned on."""
    spec = read_base(config)
    return replace(
        spec,
        embedding_multiplier=float(config["scale_emb"]),
        residual_multiplier=float(config["scale_depth"]) / math.sqrt(spec.num_layers),
        logit_scale=float(config["dim_model_base"]) / spec.hidden,
    )


def _internlm2(config: Mapping[str, Any]) -> ModelSpec:
    bias = bool(config.get("bias", False))
    return replace(read_base(config), qkv_bias=bias, output_bias=bias)


def _exaone(config: Mapping[str, Any]) -> ModelSpec:
    """EXAONE 3, whose configuration has names of its own."""
    renamed = {**config, "num_hidden_layers": config["num_layers"]}
    return read_base(renamed, eps="layer_norm_epsilon", activation="activation_function")


def _baichuan(config: Mapping[str, Any]) -> ModelSpec:
    """Models of 7B rotate; those of 13B, which state no longest context but a trained one, have slopes. The second
    generation norms the rows of its output head: its loss, or its vocabulary, tells it.
    """
    normed = "z_loss_weight" in config or int(config["vocab_size"]) == BAICHUAN2_VOCAB
    if config.get("max_position_embeddings"):
        return replace(read_base(config), normed_head=normed)
    spec = read_base({**config, "max_position_embeddings": config["model_max_length"]})
    return replace(spec, rope=RopeSpec(dim=0), slopes=alibi_slopes(spec.heads), normed_head=normed)


def _hunyuan(config: Mapping[str, Any]) -> ModelSpec:
    """Heads are normed after they rotated, by frequencies that an `alpha` has stretched once and for all."""
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"]))
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    scaling = dict(config.get(key) or {})
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind == "dynamic" and scaling.get("alpha"):
        theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
        stretched = theta * float(scaling["alpha"]) ** (head_dim / (head_dim - 2))
        config = {**config, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": stretched}}
    elif kind not in ("default", "factors"):
        raise ModelError(f"rope scaling {kind!r} is not supported; it must be dynamic, with an alpha.", param=key)
    refuse(config, "use_cla", "each layer has keys and values of its own")
    return replace(_llama(config), qk_norm=QkNorm.ROTATED, ffn_bias=False)


def _arcee(config: Mapping[str, Any]) -> ModelSpec:
    return replace(_llama(config), gated=False)


def _helium(config: Mapping[str, Any]) -> ModelSpec:
    spec = _llama(config)
    return replace(spec, rope=replace(spec.rope, interleaved=True), output_bias=False)


def _seed(config: Mapping[str, Any]) -> ModelSpec:
    return replace(
        read_base(config),
        qkv_bias=bool(config["attention_bias"]),
        output_bias=bool(config["attention_out_bias"]),
        ffn_bias=bool(config.get("mlp_bias", False)),
    )


def _ernie(config: Mapping[str, Any]) -> ModelSpec:
    spec, bias = read_base(config), bool(config.get("use_bias", False))
    rope = replace(spec.rope, interleaved=True)
    return replace(spec, rope=rope, qkv_bias=bias, output_bias=bias, ffn_bias=bias)


def read_glm(config: Mapping[str, Any]) -> ModelSpec:
    spec = read_base(config)
    rope = replace(spec.rope, interleaved=True)
    return replace(spec, rope=rope, qkv_bias=bool(config["attention_bias"]))


BAICHUAN2_VOCAB = 125696
GLM_DEFAULTS = {
    "max_position_embeddings": 131072,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
}
_PHI3_NAMES = {
    **LAYER_NAMES,
    **MERGED_GATE_UP,
    "qkv": one("self_attn.qkv_proj.weight", "attn_qkv.weight"),
}
_INTERNLM2_TOP = {
    **TOP_NAMES,
    "embed": one("model.tok_embeddings.weight", "token_embd.weight"),
    "head": one("output.weight", "output.weight"),
}
# GGUF's converter has brought Q, K and V apart.
_GGUF = {name: each.gguf for name, each in LAYER_NAMES.items()}
_INTERNLM2_NAMES = {
    "input_norm": Names(("attention_norm.weight",), _GGUF["input_norm"]),
    "qkv": Names(("attention.wqkv.weight",), _GGUF["qkv"], Stored.GROUPED),
    "qkv_bias": Names(("attention.wqkv.bias",), _GGUF["qkv_bias"], Stored.GROUPED),
    "output": Names(("attention.wo.weight",), _GGUF["output"]),
    "output_bias": Names(("attention.wo.bias",), _GGUF["output_bias"]),
    "ffn_norm": Names(("ffn_norm.weight",), _GGUF["ffn_norm"]),
    "gate_up": Names(("feed_forward.w1.weight", "feed_forward.w3.weight"), _GGUF["gate_up"]),
    "down": Names(("feed_forward.w2.weight",), _GGUF["down"]),
}
_EXAONE_TOP = {
    "embed": one("transformer.wte.weight", "token_embd.weight"),
    "final_norm": one("transformer.ln_f.weight", "output_norm.weight"),
    "head": one("lm_head.weight", "output.weight"),
}
_EXAONE_NAMES = {
    "input_norm": one("ln_1.weight", "attn_norm.weight"),
    "qkv": Names(tuple(f"attn.attention.{each}_proj.weight" for each in "qkv"), LAYER_NAMES["qkv"].gguf),
    "output": one("attn.attention.out_proj.weight", "attn_output.weight"),
    "ffn_norm": one("ln_2.weight", "ffn_norm.weight"),
    "gate_up": Names(("mlp.c_fc_0.weight", "mlp.c_fc_1.weight"), LAYER_NAMES["gate_up"].gguf),
    "down": one("mlp.c_proj.weight", "ffn_down.weight"),
}

_HUNYUAN_NORMS = {
    "q_norm": one("self_attn.query_layernorm.weight", _GGUF["q_norm"][0]),
    "k_norm": one("self_attn.key_layernorm.weight", _GGUF["k_norm"][0]),
}

# What sees is left out. Its names, and those of the text model, begin otherwise in files of newer making.
SEEING: dict[str, Any] = {
    "ignored": r"visual\..*",
    "renamed": (("model.language_model.", "model."), ("model.visual.", "visual.")),
}

_BAICHUAN = Architecture(
    _baichuan,
    gguf_interleaved=True,
    layer_names={**LAYER_NAMES, "qkv": Names(("self_attn.W_pack.weight",), _GGUF["qkv"])},
    ignored=r"model\.(layers\.\d+\.self_attn\.rotary_emb\.inv_freq|future_mask|alibi_mask)",
)

LLAMA_ROWS: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(_llama, {"max_position_embeddings": 2048}, gguf_interleaved=True),
    "MistralForCausalLM": Architecture(
        windowed, {"max_position_embeddings": 131072, "sliding_window": 4096}, gguf_interleaved=True
    ),
    "Qwen2ForCausalLM": Architecture(_qwen2, {"max_position_embeddings": 32768, "max_window_layers": 28}),
    "Qwen3ForCausalLM": Architecture(_qwen3, {"max_position_embeddings": 32768, "max_window_layers": 28}),
    "Qwen2VLForConditionalGeneration": Architecture(
        _qwen2_vl, {"max_position_embeddings": 32768, "max_window_layers": 28}, **SEEING
    ),
    "Qwen2_5_VLForConditionalGeneration": Architecture(
        _qwen2_vl, {"max_position_embeddings": 32768, "max_window_layers": 28}, **SEEING
    ),
    "Qwen3VLForConditionalGeneration": Architecture(_qwen3_vl, {"max_position_embeddings": 128000}, **SEEING),
    "Phi3ForCausalLM": Architecture(
        windowed, {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}, layer_names=_PHI3_NAMES
    ),
    "GraniteForCausalLM": Architecture(
        granite,
        {"max_position_embeddings": 2048, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}
        | {"attention_multiplier": 1.0, "logits_scaling": 1.0},
        gguf_interleaved=True,
    ),
    "SmolLM3ForCausalLM": Architecture(
        _smollm3,
        {"max_position_embeddings": 32768, "rope_theta": 2000000.0, "no_rope_layer_interval": 4}
        | {"tie_word_embeddings": True, "num_key_value_heads": 4},
        gguf_interleaved=True,
    ),
    "GlmForCausalLM": Architecture(read_glm, GLM_DEFAULTS, layer_names={**LAYER_NAMES, **MERGED_GATE_UP}),
    "InternLM2ForCausalLM": Architecture(
        _internlm2,
        {"max_position_embeddings": 2048, "rope_theta": 10000.0},
        top_names=_INTERNLM2_TOP,
        layer_names=_INTERNLM2_NAMES,
        gguf_interleaved=True,
        ignored=r"model\.layers\.\d+\.attention\.rotary_emb\.inv_freq",
    ),
    "InternLM3ForCausalLM": Architecture(_internlm3, {"max_position_embeddings": 32768}),
    "MiniCPMForCausalLM": Architecture(
        minicpm,
        {"max_position_embeddings": 2048, "tie_word_embeddings": True, "scale_emb": 1, "scale_depth": 1}
        | {"dim_model_base": 1},
        gguf_interleaved=True,
    ),
    "BaichuanForCausalLM": _BAICHUAN,
    "BaiChuanForCausalLM": _BAICHUAN,
    "ExaoneForCausalLM": Architecture(
        _exaone,
        {"max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "activation_function": "silu"},
        top_names=_EXAONE_TOP,
        layer_names=_EXAONE_NAMES,
        base="transformer.",
        layers="transformer.h.",
        ignored=r"transformer\.(h\.\d+\.attn\.attention\.)?rotary(_emb)?\.inv_freq",
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(
        _hunyuan, {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}, layer_names={**LAYER_NAMES, **_HUNYUAN_NORMS}
    ),
    "ArceeForCausalLM": Architecture(
        _arcee,
        {"max_position_embeddings": 4096, "hidden_act": "relu2", "rms_norm_eps": 1e-5},
        gguf_interleaved=True,
        layer_names={**LAYER_NAMES, **UP_ALONE},
    ),
    "HeliumForCausalLM": Architecture(
        _helium, {"max_position_embeddings": 4096, "head_dim": 128, "rms_norm_eps": 1e-8}
    ),
    "SeedOssForCausalLM": Architecture(
        _seed,
        {"max_position_embeddings": 524288, "attention_bias": True, "attention_out_bias": False, "head_dim": 128},
        layer_names={**LAYER_NAMES, "ffn_norm": POST_ATTENTION},
    ),
    "Ernie4_5ForCausalLM": Architecture(
        _ernie,
        {"max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": True}
        | {"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 2},
    ),
}
