"""Says GGUF metadata in config.json's words.

Invariants: pure; every key it reads is in the table below or named in the code. Biases, tied embeddings and rotary
factors have no metadata key: they show in which tensors the file holds.
Knows nothing of weights beyond their names.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from stoker_runtime.checkpoint.gguf_header import GGUFHeader
from stoker_runtime.errors import ModelError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}

# config.json's key → the GGUF key after "<architecture>."; the first group is required.
REQUIRED = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
}
# The same of single architectures.
OWN = {
    "gemma2": {
        "sliding_window": "attention.sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3": {"sliding_window": "attention.sliding_window", "final_logit_softcapping": "final_logit_softcapping"},
    "granite": {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    },
}
# Layers of the one size of Gemma 2 and of Gemma 3 whose queries are scaled by hidden / heads; no key says so.
GEMMA_27B = {"gemma2": 46, "gemma3": 62}

ROPE_FACTORS_TENSOR = "rope_freqs.weight"


def config_from_gguf(header: GGUFHeader) -> dict[str, Any]:
    """The file's metadata as a config.json. Raises ModelError for an unknown architecture or a missing key."""
    metadata, path = header.metadata, header.path
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path}: architecture {architecture!r} is not supported; supported in GGUF are "
            f"{', '.join(ARCHITECTURES)}.",
            param="model",
        )
    config: dict[str, Any] = {"architectures": [ARCHITECTURES[architecture]], "dtype": "bfloat16"}
    for key, name in REQUIRED.items():
        if f"{architecture}.{name}" not in metadata:
            raise ModelError(f"{path}: the metadata lacks {architecture}.{name}.")
        config[key] = metadata[f"{architecture}.{name}"]
    for key, name in {**OPTIONAL, **OWN.get(architecture, {})}.items():
        if f"{architecture}.{name}" in metadata:
            config[key] = metadata[f"{architecture}.{name}"]
    config["vocab_size"] = _vocab_size(header, architecture)
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    config["rope_scaling"] = _rope_scaling(header, architecture, config)
    config["eos_token_id"] = _end_tokens(metadata)
    if architecture in GEMMA_27B:
        by_hidden = config["num_hidden_layers"] == GEMMA_27B[architecture] or "head_dim" not in config
        by_heads = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = by_heads if by_hidden else config["head_dim"]
    window = metadata.get(f"{architecture}.attention.sliding_window")
    if architecture == "llama" and window:
        config["architectures"] = ["MistralForCausalLM"]
        config["sliding_window"] = window
    return config


def _vocab_size(header: GGUFHeader, architecture: str) -> int:
    """The embedding's rows; metadata may leave the size out or count without padding."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{header.path}: tensor token_embd.weight is missing or not a matrix.")
    return embedding.shape[0]


def _end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """End of text and, in chat models, end of turn and of message."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return [int(metadata[key]) for key in keys if key in metadata]


def _rope_scaling(header: GGUFHeader, architecture: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    factors = header.tensors.get(ROPE_FACTORS_TENSOR)
    if factors is not None:
        return {"rope_type": "factors", "factors": _read_factors(header)} | _partial(header, architecture, config)
    prefix = f"{architecture}.rope.scaling"
    kind = header.metadata.get(f"{prefix}.type", "none")
    if kind == "none":
        return _partial(header, architecture, config) or None
    scaling = {"rope_type": kind, "factor": header.metadata.get(f"{prefix}.factor")}
    keys = {
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    for name, key in keys.items():
        if f"{prefix}.{name}" in header.metadata:
            scaling[key] = header.metadata[f"{prefix}.{name}"]
    return scaling | _partial(header, architecture, config)


def _partial(header: GGUFHeader, architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    rotated = header.metadata.get(f"{architecture}.rope.dimension_count")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if rotated is None or rotated == head_dim:
        return {}
    return {"partial_rotary_factor": rotated / head_dim}


def _read_factors(header: GGUFHeader) -> list[float]:
    entry = header.tensors[ROPE_FACTORS_TENSOR]
    if entry.encoding != "F32":
        raise ModelError(f"{entry.file}: tensor {entry.name} is {entry.encoding}; it must be F32.")
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        return list(struct.unpack(f"<{entry.num_bytes // 4}f", file.read(entry.num_bytes)))
