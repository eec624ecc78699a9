"""Known shapes, for random weights without a checkpoint: `shape:qwen2.5-7b`, and the first layers of one.

Invariants: each entry is a config.json's content, so it goes through the same door as a real model's.
Knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What a config.json calls its number of layers, and what it says of them one by one.
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
BY_LAYER = ("layer_types", "layers_block_type", "hybrid_override_pattern", "no_rope_layers")

_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "max_position_embeddings": 32768,
    "num_hidden_layers": 28,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
}

_LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "eos_token_id": [128001, 128008, 128009],
    "dtype": "bfloat16",
}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
}

# Three delta nets, then attention with a gate, each before a mixture of experts.
_QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "full_attention_interval": 4,
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "intermediate_size": 5120,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000.0,
    "max_position_embeddings": 262144,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": _QWEN2
    | {
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    },
    "qwen2.5-1.5b": _QWEN2
    | {
        "hidden_size": 1536,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "head_dim": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "eos_token_id": 151645,
        "dtype": "bfloat16",
    },
    "llama-3.1-8b": _LLAMA3
    | {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "intermediate_size": 14336},
    "llama-3.3-70b": _LLAMA3
    | {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80, "intermediate_size": 28672},
    "qwen3-30b-a3b": _QWEN3_MOE
    | {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 48,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    "qwen3-235b-a22b": _QWEN3_MOE
    | {
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_hidden_layers": 94,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "first_k_dense_replace": 1,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 102400,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 163840,
        "eos_token_id": 100001,
        "dtype": "bfloat16",
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 163840,
        "eos_token_id": 1,
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 24,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "vocab_size": 201088,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 131072,
        "eos_token_id": [200002, 199999],
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4"},
    },
    # Mamba-2, attention that does not rotate and feed-forwards without a gate, each a layer of its own.
    "nemotron-h-8b": {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_hidden_layers": 52,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_head_dim": 128,
        "intermediate_size": 21504,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "vocab_size": 131072,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 8192,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    },
    "qwen3-next-80b-a3b": _QWEN3_NEXT,
    # As published: matrices in FP8 by blocks, beside routers and what delta nets learn and forget by in 16 bits.
    "qwen3-next-80b-a3b-fp8": _QWEN3_NEXT
    | {
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": [
                "lm_head",
                *(
                    f"model.layers.{layer}.{module}"
                    for layer in range(_QWEN3_NEXT["num_hidden_layers"])
                    for module in ("mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_ba", "linear_attn.conv1d")
                ),
            ],
        },
    },
    # Small enough for a CPU test: 256 bytes and a few special ids as vocabulary.
    "tiny": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "vocab_size": 260,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "eos_token_id": 257,
        "dtype": "float32",
    },
}


def first_layers(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """`config` of a model of its first `count` layers alone: their number, and lists and patterns of what each is.

    Raises ValueError, with the numbers that work, for one that the model has not.
    """
    counted = {key: count for key in COUNTS if key in config}
    most = max((int(config[key]) for key in counted), default=0)
    if not 1 <= count <= most:
        raise ValueError(f"{count} of its layers cannot be taken: it has 1 to {most} that can")
    cut = {key: config[key][:count] for key in BY_LAYER if config.get(key)}
    return {**config, **counted, **cut}
