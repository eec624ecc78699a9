"""The few numbers of a model that the operator's fit check needs, read from config.json or a GGUF header.

Invariants: reads kilobytes, never tensors; a model that does not say gives an empty result, and the fit
check then works from the bytes alone. What an architecture of the table calls its sizes is the table's to know.
Knows nothing of GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker_runtime.adapters.layout import AdapterLayout
from stoker_runtime.checkpoint.gguf_header import read_gguf_header
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.fetch.report.weights import pooled_report, weight_report
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import ModelSource, read_source
from stoker_runtime.models.encoders.spec import EncoderSpec
from stoker_runtime.models.parameter import ITEM_BYTES
from stoker_runtime.models.pooling import read_pooling
from stoker_runtime.models.pooling_spec import pooling_spec
from stoker_runtime.models.spec import ModelSpec


def shape_of(path: Path) -> dict[str, Any]:
    """{"layers", "kvHeads", "headDim", "maxContext"} of a published folder or GGUF file, and "loraLine", what one rank
    of an adapter takes, where it can have adapters, "windowLayers" and "window" where some layers look back no more
    than that, "stateBytes" where some have a state: what a sequence's take, and "weights", what those take
    (`weights.py`), where the engine serves it; {} when it does not say.
    """
    weights: dict[str, Any] = {}
    try:
        source = read_source(str(path))
        pools = read_pooling(source, EngineConfig(model=str(path))) is not None
        spec = pooling_spec(source) if pools else build_spec(source)
        if isinstance(spec, EncoderSpec):
            weights = {"weights": pooled_report(spec)}
        else:
            line = AdapterLayout.of(spec, embeddings=False).line
            return _of_spec(spec) | ({"loraLine": line} if line else {}) | _weights(spec, source, pools=pools)
    except (ConfigError, ModelError):
        pass  # a model that is not served: most have the common keys all the same
    try:
        if path.suffix == ".gguf":
            return _complete(_of_gguf(read_gguf_header(path).metadata)) | weights
        return _complete(_of_config(json.loads((path / "config.json").read_bytes()))) | weights
    except (OSError, ValueError, KeyError, TypeError, ModelError):
        return weights


def _weights(spec: ModelSpec, source: ModelSource, *, pools: bool) -> dict[str, Any]:
    try:
        return {"weights": pooled_report(spec) if pools else weight_report(spec, source)}
    except ModelError:
        return {}  # tensors of another model: the engine will name them


def _of_spec(spec: ModelSpec) -> dict[str, int]:
    # The fit counts keys and values: one cache of latents is as large as two caches of half its width.
    width = spec.head_dim if spec.caches == 2 else -(-spec.head_dim // 2)
    near = [spec.windows[layer] for layer in spec.attending if spec.windows[layer]]
    mixed = {"windowLayers": len(near), "window": max(near)} if 0 < len(near) < len(spec.attending) else {}
    # In the type that GPUs are served in.
    states = {"stateBytes": spec.recurrent.bytes_of_sequence(ITEM_BYTES["bfloat16"])} if spec.recurrent else {}
    return {
        "layers": len(spec.attending),
        "kvHeads": spec.kv_heads,
        "headDim": width,
        "maxContext": spec.max_position,
        **mixed,
        **states,
    }


def _of_config(config: Mapping[str, Any]) -> dict[str, int]:
    config = config.get("text_config", config)
    heads = int(config["num_attention_heads"])
    return {
        "layers": int(config["num_hidden_layers"]),
        "kvHeads": int(config.get("num_key_value_heads") or heads),
        "headDim": int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        "maxContext": int(config["max_position_embeddings"]),
    }


def _of_gguf(keys: Mapping[str, Any]) -> dict[str, int]:
    prefix = keys["general.architecture"]
    heads = int(keys[f"{prefix}.attention.head_count"])
    return {
        "layers": int(keys[f"{prefix}.block_count"]),
        "kvHeads": int(keys.get(f"{prefix}.attention.head_count_kv", heads)),
        "headDim": int(keys.get(f"{prefix}.attention.key_length", int(keys[f"{prefix}.embedding_length"]) // heads)),
        "maxContext": int(keys[f"{prefix}.context_length"]),
    }


def _complete(shape: dict[str, int]) -> dict[str, int]:
    return shape if all(value > 0 for value in shape.values()) else {}
