"""Layers with a state for the test of the table: transformers' configuration class, and what differs of its sizes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Changes = Callable[[random.Random], dict[str, Any]]


def _nemotron(pattern: str, **changes: Any) -> Changes:
    def draw(rng: random.Random) -> dict[str, Any]:
        groups = rng.choice([1, 2, 3])
        found = {
            "hybrid_override_pattern": pattern, "num_hidden_layers": None,
            "mamba_num_heads": groups * rng.choice([1, 2]),
            "mamba_head_dim": rng.choice([6, 12, 20]), "ssm_state_size": rng.choice([10, 24]), "n_groups": groups,
            "conv_kernel": rng.choice([2, 4]), "chunk_size": 16, "tie_word_embeddings": False,
        }  # fmt: skip
        return {**found, **changes}

    return draw


def _qwen(rng: random.Random) -> dict[str, Any]:
    key_heads = rng.choice([1, 2, 3])
    return {
        "num_hidden_layers": 5, "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 3],
        "linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * rng.choice([1, 2]),
        "linear_key_head_dim": rng.choice([10, 18]), "linear_value_head_dim": rng.choice([6, 20]),
        "linear_conv_kernel_dim": rng.choice([2, 4]), "num_experts": rng.choice([5, 7]), "num_experts_per_tok": 3,
        "moe_intermediate_size": 22, "shared_expert_intermediate_size": 31, "head_dim": 24, "mlp_only_layers": [2],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    }  # fmt: skip


# As in the test's own table: class, sizes.
HYBRIDS: dict[str, tuple[str, Changes]] = {
    "NemotronHForCausalLM": ("NemotronHConfig", _nemotron("M-M*-M")),
    "NemotronHForCausalLM-biased": (
        "NemotronHConfig", _nemotron("*MM-", use_bias=True, mlp_bias=True, use_conv_bias=False)
    ),
    "NemotronHForCausalLM-mixture": (
        "NemotronHConfig",
        _nemotron(
            "ME*EM-E", n_routed_experts=9, num_experts_per_tok=2, n_group=3, topk_group=2, moe_intermediate_size=27,
            moe_shared_expert_intermediate_size=45, routed_scaling_factor=2.5,
        ),
    ),
    "NemotronHForCausalLM-mixture-first": (
        "NemotronHConfig",
        _nemotron(
            "E*MME", n_routed_experts=7, num_experts_per_tok=3, moe_intermediate_size=50, norm_topk_prob=False,
            moe_shared_expert_intermediate_size=22,
        ),
    ),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", _qwen),
}  # fmt: skip
