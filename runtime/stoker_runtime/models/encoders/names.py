"""What checkpoints of each family of encoders call their tensors.

Invariants: plain data; a final tensor's pieces stand in the order of its rows, of a gated projection the gate first.
Knows nothing of configurations and of shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Piece(NamedTuple):
    """A module of a checkpoint, or the `part`-th of `parts` equal spans of its rows."""

    module: str
    part: int = 0
    parts: int = 1


Pieces = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """`base` stands before the encoder's names in checkpoints that hold a head besides.

    `top`: what there is once, by its final name; `layer`: what each layer has, behind `layers` and its number.
    `head`: of a classification head, where {prefix} stands for `base` if the checkpoint has it.
    """

    base: str
    top: Mapping[str, str]
    layers: str
    layer: Mapping[str, Pieces]
    head: Mapping[str, str]


def _named(*modules: str) -> Pieces:
    return tuple(Piece(module) for module in modules)


def _bert(base: str, head: Mapping[str, str]) -> EncoderNames:
    return EncoderNames(
        base=base,
        top={
            "word": "embeddings.word_embeddings",
            "position": "embeddings.position_embeddings",
            "type": "embeddings.token_type_embeddings",
            "embed_norm": "embeddings.LayerNorm",
        },
        layers="encoder.layer.",
        layer={
            "qkv": _named(*(f"attention.self.{part}" for part in ("query", "key", "value"))),
            "output": _named("attention.output.dense"),
            "attention_norm": _named("attention.output.LayerNorm"),
            "up": _named("intermediate.dense"),
            "down": _named("output.dense"),
            "ffn_norm": _named("output.LayerNorm"),
        },
        head=head,
    )


_POOLER = {"head_dense": "{prefix}pooler.dense", "head_out": "classifier"}
BERT = _bert("bert", _POOLER)
ROBERTA = _bert("roberta", {"head_dense": "classifier.dense", "head_out": "classifier.out_proj"})
MODERN_BERT = EncoderNames(
    base="model",
    top={"word": "embeddings.tok_embeddings", "embed_norm": "embeddings.norm", "final_norm": "final_norm"},
    layers="layers.",
    layer={
        "attention_norm": _named("attn_norm"),
        "qkv": _named("attn.Wqkv"),
        "output": _named("attn.Wo"),
        "ffn_norm": _named("mlp_norm"),
        "up": _named("mlp.Wi"),
        "down": _named("mlp.Wo"),
    },
    head={"head_dense": "head.dense", "head_norm": "head.norm", "head_out": "classifier"},
)
NOMIC = EncoderNames(
    base="nomic_bert",
    top={
        "word": "embeddings.word_embeddings",
        "type": "embeddings.token_type_embeddings",
        "embed_norm": "emb_ln",
    },
    layers="encoder.layers.",
    layer={
        "qkv": _named("attn.Wqkv"),
        "output": _named("attn.out_proj"),
        "attention_norm": _named("norm1"),
        "up": _named("mlp.fc12", "mlp.fc11"),
        "down": _named("mlp.fc2"),
        "ffn_norm": _named("norm2"),
    },
    head={},
)
GTE = EncoderNames(
    base="new",
    top={
        "word": "embeddings.word_embeddings",
        "type": "embeddings.token_type_embeddings",
        "embed_norm": "embeddings.LayerNorm",
    },
    layers="encoder.layer.",
    layer={
        "qkv": _named("attention.qkv_proj"),
        "output": _named("attention.o_proj"),
        "attention_norm": _named("attn_ln"),
        "up": (Piece("mlp.up_gate_proj", 1, 2), Piece("mlp.up_gate_proj", 0, 2)),
        "down": _named("mlp.down_proj"),
        "ffn_norm": _named("mlp_ln"),
    },
    head=_POOLER,
)


def _gguf(top: Mapping[str, str], layer: Mapping[str, Pieces], head: Mapping[str, str]) -> EncoderNames:
    """Of a GGUF file, which has no prefix."""
    words = {"word": "token_embd", "embed_norm": "token_embd_norm"}
    common = {"output": _named("attn_output"), "down": _named("ffn_down")}
    return EncoderNames(base="", top={**words, **top}, layers="blk.", layer={**common, **layer}, head=head)


_POST_NORMS = {"attention_norm": _named("attn_output_norm"), "ffn_norm": _named("layer_output_norm")}
_GGUF_HEAD = {"head_dense": "cls", "head_out": "cls.output"}
GGUF_BERT = _gguf(
    {"position": "position_embd", "type": "token_types"},
    {"qkv": _named("attn_q", "attn_k", "attn_v"), "up": _named("ffn_up"), **_POST_NORMS},
    _GGUF_HEAD,
)
GGUF_NOMIC = _gguf(
    {"type": "token_types"}, {"qkv": _named("attn_qkv"), "up": _named("ffn_gate", "ffn_up"), **_POST_NORMS}, {}
)
GGUF_MODERN_BERT = _gguf(
    {"final_norm": "output_norm"},
    {
        "attention_norm": _named("attn_norm"),
        "qkv": _named("attn_qkv"),
        "ffn_norm": _named("ffn_norm"),
        "up": _named("ffn_up"),
    },
    {**_GGUF_HEAD, "head_norm": "cls.norm"},
)
