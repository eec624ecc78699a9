"""Pixels against transformers' PIL image processors, and files that are no images."""

from __future__ import annotations

import random
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageFile, ImageOps
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from stoker_runtime.errors import RequestError
from stoker_runtime.images import decoding
from stoker_runtime.images.decoding import Opened
from stoker_runtime.images.rule import CLIP_MEAN, CLIP_STD, HALF, ImageKind, ImageRule

SEED = random.SystemRandom().getrandbits(32)
FIELD = "messages[3].content[1].image_url.url"
QWEN = ImageRule(ImageKind.QWEN, 5, 5, None, 14, 2, 3136, 200_000, 0, 0, 3, CLIP_MEAN, CLIP_STD, 1 / 255, 2)
GEMMA = ImageRule(ImageKind.GEMMA3, 5, 6, 7, 14, 4, 1, 1, 224, 224, 2, HALF, HALF, 1 / 255)


def noise(mode: str, height: int, width: int) -> Pillow.Image:
    bands = len(Pillow.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(SEED).integers(0, 256, (height, width, bands), np.uint8)
    return Pillow.frombytes(mode, (width, height), pixels.tobytes())


def written(image: Pillow.Image, format: str, **options: Any) -> bytes:
    found = BytesIO()
    image.save(found, format, **options)
    return found.getvalue()


def decoded(data: bytes, rule: ImageRule = QWEN) -> np.ndarray:
    image = Opened(data, rule, FIELD).decode()
    assert len(image.pixels) == image.height * image.width * 3
    assert image.digest == sha256(
        image.height.to_bytes(4, "little") + image.width.to_bytes(4, "little") + image.pixels
    ).digest()
    assert image.tokens == rule.tokens(image.height, image.width)
    return np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)


def expected(image: Pillow.Image, rule: ImageRule) -> np.ndarray:
    """What transformers makes of it, before it is normalised."""
    plain = {"do_rescale": False, "do_normalize": False, "do_convert_rgb": True, "return_tensors": "np"}
    if rule.kind is ImageKind.GEMMA3:
        processor = Gemma3ImageProcessorPil(size={"height": rule.height, "width": rule.width})
        return np.moveaxis(processor(image, **plain)["pixel_values"][0], 0, -1)
    processor = Qwen2VLImageProcessorPil(
        patch_size=rule.patch_size, size={"shortest_edge": rule.min_pixels, "longest_edge": rule.max_pixels}
    )
    made = processor(image, **plain)
    _, tall, wide = made["image_grid_thw"][0]
    side = rule.patch_size
    patches = made["pixel_values"].reshape(tall // 2, wide // 2, 2, 2, 3, rule.temporal_patch_size, side, side)
    return patches[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4).reshape(tall * side, wide * side, 3)


@pytest.mark.parametrize("rule", [QWEN, replace(QWEN, patch_size=16, min_pixels=65536), GEMMA])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK"])
def test_pixels_are_transformers(rule: ImageRule, mode: str) -> None:
    source = random.Random(f"{SEED}{mode}")
    height, width = source.randrange(8, 900), source.randrange(8, 900)
    if mode in ("P", "1"):
        image = noise("RGB", height, width).convert(mode)
    else:
        image = noise(mode, height, width)
    data = written(image, "TIFF" if mode == "CMYK" else "PNG")
    if mode == "CMYK":
        data = written(image, "JPEG")
    reopened = Pillow.open(BytesIO(data))
    assert np.array_equal(decoded(data, rule), expected(reopened, rule)), f"{mode} {height}x{width} (seed {SEED})"


@pytest.mark.parametrize("format", ["JPEG", "WEBP", "GIF", "BMP", "PNG"])
def test_every_format(format: str) -> None:
    data = written(noise("RGB", 70, 130), format)
    assert np.array_equal(decoded(data), expected(Pillow.open(BytesIO(data)), QWEN))


def test_the_first_frame_of_several() -> None:
    frames = [Pillow.new("RGB", (90, 60), color) for color in ("red", "blue")]
    data = written(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (decoded(data) == (255, 0, 0)).all()


def test_a_palette_with_transparency() -> None:
    image = Pillow.new("P", (60, 60), 1)
    image.putpalette([10, 20, 30, 40, 50, 60])
    data = written(image, "PNG", transparency=1)
    assert (decoded(data) == 255).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_camera_was(orientation: int) -> None:
    image = noise("RGB", 60, 200)
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    data = written(image, "PNG", exif=exif)
    turned = ImageOps.exif_transpose(Pillow.open(BytesIO(data)))
    assert np.array_equal(decoded(data), expected(turned, QWEN))


def of(data: bytes) -> str:
    with pytest.raises(RequestError) as wrong:
        Opened(data, QWEN, FIELD).decode()
    assert wrong.value.param == FIELD
    assert FIELD in wrong.value.message
    return wrong.value.message


def test_what_is_no_image() -> None:
    assert "one of PNG, JPEG" in of(b"")
    assert "one of PNG, JPEG" in of(random.Random(SEED).randbytes(500))
    assert "one of PNG, JPEG" in of(written(noise("RGB", 9, 9), "TIFF"))
    assert "no image that can be read" in of(b"<svg xmlns='http://www.w3.org/2000/svg'/>")


@pytest.mark.parametrize("format", ["JPEG", "WEBP", "GIF", "BMP", "PNG"])
def test_a_file_that_is_cut_short(format: str) -> None:
    data = written(noise("RGB", 200, 200), format)
    assert "can be read" in of(data[: len(data) // 2])


@pytest.mark.parametrize("format", ["JPEG", "WEBP", "GIF", "BMP", "PNG"])
def test_garbage_in_a_file_is_an_image_or_an_error(format: str) -> None:
    source = random.Random(SEED)
    data = written(noise("RGB", 64, 64), format)
    named: set[str | None] = set()
    for _ in range(60):
        broken = bytearray(data)
        for _ in range(source.randrange(1, 12)):
            broken[source.randrange(source.choice([60, len(broken)]))] = source.randrange(256)
        try:
            Opened(bytes(broken), QWEN, FIELD).decode()
        except RequestError as error:
            named.add(error.param)
    assert named <= {FIELD}, f"seed {SEED}"


def test_too_many_pixels_are_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpacked(_: object) -> None:
        raise AssertionError("unpacked")

    monkeypatch.setattr(decoding, "MAX_PIXELS", 899)
    monkeypatch.setattr(ImageFile.ImageFile, "load", unpacked)
    assert "30x30 pixels; at most 899" in of(written(Pillow.new("RGB", (30, 30)), "PNG"))


def test_a_bomb() -> None:
    data = bytearray(written(Pillow.new("1", (8, 8)), "BMP"))
    data[18:26] = (60_000).to_bytes(4, "little") * 2
    assert "more than" in of(bytes(data))


def test_a_line_is_no_image() -> None:
    assert "more than 200 times" in of(written(Pillow.new("RGB", (900, 3)), "PNG"))


