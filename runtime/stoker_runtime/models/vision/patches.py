"""Cuts images into the patches that a vision tower reads.

Invariants: pixels are normed in fp32, and rounded once; a patch's values go by channel, frame, row and column, as the
kernel of the convolution lies that reads them, and end in zeros where rows are padded. All frames are the one image.
Knows nothing of sizes that a model asks for: images come in theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker_runtime.models.vision.layout import Grid
from stoker_runtime.models.vision.spec import CHANNELS, VisionSpec, padded


class PixelScale:
    """How pixels become what a tower reads: (pixel · rescale − mean) / std, a mean and a deviation for each channel."""

    def __init__(self, rescale: float, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        self._rescale = rescale
        self._mean, self._std = (torch.tensor(tuple(each), dtype=torch.float32, device=device) for each in (mean, std))
        if self._mean.shape != (CHANNELS,) or self._std.shape != (CHANNELS,):
            raise ValueError(f"pixels have {CHANNELS} channels; given are {len(mean)} means and {len(std)} deviations")

    def __call__(self, image: Tensor) -> Tensor:
        """uint8 `[height, width, 3]` → fp32 of that shape."""
        return image.float().mul_(self._rescale).sub_(self._mean).div_(self._std)


def cut_patches(
    images: Sequence[Tensor], grids: Sequence[Grid], spec: VisionSpec, scale: PixelScale, dtype: torch.dtype
) -> Tensor:
    """The patches of all images, block by block, end to end: `[T, padded(spec.patch_values)]`."""
    width, merge, side = padded(spec.patch_values), spec.merge_size, spec.patch_size
    counts = [rows * columns for rows, columns in grids]
    # As zeros: what stands behind a patch's values is multiplied with zeros, and may be no infinity.
    make = torch.empty if width == spec.patch_values else torch.zeros
    patches = make((sum(counts), width), dtype=dtype, device=images[0].device)
    for image, (rows, columns), place in zip(images, grids, patches.split(counts), strict=True):
        pixels = scale(image.contiguous()).view(rows // merge, merge, side, columns // merge, merge, side, CHANNELS)
        values = place[:, : spec.patch_values].unflatten(1, (CHANNELS, spec.temporal_patch_size, side, side))
        blocks = values.unflatten(0, (rows // merge, columns // merge, merge, merge))
        blocks.copy_(pixels.permute(0, 3, 1, 4, 6, 2, 5).unsqueeze(5))
    return patches
