"""Encoders whose queries and keys rotate, with gated feed-forwards: ModernBERT, Nomic, GTE.

Invariants: pure; a setting that changes the result is read or refused.
Knows nothing of tensors beyond their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures.reading import FULL, SLIDING, by_layer_type, read_layer_types
from stoker_runtime.models.encoders.names import GTE, MODERN_BERT, NOMIC
from stoker_runtime.models.encoders.reading import read_activation, read_base, require
from stoker_runtime.models.encoders.spec import LINEARS, EncoderSpec
from stoker_runtime.models.layer_specs.rope_spec import RopeSpec
from stoker_runtime.models.rope_config import read_rope

# Scalings that do not depend on how long a text is.
ROPE_KINDS = ("default", "linear", "yarn")
MODERN_BERT_DEFAULTS: dict[str, Any] = {
    "hidden_activation": "gelu",
    "norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "classifier_activation": "gelu",
}
# Nomic's own keys, which are GPT-2's, and those that transformers gives them.
NOMIC_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
NOMIC_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}
GTE_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
}


def read_modern_bert(config: Mapping[str, Any]) -> EncoderSpec:
    """ModernBERT: norms before each part, windows on most layers, which rotate faster; no biases unless said so."""
    config = {**MODERN_BERT_DEFAULTS, **config}
    activation = read_activation(config["hidden_activation"], "hidden_activation", gated=True)
    spec = read_base(config, MODERN_BERT, eps="norm_eps", activation=activation, gated=True)
    period = int(config["global_attn_every_n_layers"])
    default = [SLIDING if layer % period else FULL for layer in range(spec.num_layers)]
    slides = read_layer_types(config, spec.num_layers, default)
    window = int(config["local_attention"]) // 2
    asked = {"attention_bias": ("qkv", "output"), "mlp_bias": ("up", "down"), "classifier_bias": ("head_dense",)}
    biases = frozenset(name for key, names in asked.items() if config.get(key) for name in names)
    return replace(
        spec,
        types=0,
        rope=_rope(by_layer_type(config, FULL, float(config["global_rope_theta"])), spec.head_dim),
        local_rope=_rope(by_layer_type(config, SLIDING, float(config["local_rope_theta"])), spec.head_dim),
        windows=tuple(window if each else None for each in slides),
        pre_norm=True,
        norm_bias=bool(config.get("norm_bias")),
        biases=biases | {"head_out"},
        head_activation=read_activation(config["classifier_activation"], "classifier_activation"),
        head_norm=True,
    )


def read_nomic(config: Mapping[str, Any]) -> EncoderSpec:
    """Nomic: BERT with SwiGLU that rotates. Texts end where its training did, up to where all its scalings agree."""
    config = {"rope_theta": 1000.0, **{NOMIC_KEYS.get(key, key): value for key, value in config.items()}}
    config = {"layer_norm_eps": 1e-12, "max_position_embeddings": 2048, "type_vocab_size": 2, **config}
    require(
        config, num_experts=0, moe_every_n_layers=0, prenorm=False, parallel_block=False, use_rms_norm=False,
        causal=False, rotary_emb_scale_base=None, rotary_emb_interleaved=False, rotary_emb_fraction=1.0,
        qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False, scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
    )  # fmt: skip
    asked = config.get("activation_function") or config.get("hidden_act") or "swiglu"
    activation = read_activation(NOMIC_ACTIVATIONS.get(asked, asked), "activation_function", gated=True)
    if "activation_function" in config and asked not in NOMIC_ACTIVATIONS:
        raise ModelError(
            f"activation_function {asked!r} is not supported; known are {', '.join(NOMIC_ACTIVATIONS)}.",
            param="activation_function",
        )
    spec = read_base(config, NOMIC, eps="layer_norm_eps", activation=activation, gated=True)
    trained = int(config.get("max_trained_positions") or spec.max_position)
    return replace(
        spec,
        max_position=min(spec.max_position, trained),
        rope=_rope(config, spec.head_dim),
        biases=frozenset(),
    )


def read_gte(config: Mapping[str, Any]) -> EncoderSpec:
    """GTE v1.5: BERT with a gated feed-forward that rotates, by NTK's scaling where it was stretched."""
    config = {**GTE_DEFAULTS, **config}
    require(
        config, position_embedding_type="rope", layer_norm_type="layer_norm", logn_attention_scale=False, pack_qkv=True
    )
    activation = read_activation(config["hidden_act"], "hidden_act", gated=True)
    # transformers' own models have another name before the encoder's tensors, where there is a head.
    names = replace(GTE, base="gte") if config["architectures"][0].startswith("Gte") else GTE
    spec = read_base(config, names, eps="layer_norm_eps", activation=activation, gated=True)
    scaling = config.get("rope_scaling") or {}
    if str(scaling.get("type") or scaling.get("rope_type") or "") == "ntk":
        rope = _ntk(scaling, float(config["rope_theta"]), spec.head_dim)
    else:
        rope = _rope(config, spec.head_dim)
    return replace(spec, rope=rope, biases=LINEARS - {"up"})


def _ntk(scaling: Mapping[str, Any], theta: float, dim: int) -> RopeSpec:
    """Fixed NTK: the base times the factor s, and all frequencies divided by s^(2/dim) (Su, "NTK-RoPE-fixed")."""
    require(scaling, mixed_b=None)
    factor = float(scaling["factor"])
    if factor <= 1.0:
        return RopeSpec(dim=dim, theta=theta)
    return RopeSpec(dim=dim, theta=theta * factor, kind="linear", factor=factor ** (2 / dim))


def _rope(config: Mapping[str, Any], dim: int) -> RopeSpec:
    rope = read_rope(config, dim)
    if rope.kind not in ROPE_KINDS:
        raise ModelError(
            f"rope scaling {rope.kind!r} of an encoder is not supported; known are {', '.join(ROPE_KINDS)}.",
            param="rope_type",
        )
    return rope
