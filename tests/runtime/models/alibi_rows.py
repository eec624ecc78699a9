"""Rows of the zoo whose heads know distances by slopes, as arguments of `test_zoo.Row`; transformers has their classes.

Invariants: sizes are odd where the class lets them be. Of Falcon, heads are a power of two: transformers rounds its
slopes to bf16, of which these lose nothing.
Knows nothing of how a row is run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

GONE = dict.fromkeys(("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings"))


def _bloom(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([3, 5, 6])
    return {
        **GONE, "num_hidden_layers": None, "num_attention_heads": None, "n_layer": 3, "n_head": heads,
        "hidden_size": heads * rng.choice([8, 12]), "tie_word_embeddings": True, "seq_length": 300,
    }  # fmt: skip


def _mpt(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([3, 5, 6])
    gone = {**GONE, "num_hidden_layers": None, "num_attention_heads": None, "hidden_size": None}
    attention = {"alibi": True, "alibi_bias_max": 8}  # transformers takes 8 whatever this says
    return {
        **gone, "d_model": heads * rng.choice([8, 12]), "n_heads": heads, "n_layers": 3, "expansion_ratio": 4,
        "max_seq_len": 300, "attn_config": attention, "tie_word_embeddings": True,
    }  # fmt: skip


def _falcon(**changes: Any) -> Callable[[random.Random], dict[str, Any]]:
    def sizes(rng: random.Random) -> dict[str, Any]:
        heads = 4
        common = {"hidden_size": heads * rng.choice([16, 24]), "num_attention_heads": heads, "ffn_hidden_size": 90}
        return {**GONE, **common, "max_position_embeddings": 512, **changes}

    return sizes


FEW_HEADS = {"new_decoder_architecture": True, "num_kv_heads": 2}

ALIBIS: dict[str, tuple[Any, ...]] = {
    "BloomForCausalLM": ("BloomConfig", _bloom),
    "MptForCausalLM": ("MptConfig", _mpt),
    "MPTForCausalLM": ("MptConfig", _mpt, None, lambda config: {**config, "architectures": ["MPTForCausalLM"]}),
    "FalconForCausalLM": (
        "FalconConfig", _falcon(alibi=True, parallel_attn=False, multi_query=False, bias=True),
        None, None, 2e-4, "", "sdpa",
    ),
    "FalconForCausalLM-one-kv-head": ("FalconConfig", _falcon()),
    "FalconForCausalLM-few-kv-heads": ("FalconConfig", _falcon(**FEW_HEADS)),
    "FalconForCausalLM-one-norm": ("FalconConfig", _falcon(**FEW_HEADS, num_ln_in_parallel_attn=1)),
}  # fmt: skip
