"""Rows of decoders with multi-head latent attention: DeepSeek V2 to V3 and R1, GLM-4.7-Flash, MiniCPM 3.

Invariants: pure; a setting that changes the result is read or refused. What a latent is, `models/layer_specs` says.
Knows nothing of tensors beyond their names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures.llama import minicpm
from stoker_runtime.models.architectures.moe import DEEPSEEK_NAMES, draft_layers, mixture
from stoker_runtime.models.architectures.reading import read_base, refuse
from stoker_runtime.models.architectures.row import LAYER_NAMES, Architecture, Names, one
from stoker_runtime.models.layer_specs.latent_spec import LatentSpec
from stoker_runtime.models.moe_spec import MoeSpec
from stoker_runtime.models.spec import ModelSpec

# Sizes without which there is no latent attention, and how a configuration says that all of a head's queries rotate.
_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _latent(config: Mapping[str, Any], spec: ModelSpec, *, interleaved: bool) -> ModelSpec:
    """`spec` with the latent attention that `config` describes: to the cache it is one head as wide as a latent."""
    refuse(config, "attention_bias", "latents are projected without a bias")
    narrow = int(config.get("q_lora_rank") or 0)
    latent = LatentSpec(narrow, *(int(config[key]) for key in _SIZES))
    bad = next((key for key in _SIZES if int(config[key]) < 1), None)
    if bad is not None:
        raise ModelError(f"{bad} is {config[bad]}; it must be at least 1.", param=bad)
    return replace(
        spec,
        latent=latent,
        kv_heads=1,
        head_dim=latent.cached,
        rope=replace(spec.rope, interleaved=interleaved),
        attention_multiplier=latent.qk_head_dim**-0.5 * _mscale(config) ** 2,
    )


def _base(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` as it is read: of a head, the part that rotates is all that the rotary embedding knows."""
    return {**config, "head_dim": config["qk_rope_head_dim"], "num_key_value_heads": config["num_attention_heads"]}


def _mscale(config: Mapping[str, Any]) -> float:
    """What DeepSeek's `mscale_all_dim` multiplies queries with, and keys."""
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    factor, weight = float(scaling.get("factor") or 1.0), float(scaling.get("mscale_all_dim") or 0.0)
    return 1.0 if kind == "default" or factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _sparse(config: Mapping[str, Any], method: str, **rest: Any) -> MoeSpec | None:
    """The mixtures behind the first `first_k_dense_replace` layers; None where there are none."""
    known = {"moe_layer_freq": 1, "scoring_func": rest["scoring"], "topk_method": method}
    for key, value in known.items():
        if config.get(key, value) != value:
            raise ModelError(f"{key} is {config[key]!r}, which is not supported; it must be {value!r}.", param=key)
    first, layers = int(config.get("first_k_dense_replace") or 0), int(config["num_hidden_layers"])
    if config.get("n_routed_experts") is None or first >= layers:
        return None
    return mixture(
        config,
        "moe_intermediate_size",
        layers=frozenset(range(first, layers)),
        scale=float(config.get("routed_scaling_factor") or 1.0),
        shared_ffn=int(config["moe_intermediate_size"]) * int(config.get("n_shared_experts") or 0),
        **rest,
    )


def _groups(config: Mapping[str, Any]) -> dict[str, int]:
    return {"groups": int(config.get("n_group") or 1), "top_groups": int(config.get("topk_group") or 1)}


def _deepseek2(config: Mapping[str, Any]) -> ModelSpec:
    """Greedy over all experts, or within the groups with the best one."""
    refuse(config, "norm_topk_prob", "the weights of DeepSeek V2's experts are scaled, not renormalized")
    refuse(config, "mlp_bias", "its feed-forwards have none")
    method = str(config.get("topk_method") or "greedy")
    grouped = method == "group_limited_greedy"
    chosen = _groups(config) if grouped else {}
    moe = _sparse(config, "group_limited_greedy" if grouped else "greedy", scoring="softmax", **chosen)
    return replace(_latent(config, read_base(_base(config)), interleaved=True), moe=moe)


def _deepseek3(config: Mapping[str, Any]) -> ModelSpec:
    """By corrected sigmoids, within the groups whose best two are best."""
    moe = _sparse(
        config,
        "noaux_tc",
        scoring="sigmoid",
        correction_bias=True,
        renormalize=bool(config.get("norm_topk_prob", True)),
        group_top2=True,
        **_groups(config),
    )
    interleaved = bool(config.get("rope_interleave", True))
    spec = _latent(config, read_base(_base(config)), interleaved=interleaved)
    return replace(spec, draft_layers=draft_layers(config), moe=moe)


def _glm_lite(config: Mapping[str, Any]) -> ModelSpec:
    """GLM-4.7-Flash: DeepSeek V3's layers; `mlp_layer_types` says which are dense, as the number of the first ones may.
    """
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return _deepseek3(config)
    first, layers = list(kinds).count("dense"), int(config["num_hidden_layers"])
    if list(kinds) != ["dense"] * first + ["sparse"] * (layers - first):
        raise ModelError(
            "mlp_layer_types is not supported: it must have a kind for each layer, dense ones and then sparse ones.",
            param="mlp_layer_types",
        )
    return _deepseek3({**config, "first_k_dense_replace": first})


def _minicpm3(config: Mapping[str, Any]) -> ModelSpec:
    """MiniCPM's multipliers, and no mixture."""
    width = config.get("v_head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"])
    known = {**config, "v_head_dim": width}
    return _latent(known, minicpm(_base(known)), interleaved=False)


# The first projection makes the narrow queries, or where there are none all of them, and what is cached.
_NAMES = {
    **LAYER_NAMES,
    "qkv": Names(
        ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
        ("attn_q_a.weight", "attn_kv_a_mqa.weight"),
    ),
    "qkv_unnarrowed": Names(
        ("self_attn.q_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"), ("attn_q.weight", "attn_kv_a_mqa.weight")
    ),
    "q_a_norm": one("self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight"),
    "q_b": one("self_attn.q_b_proj.weight", "attn_q_b.weight"),
    "kv_a_norm": one("self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight"),
    "kv_b": one("self_attn.kv_b_proj.weight", "attn_kv_b.weight"),
}
_MIXED = {**_NAMES, **DEEPSEEK_NAMES}
_DEEPSEEK2 = {"max_position_embeddings": 2048, "n_shared_experts": 2, "num_experts_per_tok": 6}
_DEEPSEEK3 = {"max_position_embeddings": 4096, "n_shared_experts": 1, "num_experts_per_tok": 8}
_GLM_LITE = {
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
}
_MINICPM3 = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}

LATENT_ROWS: dict[str, Architecture] = {
    "DeepseekV2ForCausalLM": Architecture(_deepseek2, _DEEPSEEK2, layer_names=_MIXED),
    "DeepseekV3ForCausalLM": Architecture(_deepseek3, _DEEPSEEK3, layer_names=_MIXED),
    "Glm4MoeLiteForCausalLM": Architecture(_glm_lite, _GLM_LITE, layer_names=_MIXED),
    "MiniCPM3ForCausalLM": Architecture(_minicpm3, _MINICPM3, layer_names=_NAMES),
}
