"""The table of vision towers: Hugging Face architecture → how its spec is read.

Invariants: torch-free. A tower is used only if its architecture stands here and every setting that changes the result
is understood; anything else is a ModelError that names its key and what is supported.
Knows nothing of the text models beyond the width of their states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.config_source import ModelSource, SourceKind
from stoker_runtime.models.encoders.reading import read_activation, require
from stoker_runtime.models.vision.names import GEMMA3, QWEN2_5, QWEN3, VisionNames
from stoker_runtime.models.vision.spec import CHANNELS, NormKind, Projector, VisionSpec

# Keys with two spellings, and the one that is read.
ALIASES = {
    "num_hidden_layers": "depth",
    "num_attention_heads": "num_heads",
    "num_channels": "in_channels",
    "in_chans": "in_channels",
}
ROPE_TYPES = ("axial", "default")


@dataclass(frozen=True, slots=True)
class VisionArchitecture:
    """`kinds`: what `model_type` of a vision_config says that is meant by this row. `fixed`: fields of the spec that no
    setting changes; `defaults`: what keys stand for that the configuration leaves out.
    """

    names: VisionNames
    kinds: tuple[str, ...]
    fixed: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN = {"temporal_patch_size": 2, "spatial_merge_size": 2, "rope_theta": 10000.0, "layer_norm_eps": 1e-6}
_QWEN3 = VisionArchitecture(
    QWEN3,
    ("qwen3_vl", "qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision"),
    {"interpolated": True},
    {
        **_QWEN,
        "depth": 27,
        "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": (8, 16, 24),
    },
)
VISION_ROWS: dict[str, VisionArchitecture] = {
    "Qwen2_5_VLForConditionalGeneration": VisionArchitecture(
        QWEN2_5,
        ("qwen2_5_vl", "qwen2_5_vl_vision"),
        {"norm": NormKind.RMS, "gated": True, "patch_bias": False},
        {
            **_QWEN,
            "depth": 32,
            "hidden_size": 3584,
            "hidden_act": "silu",
            "intermediate_size": 3420,
            "num_heads": 16,
            "patch_size": 14,
            "window_size": 112,
            "out_hidden_size": 3584,
            "fullatt_block_indexes": (7, 15, 23, 31),
        },
    ),
    "Qwen3VLForConditionalGeneration": _QWEN3,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3,
    "Gemma3ForConditionalGeneration": VisionArchitecture(
        GEMMA3,
        ("siglip_vision_model",),
        {"projector": Projector.POOLING},
        {
            "depth": 12,
            "hidden_size": 768,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 3072,
            "num_heads": 12,
            "image_size": 224,
            "patch_size": 16,
            "layer_norm_eps": 1e-6,
        },
    ),
}
ELSEWHERE = frozenset(("window_size", "fullatt_block_indexes", "deepstack_visual_indexes", "num_position_embeddings"))
"""Settings that change what some of these compute."""


def read_vision(source: ModelSource) -> VisionSpec | None:
    """The vision tower of `source`; None of a model without one, or with one that is not served.

    Raises ModelError for a setting that is missing or not supported.
    """
    config = source.config
    name = next((each for each in config.get("architectures") or [] if each in VISION_ROWS), None)
    if name is None or source.kind is SourceKind.GGUF or not config.get("vision_config"):
        return None
    try:
        return _read(name, VISION_ROWS[name], config)
    except KeyError as error:
        raise ModelError(f"{source.name}: the configuration lacks {error}.", param=str(error.args[0])) from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{source.name}: vision_config is not usable: {error}.", param="vision_config") from error


def _read(name: str, row: VisionArchitecture, config: Mapping[str, Any]) -> VisionSpec:
    given = {ALIASES.get(key, key): value for key, value in config["vision_config"].items() if value is not None}
    for key in ELSEWHERE - set(row.defaults):
        if given.get(key):
            raise ModelError(f"{key} is {given[key]!r}, which the tower of a {name} does not have.", param=key)
    vision = {**row.defaults, **given}
    require(vision, in_channels=CHANNELS)
    kind = vision.get("model_type")
    if kind is not None and kind not in row.kinds:
        raise ModelError(
            f"model_type {kind!r} of vision_config is not supported; known are {', '.join(row.kinds)}.",
            param="model_type",
        )
    pooled = row.fixed.get("projector") is Projector.POOLING
    image = _side(vision, "image_size") if pooled else 0
    hidden, heads = int(vision["hidden_size"]), int(vision["num_heads"])
    text_hidden = int((config.get("text_config") or config)["hidden_size"])
    if not pooled and int(vision["out_hidden_size"]) != text_hidden:
        raise ModelError(
            f"out_hidden_size is {vision['out_hidden_size']}; the text model's states have {text_hidden}.",
            param="out_hidden_size",
        )
    spec = VisionSpec(
        architecture=name,
        names=row.names,
        num_layers=int(vision["depth"]),
        hidden=hidden,
        heads=heads,
        ffn=int(vision["intermediate_size"]),
        text_hidden=text_hidden,
        patch_size=_side(vision, "patch_size"),
        temporal_patch_size=_side({"temporal_patch_size": 1, **vision}, "temporal_patch_size"),
        merge_size=_pooled(vision, config) if pooled else int(vision["spatial_merge_size"]),
        image_size=image,
        eps=float(vision["layer_norm_eps"]),
        activation=read_activation(vision["hidden_act"], "hidden_act", gated=bool(row.fixed.get("gated"))),
        position_side=image // _side(vision, "patch_size") if pooled else _position_side(vision),
        rope_theta=_rope_theta(vision),
        window_size=int(vision.get("window_size") or 0),
        full_attention_layers=frozenset(map(int, vision.get("fullatt_block_indexes") or ())),
        deepstack_layers=tuple(map(int, vision.get("deepstack_visual_indexes") or ())),
        **row.fixed,
    )
    _check(spec)
    return spec


def _side(vision: Mapping[str, Any], key: str) -> int:
    """A size that may stand once for each dimension, all the same."""
    value = vision[key]
    sides = set(map(int, value)) if isinstance(value, list | tuple) else {int(value)}
    if len(sides) != 1 or min(sides) < 1:
        raise ModelError(f"{key} {value!r} is not supported; it must be one size above 0.", param=key)
    return sides.pop()


def _pooled(vision: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Patches on a side of the squares whose mean is a token."""
    tokens = int(config.get("mm_tokens_per_image") or 256)
    image, patch, side = _side(vision, "image_size"), _side(vision, "patch_size"), isqrt(tokens)
    if side**2 != tokens or image % patch or (image // patch) % side:
        raise ModelError(
            f"mm_tokens_per_image is {tokens}: {image} pixels in patches of {patch} do not divide into so many.",
            param="mm_tokens_per_image",
        )
    return image // patch // side


def _position_side(vision: Mapping[str, Any]) -> int:
    positions = int(vision.get("num_position_embeddings") or 0)
    if isqrt(positions) ** 2 != positions:
        raise ModelError(
            f"num_position_embeddings is {positions}, which is no square.", param="num_position_embeddings"
        )
    return isqrt(positions)


def _rope_theta(vision: Mapping[str, Any]) -> float:
    if "rope_theta" not in vision:
        return 0.0
    rope = vision.get("rope_parameters") or {}
    kind = rope.get("rope_type") or ROPE_TYPES[0]
    if kind not in ROPE_TYPES:
        raise ModelError(f"rope_type {kind!r} of a vision tower is not supported; known is axial.", param="rope_type")
    return float(rope.get("rope_theta") or vision["rope_theta"])


def _check(spec: VisionSpec) -> None:
    """Raise ModelError where sizes do not go together."""
    if spec.hidden % spec.heads:
        raise ModelError(f"{spec.hidden} dimensions do not divide into {spec.heads} heads.", param="num_heads")
    if spec.rope_theta and spec.head_dim % 4:
        raise ModelError(f"heads of {spec.head_dim} dimensions do not divide into rotated fours.", param="num_heads")
    if spec.window_size and spec.window < 1:
        raise ModelError(
            f"window_size is {spec.window_size}: that is less than a block of {spec.block_pixels} pixels.",
            param="window_size",
        )
    for key, layers in (
        ("fullatt_block_indexes", spec.full_attention_layers),
        ("deepstack_visual_indexes", spec.deepstack_layers),
    ):
        if any(not 0 <= layer < spec.num_layers for layer in layers) or len(set(layers)) != len(layers):
            raise ModelError(f"{key} {sorted(layers)} are not layers of {spec.num_layers}.", param=key)
