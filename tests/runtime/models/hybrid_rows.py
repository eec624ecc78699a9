"""Layers with a state for the test of the table: transformers' configuration class, and what differs of its sizes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Changes = Callable[[random.Random], dict[str, Any]]
LEAST_STEP = 1e-9
"""Below it transformers makes no step of Nemotron-H, which the published code does on GPUs; its default is 0.001."""


def _nemotron(pattern: str, **changes: Any) -> Changes:
    def draw(rng: random.Random) -> dict[str, Any]:
        groups = rng.choice([1, 2, 3])
        found = {
            "hybrid_override_pattern": pattern, "num_hidden_layers": None,
            "mamba_num_heads": groups * rng.choice([1, 2]),
            "mamba_head_dim": rng.choice([6, 12, 20]), "ssm_state_size": rng.choice([10, 24]), "n_groups": groups,
            "conv_kernel": rng.choice([2, 4]), "chunk_size": 16, "tie_word_embeddings": False,
            "time_step_min": LEAST_STEP,
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


def _qwen3_5(rng: random.Random) -> dict[str, Any]:
    """As Qwen3-Next's, and rotation by three positions, which text has alike."""
    left = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    sizes = {key: value for key, value in _qwen3_5_moe(rng).items() if key not in left}
    return sizes | {"intermediate_size": rng.randrange(50, 90)}


def _qwen3_5_moe(rng: random.Random) -> dict[str, Any]:
    sizes = {key: value for key, value in _qwen(rng).items() if key != "mlp_only_layers"}
    rope = {"mrope_section": [1, 1, 1], "mrope_interleaved": True}
    # A name that transformers' class of the mixture's sizes does not have.
    return sizes | {"rope_parameters": sizes["rope_parameters"] | rope, "intermediate_size": None}


def _granite(kinds: str, **changes: Any) -> Changes:
    """Layers by letters: M is Mamba-2, * attention."""

    def draw(rng: random.Random) -> dict[str, Any]:
        words = {"M": "linear_attention", "*": "full_attention"}
        groups, hidden = rng.choice([1, 2, 3]), 24 * rng.choice([2, 3])
        found = {
            "hidden_size": hidden, "num_hidden_layers": len(kinds), "layer_types": [words[each] for each in kinds],
            "head_dim": None, "num_attention_heads": 4, "num_key_value_heads": rng.choice([1, 2, 4]),
            "mamba_n_heads": groups * 2, "mamba_d_head": "auto", "mamba_d_state": rng.choice([10, 24]),
            "mamba_n_groups": groups, "mamba_d_conv": rng.choice([2, 4]), "mamba_chunk_size": 16,
            "shared_intermediate_size": rng.randrange(20, 50), "intermediate_size": rng.randrange(20, 30),
            "num_local_experts": 7, "num_experts_per_tok": 3, "position_embedding_type": "nope",
            "embedding_multiplier": 3 + rng.random(), "residual_multiplier": 0.3 + rng.random(),
            "attention_multiplier": 0.1 + rng.random() / 4, "logits_scaling": 2 + rng.random(),
        }  # fmt: skip
        return {**found, **changes}

    return draw


def _published_kinds(config: dict[str, Any]) -> dict[str, Any]:
    """What layers are in the words of published files."""
    words = {"linear_attention": "mamba", "full_attention": "attention"}
    return {**config, "layer_types": [words[each] for each in config["layer_types"]]}


def _beside_drafts(tensors: Tensors) -> Tensors:
    """As published, with what sees and what drafts."""
    return tensors | {"mtp.fc.weight": torch.ones(3, 6), "model.visual.patch.weight": torch.ones(2, 2)}


def _row(config: str, changes: Changes, **more: Any) -> dict[str, Any]:
    # transformers goes through prompts in chunks there, whose sums are others than those of a recurrence.
    return {"config": config, "changes": changes, "limit": 2e-3, **more}


# What the rows of the test's own table are made of.
HYBRIDS: dict[str, dict[str, Any]] = {
    "NemotronHForCausalLM": _row("NemotronHConfig", _nemotron("M-M*-M")),
    "NemotronHForCausalLM-biased": _row(
        "NemotronHConfig", _nemotron("*MM-", use_bias=True, mlp_bias=True, use_conv_bias=False)
    ),
    "NemotronHForCausalLM-mixture": _row(
        "NemotronHConfig",
        _nemotron(
            "ME*EM-E", n_routed_experts=9, num_experts_per_tok=2, n_group=3, topk_group=2, moe_intermediate_size=27,
            moe_shared_expert_intermediate_size=45, routed_scaling_factor=2.5,
        ),
    ),
    "NemotronHForCausalLM-mixture-first": _row(
        "NemotronHConfig",
        _nemotron(
            "E*MME", n_routed_experts=7, num_experts_per_tok=3, moe_intermediate_size=50, norm_topk_prob=False,
            moe_shared_expert_intermediate_size=22,
        ),
    ),
    "GraniteMoeHybridForCausalLM": _row("GraniteMoeHybridConfig", _granite("MM*M"), settings=_published_kinds),
    "GraniteMoeHybridForCausalLM-dense": _row(
        "GraniteMoeHybridConfig",
        _granite("M*M", num_local_experts=0, mamba_proj_bias=True, mamba_conv_bias=False, attention_bias=True),
    ),
    "GraniteMoeHybridForCausalLM-attention": _row(
        "GraniteMoeHybridConfig", _granite("***", num_local_experts=0, position_embedding_type="rope"),
        settings=_published_kinds,
    ),
    "Qwen3NextForCausalLM": _row("Qwen3NextConfig", _qwen),
    "Qwen3_5ForCausalLM": _row("Qwen3_5TextConfig", _qwen3_5, published=_beside_drafts),
    "Qwen3_5ForConditionalGeneration": _row(
        "Qwen3_5Config", _qwen3_5, published=_beside_drafts, model="Qwen3_5ForConditionalGeneration"
    ),
    "Qwen3_5MoeForCausalLM": _row("Qwen3_5MoeTextConfig", _qwen3_5_moe, published=_beside_drafts),
    "Qwen3_5MoeForConditionalGeneration": _row(
        "Qwen3_5MoeConfig", _qwen3_5_moe, published=_beside_drafts, model="Qwen3_5MoeForConditionalGeneration"
    ),
}  # fmt: skip
