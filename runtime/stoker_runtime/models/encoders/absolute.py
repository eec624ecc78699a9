"""Encoders with a table of positions: BERT and RoBERTa, and those that are built as they are.

Invariants: pure; a setting that changes the result is read or refused.
Knows nothing of tensors beyond their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker_runtime.models.encoders.names import BERT, ROBERTA, EncoderNames
from stoker_runtime.models.encoders.reading import read_activation, read_base, require
from stoker_runtime.models.encoders.spec import EncoderSpec

# What a key that config.json leaves out stands for.
DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}


def read_bert(config: Mapping[str, Any]) -> EncoderSpec:
    """BERT."""
    return _read(config, BERT)


def read_roberta(config: Mapping[str, Any]) -> EncoderSpec:
    """RoBERTa: its positions begin after the one that padding takes."""
    spec = _read(config, ROBERTA)
    offset = int(config.get("pad_token_id", 1)) + 1
    return replace(spec, position_offset=offset, max_position=spec.max_position - offset)


def _read(config: Mapping[str, Any], names: EncoderNames) -> EncoderSpec:
    config = {**DEFAULTS, **config}
    require(config, position_embedding_type="absolute")
    activation = read_activation(config["hidden_act"], "hidden_act")
    return read_base(config, names, eps="layer_norm_eps", activation=activation, gated=False)
