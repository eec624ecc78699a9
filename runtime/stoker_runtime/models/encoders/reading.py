"""What all encoders read from config.json: sizes, the activation, whether there is a classification head.

Invariants: pure; a value that changes the result and is not understood is a ModelError that names its key.
Knows nothing of how positions come in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures import read_dtype
from stoker_runtime.models.encoders.names import EncoderNames
from stoker_runtime.models.encoders.spec import EncoderSpec

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
GATING = ("gelu", "gelu_tanh", "silu")


def read_activation(value: Any, key: str, *, gated: bool = False) -> str:
    """An activation by this package's name, one that a gate can have if `gated`."""
    known = [name for name, own in ACTIVATIONS.items() if own in GATING or not gated]
    if value not in known:
        raise ModelError(f"{key} {value!r} is not supported; known are {', '.join(known)}.", param=key)
    return ACTIVATIONS[value]


def require(config: Mapping[str, Any], **settings: object) -> None:
    """Raise ModelError where a key is there, set, and says something else than it must."""
    for key, right in settings.items():
        value = config.get(key)
        if value is not None and value != right:
            raise ModelError(f"{key} {value!r} is not supported; known are {right}.", param=key)


def read_base(config: Mapping[str, Any], names: EncoderNames, *, eps: str, activation: str, gated: bool) -> EncoderSpec:
    """What all encoders share; `eps` is the value's key, `activation` the name that is supported already."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    if hidden % heads:
        raise ModelError(f"{hidden} hidden dimensions do not divide into {heads} heads.", param="num_attention_heads")
    name = str(config["architectures"][0])
    return EncoderSpec(
        architecture=name,
        names=names,
        num_layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        ffn=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        max_position=int(config["max_position_embeddings"]),
        eps=float(config[eps]),
        activation=activation,
        types=int(config.get("type_vocab_size") or 0),
        gated=gated,
        scores=name.endswith("ForSequenceClassification"),
        dtype=read_dtype(config),
    )
