"""Vision towers against transformers: tiny random checkpoints of every family, images as its processors see them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.runtime.models.vision.published import PUBLISHED
from tests.runtime.models.vision.towers import CHECKPOINTS, SCALE, Image, draw_images, oracle, save_random

from stoker_runtime.models.config_source import ModelSource, SourceKind, read_source
from stoker_runtime.models.vision.table import read_vision
from stoker_runtime.models.vision.tower import Tower, VisionOutput
from stoker_runtime.weights.vision.load import load_vision

CPU = torch.device("cpu")
Make = Callable[[str], Path]
# (rows, columns) of blocks: one, a row, less and more than a window, windows that are cut at both ends.
GRIDS = [(4, 7), (1, 1), (1, 5), (3, 3), (8, 2)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A folder with the named checkpoint, every parameter random."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = save_random(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


def load(folder: Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Tower:
    source = read_source(str(folder))
    spec = read_vision(source)
    assert spec is not None
    return Tower(spec, load_vision(source, spec, device, dtype), **SCALE)


def images_for(tower: Tower) -> list[Image]:
    """Several of different sizes, or of the one that all have."""
    spec = tower.spec
    if spec.image_size:
        return draw_images([(spec.image_size, spec.image_size)] * 3)
    return draw_images([(rows * spec.block_pixels, columns * spec.block_pixels) for rows, columns in GRIDS])


def encode(tower: Tower, images: list[Image], device: torch.device = CPU) -> list[torch.Tensor]:
    found = tower.encode([torch.from_numpy(image).to(device) for image in images])
    return [found.embeddings, *found.deepstack]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_embeddings_are_those_of_transformers(checkpoint: Make, name: str) -> None:
    folder = checkpoint(name)
    tower = load(folder)
    images = images_for(tower)
    expected = oracle(folder, name, images)
    found = encode(tower, images)
    assert len(found) == len(expected) == 1 + len(tower.spec.deepstack_layers)
    assert len(found[0]) == sum(tower.spec.tokens_of(*image.shape[:2]) for image in images)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_sixteen_bits_lie_near_thirty_two(checkpoint: Make, name: str) -> None:
    folder = checkpoint(name)
    tower = load(folder, torch.bfloat16)
    images = images_for(tower)
    exact = oracle(folder, name, images)
    theirs = oracle(folder, name, images, torch.bfloat16)
    for ours, other, right in zip(encode(tower, images), theirs, exact, strict=True):
        assert ours.dtype is torch.bfloat16
        size = right.norm()
        assert (ours.float() - right).norm() / size < 1.5 * (other.float() - right).norm() / size + 1e-3


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_images_do_not_see_each_other(checkpoint: Make, name: str) -> None:
    tower = load(checkpoint(name))
    images = images_for(tower)
    together = encode(tower, images)
    alone = [torch.cat(each) for each in zip(*(encode(tower, [image]) for image in images), strict=True)]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_it_rehearses_few_patches_and_many(checkpoint: Make, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = load(checkpoint(name))
    patches: list[int] = []
    encode = Tower.encode

    def note(self: Tower, images: list[torch.Tensor]) -> VisionOutput:
        patches.append(sum(self.spec.patches_of(*image.shape[:2]) for image in images))
        return encode(self, images)

    monkeypatch.setattr(Tower, "encode", note)
    tower.rehearse()
    assert max(patches) > 128 or tower.spec.image_size
    assert min(patches) == tower.spec.block or tower.spec.image_size


def test_an_image_of_another_size_is_refused(checkpoint: Make) -> None:
    tower = load(checkpoint("qwen2_5_vl"))
    with pytest.raises(ValueError, match="20x25 pixels: both must be multiples of 10"):
        tower.encode([torch.zeros(20, 25, 3, dtype=torch.uint8)])
    with pytest.raises(ValueError, match=r"float32 \(20, 20, 3\)"):
        tower.encode([torch.zeros(20, 20, 3)])
    with pytest.raises(ValueError, match="no images"):
        tower.encode([])
    fixed = load(checkpoint("gemma3"))
    with pytest.raises(ValueError, match="55x60 pixels: all have 60x60"):
        fixed.encode([torch.zeros(55, 60, 3, dtype=torch.uint8)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_gpu_gives_the_same(checkpoint: Make, name: str, dtype: torch.dtype) -> None:
    folder, gpu = checkpoint(name), torch.device("cuda")
    exact = load(folder)
    images = images_for(exact)
    found = encode(load(folder, dtype, gpu), images, gpu)
    near = encode(load(folder, dtype), images)
    for ours, cpu, right in zip(found, near, encode(exact, images), strict=True):
        size = right.norm()
        assert (ours.cpu().float() - right).norm() / size < 1.5 * (cpu.float() - right).norm() / size + 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", PUBLISHED)
def test_working_memory_is_what_was_planned(architecture: str, dtype: torch.dtype) -> None:
    """Of towers of published sizes, three layers deep."""
    gpu = torch.device("cuda")
    settings = PUBLISHED[architecture]
    vision = {key: value for key, value in settings["vision_config"].items() if not key.endswith("indexes")}
    vision |= {"num_hidden_layers" if "num_hidden_layers" in vision else "depth": 3}
    vision |= {key: [0, 2] for key in settings["vision_config"] if key.endswith("indexes")}
    config = {"architectures": [architecture], **settings, "vision_config": vision}
    source = ModelSource("shape:published", SourceKind.SHAPE, None, config)
    spec = read_vision(source)
    assert spec is not None
    tower = Tower(spec, load_vision(source, spec, gpu, dtype), **SCALE)
    side = spec.image_size or 40 * spec.block_pixels
    images = [torch.zeros(side, side, 3, dtype=torch.uint8, device=gpu) for _ in range(2)]
    tower.encode(images)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tower.encode(images)
    used = torch.cuda.max_memory_allocated() - before
    planned = spec.working_bytes(2 * spec.patches_of(side, side), str(dtype).removeprefix("torch."))
    assert 0.6 * planned < used <= planned
