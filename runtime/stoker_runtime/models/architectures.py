"""The table: Hugging Face architecture → how its spec is read and where its checkpoint tensors go.

Invariants: torch-free. A model is served only if its architecture stands here and every setting that changes the
result is understood; anything else is a ModelError that names it and what is supported.
Knows nothing of file formats beyond the two vocabularies of tensor names, Hugging Face's and GGUF's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.config_source import ModelSource
from stoker_runtime.models.quantized_checkpoint import QuantizedCheckpoint, left_dense, read_quantization
from stoker_runtime.models.rope_config import max_position, read_rope
from stoker_runtime.models.spec import ModelSpec, Role

log = logging.getLogger(__name__)

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class Names:
    """A final tensor's pieces in checkpoints, stacked by rows in this order: in Hugging Face's and GGUF's words."""

    hf: tuple[str, ...]
    gguf: tuple[str, ...]


TOP_NAMES = {
    "embed": Names(("model.embed_tokens.weight",), ("token_embd.weight",)),
    "final_norm": Names(("model.norm.weight",), ("output_norm.weight",)),
    "head": Names(("lm_head.weight",), ("output.weight",)),
}


def _projections(hf: str, gguf: str, suffix: str, *parts: tuple[str, str]) -> Names:
    return Names(
        tuple(f"{hf}.{name}_proj.{suffix}" for name, _ in parts),
        tuple(f"{gguf}_{name}.{suffix}" for _, name in parts),
    )


_QKV = (("q", "q"), ("k", "k"), ("v", "v"))
_GATE_UP = (("gate", "gate"), ("up", "up"))

# In Hugging Face checkpoints these stand under "model.layers.N.", in GGUF files under "blk.N.".
LAYER_NAMES = {
    "input_norm": Names(("input_layernorm.weight",), ("attn_norm.weight",)),
    "qkv": _projections("self_attn", "attn", "weight", *_QKV),
    "qkv_bias": _projections("self_attn", "attn", "bias", *_QKV),
    "q_norm": Names(("self_attn.q_norm.weight",), ("attn_q_norm.weight",)),
    "k_norm": Names(("self_attn.k_norm.weight",), ("attn_k_norm.weight",)),
    "output": _projections("self_attn", "attn", "weight", ("o", "output")),
    "output_bias": _projections("self_attn", "attn", "bias", ("o", "output")),
    "post_norm": Names(("post_attention_layernorm.weight",), ("ffn_norm.weight",)),
    "gate_up": _projections("mlp", "ffn", "weight", *_GATE_UP),
    "gate_up_bias": _projections("mlp", "ffn", "bias", *_GATE_UP),
    "down": _projections("mlp", "ffn", "weight", ("down", "down")),
    "down_bias": _projections("mlp", "ffn", "bias", ("down", "down")),
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row. `defaults` are what the architecture assumes for keys its config.json leaves out.

    `gguf_interleaved`: GGUF files of it store the rows of Q and K for rotation of neighbouring pairs, not of halves.
    """

    build: Callable[[Mapping[str, Any]], ModelSpec]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    gguf_interleaved: bool = False
    top_names: Mapping[str, Names] = field(default_factory=lambda: TOP_NAMES)
    layer_names: Mapping[str, Names] = field(default_factory=lambda: LAYER_NAMES)


def _base(config: Mapping[str, Any]) -> ModelSpec:
    """What all architectures of the Llama family share."""
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    rope = read_rope(config, head_dim)
    activation = str(config.get("hidden_act") or "silu")
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"hidden_act {activation!r} is not supported; known are {', '.join(ACTIVATIONS)}.",
            param="hidden_act",
        )
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
        eps=float(config.get("rms_norm_eps") or 1e-6),
        rope=rope,
        activation=ACTIVATIONS[activation],
        windows=(0,) * layers,
        max_position=max_position(config, rope),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=read_dtype(config),
    )


def _llama(config: Mapping[str, Any]) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    ffn_bias = bool(config.get("mlp_bias", False))
    return replace(_base(config), qkv_bias=bias, output_bias=bias, ffn_bias=ffn_bias)


def _mistral(config: Mapping[str, Any]) -> ModelSpec:
    spec = _base(config)
    return replace(spec, windows=(int(config.get("sliding_window") or 0),) * spec.num_layers)


def _qwen2(config: Mapping[str, Any]) -> ModelSpec:
    spec = _base(config)
    return replace(spec, qkv_bias=True, windows=_qwen_windows(config, spec.num_layers))


def _qwen3(config: Mapping[str, Any]) -> ModelSpec:
    spec = _base(config)
    bias = bool(config.get("attention_bias", False))
    windows = _qwen_windows(config, spec.num_layers)
    return replace(spec, qkv_bias=bias, output_bias=bias, qk_norm=True, windows=windows)


def _qwen_windows(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Qwen slides only if told to, in the layers that `layer_types` names or from `max_window_layers` on."""
    if not config.get("use_sliding_window") or not config.get("sliding_window"):
        return (0,) * layers
    window = int(config["sliding_window"])
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(config.get("max_window_layers") or 0)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    known = {"full_attention": 0, "sliding_attention": window}
    for kind in kinds:
        if kind not in known:
            raise ModelError(
                f"layer type {kind!r} is not supported; known are {', '.join(known)}.", param="layer_types"
            )
    return tuple(known[kind] for kind in kinds)


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(_llama, {"max_position_embeddings": 2048}, gguf_interleaved=True),
    "MistralForCausalLM": Architecture(
        _mistral, {"max_position_embeddings": 131072, "sliding_window": 4096}, gguf_interleaved=True
    ),
    "Qwen2ForCausalLM": Architecture(_qwen2, {"max_position_embeddings": 32768, "max_window_layers": 28}),
    "Qwen3ForCausalLM": Architecture(_qwen3, {"max_position_embeddings": 32768, "max_window_layers": 28}),
}


def build_spec(source: ModelSource) -> ModelSpec:
    """The spec of a model. Raises ModelError for an unknown architecture, setting or quantization."""
    architectures = source.config.get("architectures") or ["none"]
    known = [name for name in architectures if name in ARCHITECTURES]
    if not known:
        raise ModelError(
            f"{source.name}: architecture {', '.join(architectures)} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}.",
            param="model",
        )
    checkpoint = read_quantization(source.name, source.config)
    row = ARCHITECTURES[known[0]]
    config = {**row.defaults, **source.config, "architectures": known}
    try:
        spec = row.build(config)
    except KeyError as error:
        raise ModelError(f"{source.name}: the configuration lacks {error}.", param=str(error.args[0])) from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{source.name}: the configuration is not usable: {error}.") from error
    spec = replace(_checked(source.name, spec), eos_token_ids=_eos_ids(source, spec.vocab))
    return spec if checkpoint is None else _quantized(spec, checkpoint, row)


def _quantized(spec: ModelSpec, checkpoint: QuantizedCheckpoint, row: Architecture) -> ModelSpec:
    """`spec` of a quantized checkpoint. Raises ModelError where a part of a merged matrix is and a part is not."""
    dense = []
    for parameter in spec.parameters():
        if parameter.role is Role.LINEAR:
            _, layer, field = parameter.name.split(".")
            names = row.layer_names[field].hf
            modules = [f"model.layers.{layer}.{name.removesuffix('.weight')}" for name in names]
            if left_dense(checkpoint, parameter.name, modules):
                dense.append(parameter.name)
    return replace(spec, checkpoint=checkpoint, dense_parameters=frozenset(dense))


def _checked(name: str, spec: ModelSpec) -> ModelSpec:
    if spec.heads % spec.kv_heads:
        raise ModelError(f"{name}: {spec.heads} query heads cannot share {spec.kv_heads} key-value heads evenly.")
    if len(spec.windows) != spec.num_layers:
        raise ModelError(f"{name}: layer_types has {len(spec.windows)} entries for {spec.num_layers} layers.")
    if spec.rope.dim % 2 or spec.rope.dim > spec.head_dim:
        raise ModelError(f"{name}: {spec.rope.dim} rotary dimensions do not fit heads of {spec.head_dim}.")
    return spec


def read_dtype(config: Mapping[str, Any]) -> str:
    """The dtype that config.json names for the weights. Raises ModelError for one that is not known."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ModelError(f"dtype {dtype!r} is not supported; it must be float32, bfloat16 or float16.", param="dtype")
    return dtype


def _eos_ids(source: ModelSource, vocab: int) -> tuple[int, ...]:
    """The union of config.json's and generation_config.json's: either may name only one of a chat model's ends.

    Without those that the model cannot write, because its vocabulary ends before them.
    """
    ids: list[int] = []
    for config in (source.config, source.generation):
        value = config.get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        ids += [int(token) for token in values if token is not None and int(token) not in ids]
    beyond = [token for token in ids if not 0 <= token < vocab]
    if beyond:
        log.warning("%s: eos_token_id %s lies beyond the vocabulary of %d; it is left out", source.name, beyond, vocab)
    return tuple(token for token in ids if token not in beyond)
