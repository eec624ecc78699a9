"""Says the GGUF metadata of an encoder in config.json's words.

Invariants: pure; what changes the result and cannot be said in config.json's words is refused by name. Biases, kinds of
tokens and a head that scores have no metadata key: they show in which tensors the file holds, and of what shape.
Knows nothing of weights beyond their names and shapes. Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker_runtime.checkpoint.gguf_header import GGUFHeader
from stoker_runtime.errors import ModelError
from stoker_runtime.models.gguf.table import REQUIRED

SLIDING, FULL = "sliding_attention", "full_attention"
HEAD, SCORE = "cls.weight", "cls.output.weight"
EPS = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")
ACTIVATION = ("hidden_act", "hidden_activation")
POOLINGS = ("none", "mean", "cls", "last", "rank")
"""What the numbers of `pooling_type` stand for."""


@dataclass(frozen=True, slots=True)
class GGUFEncoder:
    """`family` is the row of the encoders' table that reads it, as it does what files hold of the families `kin`.

    `eps` and `activation` are config.json's keys; `own`, config.json's key → the GGUF key after "<architecture>.";
    `biases`, config.json's key → the tensor that shows it; `says`, what its files leave out.
    """

    family: str
    kin: tuple[str, ...] = ()
    eps: str = "layer_norm_eps"
    activation: str = "hidden_act"
    own: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    says: Mapping[str, Any] = field(default_factory=dict)


GGUF_ENCODERS: dict[str, GGUFEncoder] = {
    # Files of the others have no rows before the first position's.
    "bert": GGUFEncoder("Bert", kin=("Roberta", "XLMRoberta", "Camembert")),
    "nomic-bert": GGUFEncoder("NomicBert", own={"rope_theta": "rope.freq_base"}),
    "modern-bert": GGUFEncoder(
        "ModernBert",
        eps="norm_eps",
        activation="hidden_activation",
        own={"global_rope_theta": "rope.freq_base", "local_rope_theta": "rope.freq_base_swa"},
        biases={
            "attention_bias": "blk.0.attn_qkv.bias",
            "mlp_bias": "blk.0.ffn_up.bias",
            "norm_bias": "output_norm.bias",
            "classifier_bias": "cls.bias",
        },
        # No file says which state its head reads; the published rerankers' reads the mean.
        says={"classifier_pooling": "mean"},
    ),
}


def encoder_config(header: GGUFHeader, vocab: int) -> dict[str, Any]:
    """The file's metadata as a config.json; `vocab` is its embedding's rows. Raises ModelError for a key that is
    missing, and for what encoders do not do.
    """
    architecture = str(header.metadata["general.architecture"])
    row = GGUF_ENCODERS[architecture]
    stated = {
        key.removeprefix(f"{architecture}."): value
        for key, value in header.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    _refuse(header, architecture, stated)
    config: dict[str, Any] = {"dtype": "float32", "vocab_size": vocab, **row.says}
    config |= {key: _required(header, stated, name) for key, name in REQUIRED.items()}
    config[row.eps] = _required(header, stated, next((name for name in EPS if name in stated), EPS[0]))
    config |= {key: stated[name] for key, name in row.own.items() if name in stated}
    config |= {key: tensor in header.tensors for key, tensor in row.biases.items()}
    if activation := next((stated[name] for name in ACTIVATION if name in stated), None):
        config[row.activation] = activation
    config["type_vocab_size"] = _rows(header, "token_types.weight")
    if positions := _rows(header, "position_embd.weight"):
        config["max_position_embeddings"] = positions
    if architecture == "modern-bert":
        config |= _layer_types(header, stated, int(config["num_hidden_layers"]))
    return config | _task(header, row, stated)


def _refuse(header: GGUFHeader, architecture: str, stated: Mapping[str, Any]) -> None:
    if stated.get("attention.causal"):
        raise ModelError(f"{header.path}: {architecture}.attention.causal is true; encoders see both ways.")
    scaling = stated.get("rope.scaling.type", "none")
    if scaling != "none":
        raise ModelError(f"{header.path}: {architecture}.rope.scaling.type is {scaling!r}; encoders know none.")


def _required(header: GGUFHeader, stated: Mapping[str, Any], name: str) -> Any:
    if name not in stated:
        raise ModelError(f"{header.path}: the metadata lacks {header.metadata['general.architecture']}.{name}.")
    return stated[name]


def _rows(header: GGUFHeader, tensor: str) -> int:
    """Rows of a matrix, of which a single one may be written as a vector; 0 where the file lacks it."""
    entry = header.tensors.get(tensor)
    if entry is None:
        return 0
    return entry.shape[0] if len(entry.shape) > 1 else 1


def _layer_types(header: GGUFHeader, stated: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Which layers look to a window's ends alone: all but each n-th, from the first on, or as listed."""
    window = stated.get("attention.sliding_window") or 0
    if not window:
        return {"layer_types": [FULL] * layers}
    _required(header, stated, "rope.freq_base_swa")
    pattern = stated.get("attention.sliding_window_pattern", 3)
    slides = pattern if isinstance(pattern, list) else [bool(not pattern or layer % pattern) for layer in range(layers)]
    return {"local_attention": window, "layer_types": [SLIDING if each else FULL for each in slides]}


def _task(header: GGUFHeader, row: GGUFEncoder, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the file scores pairs, and otherwise which states become a vector, if it says so."""
    number = stated.get("pooling_type")
    if number is not None and not 0 <= number < len(POOLINGS):
        raise ModelError(f"{header.path}: pooling_type is {number}; known are 0 to {len(POOLINGS) - 1}.")
    name = "" if number is None else POOLINGS[number]
    if name != "rank" and (name or SCORE not in header.tensors):
        return {"architectures": [f"{row.family}Model"]} | ({"pooling_type": name} if name else {})
    lacking = next((tensor for tensor in (HEAD, SCORE) if tensor not in header.tensors), None)
    if lacking is not None:
        raise ModelError(
            f"{header.path}: it scores pairs, but lacks tensor {lacking}: converters leave out the dense layer of "
            "BERT's own cross-encoders, without which scores are wrong. Serve its folder of safetensors."
        )
    return {"architectures": [f"{row.family}ForSequenceClassification"], "num_labels": _rows(header, SCORE)}
