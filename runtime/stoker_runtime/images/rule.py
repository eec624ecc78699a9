"""What a model asks of its images: their sizes, their tokens, and how their pixels are normalised.

Invariants: a rule is read from the files that transformers reads (processor_config.json, else
preprocessor_config.json) and says what transformers' PIL image processors do; without either file it is the one that
was published with the architecture. What we cannot do of it is a ModelError that names the file and the key.
Knows nothing of decoding, nor of texts around an image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from stoker_runtime.checkpoint.safetensors_index import read_checkpoint_index
from stoker_runtime.errors import ModelError
from stoker_runtime.models.config_source import ModelSource, SourceKind, read_json

PROCESSOR_FILE = "processor_config.json"
IMAGE_FILE = "preprocessor_config.json"
TOWERS = ("visual", "vision_tower")
"""What tensors that see have in their names, between dots."""
MAX_ASPECT = 200
"""Longer to shorter side beyond which Qwen's models take no image."""
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
BILINEAR, BICUBIC = 2, 3
"""As Pillow numbers them, and `resample` of the files."""
RESCALE = 1 / 255


class ImageKind(StrEnum):
    """Families of models by what they do with an image."""

    QWEN = "qwen"
    GEMMA3 = "gemma3"


class TooNarrowError(ValueError):
    """An image whose sides are too unlike."""


@dataclass(frozen=True, slots=True)
class ImageRule:
    """How an image becomes pixels and tokens.

    `placeholder` is the id that stands for each token of an image; the template writes `marker` once an image, which
    for Gemma is another id, and `end` (None: nothing) comes behind it. Sides of an image are multiples of
    `patch_size · merge_size` between `min_pixels` and `max_pixels` in area (qwen), or `height` and `width` (gemma3),
    and `merge_size²` patches are a token. A pixel's value v becomes (v · `rescale` − `mean`) / `std` by channel.
    """

    kind: ImageKind
    placeholder: int
    marker: int
    end: int | None
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    height: int
    width: int
    resample: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float
    temporal_patch_size: int = 1

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """The height and width that an image of these sides is resized to. Raises TooNarrowError."""
        if self.kind is ImageKind.GEMMA3:
            return self.height, self.width
        return smart_resize(height, width, self.patch_size * self.merge_size, self.min_pixels, self.max_pixels)

    def tokens(self, height: int, width: int) -> int:
        """Placeholders of an image that was resized to these sides."""
        side = self.patch_size * self.merge_size
        return (height // side) * (width // side)

    def span(self, height: int, width: int) -> int:
        """Positions that such an image takes: of models that rotate by rows and columns its longer side in tokens."""
        if self.kind is ImageKind.GEMMA3:
            return self.tokens(height, width)
        return max(height, width) // (self.patch_size * self.merge_size)

    @property
    def most_pixels(self) -> int:
        """Of the largest image after it was resized."""
        return self.max_pixels


def smart_resize(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Sides that are multiples of `factor`, of an area within the bounds, and about as unlike as these.

    It is transformers' function of this name (models/qwen2_vl), its rounding of halves to even included.
    """
    if max(height, width) / min(height, width) > MAX_ASPECT:
        raise TooNarrowError(f"one side is more than {MAX_ASPECT} times the other")
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if tall * wide > most:
        beta = math.sqrt((height * width) / most)
        tall = max(factor, math.floor(height / beta / factor) * factor)
        wide = max(factor, math.floor(width / beta / factor) * factor)
    elif tall * wide < least:
        beta = math.sqrt(least / (height * width))
        tall = math.ceil(height * beta / factor) * factor
        wide = math.ceil(width * beta / factor) * factor
    return tall, wide


def read_rule(source: ModelSource) -> ImageRule | None:
    """The rule of a model that sees; None for one that does not, or whose checkpoint has no vision tower.

    Raises ModelError.
    """
    named = source.config.get("architectures") or [""]
    reader = _READERS.get(named[0])
    if reader is None or source.kind is SourceKind.GGUF or not source.config.get("vision_config"):
        return None
    if source.kind is SourceKind.FOLDER and source.path is not None and not _has_tower(source.path):
        return None
    return reader(source.config, _Settings.read(source.path))


def _has_tower(folder: Path) -> bool:
    """Whether the checkpoint has one; where there are no weights, as where a model is only described, it would."""
    try:
        names = read_checkpoint_index(folder)
    except ModelError:
        return True  # what is wrong with files, whoever loads them says
    return any(part in TOWERS for name in names for part in name.split("."))


@dataclass(frozen=True, slots=True)
class _Settings:
    """The image processor's file: `values` None where there is none. `where` is for messages."""

    values: Mapping[str, Any] | None
    where: str

    @classmethod
    def read(cls, folder: Path | None) -> _Settings:
        """What transformers would read of `folder`."""
        processor, own = (folder / name if folder else Path() for name in (PROCESSOR_FILE, IMAGE_FILE))
        if folder and processor.is_file():
            inner = read_json(processor).get("image_processor")
            if isinstance(inner, dict):
                return cls(inner, f"{processor}: image_processor")
        if folder and own.is_file():
            return cls(read_json(own), str(own))
        return cls(None, "config.json")

    def get(self, name: str, default: Any) -> Any:
        """A value; null counts as none."""
        found = (self.values or {}).get(name)
        return default if found is None else found

    def integer(self, name: str, default: int) -> int:
        """A positive whole number."""
        return self.checked_integer(name, self.get(name, default))

    def checked_integer(self, name: str, value: Any) -> int:
        """`value` if it is a positive whole number. Raises ModelError."""
        if type(value) is not int or value < 1:
            raise ModelError(f"{self.where}: {name} is {value!r}; it must be a whole number of at least 1.")
        return value

    def channels(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """A number for each of red, green and blue."""
        found = self.get(name, default)
        found = [found] * 3 if isinstance(found, (int, float)) else found
        if not isinstance(found, (list, tuple)) or len(found) != 3 or not all(map(_is_number, found)):
            raise ModelError(f"{self.where}: {name} is {found!r}; it must be three numbers.")
        return tuple(map(float, found))

    def normalisation(self, mean: tuple[float, ...], std: tuple[float, ...]) -> dict[str, Any]:
        """`mean`, `std` and `rescale`, and how to resize is checked too. Raises ModelError."""
        if not self.get("do_resize", True):
            raise ModelError(f"{self.where}: do_resize is false; images of any size cannot be served.")
        if not self.get("do_normalize", True):
            mean, std = (0.0,) * 3, (1.0,) * 3
        else:
            mean, std = self.channels("image_mean", mean), self.channels("image_std", std)
        if 0.0 in std:
            raise ModelError(f"{self.where}: image_std is {std!r}; it must not hold 0.")
        rescale = self.get("rescale_factor", RESCALE)
        if not _is_number(rescale):
            raise ModelError(f"{self.where}: rescale_factor is {rescale!r}; it must be a number.")
        return {"mean": mean, "std": std, "rescale": float(rescale) if self.get("do_rescale", True) else 1.0}

    def resample(self, default: int) -> int:
        """One of Pillow's ways to resize."""
        found = self.get("resample", default)
        if type(found) is not int or not 0 <= found <= 5:
            raise ModelError(f"{self.where}: resample is {found!r}; it must be one of Pillow's, 0 to 5.")
        return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class _QwenDefaults:
    """What was published with an architecture, for a folder without the file."""

    patch_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


_QWEN2_5 = _QwenDefaults(14, 56 * 56, 28 * 28 * 16384, CLIP_MEAN, CLIP_STD)
_QWEN3 = _QwenDefaults(16, 256 * 256, 4096 * 4096, HALF, HALF)
_UNSAID = _QwenDefaults(14, 56 * 56, 28 * 28 * 1280, CLIP_MEAN, CLIP_STD)
"""transformers' values for what a file leaves out."""


def _qwen(published: _QwenDefaults) -> Callable[[Mapping[str, Any], _Settings], ImageRule]:
    def read(config: Mapping[str, Any], settings: _Settings) -> ImageRule:
        vision = config["vision_config"]
        unsaid = published if settings.values is None else _UNSAID
        patch = settings.checked_integer("vision_config.patch_size", vision.get("patch_size", published.patch_size))
        merge = settings.checked_integer("vision_config.spatial_merge_size", vision.get("spatial_merge_size", 2))
        for name, own in (("patch_size", patch), ("merge_size", merge)):
            if (found := settings.integer(name, own)) != own:
                raise ModelError(f"{settings.where}: {name} is {found}; config.json's vision_config has {own}.")
        size = settings.get("size", {})
        if not isinstance(size, dict):
            raise ModelError(f"{settings.where}: size is {size!r}; it must be an object.")
        bounds = [
            settings.integer(name, size.get(edge) or default)
            for name, edge, default in (
                ("min_pixels", "shortest_edge", unsaid.min_pixels),
                ("max_pixels", "longest_edge", unsaid.max_pixels),
            )
        ]
        if bounds[1] < max(bounds[0], (patch * merge) ** 2):
            raise ModelError(f"{settings.where}: max_pixels is {bounds[1]}, which is less than one image must have.")
        placeholder = config.get("image_token_id", 151655)
        return ImageRule(
            kind=ImageKind.QWEN,
            placeholder=placeholder,
            marker=placeholder,
            end=None,
            patch_size=patch,
            merge_size=merge,
            min_pixels=bounds[0],
            max_pixels=bounds[1],
            height=0,
            width=0,
            resample=settings.resample(BICUBIC),
            temporal_patch_size=settings.integer("temporal_patch_size", vision.get("temporal_patch_size", 2)),
            **settings.normalisation(unsaid.mean, unsaid.std),
        )

    return read


def _gemma3(config: Mapping[str, Any], settings: _Settings) -> ImageRule:
    vision = config["vision_config"]
    if settings.get("do_pan_and_scan", False):
        raise ModelError(
            f"{settings.where}: do_pan_and_scan is true, which is not supported; set it to false, or serve text alone "
            "(--language-model-only)."
        )
    side = settings.checked_integer("vision_config.image_size", vision.get("image_size", 896))
    patch = settings.checked_integer("vision_config.patch_size", vision.get("patch_size", 14))
    size = settings.get("size", {"height": side, "width": side})
    if not isinstance(size, dict) or (size.get("height"), size.get("width")) != (side, side):
        raise ModelError(f"{settings.where}: size is {size!r}; config.json's vision_config has image_size {side}.")
    tokens = settings.checked_integer("mm_tokens_per_image", config.get("mm_tokens_per_image", 256))
    across = math.isqrt(tokens)
    if across * across != tokens or side % (patch * across):
        raise ModelError(f"config.json: mm_tokens_per_image is {tokens}, which {side // patch}² patches do not make.")
    if (said := settings.integer("image_seq_length", tokens)) != tokens:
        raise ModelError(f"{settings.where}: image_seq_length is {said}; config.json has mm_tokens_per_image {tokens}.")
    return ImageRule(
        kind=ImageKind.GEMMA3,
        placeholder=_token(config, "image", 262144),
        marker=_token(config, "boi", 255999),
        end=_token(config, "eoi", 256000),
        patch_size=patch,
        merge_size=side // patch // across,
        min_pixels=side * side,
        max_pixels=side * side,
        height=side,
        width=side,
        resample=settings.resample(BILINEAR),
        **settings.normalisation(HALF, HALF),
    )


def _token(config: Mapping[str, Any], name: str, default: int) -> int:
    """An id under either of the names that configurations have for it."""
    found: int = config.get(f"{name}_token_index", config.get(f"{name}_token_id", default))
    return found


_READERS: dict[str, Callable[[Mapping[str, Any], _Settings], ImageRule]] = {
    "Qwen2_5_VLForConditionalGeneration": _qwen(_QWEN2_5),
    "Qwen3VLForConditionalGeneration": _qwen(_QWEN3),
    "Qwen3VLMoeForConditionalGeneration": _qwen(_QWEN3),
    "Gemma3ForConditionalGeneration": _gemma3,
}
