"""Rows of Mistral's third generation: Ministral 3, whose queries grow with their positions, and models that see.

Invariants: pure; a setting that changes the result is read or refused.
Knows nothing of tensors beyond their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures.llama import text_of, windowed
from stoker_runtime.models.architectures.row import Architecture
from stoker_runtime.models.spec import ModelSpec

# What a text model of this kind slides by where its configuration does not say.
_WINDOWS = {"mistral": 4096, "ministral3": 0}


def _ministral3(config: Mapping[str, Any]) -> ModelSpec:
    """`llama_4_scaling_beta` says how queries grow with each trained length that lies before them."""
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    growth, trained = scaling.get("llama_4_scaling_beta"), scaling.get("original_max_position_embeddings")
    if growth is None or not trained:
        missing = "llama_4_scaling_beta" if growth is None else "original_max_position_embeddings"
        raise ModelError(f"rope_parameters lacks {missing!r}, by which queries of this model grow.", param=missing)
    spec = windowed(config)
    rope = replace(spec.rope, original_max_position=int(trained), query_growth=float(growth))
    return replace(spec, rope=rope)


def _mistral3(config: Mapping[str, Any]) -> ModelSpec:
    """The text model: of Mistral Small 3.1 and 3.2 a Mistral, of Ministral 3 its own kind."""
    own = config["text_config"] or {}
    kind = str(own.get("model_type") or "mistral")
    if kind not in _WINDOWS:
        raise ModelError(
            f"text_config.model_type {kind!r} is not supported; it must be {' or '.join(_WINDOWS)}.",
            param="text_config.model_type",
        )
    # A window of null is none.
    text = {**text_of(config), "sliding_window": own.get("sliding_window", _WINDOWS[kind])}
    return _ministral3(text) if kind == "ministral3" else windowed(text)


MISTRAL_ROWS: dict[str, Architecture] = {
    "Ministral3ForCausalLM": Architecture(
        _ministral3, {"max_position_embeddings": 262144, "rms_norm_eps": 1e-5}, gguf_interleaved=True
    ),
    # What sees is left out. All names begin otherwise in files of newer making.
    "Mistral3ForConditionalGeneration": Architecture(
        _mistral3,
        {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        ignored=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
        renamed=(
            ("model.language_model.", "model."),
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
        ),
    ),
}
