"""What published configurations of a row may turn on or off, as keyword arguments of `test_zoo.Row`.

A setting that a class of transformers has, and a row of `test_zoo` leaves at its default: biases above all, and names
of tensors as older files have them.
Knows nothing of how a row is run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.runtime.models.alibi_rows import GONE
from torch import Tensor

Sizes = dict[str, Any]


def _fixed(**changes: Any) -> Callable[[random.Random], Sizes]:
    return lambda rng: changes


def _square(**changes: Any) -> Callable[[random.Random], Sizes]:
    def sizes(rng: random.Random) -> Sizes:
        kv_heads, group, head_dim = rng.choice([1, 3]), rng.choice([2, 3]), rng.choice([12, 16, 20])
        heads = kv_heads * group
        width = {"head_dim": None, "hidden_size": heads * head_dim, "num_attention_heads": heads}
        return {**width, "num_key_value_heads": kv_heads, **changes}

    return sizes


def _phi4_mini(rng: random.Random) -> Sizes:
    """Three quarters of a head rotate, by factors of their own for long texts."""
    pairs = 9  # of 24 dimensions
    factors = {name: [1 + 3 * rng.random() for _ in range(pairs)] for name in ("short_factor", "long_factor")}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, **factors}
    trained = {"original_max_position_embeddings": rng.choice([32, 256])}
    sizes = {"hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24}
    return {**sizes, **trained, "max_position_embeddings": 512, "rope_parameters": rope | trained}


def _gpt2(rng: random.Random) -> Sizes:
    heads, dim = rng.choice([3, 5]), rng.choice([8, 12])
    gone = GONE | dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers"))
    return {**gone, "n_head": heads, "n_embd": heads * dim, "n_layer": 3, "n_positions": 300, "n_inner": None}


def _bare(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without `transformer.`, and with the masks that old files keep beside each layer's weights."""
    found = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    masks = {f"h.{layer}.attn.bias": next(iter(tensors.values())).new_ones(1, 1, 4, 4) for layer in range(3)}
    return found | masks


VARIANTS: dict[str, dict[str, Any]] = {
    "CohereForCausalLM-biased": {"config": "CohereConfig", "changes": _square(attention_bias=True)},
    "Cohere2ForCausalLM-biased": {
        "config": "Cohere2Config", "changes": _square(attention_bias=True, sliding_window=7, num_hidden_layers=5),
    },
    "NemotronForCausalLM-biased": {"config": "NemotronConfig", "changes": _fixed(attention_bias=True)},
    "Olmo2ForCausalLM-biased": {"config": "Olmo2Config", "changes": _fixed(attention_bias=True)},
    "GemmaForCausalLM-biased": {"config": "GemmaConfig", "changes": _fixed(attention_bias=True)},
    "Gemma2ForCausalLM-biased": {
        "config": "Gemma2Config", "changes": _fixed(attention_bias=True, hidden_size=72, sliding_window=9),
    },
    "Qwen3ForCausalLM-biased": {"config": "Qwen3Config", "changes": _fixed(attention_bias=True)},
    "GPTNeoXForCausalLM-unbiased": {
        "config": "GPTNeoXConfig",
        "changes": _fixed(
            hidden_size=72, num_attention_heads=3, num_key_value_heads=3, head_dim=None, attention_bias=False
        ),
    },
    "Glm4ForCausalLM-unbiased": {"config": "Glm4Config", "changes": _fixed(head_dim=20, attention_bias=False)},
    "Starcoder2ForCausalLM-unbiased": {"config": "Starcoder2Config", "changes": _square(use_bias=False)},
    "Phi3ForCausalLM-partial": {"config": "Phi3Config", "changes": _phi4_mini},
    "GPT2LMHeadModel-bare": {"config": "GPT2Config", "changes": _gpt2, "published": _bare},
}  # fmt: skip
