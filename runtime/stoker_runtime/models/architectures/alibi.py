"""Rows of families whose heads know distances by slopes (ALiBi, Press et al. 2022) and do not rotate: BLOOM, MPT, and
Falcon, of which some rotate.

Invariants: pure; a setting that changes the result is read or refused.
Knows nothing of tensors beyond their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures.reading import read_base, refuse
from stoker_runtime.models.architectures.row import Architecture, Names, Stored, one, with_biases
from stoker_runtime.models.layer_specs.rope_spec import RopeSpec
from stoker_runtime.models.spec import ModelSpec, Norm


def alibi_slopes(heads: int, most: float = 8.0) -> tuple[float, ...]:
    """The slope of each head: 2^(-most/n), 2^(-2·most/n)… of n heads that are a power of two; of further heads those
    that lie between, from the steepest on.
    """
    power = 1 << (heads.bit_length() - 1)
    between = (2.0 ** (-most * (head + 0.5) / power) for head in range(heads - power))
    return (*(2.0 ** (-most * (head + 1) / power) for head in range(power)), *between)


def _bloom(config: Mapping[str, Any]) -> ModelSpec:
    refuse(config, "apply_residual_connection_post_layernorm", "no published model adds what is normed")
    older = {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    common = {key: config[key] if config.get(key) is not None else config[old] for key, old in older.items()}
    common["max_position_embeddings"] = config.get("seq_length") or config["max_position_embeddings"]
    common["intermediate_size"] = 4 * int(common["hidden_size"])
    spec = read_base({**config, **common}, eps="layer_norm_epsilon")
    return replace(
        spec,
        rope=RopeSpec(dim=0), slopes=alibi_slopes(spec.heads), embedding_norm=True,
        norm=Norm.LAYER, norm_bias=True, gated=False, qkv_bias=True, output_bias=True, ffn_bias=True,
    )  # fmt: skip


def _mpt(config: Mapping[str, Any]) -> ModelSpec:
    """No biases, and settings of attention in an object of their own."""
    attention = config.get("attn_config") or {}
    refuse(attention, "clip_qkv", "queries, keys and values are not clipped")
    refuse(attention, "qk_ln", "no published model of this class norms its queries")
    refuse(attention, "prefix_lm", "attention is causal")
    refuse(config, "logit_scale", "no published model scales its logits")
    for key, known, found in (
        ("attn_type", "multihead_attention", attention.get("attn_type")),
        ("alibi", True, attention.get("alibi")),
        ("no_bias", True, config.get("no_bias")),
    ):
        if found not in (None, known):
            raise ModelError(f"{key} is {found!r}; of MPT only {known!r} is supported.", param=key)
    common = {
        "hidden_size": config["d_model"],
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": config["n_heads"],
        "intermediate_size": int(config["expansion_ratio"]) * int(config["d_model"]),
        "max_position_embeddings": config["max_seq_len"],
    }
    spec = read_base({**config, **common}, eps="layer_norm_epsilon")
    return replace(
        spec,
        rope=RopeSpec(dim=0), slopes=alibi_slopes(spec.heads, float(attention.get("alibi_bias_max") or 8.0)),
        attention_multiplier=float(attention.get("softmax_scale") or 0.0), norm=Norm.LAYER, gated=False,
    )  # fmt: skip


def _falcon(config: Mapping[str, Any]) -> ModelSpec:
    """Three generations: with slopes, which are scaled as logits are; with one KV head; with a few of them."""
    newer, parallel = bool(config["new_decoder_architecture"]), bool(config["parallel_attn"])
    kv_heads = config.get("num_kv_heads") if newer else 1 if config["multi_query"] else None
    hidden = int(config["hidden_size"])
    common = {
        "num_key_value_heads": kv_heads or config["num_attention_heads"],
        "intermediate_size": config.get("ffn_hidden_size") or 4 * hidden,
    }
    spec = read_base({**config, **common}, eps="layer_norm_epsilon", activation="activation")
    bias = bool(config["bias"])
    slopes = tuple(each * spec.attention_scale for each in alibi_slopes(spec.heads)) if config["alibi"] else ()
    norms = config.get("num_ln_in_parallel_attn") or (2 if newer else 1)
    return replace(
        spec,
        rope=RopeSpec(dim=0) if slopes else spec.rope, slopes=slopes,
        norm=Norm.LAYER, norm_bias=True, parallel=newer or parallel, shared_norm=(newer or parallel) and norms == 1,
        gated=False, qkv_bias=bias, output_bias=bias, ffn_bias=bias,
    )  # fmt: skip


_BIASES = with_biases(
    {
        "input_norm": ("input_layernorm", "attn_norm"),
        "ffn_norm": ("post_attention_layernorm", "ffn_norm"),
        "output": ("self_attention.dense", "attn_output"),
        "gate_up": ("mlp.dense_h_to_4h", "ffn_up"),
        "down": ("mlp.dense_4h_to_h", "ffn_down"),
    }
)
_MERGED_QKV = {
    "qkv": one("self_attention.query_key_value.weight", stored=Stored.GROUPED),
    "qkv_bias": one("self_attention.query_key_value.bias", stored=Stored.GROUPED),
}
_TOP = {
    "embed": one("transformer.word_embeddings.weight"),
    "final_norm": one("transformer.ln_f.weight"),
    "final_norm_bias": one("transformer.ln_f.bias"),
    "head": one("lm_head.weight"),
}
_BLOOM_TOP = {
    **_TOP,
    "embed_norm": one("transformer.word_embeddings_layernorm.weight"),
    "embed_norm_bias": one("transformer.word_embeddings_layernorm.bias"),
}
_FALCON_NAMES = {
    **_BIASES,
    **_MERGED_QKV,
    # Where attention and feed-forward each norm the stream that both read.
    "input_norm_apart": one("ln_attn.weight"),
    "input_norm_bias_apart": one("ln_attn.bias"),
    "ffn_norm_apart": one("ln_mlp.weight"),
    "ffn_norm_bias_apart": one("ln_mlp.bias"),
}
_MPT_NAMES: dict[str, Names] = {
    "input_norm": one("norm_1.weight"),
    "qkv": one("attn.Wqkv.weight"),
    "output": one("attn.out_proj.weight"),
    "ffn_norm": one("norm_2.weight"),
    "gate_up": one("ffn.up_proj.weight"),
    "down": one("ffn.down_proj.weight"),
}
_BASE, _LAYERS = "transformer.", "transformer.h."

ALIBI_ROWS: dict[str, Architecture] = {
    "BloomForCausalLM": Architecture(
        _bloom,
        {"max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "hidden_act": "gelu_new"}
        | {"tie_word_embeddings": True},
        top_names=_BLOOM_TOP,
        layer_names={**_BIASES, **_MERGED_QKV},
        base=_BASE,
        layers=_LAYERS,
    ),
    "MptForCausalLM": Architecture(
        _mpt,
        {"max_seq_len": 2048, "layer_norm_epsilon": 1e-5, "hidden_act": "gelu", "expansion_ratio": 4}
        | {"tie_word_embeddings": True},
        top_names={
            "embed": one("transformer.wte.weight"),
            "final_norm": one("transformer.norm_f.weight"),
            "head": one("lm_head.weight"),
        },
        layer_names=_MPT_NAMES,
        base=_BASE,
        layers="transformer.blocks.",
    ),
    "FalconForCausalLM": Architecture(
        _falcon,
        {"max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "activation": "gelu", "alibi": False}
        | {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": False}
        | {"tie_word_embeddings": True},
        top_names=_TOP,
        layer_names=_FALCON_NAMES,
        base=_BASE,
        layers=_LAYERS,
    ),
}
ALIBI_ROWS["MPTForCausalLM"] = ALIBI_ROWS["MptForCausalLM"]
