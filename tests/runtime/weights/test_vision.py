"""Loads vision towers: every published form of their names, several files, what is refused by name, random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.models.vision.towers import CHECKPOINTS, SCALE, draw_images, save_random

from stoker_runtime.errors import ModelError
from stoker_runtime.models.config_source import ModelSource, SourceKind, read_source
from stoker_runtime.models.vision.spec import VisionSpec
from stoker_runtime.models.vision.table import read_vision
from stoker_runtime.models.vision.tower import Tower
from stoker_runtime.weights.vision.load import load_vision

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
# How files of different makings call what these tests save.
SPELLINGS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "qwen-old": ("qwen2_5_vl", (("model.visual.", "visual."), ("model.language_model.", "model."))),
    "qwen-new": ("qwen2_5_vl", (("visual.", "model.visual."),)),
    "qwen3-old": ("qwen3_vl", (("model.visual.", "visual."),)),
    "qwen3-new": ("qwen3_vl", (("visual.", "model.visual."),)),
    "gemma-published": ("gemma3-head", (("vision_tower.", "vision_tower.vision_model."),)),
    "gemma-nested": (
        "gemma3-head",
        (
            ("vision_tower.", "model.vision_tower.vision_model."),
            ("multi_modal_projector.", "model.multi_modal_projector."),
        ),
    ),
    "gemma-flat": ("gemma3-head", (("vision_tower.", "model.vision_tower."),)),
}


def spelled(name: str, changes: tuple[tuple[str, str], ...]) -> str:
    for old, new in changes:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def described(folder: Path) -> tuple[ModelSource, VisionSpec]:
    source = read_source(str(folder))
    spec = read_vision(source)
    assert spec is not None
    return source, spec


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Tensors:
    return load_vision(*described(folder), CPU, dtype)


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def change(folder: Path, edit: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def named(tensors: Tensors, end: str) -> str:
    return next(name for name in tensors if name.endswith(end))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_all_published_names_are_read(spelling: str, tmp_path: Path) -> None:
    name, changes = SPELLINGS[spelling]
    as_saved = load(save_random(name, tmp_path / "saved"))
    assert same(as_saved, load(save_random(name, tmp_path / "other", lambda each: spelled(each, changes))))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_rows_lie_where_they_should(name: str, tmp_path: Path) -> None:
    folder = save_random(name, tmp_path)
    weights, tensors = load(folder), load_file(folder / "model.safetensors")
    _, spec = described(folder)
    if name == "gemma3":
        projection = tensors["multi_modal_projector.mm_input_projection_weight"]
        torch.testing.assert_close(weights["projection"], projection.t())
        torch.testing.assert_close(weights["pooled_norm"], 1 + tensors["multi_modal_projector.mm_soft_emb_norm.weight"])
        assert spec.patch_values == 75
        assert weights["patch"].shape == (72, 128)
        assert not weights["patch"][:, 75:].any()
        return
    for at, half in enumerate(("gate_proj", "up_proj")):
        rows = weights["layers.1.up"][at * 64 : at * 64 + 64]
        torch.testing.assert_close(rows[:53], tensors[named(tensors, f"visual.blocks.1.mlp.{half}.weight")])
        assert not rows[53:].any()
        assert not weights["layers.1.up_bias"][at * 64 + 53 : at * 64 + 64].any()
    assert weights["layers.1.down"].shape == (72, 64)
    assert not weights["layers.1.down"][:, 53:].any()


def test_several_files_are_read(tmp_path: Path) -> None:
    whole = load(save_random("qwen3_vl_moe", tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = [f"model-{at:05}-of-00003.safetensors" for at in (1, 2, 3)]
    places = {name: files[at % 3] for at, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensors[name] for name in tensors if places[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert same(whole, load(tmp_path))


def test_sixteen_bits_are_read_as_what_is_asked_for(tmp_path: Path) -> None:
    save_random("gemma3", tmp_path)

    def halve(tensors: Tensors) -> None:
        tensors.update({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})

    change(tmp_path, halve)
    exact, half = load(tmp_path), load(tmp_path, torch.float16)
    assert half["pooled_norm"].dtype is torch.float32  # 1 + weight is no number of 16 bits
    for name, tensor in exact.items():
        torch.testing.assert_close(half[name].float(), tensor, rtol=1e-3, atol=1e-6)


def test_a_quantized_text_model_does_not_matter(tmp_path: Path) -> None:
    before = load(save_random("qwen3_vl", tmp_path))

    def quantize(tensors: Tensors) -> None:
        name = named(tensors, "language_model.layers.0.mlp.down_proj.weight")
        tensors[f"{name}_scale"] = torch.ones(1)
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    change(tmp_path, quantize)
    assert same(before, load(tmp_path))


def test_a_linear_in_fp8_is_refused_by_name(tmp_path: Path) -> None:
    save_random("qwen2_5_vl", tmp_path)

    def quantize(tensors: Tensors) -> None:
        name = named(tensors, "visual.blocks.2.attn.proj.weight")
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    change(tmp_path, quantize)
    with pytest.raises(ModelError, match=r"visual\.blocks\.2\.attn\.proj is quantized .* F8_E4M3"):
        load(tmp_path)


@pytest.mark.parametrize("ending", ["weight_packed", "qweight", "weight_scale"])
def test_packed_linears_are_refused_by_name(ending: str, tmp_path: Path) -> None:
    save_random("qwen3_vl", tmp_path)

    def quantize(tensors: Tensors) -> None:
        name = named(tensors, "visual.blocks.0.mlp.linear_fc1.weight")
        if ending != "weight_scale":
            del tensors[name]
        tensors[f"{name.removesuffix('weight')}{ending}"] = torch.zeros(4, 4, dtype=torch.int32)

    change(tmp_path, quantize)
    with pytest.raises(ModelError, match=r"visual\.blocks\.0\.mlp\.linear_fc1 is quantized"):
        load(tmp_path)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    save_random("qwen3_vl", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = named(tensors, "visual.merger.norm.weight")

    def with_tensors(**more: torch.Tensor) -> None:
        save_file({**tensors, **more}, tmp_path / "model.safetensors")

    with_tensors(**{f"{name.removesuffix('weight')}gain": torch.ones(1)})
    with pytest.raises(ModelError, match=r"visual\.merger\.norm\.gain has no place in the tower of a Qwen3VL"):
        load(tmp_path)
    with_tensors(**{name: torch.ones(7)})
    with pytest.raises(ModelError, match=r"visual\.merger\.norm\.weight is \[7\]; .* asks for \[72\]"):
        load(tmp_path)
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks tensor visual\.merger\.norm\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_shape_draws_its_weights(name: str, tmp_path: Path) -> None:
    folder = save_random(name, tmp_path)
    source, spec = described(folder)
    shape = ModelSource("shape:it", SourceKind.SHAPE, None, source.config)
    weights = load_vision(shape, spec, CPU, torch.float32, seed=3)
    assert same(weights, load_vision(shape, spec, CPU, torch.float32, seed=3))
    assert not same(weights, load_vision(shape, spec, CPU, torch.float32, seed=4))
    loaded = load(folder)
    for key, tensor in loaded.items():
        assert torch.equal(weights[key].any(0), tensor.any(0))  # columns of zeros
    side = spec.image_size or 2 * spec.block_pixels
    (image,) = draw_images([(side, side)])
    found = Tower(spec, weights, **SCALE).encode([torch.from_numpy(image)])
    assert found.embeddings.isfinite().all()
    assert found.embeddings.std() > 0
