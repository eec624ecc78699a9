"""How experts in NVFP4 rest in memory: codes where bf16 wants their bits, scales beside those of the same step.

Codes lie as `fp4_words.py` says, in steps of 128 columns. A step has eight bytes of scales a row, one for each code
place, and those of neighbouring rows lie together: [steps, rows, 8]. A byte is the scale's exponent + 10 in its upper
five bits, which is above zero for what is e4m3's least, too, and its mantissa in the lower three: beside the bits of
2^97 they are a bf16, 2^107 times the scale. Of the 2^126 that codes lack as bits of bf16 a product then lacks 2^19.
Invariants: exact both ways: a scale's sign is in its codes, and those under a scale of zero are zero. A row takes 4.5
bits a number, and up to 8 bytes more for each step at its end that is shorter than 128. A matrix's factor is apart.
Knows nothing of experts, files and products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.moe.layouts.fp4_words import blocks_of, pack_words, unpack_words
from stoker_kernels.quant import (
    E2M1,
    FP4_BLOCKS,
    FP8,
    FP8_MAX,
    nearest_e2m1,
    pack_rows,
    unpack_rows,
    widened_scales,
    without_signs,
)

BLOCK = FP4_BLOCKS["nvfp4"]


def pack_nvfp4(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as files have it, codes uint8 [R, K / 2] with the lower column in a byte's lower half and e4m3 as uint8
    [R, K / 16], as it rests: uint8 [R, K / 2] and [S, R, 8]. Raises ValueError for a scale that is no number.
    """
    codes, wide = without_signs(unpack_rows(blocks.contiguous(), 4), scales)
    wide = wide[:, blocks_of(blocks.shape[1] * 2, BLOCK, scales.device)]
    return pack_words(codes, BLOCK), wide.transpose(0, 1).contiguous()


def unpack_nvfp4(data: Tensor, scales: Tensor) -> Tensor:
    """The numbers of such a matrix, its factor left out: fp32 [R, K]."""
    rows, columns = data.shape[0], data.shape[1] * 2
    bits = torch.empty((rows, columns // BLOCK), dtype=torch.uint8, device=data.device)
    bits[:, blocks_of(columns, BLOCK, data.device)] = scales.transpose(0, 1)
    return (unpack_words(data, BLOCK).view(rows, -1, BLOCK) * widened_scales(bits)[..., None]).view(rows, columns)


def quantize_nvfp4(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix [R, K] rounded to NVFP4: its largest number becomes 6 under the largest scale, a block's largest 6 or
    what is next to it. As files have it: codes uint8 [R, K / 2], e4m3 as uint8 [R, K / 16], and the factor, fp32 [].
    """
    parts = matrix.float().view(matrix.shape[0], -1, BLOCK)
    largest = parts.abs().amax()
    factor = torch.where(largest > 0, largest / (E2M1[-1] * FP8_MAX), 1.0)
    scale = (parts.abs().amax(-1) / (E2M1[-1] * factor)).clamp(max=FP8_MAX).to(FP8)
    exact = (scale.float() * factor).unsqueeze(-1)
    codes = nearest_e2m1(torch.where(exact > 0, parts / exact, 0.0))
    return pack_rows(codes.flatten(1), 4), scale.view(torch.uint8), factor
