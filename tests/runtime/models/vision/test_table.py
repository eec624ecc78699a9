"""What is read of a vision_config, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from tests.runtime.models.vision.published import GEMMA3, PUBLISHED, QWEN2_5, QWEN3
from tests.runtime.models.vision.towers import TEXT

from stoker_runtime.errors import ModelError
from stoker_runtime.models.config_source import ModelSource, SourceKind
from stoker_runtime.models.parameter import Role
from stoker_runtime.models.vision.spec import NormKind, Projector, VisionSpec
from stoker_runtime.models.vision.table import read_vision


def read(architecture: str, kind: SourceKind = SourceKind.SHAPE, top: Any = (), **vision: Any) -> VisionSpec | None:
    config = {"architectures": [architecture], **PUBLISHED.get(architecture, {}), **dict(top)}
    if vision:
        config["vision_config"] = {**config["vision_config"], **vision}
    return read_vision(ModelSource("shape:published", kind, None, config))


def known(architecture: str) -> VisionSpec:
    spec = read(architecture)
    assert spec is not None
    return spec


def test_published_configurations_are_read() -> None:
    qwen = known(QWEN2_5)
    assert (qwen.num_layers, qwen.head_dim, qwen.window, qwen.block_pixels) == (32, 80, 4, 28)
    assert (qwen.norm, qwen.gated, qwen.patch_bias, qwen.position_side) == (NormKind.RMS, True, False, 0)
    assert [layer for layer in range(32) if not qwen.windowed(layer)] == [7, 15, 23, 31]
    assert (qwen.tokens_of(28, 56), qwen.tokens_of(1008, 756), qwen.patches_of(28, 56)) == (2, 36 * 27, 8)
    newer = known(QWEN3)
    assert (newer.num_layers, newer.head_dim, newer.position_side, newer.window) == (27, 72, 48, 0)
    assert (newer.interpolated, newer.deepstack_layers, newer.patch_values) == (True, (8, 16, 24), 1536)
    gemma = known(GEMMA3)
    assert (gemma.num_layers, gemma.head_dim, gemma.merge_size, gemma.position_side) == (27, 72, 4, 64)
    assert (gemma.projector, gemma.tokens_of(896, 896), gemma.rope_theta) == (Projector.POOLING, 256, 0.0)


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_bytes_are_those_of_the_tensors(architecture: str) -> None:
    spec = known(architecture)
    tensors = list(spec.tensors())
    names = [each.parameter.name for each in tensors]
    assert len(set(names)) == len(names)
    sources = [piece.tensor for each in tensors for piece in each.pieces]
    assert len(set(sources)) == len(sources)
    for parameter, pieces, _ in tensors:
        assert all(piece.row + piece.rows <= parameter.shape[0] for piece in pieces)
        if parameter.role is Role.LINEAR:
            assert parameter.shape[1] % 8 == 0
    values = sum(piece.rows * piece.columns for each in tensors for piece in each.pieces)
    assert 2 * values <= spec.parameter_bytes("bfloat16") < 2.04 * values
    assert spec.working_bytes(1024) < spec.working_bytes(1024, "float32") < 2.5 * spec.working_bytes(1024)


def test_the_mixture_has_the_dense_models_tower() -> None:
    config = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], **PUBLISHED[QWEN3]}
    found = read_vision(ModelSource("shape:it", SourceKind.SHAPE, None, config))
    assert found is not None
    assert list(found.tensors()) == list(known(QWEN3).tensors())


def test_models_without_a_tower_have_none() -> None:
    assert read("Qwen3ForCausalLM", top=TEXT) is None
    assert read("Qwen2VLForConditionalGeneration", top=PUBLISHED[QWEN2_5]) is None
    assert read(QWEN3, SourceKind.GGUF) is None
    assert read(QWEN3, top={"vision_config": None}) is None


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        (QWEN2_5, "hidden_act", "quick_gelu"),
        (QWEN2_5, "in_chans", 1),
        (QWEN2_5, "out_hidden_size", 2048),
        (QWEN2_5, "window_size", 14),
        (QWEN2_5, "fullatt_block_indexes", [7, 32]),
        (QWEN2_5, "deepstack_visual_indexes", [3]),
        (QWEN2_5, "model_type", "qwen2_vl"),
        (QWEN2_5, "num_heads", 11),
        (QWEN3, "patch_size", [14, 16]),
        (QWEN3, "num_position_embeddings", 2300),
        (QWEN3, "deepstack_visual_indexes", [8, 8]),
        (QWEN3, "window_size", 112),
        (QWEN3, "num_heads", 64),
        (GEMMA3, "hidden_act", "tanh"),
        (GEMMA3, "model_type", "clip_vision_model"),
    ],
)
def test_settings_that_change_the_result_are_refused_by_name(architecture: str, key: str, value: Any) -> None:
    with pytest.raises(ModelError) as raised:
        read(architecture, **{key: value})
    assert raised.value.param == {"in_chans": "in_channels"}.get(key, key)


def test_a_rotation_of_another_kind_is_refused() -> None:
    with pytest.raises(ModelError, match="rope_type 'yarn'"):
        read(QWEN3, rope_parameters={"rope_type": "yarn", "factor": 2.0})


@pytest.mark.parametrize("tokens", [255, 100, 169])
def test_squares_that_do_not_fit_are_refused(tokens: int) -> None:
    with pytest.raises(ModelError, match=f"mm_tokens_per_image is {tokens}"):
        read(GEMMA3, top={"mm_tokens_per_image": tokens})


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ModelError, match="lacks 'hidden_size'"):
        read(GEMMA3, top={"text_config": {"num_hidden_layers": 1}})
