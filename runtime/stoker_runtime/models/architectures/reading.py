"""What architectures read from config.json in the same way: sizes, activation, windows, dtype.

Invariants: pure; a value that changes the result and is not understood is a ModelError that names its key.
Knows nothing of which architectures exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.rope_config import max_position, read_rope
from stoker_runtime.models.spec import ModelSpec

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
SLIDING, FULL = "sliding_attention", "full_attention"


def read_base(config: Mapping[str, Any], *, eps: str = "rms_norm_eps", activation: str = "hidden_act") -> ModelSpec:
    """What all decoders share; `eps` and `activation` are the keys under which the architecture keeps these."""
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    rope = read_rope(config, head_dim)
    layers = int(config["num_hidden_layers"])
    return ModelSpec(
        architecture=config["architectures"][0],
        num_layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        ffn=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        eps=float(config.get(eps) or 1e-6),
        rope=rope,
        activation=read_activation(config, activation),
        windows=(0,) * layers,
        max_position=max_position(config, rope),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=read_dtype(config),
    )


def read_activation(config: Mapping[str, Any], key: str) -> str:
    """The activation by this package's name. Raises ModelError for one that is not known."""
    activation = str(config.get(key) or "silu")
    if activation not in ACTIVATIONS:
        raise ModelError(f"{key} {activation!r} is not supported; known are {', '.join(ACTIVATIONS)}.", param=key)
    return ACTIVATIONS[activation]


def read_layer_types(config: Mapping[str, Any], layers: int, default: Sequence[str]) -> tuple[bool, ...]:
    """Which layers slide, by `layer_types` or, where there is none, by `default`."""
    kinds = config.get("layer_types") or default
    for kind in kinds:
        if kind not in (SLIDING, FULL):
            raise ModelError(f"layer type {kind!r} is not supported; known are {FULL}, {SLIDING}.", param="layer_types")
    if len(kinds) != layers:
        raise ModelError(f"layer_types has {len(kinds)} entries for {layers} layers.", param="layer_types")
    return tuple(kind == SLIDING for kind in kinds)


def by_layer_type(config: Mapping[str, Any], kind: str, theta: float) -> dict[str, Any]:
    """`config` as layers of `kind` read their rotary embedding: from `rope_parameters` of that kind, or from `theta`
    where older configurations, which hold none by kind, leave it to the architecture.
    """
    parameters = config.get("rope_parameters") or {}
    own = parameters.get(kind)
    if own is None and any(each in parameters for each in (SLIDING, FULL)):
        own = {"rope_theta": theta}
    if own is not None:
        return {**config, "rope_scaling": None, "rope_parameters": {"rope_theta": theta, **own}}
    return {**config, "rope_theta": theta} if config.get("rope_theta") is None else dict(config)


def every(period: int, layers: int) -> list[str]:
    """Layer types of which each `period`-th sees everything and the others slide; 0: all see everything."""
    return [SLIDING if period and (layer + 1) % period else FULL for layer in range(layers)]


def refuse(config: Mapping[str, Any], key: str, reason: str) -> None:
    """Raises ModelError where `key` is set, and not to false."""
    if config.get(key):
        raise ModelError(f"{key} is {config[key]!r}, which is not supported: {reason}.", param=key)


def read_dtype(config: Mapping[str, Any]) -> str:
    """The dtype that config.json names for the weights. Raises ModelError for one that is not known."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ModelError(f"dtype {dtype!r} is not supported; it must be float32, bfloat16 or float16.", param="dtype")
    return dtype
