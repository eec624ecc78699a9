"""Rules from checkpoints' files, and sizes and tokens against transformers' own image processors."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from stoker_runtime.errors import ModelError
from stoker_runtime.images import rule as rules
from stoker_runtime.images.rule import ImageKind, TooNarrowError, read_rule
from stoker_runtime.models.config_source import read_source

SEED = random.SystemRandom().getrandbits(32)
QWEN = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "image_token_id": 77,
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2},
}
QWEN3 = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
}
GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "mm_tokens_per_image": 16,
    "image_token_index": 90,
    "boi_token_index": 91,
    "eoi_token_index": 92,
    "vision_config": {"image_size": 112, "patch_size": 14},
}


def checkpoint(
    folder: Path, config: dict[str, Any], files: dict[str, Any] | None = None, tensor: str = "model.visual.patch.weight"
) -> rules.ImageRule | None:
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in (files or {}).items():
        (folder / name).write_text(json.dumps(content))
    save_file({tensor: torch.zeros(1)}, folder / "model.safetensors")
    return read_rule(read_source(str(folder)))


def test_what_was_published_where_there_is_no_file(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, QWEN)
    assert found is not None
    assert (found.kind, found.placeholder, found.marker, found.end) == (ImageKind.QWEN, 77, 77, None)
    assert (found.min_pixels, found.max_pixels, found.resample) == (3136, 12845056, 3)
    assert found.mean[0] == pytest.approx(0.48145466)
    newer = checkpoint(tmp_path, QWEN3)
    assert newer is not None
    assert (newer.patch_size, newer.min_pixels, newer.max_pixels, newer.mean) == (16, 65536, 16777216, (0.5, 0.5, 0.5))
    assert newer.placeholder == 151655


def test_gemmas(tmp_path: Path) -> None:
    file = {
        "do_convert_rgb": None,
        "do_pan_and_scan": None,
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
        "image_seq_length": 16,
        "resample": 1,
        "rescale_factor": 0.25,
        "size": {"height": 112, "width": 112},
    }
    found = checkpoint(tmp_path, GEMMA, {"preprocessor_config.json": file}, "vision_tower.x")
    assert found is not None
    assert (found.placeholder, found.marker, found.end, found.merge_size) == (90, 91, 92, 2)
    assert (found.mean, found.std, found.rescale, found.resample) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 0.25, 1)
    assert found.size_of(5, 900) == (112, 112)
    assert found.tokens(112, 112) == 16


def test_the_processors_file_wins(tmp_path: Path) -> None:
    files = {
        "processor_config.json": {"image_processor": {"size": {"shortest_edge": 999, "longest_edge": 99999}}},
        "preprocessor_config.json": {"min_pixels": 1},
    }
    found = checkpoint(tmp_path, QWEN, files)
    assert found is not None
    assert (found.min_pixels, found.max_pixels) == (999, 99999)
    assert found.mean == rules.CLIP_MEAN


def test_who_does_not_see(tmp_path: Path) -> None:
    assert checkpoint(tmp_path, QWEN, tensor="model.layers.0.mlp.weight") is None
    assert checkpoint(tmp_path, {**QWEN, "vision_config": None}) is None
    assert checkpoint(tmp_path, {**QWEN, "architectures": ["Qwen3ForCausalLM"]}) is None


@pytest.mark.parametrize(
    ("config", "file", "says"),
    [
        (GEMMA, {"do_pan_and_scan": True}, "do_pan_and_scan is true"),
        (GEMMA, {"size": {"shortest_edge": 112}}, "image_size 112"),
        (GEMMA, {"image_seq_length": 5}, "image_seq_length is 5"),
        ({**GEMMA, "mm_tokens_per_image": 15}, {}, "mm_tokens_per_image is 15"),
        (QWEN, {"patch_size": 16}, "patch_size is 16"),
        (QWEN, {"do_resize": False}, "do_resize is false"),
        (QWEN, {"image_std": [1, 0, 1]}, "must not hold 0"),
        (QWEN, {"image_mean": [1, 2]}, "three numbers"),
        (QWEN, {"max_pixels": 700}, "max_pixels is 700"),
        (QWEN, {"min_pixels": "a"}, "min_pixels is 'a'"),
        (QWEN, {"resample": 9}, "resample is 9"),
    ],
)
def test_what_cannot_be_served_names_its_key(
    tmp_path: Path, config: dict[str, Any], file: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        checkpoint(tmp_path, config, {"preprocessor_config.json": file})


def test_sizes_are_transformers() -> None:
    source = random.Random(SEED)
    for _ in range(500):
        sides = source.choice([1, 40, 3000]) + source.randrange(60), 1 + source.randrange(source.choice([30, 2000]))
        factor = source.choice([28, 32, 12])
        bounds = source.choice([(3136, 1003520), (65536, 16777216), (1, factor * factor)])
        try:
            expected = smart_resize(*sides, factor=factor, min_pixels=bounds[0], max_pixels=bounds[1])
        except ValueError:
            with pytest.raises(TooNarrowError):
                rules.smart_resize(*sides, factor, *bounds)
            continue
        assert rules.smart_resize(*sides, factor, *bounds) == expected, f"{sides} {factor} {bounds} (seed {SEED})"


@pytest.mark.parametrize("config", [QWEN, QWEN3])
def test_tokens_are_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    patch = config["vision_config"]["patch_size"]
    file = {"patch_size": patch, "merge_size": 2, "size": {"shortest_edge": 4000, "longest_edge": 90000}}
    found = checkpoint(tmp_path, config, {"preprocessor_config.json": file})
    assert found is not None
    processor = Qwen2VLImageProcessorPil(**file)
    source = np.random.default_rng(SEED)
    for _ in range(10):
        height, width = (int(side) for side in source.integers(20, 500, 2))
        made = processor(np.zeros((height, width, 3), np.uint8), return_tensors="np")
        assert found.tokens(*found.size_of(height, width)) == made["image_grid_thw"][0].prod() // 4, (height, width)
