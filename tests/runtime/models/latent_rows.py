"""Latent attention for the test of the table: transformers' configuration class, and what differs of its sizes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Changes = Callable[[random.Random], dict[str, Any]]

# As DeepSeek scales: attention by the square of one factor, cos and sin by the quotient of both.
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.9, "mscale_all_dim": 0.7,
}  # fmt: skip


def _sizes(**changes: Any) -> Changes:
    """Ranks and parts of heads that differ all, and none a power of two."""

    def draw(rng: random.Random) -> dict[str, Any]:
        heads = rng.choice([3, 5, 6])
        found = {
            "num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": heads * rng.choice([10, 14]),
            "q_lora_rank": rng.choice([20, 28]), "kv_lora_rank": rng.choice([22, 36]), "head_dim": None,
            "qk_nope_head_dim": rng.choice([14, 12]), "qk_rope_head_dim": rng.choice([6, 10]),
            "v_head_dim": rng.choice([9, 15]),
        }  # fmt: skip
        return {**found, **changes}

    return draw


def _mixed(**changes: Any) -> Changes:
    experts = {
        "n_routed_experts": 12, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 23,
        "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2,
    }  # fmt: skip
    return _sizes(**{**experts, **changes})


def _longrope(rng: random.Random) -> dict[str, Any]:
    scaling = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 512, "factor": 1.0,
        "short_factor": [1 + rng.random() for _ in range(4)], "long_factor": [3 + rng.random() for _ in range(4)],
    }  # fmt: skip
    changes = {"rope_parameters": scaling, "scale_emb": 7, "scale_depth": 1.3, "dim_model_base": 24}
    return {**_sizes(qk_rope_head_dim=8)(rng), **changes}


# As in the test's own table: class, sizes.
LATENTS: dict[str, tuple[str, Changes]] = {
    "DeepseekV2ForCausalLM": (
        "DeepseekV2Config", _mixed(topk_method="group_limited_greedy", routed_scaling_factor=1.6, rope_parameters=_YARN)
    ),
    "DeepseekV2ForCausalLM-lite": (
        "DeepseekV2Config", _mixed(topk_method="greedy", q_lora_rank=None, n_group=1, topk_group=1)
    ),
    "DeepseekV3ForCausalLM": (
        "DeepseekV3Config", _mixed(routed_scaling_factor=2.5, num_nextn_predict_layers=0, rope_parameters=_YARN)
    ),
    "DeepseekV3ForCausalLM-halves": (
        "DeepseekV3Config",
        _mixed(q_lora_rank=None, rope_interleave=False, norm_topk_prob=False, num_nextn_predict_layers=0),
    ),
    "Glm4MoeLiteForCausalLM": (
        "Glm4MoeLiteConfig",
        _mixed(head_dim=None, mlp_layer_types=["dense", "dense", "sparse"], num_nextn_predict_layers=0),
    ),
    "Glm4MoeLiteForCausalLM-one-group": (
        "Glm4MoeLiteConfig", _mixed(n_group=1, topk_group=1, num_nextn_predict_layers=0, rope_parameters=_YARN)
    ),
    "MiniCPM3ForCausalLM": ("MiniCPM3Config", _longrope),
}  # fmt: skip
