"""Rows with layer norms: those whose attention and feed-forward read the same stream (Phi, GPT-NeoX, Cohere, StableLM),
and those with a feed-forward that has no gate (GPT-2, Nemotron, StarCoder 2).

Invariants: pure; a setting that changes the result is read or refused.
Knows nothing of tensors beyond their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures.reading import every, read_base, read_layer_types, refuse
from stoker_runtime.models.architectures.row import LAYER_NAMES, TOP_NAMES, UP_ALONE, Architecture, Names, Stored, one
from stoker_runtime.models.layer_specs.rope_spec import RopeSpec
from stoker_runtime.models.spec import ModelSpec, Norm, QkNorm


def _phi(config: Mapping[str, Any]) -> ModelSpec:
    refuse(config, "qk_layernorm", "no published model norms its queries so")
    return replace(
        read_base(config, eps="layer_norm_eps"),
        norm=Norm.LAYER, norm_bias=True, parallel=True, shared_norm=True, gated=False,
        qkv_bias=True, output_bias=True, ffn_bias=True, head_bias=True,
    )  # fmt: skip


def _neox(config: Mapping[str, Any]) -> ModelSpec:
    older = {"rope_theta": config.get("rotary_emb_base"), "partial_rotary_factor": config["rotary_pct"]}
    bias = bool(config["attention_bias"])
    return replace(
        read_base({**older, **config}, eps="layer_norm_eps"),
        norm=Norm.LAYER, norm_bias=True, parallel=bool(config["use_parallel_residual"]), gated=False,
        qkv_bias=bias, output_bias=bias, ffn_bias=True,
    )  # fmt: skip


def _cohere(config: Mapping[str, Any]) -> ModelSpec:
    spec, bias = read_base(config, eps="layer_norm_eps"), bool(config.get("attention_bias", False))
    return replace(
        spec,
        rope=replace(spec.rope, interleaved=True),
        norm=Norm.LAYER, parallel=True, shared_norm=True, qkv_bias=bias, output_bias=bias,
        qk_norm=QkNorm.LAYER if config.get("use_qk_norm") else QkNorm.NONE,
        logit_scale=float(config["logit_scale"]),
    )  # fmt: skip


def _cohere2(config: Mapping[str, Any]) -> ModelSpec:
    """Layers that see everything do not rotate."""
    for key, known in (("use_parallel_block", True), ("use_gated_activation", True), ("use_qk_norm", False)):
        if config.get(key, known) != known:
            raise ModelError(f"{key} is {config[key]!r}; of Cohere 2 only {known} is supported.", param=key)
    spec = _cohere(config)
    slides = read_layer_types(config, spec.num_layers, every(int(config["sliding_window_pattern"]), spec.num_layers))
    window = int(config["sliding_window"])
    return replace(
        spec,
        windows=tuple(window if each else 0 for each in slides),
        unrotated=frozenset(layer for layer, each in enumerate(slides) if not each),
    )


def _stablelm(config: Mapping[str, Any]) -> ModelSpec:
    parallel = bool(config.get("use_parallel_residual", False))
    return replace(
        read_base(config, eps="layer_norm_eps"),
        norm=Norm.LAYER, norm_bias=True, parallel=parallel, shared_norm=parallel,
        qkv_bias=bool(config.get("use_qkv_bias", False)),
        qk_norm=QkNorm.LAYER if config.get("qk_layernorm") else QkNorm.NONE,
    )  # fmt: skip


def _nemotron(config: Mapping[str, Any]) -> ModelSpec:
    bias, ffn_bias = bool(config.get("attention_bias", False)), bool(config.get("mlp_bias", False))
    return replace(
        read_base(config, eps="norm_eps"),
        norm=Norm.LAYER, norm_bias=True, norm_offset=1.0, gated=False,
        qkv_bias=bias, output_bias=bias, ffn_bias=ffn_bias,
    )  # fmt: skip


def _starcoder2(config: Mapping[str, Any]) -> ModelSpec:
    spec, bias = read_base(config, eps="norm_epsilon"), bool(config["use_bias"])
    return replace(
        spec,
        norm=Norm.LAYER, norm_bias=True, gated=False, qkv_bias=bias, output_bias=bias, ffn_bias=bias,
        windows=(int(config.get("sliding_window") or 0),) * spec.num_layers,
    )  # fmt: skip


def _gpt2(config: Mapping[str, Any]) -> ModelSpec:
    """Learned positions in the place of a rotation."""
    refuse(config, "scale_attn_by_inverse_layer_idx", "attention is scaled alike in all layers")
    refuse(config, "add_cross_attention", "there is nothing else to attend to")
    if not config.get("scale_attn_weights", True):
        raise ModelError("scale_attn_weights is false, which is not supported.", param="scale_attn_weights")
    common = {
        "hidden_size": config["n_embd"],
        "num_hidden_layers": config["n_layer"],
        "num_attention_heads": config["n_head"],
        "intermediate_size": config.get("n_inner") or 4 * int(config["n_embd"]),
        "max_position_embeddings": config["n_positions"],
        "num_key_value_heads": None,
        "head_dim": None,
    }
    return replace(
        read_base({**config, **common}, eps="layer_norm_epsilon", activation="activation_function"),
        rope=RopeSpec(dim=0), learned_positions=True,
        norm=Norm.LAYER, norm_bias=True, gated=False, qkv_bias=True, output_bias=True, ffn_bias=True,
    )  # fmt: skip


def _with_biases(names: Mapping[str, tuple[str, str]]) -> dict[str, Names]:
    """A matrix's names, and those of its bias, from their beginnings."""
    found = {field: one(f"{hf}.weight", f"{gguf}.weight") for field, (hf, gguf) in names.items()}
    return found | {f"{field}_bias": one(f"{hf}.bias", f"{gguf}.bias") for field, (hf, gguf) in names.items()}


_PHI_TOP = {
    **TOP_NAMES,
    "final_norm": one("model.final_layernorm.weight", "output_norm.weight"),
    "final_norm_bias": one("model.final_layernorm.bias", "output_norm.bias"),
}
_PHI_NAMES = LAYER_NAMES | _with_biases(
    {
        "output": ("self_attn.dense", "attn_output"),
        "gate_up": ("mlp.fc1", "ffn_up"),
        "down": ("mlp.fc2", "ffn_down"),
    }
)
_NEOX_TOP = {
    "embed": one("gpt_neox.embed_in.weight", "token_embd.weight"),
    "final_norm": one("gpt_neox.final_layer_norm.weight", "output_norm.weight"),
    "final_norm_bias": one("gpt_neox.final_layer_norm.bias", "output_norm.bias"),
    "head": one("embed_out.weight", "output.weight"),
}
_NEOX_NAMES = {
    **LAYER_NAMES,
    **_with_biases({
        "output": ("attention.dense", "attn_output"),
        "gate_up": ("mlp.dense_h_to_4h", "ffn_up"),
        "down": ("mlp.dense_4h_to_h", "ffn_down"),
    }),
    "qkv": one("attention.query_key_value.weight", "attn_qkv.weight", stored=Stored.GROUPED),
    "qkv_bias": one("attention.query_key_value.bias", "attn_qkv.bias", stored=Stored.GROUPED),
}  # fmt: skip
_STABLELM_NAMES = {
    **LAYER_NAMES,
    "q_norm": one("self_attn.q_layernorm.norms.{head}.weight", "attn_q_norm.weight", stored=Stored.BY_HEAD),
    "k_norm": one("self_attn.k_layernorm.norms.{head}.weight", "attn_k_norm.weight", stored=Stored.BY_HEAD),
}
_STARCODER2_NAMES = LAYER_NAMES | _with_biases({"gate_up": ("mlp.c_fc", "ffn_up"), "down": ("mlp.c_proj", "ffn_down")})
_GPT2_TOP = {
    "embed": one("transformer.wte.weight", "token_embd.weight"),
    "positions": one("transformer.wpe.weight", "position_embd.weight"),
    "final_norm": one("transformer.ln_f.weight", "output_norm.weight"),
    "final_norm_bias": one("transformer.ln_f.bias", "output_norm.bias"),
    "head": one("lm_head.weight", "output.weight"),
}
_GPT2_LINEARS = {
    "qkv": ("attn.c_attn", "attn_qkv"),
    "output": ("attn.c_proj", "attn_output"),
    "gate_up": ("mlp.c_fc", "ffn_up"),
    "down": ("mlp.c_proj", "ffn_down"),
}
_GPT2_NAMES = {
    **_with_biases({"input_norm": ("ln_1", "attn_norm"), "ffn_norm": ("ln_2", "ffn_norm")}),
    **_with_biases(_GPT2_LINEARS),
    **{name: one(f"{hf}.weight", f"{gguf}.weight", Stored.COLUMNS) for name, (hf, gguf) in _GPT2_LINEARS.items()},
}
_COHERE_DEFAULTS = {
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
    "layer_norm_eps": 1e-5,
}

LAYER_NORM_ROWS: dict[str, Architecture] = {
    "PhiForCausalLM": Architecture(
        _phi,
        {"max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "hidden_act": "gelu_new"}
        | {"partial_rotary_factor": 0.5},
        top_names=_PHI_TOP,
        layer_names=_PHI_NAMES,
    ),
    "GPTNeoXForCausalLM": Architecture(
        _neox,
        {"max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "hidden_act": "gelu", "rotary_pct": 0.25}
        | {"use_parallel_residual": True, "attention_bias": True},
        top_names=_NEOX_TOP,
        layer_names=_NEOX_NAMES,
        base="gpt_neox.",
        layers="gpt_neox.layers.",
        ignored=r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    ),
    "CohereForCausalLM": Architecture(_cohere, _COHERE_DEFAULTS | {"rope_theta": 500000.0}),
    "Cohere2ForCausalLM": Architecture(
        _cohere2, _COHERE_DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4}
    ),
    "StableLmForCausalLM": Architecture(
        _stablelm,
        {"max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
        layer_names=_STABLELM_NAMES,
    ),
    "NemotronForCausalLM": Architecture(
        _nemotron,
        {"max_position_embeddings": 4096, "norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
        layer_names={**LAYER_NAMES, **UP_ALONE},
    ),
    "Starcoder2ForCausalLM": Architecture(
        _starcoder2,
        {"max_position_embeddings": 4096, "norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "use_bias": True}
        | {"tie_word_embeddings": True, "num_key_value_heads": 2},
        layer_names=_STARCODER2_NAMES,
    ),
    "GPT2LMHeadModel": Architecture(
        _gpt2,
        {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": True}
        | {"n_positions": 1024},
        top_names=_GPT2_TOP,
        layer_names=_GPT2_NAMES,
        base="transformer.",
        layers="transformer.h.",
        ignored=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
    ),
}
