"""What a row of the table says, and the names of tensors that most of them share.

Invariants: plain data; a final tensor's pieces stand in the order of its rows.
Knows nothing of file formats beyond the two vocabularies of tensor names, Hugging Face's and GGUF's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stoker_runtime.models.spec import ModelSpec


class Stored(StrEnum):
    """How a Hugging Face checkpoint lays out a final tensor's pieces: their rows one after the other; a tensor for each
    head, whose number stands in the name for {head}; or columns for rows, as GPT-2's Conv1D; or in groups of rows, of
    which each has a part of several pieces, as merged Q, K and V of one KV head (`models/grouped_rows.py`); or in pairs
    of rows, of gate and of up in turn. Of experts:
    tensors for each, whose number stands for {expert}; one tensor for all, [E, rows, columns]; or [E, columns, rows],
    gate and up taking turns, or one behind the other, unless its shape says that rows are rows.
    """

    ROWS = "rows"
    BY_HEAD = "by_head"
    COLUMNS = "columns"
    GROUPED = "grouped"
    PAIRED = "paired"
    BY_EXPERT = "by_expert"
    STACKED = "stacked"
    STACKED_COLUMNS = "stacked_columns"
    STACKED_HALVES = "stacked_halves"

    @property
    def is_stacked(self) -> bool:
        """Whether there is one tensor for all experts."""
        return self in (Stored.STACKED, Stored.STACKED_COLUMNS, Stored.STACKED_HALVES)


@dataclass(frozen=True, slots=True)
class Names:
    """A final tensor's pieces in checkpoints, stacked by rows in this order: in Hugging Face's and GGUF's words.

    `stored` is of Hugging Face's. GGUF's pieces are rows, or as `gguf_stored` says; of experts, whose number stands for
    {expert}, there is one tensor for all, which is brought apart (`weights/entries_apart.py`).
    """

    hf: tuple[str, ...]
    gguf: tuple[str, ...] = ()
    stored: Stored = Stored.ROWS
    gguf_stored: Stored = Stored.ROWS


def one(hf: str, gguf: str = "", stored: Stored = Stored.ROWS) -> Names:
    """The names of a final tensor that is one tensor in checkpoints, too."""
    return Names((hf,), (gguf,) if gguf else (), stored)


TOP_NAMES = {
    "embed": one("model.embed_tokens.weight", "token_embd.weight"),
    "final_norm": one("model.norm.weight", "output_norm.weight"),
    "final_norm_bias": one("model.norm.bias", "output_norm.bias"),
    "head": one("lm_head.weight", "output.weight"),
    "head_bias": one("lm_head.bias", "output.bias"),
}


def _projections(hf: str, gguf: str, suffix: str, *parts: tuple[str, str]) -> Names:
    return Names(
        tuple(f"{hf}.{name}_proj.{suffix}" for name, _ in parts),
        tuple(f"{gguf}_{name}.{suffix}" for _, name in parts),
    )


def with_biases(names: Mapping[str, tuple[str, str]]) -> dict[str, Names]:
    """A matrix's names, and those of its bias, from their beginnings."""
    found = {field: one(f"{hf}.weight", f"{gguf}.weight") for field, (hf, gguf) in names.items()}
    return found | {f"{field}_bias": one(f"{hf}.bias", f"{gguf}.bias") for field, (hf, gguf) in names.items()}


_QKV = (("q", "q"), ("k", "k"), ("v", "v"))
_GATE_UP = (("gate", "gate"), ("up", "up"))

# In Hugging Face checkpoints these stand under the row's `layers`, in GGUF files under "blk.N.".
LAYER_NAMES = {
    "input_norm": one("input_layernorm.weight", "attn_norm.weight"),
    "input_norm_bias": one("input_layernorm.bias", "attn_norm.bias"),
    "qkv": _projections("self_attn", "attn", "weight", *_QKV),
    "qkv_bias": _projections("self_attn", "attn", "bias", *_QKV),
    "q_norm": one("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "k_norm": one("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "output": _projections("self_attn", "attn", "weight", ("o", "output")),
    "output_bias": _projections("self_attn", "attn", "bias", ("o", "output")),
    "ffn_norm": one("post_attention_layernorm.weight", "ffn_norm.weight"),
    "ffn_norm_bias": one("post_attention_layernorm.bias", "ffn_norm.bias"),
    "gate_up": _projections("mlp", "ffn", "weight", *_GATE_UP),
    "gate_up_bias": _projections("mlp", "ffn", "bias", *_GATE_UP),
    "down": _projections("mlp", "ffn", "weight", ("down", "down")),
    "down_bias": _projections("mlp", "ffn", "bias", ("down", "down")),
}

# Gate and up of a checkpoint that holds them as one matrix, and what a feed-forward without a gate has in their place.
MERGED_GATE_UP = {"gate_up": one("mlp.gate_up_proj.weight", "ffn_up.weight")}
UP_ALONE = {
    "gate_up": one("mlp.up_proj.weight", "ffn_up.weight"),
    "gate_up_bias": one("mlp.up_proj.bias", "ffn_up.bias"),
}
# GGUF files of some architectures call the norm before the feed-forward by where it stands.
POST_ATTENTION = one("post_attention_layernorm.weight", "post_attention_norm.weight")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row. `defaults` are what the architecture assumes for keys its config.json leaves out.

    `gguf_interleaved`: GGUF files of it store the rows of Q and K for rotation of neighbouring pairs, not of halves.
    `base` begins the names of all but the head, and is left out by checkpoints that were saved without one; `modules`,
    unless "", is what the modules of transformers, and so adapters, have in its place. `layers` begins a layer's.
    `layer_names` may have what a field's tensor of all experts is called, as `_stacked`, where some files have one.
    `ignored` is a regular expression of tensors that say nothing new. Names that begin with the first of a pair in
    `renamed` begin with the second, in this order.
    """

    build: Callable[[Mapping[str, Any]], ModelSpec]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    gguf_interleaved: bool = False
    top_names: Mapping[str, Names] = field(default_factory=lambda: TOP_NAMES)
    layer_names: Mapping[str, Names] = field(default_factory=lambda: LAYER_NAMES)
    base: str = "model."
    modules: str = ""
    layers: str = "model.layers."
    ignored: str = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    renamed: tuple[tuple[str, str], ...] = ()

    def names_of(self, spec: ModelSpec, field: str) -> Names:
        """What a tensor of a layer is called: the first projection by whether it narrows queries, or has gates; norms
        by whether two read the same stream; some experts by whether the checkpoint is quantized.
        """
        if spec.checkpoint is not None and f"{field}_quantized" in self.layer_names:
            field = f"{field}_quantized"
        if field == "qkv" and spec.latent is not None and not spec.latent.q_lora_rank:
            field = "qkv_unnarrowed"
        if spec.parallel and not spec.shared_norm and f"{field}_apart" in self.layer_names:
            field = f"{field}_apart"
        if field == "state_in" and spec.recurrent is not None and spec.recurrent.gates_apart:
            field = "state_in_alone"
        return self.layer_names[field]
