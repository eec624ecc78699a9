"""Says GGUF metadata in config.json's words.

Invariants: pure; every key it reads is in a table here or in `table.py`, or named in the code. Biases, norms of
queries, tied embeddings and rotary factors have no metadata key: they show in which tensors the file holds.
Knows nothing of weights beyond their names and shapes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from stoker_runtime.checkpoint.gguf_header import GGUFHeader
from stoker_runtime.errors import ModelError
from stoker_runtime.models.gguf.encoders import GGUF_ENCODERS, encoder_config
from stoker_runtime.models.gguf.rope import read_rope_scaling
from stoker_runtime.models.gguf.table import GGUF_ROWS, REQUIRED, GGUFRow

TABLE = "stoker_runtime/models/gguf/table.py"
# config.json's key → the GGUF key after "<architecture>.", of what a file may leave out.
OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
}
# config.json's keys for what shows in the first layer's tensors, or in those of no layer.
SHOWN = {
    "attn_q.bias": ("attention_bias", "qkv_bias", "use_qkv_bias", "use_bias"),
    "attn_output.bias": ("attention_out_bias", "bias"),
    "ffn_up.bias": ("mlp_bias",),
    "attn_q_norm.weight": ("use_qk_norm", "qk_layernorm"),
}
# Layers of the one size of Gemma 2 and of Gemma 3 whose queries are scaled by hidden / heads; no key says so.
GEMMA_27B = {"gemma2": 46, "gemma3": 62}
# What the makers of MiniCPM 1 and 2 scale by, which their first files leave out: of embeddings, by depth, by width.
MINICPM = (12.0, 1.4, 256.0)
# Layers of Baichuan's 13B, which has ALiBi; no key says so.
BAICHUAN_13B = 40
# DeepSeek's sizes by their experts: in how many groups these are, and how many are chosen from; older files leave both
# out.
DEEPSEEK_GROUPS = {160: (8, 3), 256: (8, 4)}
SIGMOID = 2
"""The number of `expert_gating_func` for scores by a sigmoid."""


def config_from_gguf(header: GGUFHeader) -> dict[str, Any]:
    """The file's metadata as a config.json. Raises ModelError for an unknown architecture or a missing key."""
    metadata, path = header.metadata, header.path
    architecture = metadata.get("general.architecture")
    if architecture in GGUF_ENCODERS:
        return encoder_config(header, _vocab_size(header))
    if architecture not in GGUF_ROWS:
        known = (*GGUF_ROWS, *GGUF_ENCODERS)
        near = difflib.get_close_matches(str(architecture), known, n=1)
        hint = f" The nearest is {near[0]}." if near else ""
        raise ModelError(
            f"{path}: architecture {architecture!r} is not supported.{hint} Supported in GGUF are "
            f"{', '.join(known)}: the rows of {TABLE}, where one that the decoder can run is added, and of encoders.py "
            "beside it.",
            param="model",
        )
    row = GGUF_ROWS[architecture]
    config: dict[str, Any] = {"architectures": [row.architecture], "dtype": "bfloat16", **row.says}
    norm = "layer_norm_epsilon" if row.layer_norm else "layer_norm_rms_epsilon"
    for key, name in {**REQUIRED, row.eps: f"attention.{norm}"}.items():
        if f"{architecture}.{name}" not in metadata:
            raise ModelError(f"{path}: the metadata lacks {architecture}.{name}.")
        config[key] = _of_layers(metadata[f"{architecture}.{name}"])
    for key, name in {**OPTIONAL, **row.own}.items():
        if f"{architecture}.{name}" in metadata:
            config[key] = _of_layers(metadata[f"{architecture}.{name}"])
    config["vocab_size"] = _vocab_size(header)
    config["eos_token_id"] = _end_tokens(metadata)
    config |= _shown(header)
    if architecture in GEMMA_27B:
        by_hidden = config["num_hidden_layers"] == GEMMA_27B[architecture] or "head_dim" not in config
        by_heads = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = by_heads if by_hidden else config["head_dim"]
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config["rope_scaling"] = read_rope_scaling(header, architecture, int(config["head_dim"]))
    return config | _particular(header, architecture, row, config)


def _particular(header: GGUFHeader, architecture: str, row: GGUFRow, config: Mapping[str, Any]) -> dict[str, Any]:
    """What an architecture's files say in ways of their own."""
    window = header.metadata.get(f"{architecture}.attention.sliding_window")
    if architecture == "llama" and config.get("num_local_experts"):
        return {"architectures": ["MixtralForCausalLM"], "sliding_window": window}
    if architecture == "llama" and window:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    if architecture == "mistral3":
        return _mistral3(header, config)
    if architecture == "olmo2" and window:
        return {"architectures": ["Olmo3ForCausalLM"], **_layer_types(header, architecture)}
    if architecture == "exaone4":
        return _layer_types(header, architecture)
    if architecture == "gpt-oss":
        return _gpt_oss(header, config)
    if architecture == "glm4moe":
        behind = int(config.get("num_nextn_predict_layers") or 0)
        return {"num_hidden_layers": config["num_hidden_layers"] - behind}
    if architecture == "phimoe":
        factor = (config["rope_scaling"] or {}).get("attention_factor")
        return {"rope_scaling": {**config["rope_scaling"], "short_mscale": factor, "long_mscale": factor}}
    if architecture == "minicpm":
        return _minicpm(header, config)
    if architecture == "baichuan" and config["num_hidden_layers"] == BAICHUAN_13B:
        return {"max_position_embeddings": None, "model_max_length": config["max_position_embeddings"]}
    if architecture.startswith("nemotron_h"):
        return _nemotron_h(header, architecture, config)
    if architecture == "qwen3next":
        return _qwen3_next(header, config)
    if row.own.get("kv_lora_rank"):
        return _latent(header, architecture, config)
    return {}


def _vocab_size(header: GGUFHeader) -> int:
    """The embedding's rows; metadata may leave the size out or count without padding."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{header.path}: tensor token_embd.weight is missing or not a matrix.")
    return embedding.shape[0]


def _shown(header: GGUFHeader) -> dict[str, bool]:
    """What the file has no key for: it has the tensors, or not."""
    found: dict[str, bool] = {}
    for tensor, keys in SHOWN.items():
        names = (f"blk.0.{tensor}", f"blk.0.{tensor.replace('attn_q.', 'attn_qkv.')}")
        found |= dict.fromkeys(keys, any(name in header.tensors for name in names))
    head = {"lm_head_bias": "output.bias" in header.tensors}
    return found | head | {"tie_word_embeddings": "output.weight" not in header.tensors}


def _end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """End of text and, in chat models, end of turn and of message."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return [int(metadata[key]) for key in keys if key in metadata]


def _layer_types(header: GGUFHeader, architecture: str) -> dict[str, Any]:
    """Which layers slide, where the file says it layer by layer."""
    slides = header.metadata.get(f"{architecture}.attention.sliding_window_pattern")
    if not isinstance(slides, list):
        return {}
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in slides]}


def _gpt_oss(header: GGUFHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    """Its YaRN is cut at no whole dimension. Experts in MXFP4 stay so."""
    found: dict[str, Any] = {"rope_scaling": {**(config["rope_scaling"] or {}), "truncate": False}}
    experts = header.tensors.get("blk.0.ffn_gate_exps.weight")
    if experts is not None and experts.encoding == "MXFP4":
        found["quantization_config"] = {"quant_method": "mxfp4"}
    return found


def _mistral3(header: GGUFHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    """How queries grow, and, where cos and sin stay as they are, the two equal factors that say so."""
    growth = header.metadata.get("mistral3.attention.temperature_scale")
    if not growth:
        return {}
    equal = header.metadata.get("mistral3.rope.scaling.yarn_log_multiplier") or None
    scaling = {"llama_4_scaling_beta": growth, "mscale": equal, "mscale_all_dim": equal}
    return {"architectures": ["Ministral3ForCausalLM"], "rope_scaling": config["rope_scaling"] | scaling}


def _minicpm(header: GGUFHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    """The factors themselves, from which the makers' settings follow."""
    embedding, depth, width = MINICPM
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    residual = header.metadata.get("minicpm.residual_scale", depth / math.sqrt(layers))
    return {
        "scale_emb": header.metadata.get("minicpm.embedding_scale", embedding),
        "scale_depth": residual * math.sqrt(layers),
        "dim_model_base": hidden / header.metadata.get("minicpm.logit_scale", hidden / width),
    }


def _of_layers(value: Any) -> Any:
    """Of sizes that are given layer by layer, and are 0 where a layer has nothing of the kind, the largest."""
    return max(value) if isinstance(value, list) else value


def _layers_with(header: GGUFHeader, tensor: str, layers: int) -> list[bool]:
    return [f"blk.{layer}.{tensor}" in header.tensors for layer in range(layers)]


def _nemotron_h(header: GGUFHeader, architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What each block is, its tensors say; without them it is attention."""
    count, heads = config["num_hidden_layers"], config.get("mamba_num_heads") or 1
    kinds = (("ssm_in.weight", "M"), ("ffn_up_exps.weight", "E"), ("ffn_up.weight", "-"))
    letters = ["*"] * count
    for tensor, letter in kinds:
        letters = [
            letter if there else old for old, there in zip(letters, _layers_with(header, tensor, count), strict=True)
        ]
    return {
        "hybrid_override_pattern": "".join(letters),
        "mamba_head_dim": header.metadata.get(f"{architecture}.ssm.inner_size", 0) // heads,
        "use_bias": any(_layers_with(header, "ssm_in.bias", count)),
        "use_conv_bias": any(_layers_with(header, "ssm_conv1d.bias", count)),
        "mlp_bias": any(_layers_with(header, "ffn_up.bias", count)),
    }


def _qwen3_next(header: GGUFHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    linear = _layers_with(header, "ssm_conv1d.weight", config["num_hidden_layers"])
    inner = header.metadata.get("qwen3next.ssm.inner_size", 0)
    return {
        "layer_types": ["linear_attention" if each else "full_attention" for each in linear],
        "linear_value_head_dim": inner // (config.get("linear_num_value_heads") or 1),
    }


def _latent(header: GGUFHeader, architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of a head's parts, which older files give as those of keys and values, newer ones under names of theirs."""

    def length(name: str, otherwise: int) -> int:
        prefix = f"{architecture}.attention.{name}_length"
        return int(header.metadata.get(f"{prefix}_mla", header.metadata.get(prefix, otherwise)))

    rotated, heads = header.metadata.get(f"{architecture}.rope.dimension_count"), config["num_attention_heads"]
    if rotated is None:
        raise ModelError(f"{header.path}: the metadata lacks {architecture}.rope.dimension_count.")
    keys = length("key", int(config["head_dim"])) - rotated
    widening = header.tensors.get("blk.0.attn_kv_b.weight")
    values = length("value", config["hidden_size"] // heads) if widening is None else widening.shape[0] // heads - keys
    found: dict[str, Any] = {
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys,
        "v_head_dim": values,
        "rope_scaling": {**config["rope_scaling"], "partial_rotary_factor": 1.0},
    }
    if architecture != "deepseek2":
        return found
    scaling, prefix = found["rope_scaling"], f"{architecture}.rope.scaling.yarn_log_multiplier"
    if prefix in header.metadata:
        # Of the two factors that the makers have, which are equal in all models; stored times 0.1.
        scaling["mscale"] = scaling["mscale_all_dim"] = 10 * header.metadata[prefix]
    groups, chosen = DEEPSEEK_GROUPS.get(config.get("n_routed_experts", 0), (1, 1))
    found["n_group"], found["topk_group"] = config.get("n_group", groups), config.get("topk_group", chosen)
    if header.metadata.get("deepseek2.expert_gating_func") == SIGMOID:
        return found | {"architectures": ["DeepseekV3ForCausalLM"]}
    return found | {"topk_method": "group_limited_greedy" if found["n_group"] > 1 else "greedy"}
