"""Mixtures of experts for the test of the table: transformers' configuration class, and what differs of its sizes."""

from __future__ import annotations

import random
from typing import Any

from tests.runtime.models.row_sizes import Changes, square

_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
    "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip


def _sizes(**changes: Any) -> Changes:
    """Numbers of experts that are no powers of two, one layer more, and an expert's width apart from the dense one."""

    def draw(rng: random.Random) -> dict[str, Any]:
        experts, top_k = rng.choice([5, 6, 7, 11]), rng.choice([2, 3])
        found = {"num_experts": experts, "num_experts_per_tok": top_k, "num_hidden_layers": 4}
        return {**found, "moe_intermediate_size": rng.randrange(20, 50), **changes}

    return draw


def _square(**changes: Any) -> Changes:
    """Heads as wide as the hidden size asks for: the configuration has none of their own."""

    def draw(rng: random.Random) -> dict[str, Any]:
        return {**_sizes()(rng), **square()(rng), **changes}

    return draw


def _granite(rng: random.Random) -> dict[str, Any]:
    factors = {
        "embedding_multiplier": 3 + rng.random(), "residual_multiplier": 0.3 + rng.random(),
        "attention_multiplier": 0.1 + rng.random() / 4, "logits_scaling": 2 + rng.random(),
    }  # fmt: skip
    return {**_square(num_experts=None, num_local_experts=9)(rng), **factors}


def _longrope(rng: random.Random) -> dict[str, Any]:
    scaling = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_mscale": 1.2, "long_mscale": 1.2,
        "original_max_position_embeddings": 512, "short_factor": [1 + rng.random() for _ in range(8)],
        "long_factor": [3 + rng.random() for _ in range(8)],
    }  # fmt: skip
    return {
        **_sizes(num_experts=None, num_local_experts=9, num_experts_per_tok=2)(rng), "head_dim": None,
        "hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1, "rope_parameters": scaling,
    }  # fmt: skip


def _ernie(**changes: Any) -> Changes:
    """By names of its own."""

    def draw(rng: random.Random) -> dict[str, Any]:
        found = _sizes()(rng)
        own = {"moe_num_experts": found.pop("num_experts"), "moe_k": found.pop("num_experts_per_tok")}
        return {**found, **own, "moe_num_shared_experts": 1, **changes}

    return draw


_PARTIAL = {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.25}
_LOCAL = {"num_experts": None, "num_local_experts": 7}
_GROUPED = {
    "num_experts": None, "n_routed_experts": 12, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3,
    "n_shared_experts": 2, "routed_scaling_factor": 1.7,
}  # fmt: skip

# As in the test's own table: class, sizes.
MIXTURES: dict[str, tuple[str, Changes]] = {
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        _square(
            shared_expert_intermediate_size=37, decoder_sparse_step=2, mlp_only_layers=[3], use_sliding_window=True,
            sliding_window=9, max_window_layers=2,
        ),
    ),
    "Qwen2MoeForCausalLM-renormalized": (
        "Qwen2MoeConfig", _square(shared_expert_intermediate_size=21, norm_topk_prob=True, qkv_bias=False)
    ),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", _sizes(norm_topk_prob=True, mlp_only_layers=[1])),
    "Qwen3MoeForCausalLM-window": (
        "Qwen3MoeConfig", _sizes(attention_bias=True, use_sliding_window=True, sliding_window=7)
    ),
    "MixtralForCausalLM": ("MixtralConfig", _sizes(sliding_window=11, **_LOCAL)),
    "PhimoeForCausalLM": (
        "PhimoeConfig", _square(num_experts=None, num_local_experts=5, num_experts_per_tok=2, router_jitter_noise=0.3)
    ),
    "PhimoeForCausalLM-long": (
        "PhimoeConfig", lambda rng: {**_longrope(rng), "attention_bias": True, "lm_head_bias": True}
    ),
    "OlmoeForCausalLM": ("OlmoeConfig", _square()),
    "GraniteMoeForCausalLM": ("GraniteMoeConfig", _granite),
    "GraniteMoeSharedForCausalLM": (
        "GraniteMoeSharedConfig", lambda rng: {**_granite(rng), "shared_intermediate_size": 27}
    ),
    "Glm4MoeForCausalLM": (
        "Glm4MoeConfig",
        _sizes(
            head_dim=20, use_qk_norm=True, attention_bias=True, first_k_dense_replace=1, num_mtp_layers=0, **_GROUPED
        ),
    ),
    "Glm4MoeForCausalLM-one-group": (
        "Glm4MoeConfig", _sizes(head_dim=24, first_k_dense_replace=2, num_mtp_layers=0,
                                **_GROUPED | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    ),
    "Ernie4_5_MoeForCausalLM": (
        "Ernie4_5_MoeConfig", _ernie(moe_num_shared_experts=3, moe_layer_start_index=2, moe_layer_end_index=3)
    ),
    "Ernie4_5_MoeForCausalLM-alternating": ("Ernie4_5_MoeConfig", _ernie(moe_layer_interval=2)),
    "MiniMaxM2ForCausalLM": ("MiniMaxM2Config", _sizes(head_dim=24, rope_parameters=_PARTIAL, **_LOCAL)),
    "Dots1ForCausalLM": (
        "Dots1Config", _sizes(first_k_dense_replace=1, sliding_window=9, max_window_layers=2, **_GROUPED)
    ),
    "Dots1ForCausalLM-renormalized": (
        "Dots1Config", _sizes(attention_bias=True, norm_topk_prob=True, **_GROUPED | {"n_group": 1, "topk_group": 1})
    ),
    "GptOssForCausalLM": (
        "GptOssConfig", _sizes(sliding_window=8, swiglu_limit=0.8, rope_parameters=_YARN, **_LOCAL)
    ),
}  # fmt: skip
