"""The table of encoders: Hugging Face architecture → how its spec is read.

Invariants: torch-free. A model is served only if its architecture stands here and every setting that changes the
result is understood; anything else is a ModelError that names it and what is supported.
Knows nothing of pooling, and nothing of decoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures import read_dtype
from stoker_runtime.models.config_source import ModelSource, SourceKind
from stoker_runtime.models.encoder_spec import EncoderSpec

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Family → prefix of the encoder's tensors beside a head, and the shape of a classification head.
FAMILIES = {"Bert": "bert", "Roberta": "roberta", "XLMRoberta": "roberta", "Camembert": "roberta"}
HEADLESS = ("Model", "ForMaskedLM")
CLASSIFIER = "ForSequenceClassification"
ENCODERS = tuple(f"{family}{kind}" for family in FAMILIES for kind in (*HEADLESS, CLASSIFIER))

# What a key that config.json leaves out stands for.
DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "position_embedding_type": "absolute",
}


def encoder_name(source: ModelSource) -> str | None:
    """The architecture of `source` if it is an encoder of this table."""
    return next((name for name in source.config.get("architectures") or [] if name in ENCODERS), None)


def build_encoder(source: ModelSource) -> EncoderSpec:
    """The spec of an encoder. Raises ModelError for a setting that is missing or not supported."""
    name = encoder_name(source)
    if name is None or source.kind is not SourceKind.FOLDER:
        raise ModelError(f"{source.name}: no encoder; known are {', '.join(ENCODERS)}.", param="model")
    if source.config.get("quantization_config"):
        raise ModelError(f"{source.name}: quantized encoders are not supported.", param="quantization_config")
    try:
        return _build(name, {**DEFAULTS, **source.config})
    except KeyError as error:
        raise ModelError(f"{source.name}: the configuration lacks {error}.", param=str(error.args[0])) from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{source.name}: the configuration is not usable: {error}.") from error


def _build(name: str, config: Mapping[str, Any]) -> EncoderSpec:
    for key, right in (("position_embedding_type", "absolute"), ("hidden_act", None)):
        known = list(ACTIVATIONS) if right is None else [right]
        if config[key] not in known:
            raise ModelError(f"{key} {config[key]!r} is not supported; known are {', '.join(known)}.", param=key)
    family = next(family for family in FAMILIES if name.startswith(family))
    base = FAMILIES[family]
    labels = int(config.get("num_labels") or len(config.get("id2label") or "ab"))
    if name.endswith(CLASSIFIER) and labels != 1:
        raise ModelError(
            f"{name} with {labels} labels is not supported; served are cross-encoders, which have one.",
            param="num_labels",
        )
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    if hidden % heads:
        raise ModelError(f"{hidden} hidden dimensions do not divide into {heads} heads.", param="num_attention_heads")
    return EncoderSpec(
        architecture=name,
        base=base,
        num_layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        ffn=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        positions=int(config["max_position_embeddings"]),
        # RoBERTa's positions begin after the one that padding takes.
        position_offset=int(config.get("pad_token_id", 1)) + 1 if base == "roberta" else 0,
        types=int(config["type_vocab_size"]),
        eps=float(config["layer_norm_eps"]),
        activation=ACTIVATIONS[config["hidden_act"]],
        head=base if name.endswith(CLASSIFIER) else "",
        dtype=read_dtype(config),
    )
