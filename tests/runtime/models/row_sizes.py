"""Sizes of random tiny models, as rows of the zoo change them: drawn by the given random numbers, or as they are said.

Knows nothing of architectures beyond what their configurations call a size.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Sizes = dict[str, Any]
Changes = Callable[[random.Random], Sizes]


def fixed(**changes: Any) -> Changes:
    """Nothing drawn."""
    return lambda rng: changes


def square(**changes: Any) -> Changes:
    """For architectures whose heads are as wide together as the model."""

    def sizes(rng: random.Random) -> Sizes:
        kv_heads, group, head_dim = rng.choice([1, 3]), rng.choice([2, 3]), rng.choice([12, 16, 20])
        heads = kv_heads * group
        found = {"head_dim": None, "hidden_size": heads * head_dim, "num_attention_heads": heads}
        return {**found, "num_key_value_heads": kv_heads, **changes}

    return sizes


def neox(**changes: Any) -> Changes:
    """Of 24 dimensions a quarter rotates."""
    return fixed(hidden_size=72, num_attention_heads=3, num_key_value_heads=3, head_dim=None, **changes)


def gpt2(rng: random.Random) -> Sizes:
    """By GPT-2's own names."""
    heads, dim = rng.choice([3, 5]), rng.choice([8, 12])
    sizes = dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"))
    sizes |= dict.fromkeys(("num_key_value_heads", "head_dim", "intermediate_size"))
    return {**sizes, "n_head": heads, "n_embd": heads * dim, "n_layer": 3, "n_positions": 300, "n_inner": None}
