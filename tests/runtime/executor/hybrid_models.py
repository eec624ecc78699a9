"""Random models whose layers keep a state, in which the last token says most of the next, and what drafts for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.runtime.executor.eagle_heads import save_head
from tests.runtime.executor.test_speculation import METHODS

NEMOTRON, QWEN = "NemotronHForCausalLM", "Qwen3NextForCausalLM"
GIVERS = (".o_proj.weight", ".out_proj.weight", ".down_proj.weight")
"""What layers give to the stream."""


def save_hybrid(kind: str, folder: Path, seed: int, vocab: int = 168) -> str:
    """A model in `folder` whose layers say little beside the embedding, so that texts go in circles."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": vocab,
        "max_position_embeddings": 512, "tie_word_embeddings": False, "initializer_range": 0.15,
    }  # fmt: skip
    if kind == NEMOTRON:
        config = transformers.NemotronHConfig(
            **sizes, layers_block_type=["mamba", "attention", "mamba", "mlp", "mamba"], mamba_num_heads=6,
            mamba_head_dim=20, ssm_state_size=24, n_groups=3, conv_kernel=4, chunk_size=16, intermediate_size=96,
        )  # fmt: skip
    else:
        config = transformers.Qwen3NextConfig(
            **sizes, num_hidden_layers=4, intermediate_size=96, moe_intermediate_size=32, num_experts=6,
            num_experts_per_tok=2, shared_expert_intermediate_size=48, linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=20, linear_value_head_dim=36, linear_conv_kernel_dim=4,
            layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            mlp_only_layers=[0, 1, 2, 3],  # a router's choice may be a matter of rounding
        )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.9)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.4)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    found = load_file(file)
    save_file({name: each * (0.1 if name.endswith(GIVERS) else 1) for name, each in found.items()}, file)
    return str(folder)


def save_draft_model(model: str) -> str:
    """A folder within `model` with a Llama that has its ends, and so often says what it does."""
    import transformers

    found, config = load_file(Path(model) / "model.safetensors"), json.loads((Path(model) / "config.json").read_text())
    table = next(each for name, each in found.items() if "embed" in name)
    small = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=table.shape[1], vocab_size=len(table), intermediate_size=40, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.02,
            tie_word_embeddings=False, eos_token_id=config.get("eos_token_id"),
        )
    )  # fmt: skip
    with torch.no_grad():
        small.model.embed_tokens.weight.copy_(table)
        small.lm_head.weight.copy_(found["lm_head.weight"])
    folder = Path(model) / "draft"
    small.save_pretrained(folder)
    return str(folder)


def drafts_of(method: str, model: str, seed: int) -> dict[str, Any]:
    """The settings of a method for `model`."""
    if method == "draft_model":
        return METHODS[method] | {"model": save_draft_model(model)}
    return METHODS[method] | ({"model": save_head(model, seed)} if method == "eagle3" else {})
