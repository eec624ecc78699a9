"""What published configurations of a row may turn on or off, as keyword arguments of `test_zoo.Row`.

A setting that a class of transformers has, and a row of `test_zoo` leaves at its default: biases above all, and names
of tensors as older files have them.
Knows nothing of how a row is run.
"""

from __future__ import annotations

import random
from typing import Any

from tests.runtime.models.row_sizes import Sizes, fixed, gpt2, neox, square
from torch import Tensor


def _phi4_mini(rng: random.Random) -> Sizes:
    """Three quarters of a head rotate, by factors of their own for long texts."""
    pairs = 9  # of 24 dimensions
    factors = {name: [1 + 3 * rng.random() for _ in range(pairs)] for name in ("short_factor", "long_factor")}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, **factors}
    trained = {"original_max_position_embeddings": rng.choice([32, 256])}
    sizes = {"hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24}
    return {**sizes, **trained, "max_position_embeddings": 512, "rope_parameters": rope | trained}


def _bare(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without `transformer.`, and with the masks that old files keep beside each layer's weights."""
    found = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    masks = {f"h.{layer}.attn.bias": next(iter(tensors.values())).new_ones(1, 1, 4, 4) for layer in range(3)}
    return found | masks


VARIANTS: dict[str, dict[str, Any]] = {
    "CohereForCausalLM-biased": {"config": "CohereConfig", "changes": square(attention_bias=True)},
    "Cohere2ForCausalLM-biased": {
        "config": "Cohere2Config", "changes": square(attention_bias=True, sliding_window=7, num_hidden_layers=5),
    },
    "NemotronForCausalLM-biased": {"config": "NemotronConfig", "changes": fixed(attention_bias=True)},
    "Olmo2ForCausalLM-biased": {"config": "Olmo2Config", "changes": fixed(attention_bias=True)},
    "GemmaForCausalLM-biased": {"config": "GemmaConfig", "changes": fixed(attention_bias=True)},
    "Gemma2ForCausalLM-biased": {
        "config": "Gemma2Config", "changes": fixed(attention_bias=True, hidden_size=72, sliding_window=9),
    },
    "Qwen3ForCausalLM-biased": {"config": "Qwen3Config", "changes": fixed(attention_bias=True)},
    "GPTNeoXForCausalLM-unbiased": {
        "config": "GPTNeoXConfig",
        "changes": neox(attention_bias=False),
    },
    "Glm4ForCausalLM-unbiased": {"config": "Glm4Config", "changes": fixed(head_dim=20, attention_bias=False)},
    "Starcoder2ForCausalLM-unbiased": {"config": "Starcoder2Config", "changes": square(use_bias=False)},
    "Phi3ForCausalLM-partial": {"config": "Phi3Config", "changes": _phi4_mini},
    "GPT2LMHeadModel-bare": {"config": "GPT2Config", "changes": gpt2, "published": _bare},
}  # fmt: skip
