"""Rows of decoders whose feed-forward is a mixture of experts.

Invariants: pure; a setting that changes the result is read or refused. What a mixture is, `models/moe_spec.py` says.
Knows nothing of tensors beyond their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures.llama import SEEING, granite, qwen_windows, text_of, windowed
from stoker_runtime.models.architectures.reading import every, read_base, read_layer_types, refuse
from stoker_runtime.models.architectures.row import (
    LAYER_NAMES,
    POST_ATTENTION,
    TOP_NAMES,
    Architecture,
    Names,
    Stored,
    one,
)
from stoker_runtime.models.moe_spec import MoeSpec
from stoker_runtime.models.spec import ModelSpec, Norm, QkNorm

GPT_OSS_SLOPE = 1.702


def mixture(config: Mapping[str, Any], ffn: str, **rest: Any) -> MoeSpec:
    """What all mixtures say; `ffn` is the key of an expert's width, and `layers`, if not in `rest`, are all."""
    spoken = ("num_experts", "n_routed_experts", "num_local_experts")
    found = next((key for key in spoken if key in config), spoken[0])
    layers = rest.pop("layers", None)
    every_layer = frozenset(range(int(config["num_hidden_layers"])))
    if str(config.get("hidden_act") or "silu") not in ("silu", "swish"):
        raise ModelError(f"experts with hidden_act {config['hidden_act']!r} are not supported.", param="hidden_act")
    spec = MoeSpec(
        layers=every_layer if layers is None else every_layer & layers,
        experts=int(config[found]),
        top_k=int(config["num_experts_per_tok"]),
        ffn=int(config[ffn]),
        **rest,
    )
    if not 1 <= spec.top_k <= spec.experts // spec.groups * spec.top_groups or spec.experts % spec.groups:
        raise ModelError(
            f"{spec.top_k} of {spec.experts} experts, in {spec.top_groups} of {spec.groups} groups, cannot be chosen.",
            param="num_experts_per_tok",
        )
    return spec


def qwen_sparse_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """The sparse layers: each `decoder_sparse_step`-th but those in `mlp_only_layers`."""
    step, plain = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
    layers = range(int(config["num_hidden_layers"]))
    return frozenset(layer for layer in layers if (layer + 1) % step == 0 and layer not in plain)


def _qwen2(config: Mapping[str, Any]) -> ModelSpec:
    moe = mixture(
        config,
        "moe_intermediate_size",
        layers=qwen_sparse_layers(config),
        renormalize=bool(config.get("norm_topk_prob", False)),
        shared_ffn=int(config["shared_expert_intermediate_size"]),
        shared_gate=True,
    )
    spec = read_base(config)
    windows = qwen_windows(config, spec.num_layers)
    return replace(spec, qkv_bias=bool(config.get("qkv_bias", True)), windows=windows, moe=moe)


def _qwen3(config: Mapping[str, Any]) -> ModelSpec:
    renormalize = bool(config.get("norm_topk_prob", False))
    moe = mixture(config, "moe_intermediate_size", layers=qwen_sparse_layers(config), renormalize=renormalize)
    spec, bias = read_base(config), bool(config.get("attention_bias", False))
    window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window") else 0
    windows = (window,) * spec.num_layers
    return replace(spec, qkv_bias=bias, output_bias=bias, qk_norm=QkNorm.HEAD, windows=windows, moe=moe)


def _qwen3_vl(config: Mapping[str, Any]) -> ModelSpec:
    return _qwen3(text_of(config))


def _mixtral(config: Mapping[str, Any]) -> ModelSpec:
    moe = mixture(config, "intermediate_size", renormalize=True)
    return replace(windowed(config), moe=moe)


def _phimoe(config: Mapping[str, Any]) -> ModelSpec:
    """Phi-3.5-MoE: its longrope says what cos and sin are multiplied with, for short and for long contexts."""
    jitter = float(config.get("router_jitter_noise") or 0.0)
    moe = mixture(config, "intermediate_size", scoring="sparsemixer", jitter=jitter)
    if moe.top_k != 2:
        raise ModelError(f"sparsemixer chooses 2 experts, not {moe.top_k}.", param="num_experts_per_tok")
    spec = windowed(config)
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope = spec.rope
    if rope.kind != "default":
        short, long = scaling.get("short_mscale"), scaling.get("long_mscale")
        if short is None or short != long:
            raise ModelError(
                f"short_mscale {short!r} and long_mscale {long!r} are not supported: they must be equal.",
                param="rope_scaling",
            )
        rope = replace(rope, attention_factor=float(short))
    bias = bool(config.get("attention_bias", False))
    return replace(
        spec,
        rope=rope,
        norm=Norm.LAYER,
        norm_bias=True,
        qkv_bias=bias,
        output_bias=bias,
        head_bias=bool(config.get("lm_head_bias", False)),
        moe=moe,
    )


def _olmoe(config: Mapping[str, Any]) -> ModelSpec:
    refuse(config, "clip_qkv", "queries, keys and values are never clipped here")
    moe = mixture(config, "intermediate_size", renormalize=bool(config.get("norm_topk_prob", False)))
    bias = bool(config.get("attention_bias", False))
    return replace(read_base(config), qkv_bias=bias, output_bias=bias, qk_norm=QkNorm.WHOLE, moe=moe)


def _granite_moe(config: Mapping[str, Any]) -> ModelSpec:
    shared = int(config.get("shared_intermediate_size") or 0)
    moe = mixture(config, "intermediate_size", renormalize=True, shared_ffn=shared)
    return replace(granite(config), moe=moe)


def corrected_mixture(config: Mapping[str, Any], **rest: Any) -> MoeSpec:
    """`mixture` of experts that are scored by a sigmoid, with a bias for the choice alone, in groups."""
    return mixture(
        config,
        "moe_intermediate_size",
        scoring="sigmoid",
        correction_bias=True,
        renormalize=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor") or 1.0),
        groups=int(config.get("n_group") or 1),
        top_groups=int(config.get("topk_group") or 1),
        group_top2=True,
        **rest,
    )


def _glm4(config: Mapping[str, Any]) -> ModelSpec:
    first = int(config.get("first_k_dense_replace") or 0)
    moe = corrected_mixture(
        config,
        layers=frozenset(range(first, int(config["num_hidden_layers"]))),
        shared_ffn=int(config["moe_intermediate_size"]) * int(config.get("n_shared_experts") or 0),
    )
    qk_norm = QkNorm.HEAD if config.get("use_qk_norm") else QkNorm.NONE
    return replace(
        read_base(config),
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm=qk_norm,
        draft_layers=draft_layers(config),
        moe=moe,
    )


def draft_layers(config: Mapping[str, Any]) -> int:
    """Layers behind the last that predict tokens further ahead."""
    return int(config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0)


def _gpt_oss(config: Mapping[str, Any]) -> ModelSpec:
    slope, limit = float(config.get("swiglu_alpha") or GPT_OSS_SLOPE), float(config.get("swiglu_limit") or 7.0)
    if slope != GPT_OSS_SLOPE:
        raise ModelError(f"swiglu_alpha {slope} is not supported; it must be {GPT_OSS_SLOPE}.", param="swiglu_alpha")
    packing = str((config.get("quantization_config") or {}).get("quant_method") or "")
    moe = mixture(
        config,
        "intermediate_size",
        renormalize=True,
        router_bias=True,
        expert_bias=True,
        limit=limit,
        packing=packing,
    )
    spec, bias = read_base(config), bool(config.get("attention_bias", True))
    window = int(config.get("sliding_window") or 0)
    slides = read_layer_types(config, spec.num_layers, every(2, spec.num_layers))
    windows = tuple(window if each else 0 for each in slides)
    return replace(spec, qkv_bias=bias, output_bias=bias, sinks=True, windows=windows, moe=moe)


GGUF_ROUTER, GGUF_CORRECTION = "ffn_gate_inp.weight", "exp_probs_b.bias"
GGUF_GATE_UP = ("ffn_gate_exps.{expert}.weight", "ffn_up_exps.{expert}.weight")
GGUF_DOWN = ("ffn_down_exps.{expert}.weight",)
GGUF_SHARED = ("ffn_gate_shexp.weight", "ffn_up_shexp.weight")
GGUF_SHARED_DOWN = "ffn_down_shexp.weight"


def _by_expert(prefix: str, gate: str, up: str, down: str, router: str) -> dict[str, Names]:
    """Names of a mixture whose experts are tensors of their own."""
    return {
        "router": one(f"{router}.weight", GGUF_ROUTER),
        "experts_gate_up": Names(
            tuple(f"{prefix}.{{expert}}.{name}.weight" for name in (gate, up)), GGUF_GATE_UP, Stored.BY_EXPERT
        ),
        "experts_down": Names((f"{prefix}.{{expert}}.{down}.weight",), GGUF_DOWN, Stored.BY_EXPERT),
    }


def _shared(prefix: str) -> dict[str, Names]:
    return {
        "shared_gate_up": Names((f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"), GGUF_SHARED),
        "shared_down": one(f"{prefix}.down_proj.weight", GGUF_SHARED_DOWN),
    }


_PROJECTIONS = _by_expert("mlp.experts", "gate_proj", "up_proj", "down_proj", "mlp.gate")
NUMBERED = _by_expert("block_sparse_moe.experts", "w1", "w3", "w2", "block_sparse_moe.gate")
QWEN2_MOE_NAMES = {
    **LAYER_NAMES,
    **_PROJECTIONS,
    **_shared("mlp.shared_expert"),
    "shared_gate": one("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight"),
}
# Where they are not quantized, one tensor for all experts, turned.
_QWEN3_VL_NAMES = {
    **LAYER_NAMES,
    **_PROJECTIONS,
    **{f"{name}_quantized": _PROJECTIONS[name] for name in ("experts_gate_up", "experts_down")},
    "experts_gate_up": Names(("mlp.experts.gate_up_proj",), GGUF_GATE_UP, Stored.STACKED_HALVES),
    "experts_down": Names(("mlp.experts.down_proj",), GGUF_DOWN, Stored.STACKED_HALVES),
}
GRANITE_MOE_NAMES = {
    **LAYER_NAMES,
    "router": one("block_sparse_moe.router.layer.weight", GGUF_ROUTER),
    "experts_gate_up": Names(("block_sparse_moe.input_linear.weight",), GGUF_GATE_UP, Stored.STACKED),
    "experts_down": Names(("block_sparse_moe.output_linear.weight",), GGUF_DOWN, Stored.STACKED),
    "shared_gate_up": Names(("shared_mlp.input_linear.weight",), GGUF_SHARED),
    "shared_down": one("shared_mlp.output_linear.weight", GGUF_SHARED_DOWN),
}
DEEPSEEK_NAMES = {
    **_PROJECTIONS,
    **_shared("mlp.shared_experts"),
    "correction_bias": one("mlp.gate.e_score_correction_bias", GGUF_CORRECTION),
}
_GPT_OSS_NAMES = {
    **LAYER_NAMES,
    "sinks": one("self_attn.sinks", "attn_sinks.weight"),
    "ffn_norm": POST_ATTENTION,
    "router": one("mlp.router.weight", GGUF_ROUTER),
    "router_bias": one("mlp.router.bias", "ffn_gate_inp.bias"),
    "experts_gate_up": Names(("mlp.experts.gate_up_proj",), GGUF_GATE_UP, Stored.STACKED_COLUMNS),
    "experts_gate_up_bias": Names(
        ("mlp.experts.gate_up_proj_bias",),
        ("ffn_gate_exps.{expert}.bias", "ffn_up_exps.{expert}.bias"),
        Stored.STACKED_COLUMNS,
    ),
    "experts_down": Names(("mlp.experts.down_proj",), GGUF_DOWN, Stored.STACKED_COLUMNS),
    "experts_down_bias": Names(
        ("mlp.experts.down_proj_bias",), ("ffn_down_exps.{expert}.bias",), Stored.STACKED_COLUMNS
    ),
}
_GPT_OSS_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "head_dim": 64,
    "sliding_window": 128,
    "rope_theta": 150000.0,
    "max_position_embeddings": 131072,
}


def _row(
    build: Callable[[Mapping[str, Any]], ModelSpec],
    names: Mapping[str, Names],
    *,
    gguf_interleaved: bool = False,
    **defaults: Any,
) -> Architecture:
    return Architecture(build, defaults, gguf_interleaved, layer_names=names, top_names=TOP_NAMES)


MOE_ROWS: dict[str, Architecture] = {
    "Qwen2MoeForCausalLM": _row(_qwen2, QWEN2_MOE_NAMES, max_position_embeddings=32768, max_window_layers=28),
    "Qwen3MoeForCausalLM": _row(_qwen3, {**LAYER_NAMES, **_PROJECTIONS}, max_position_embeddings=32768),
    "Qwen3VLMoeForConditionalGeneration": Architecture(
        _qwen3_vl, {"max_position_embeddings": 128000, "norm_topk_prob": True}, layer_names=_QWEN3_VL_NAMES, **SEEING
    ),
    "MixtralForCausalLM": _row(
        _mixtral, {**LAYER_NAMES, **NUMBERED}, max_position_embeddings=131072, rope_theta=1e6, rms_norm_eps=1e-5,
        num_local_experts=8, num_experts_per_tok=2, gguf_interleaved=True,
    ),
    "PhimoeForCausalLM": _row(
        _phimoe, {**LAYER_NAMES, **NUMBERED}, max_position_embeddings=131072, rope_theta=1e6, rms_norm_eps=1e-5,
        num_local_experts=16, num_experts_per_tok=2, router_jitter_noise=0.01,
    ),
    "OlmoeForCausalLM": _row(
        _olmoe, {**LAYER_NAMES, **_PROJECTIONS}, max_position_embeddings=4096, rms_norm_eps=1e-5,
        num_experts=64, num_experts_per_tok=8,
    ),
    "GraniteMoeForCausalLM": _row(
        _granite_moe, GRANITE_MOE_NAMES, max_position_embeddings=2048, gguf_interleaved=True,
    ),
    "GraniteMoeSharedForCausalLM": _row(
        _granite_moe, GRANITE_MOE_NAMES, max_position_embeddings=2048, gguf_interleaved=True,
    ),
    "Glm4MoeForCausalLM": _row(
        _glm4, {**LAYER_NAMES, **DEEPSEEK_NAMES, "ffn_norm": POST_ATTENTION}, max_position_embeddings=131072,
        rms_norm_eps=1e-5, first_k_dense_replace=1, n_shared_experts=1,
    ),
    "GptOssForCausalLM": Architecture(_gpt_oss, _GPT_OSS_DEFAULTS, layer_names=_GPT_OSS_NAMES),
}  # fmt: skip
