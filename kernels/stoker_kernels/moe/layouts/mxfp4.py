"""How experts in MXFP4 rest in memory: codes where bf16 wants their bits, scales beside those of the same step.

Codes lie as `fp4_words.py` says. A step has eight bytes of scales a row, one for each code place, and those of
neighbouring rows lie together: [steps, rows, 8]. A byte is e8m0's exponent + 94: as the exponent of a bf16 it is
2^126 · 2^-32 times the scale.
Invariants: exact both ways for scales from 2^-100 to 2^33; a row takes 4.25 bits a number, and up to 8 bytes more for
each step at its end that is shorter than 256.
Knows nothing of experts, files and products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.moe.layouts.fp4_words import blocks_of, pack_words, unpack_words
from stoker_kernels.moe.steps import BLOCK, PLACES, steps_of
from stoker_kernels.quant import nearest_e2m1, pack_rows, unpack_rows

EXPONENT_BIAS = 127  # of e8m0
MOVED = 94  # of a scale's exponent: 126 that codes lack as bits of bf16, less the 32 that keep small and large in range
LARGEST_EXPONENT = 254 - MOVED


def scale_bytes(rows: int, columns: int) -> int:
    """Bytes of its scales."""
    return rows * PLACES * len(steps_of(columns))


def pack_mxfp4(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as files have it, codes uint8 [R, K / 2] with the lower column in a byte's lower half and exponents
    uint8 [R, K / 32], as it rests: uint8 [R, K / 2] and [S, R, 8]. Raises ValueError for a scale beyond 2^33.
    """
    largest = int(scales.max())
    if largest > LARGEST_EXPONENT:
        most = LARGEST_EXPONENT - EXPONENT_BIAS
        raise ValueError(f"has a scale of 2^{largest - EXPONENT_BIAS}; the largest that is multiplied is 2^{most}")
    moved = scales[:, blocks_of(blocks.shape[1] * 2, BLOCK, scales.device)] + MOVED
    return pack_words(unpack_rows(blocks.contiguous(), 4), BLOCK), moved.transpose(0, 1).contiguous()


def unpack_mxfp4(data: Tensor, scales: Tensor) -> Tensor:
    """The numbers of such a matrix, fp32 [R, K]."""
    rows, columns = data.shape[0], data.shape[1] * 2
    exponents = torch.empty((rows, columns // BLOCK), dtype=torch.int32, device=data.device)
    exponents[:, blocks_of(columns, BLOCK, data.device)] = scales.transpose(0, 1).int() - MOVED - EXPONENT_BIAS
    values = unpack_words(data, BLOCK).view(rows, -1, BLOCK)
    return torch.ldexp(values, exponents.unsqueeze(-1)).view(rows, columns)


def quantize_mxfp4(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [R, K] rounded to MXFP4 as OCP's specification does it: the largest of a block becomes 4 to 8, beyond 6
    is 6. As files have it: codes uint8 [R, K / 2], exponents uint8 [R, K / 32].
    """
    rows, columns = matrix.shape
    parts = matrix.float().view(rows, -1, BLOCK)
    exponent = torch.frexp(parts.abs().amax(-1))[1] - 3
    exponent = exponent.clamp(-EXPONENT_BIAS, LARGEST_EXPONENT - EXPONENT_BIAS)
    small = torch.ldexp(parts, -exponent.unsqueeze(-1))
    return pack_rows(nearest_e2m1(small).view(rows, columns), 4), (exponent + EXPONENT_BIAS).to(torch.uint8)
