"""A Llama of random weights, whose heads two ranks can share; its tokens are letters.

Invariants: small enough for a ConfigMap that kubectl applies, which is a quarter of a MiB.
Knows nothing of clusters.
"""

from __future__ import annotations

import json

import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 48, 6, 2, 88, 3
CONTEXT = 6000
# As the files of bytes spell what can be printed; \u0120 is the blank.
_LETTERS = [*map(chr, range(ord("!"), ord("~") + 1)), "\u0120"]


def tiny_llama(seed: int) -> dict[str, bytes]:
    """The files of a checkpoint, by their names."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        drawn = torch.randn((rows, columns), generator=generator)
        return drawn.div(columns**0.5).half()

    kv = HIDDEN // HEADS * KV_HEADS
    tensors = {
        "model.embed_tokens.weight": matrix(len(_LETTERS), HIDDEN),
        "lm_head.weight": matrix(len(_LETTERS), HIDDEN) * 4,
        "model.norm.weight": torch.ones(HIDDEN).half(),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for projection, rows, columns in (
            ("self_attn.q_proj", HIDDEN, HIDDEN), ("self_attn.k_proj", kv, HIDDEN), ("self_attn.v_proj", kv, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN), ("mlp.gate_proj", FFN, HIDDEN), ("mlp.up_proj", FFN, HIDDEN),
            ("mlp.down_proj", HIDDEN, FFN),
        ):  # fmt: skip
            tensors[f"{name}.{projection}.weight"] = matrix(rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = torch.ones(HIDDEN).half()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16", "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "vocab_size": len(_LETTERS),
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    return {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": save(tensors),
        "tokenizer.json": _letters_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}).encode(),
    }


def _letters_tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE({letter: at for at, letter in enumerate(_LETTERS)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made
