"""How experts in MXFP4 rest in memory: codes where bf16 wants their bits, scales beside those of the same step.

Codes lie in words as `steps.py` says, so that one code place of a step's words is columns that share a scale. The
places 2f and 2f + 1 lie in a word's lower and upper half alike: for f = 0, 1, 2 sign, exponent and mantissa of e2m1 are
bits 15 and 8 to 6, where bf16 has its own, moved down by 3 · f; f = 3 has the rest, the sign in bit 14, the mantissa in
13, the exponent in 11 and 10.

A step has eight bytes of scales a row, one for each code place, and those of neighbouring rows lie together:
[steps, rows, 8]. A byte is e8m0's exponent + 94: as the exponent of a bf16 it is 2^126 · 2^-32 times the scale.
Invariants: exact both ways for scales from 2^-100 to 2^33; a row takes 4.25 bits a number, and up to 8 bytes more for
each step at its end that is shorter than 256.
Knows nothing of experts, files and products.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from stoker_kernels.moe.steps import BLOCK, PLACES, STEP, runs_of, shape_of, steps_of
from stoker_kernels.quant import E2M1, unpack_rows

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
    rows, columns = blocks.shape[0], blocks.shape[1] * 2
    largest = int(scales.max())
    if largest > LARGEST_EXPONENT:
        most = LARGEST_EXPONENT - EXPONENT_BIAS
        raise ValueError(f"has a scale of 2^{largest - EXPONENT_BIAS}; the largest that is multiplied is 2^{most}")
    codes = unpack_rows(blocks.contiguous(), 4)
    table = _bits(codes.device)
    found = torch.empty((rows, columns // 4), dtype=torch.int16, device=codes.device)
    for start, size in runs_of(columns):
        count, words = shape_of(columns, start, size)
        part = codes[:, start : start + count * size].reshape(rows, count, 4, 2, words)
        halves = sum(table[field][part[:, :, field].int()] for field in range(4))  # [R, count, 2, words]
        assert isinstance(halves, Tensor)
        at = start // 4
        found[:, at : at + count * words * 2] = halves.transpose(2, 3).reshape(rows, -1).to(torch.int16)
    moved = scales[:, _blocks_of(columns, scales.device)] + MOVED
    return found.view(torch.uint8), moved.transpose(0, 1).contiguous()


def unpack_mxfp4(data: Tensor, scales: Tensor) -> Tensor:
    """The numbers of such a matrix, fp32 [R, K]."""
    rows, columns = data.shape[0], data.shape[1] * 2
    halves = data.view(torch.int16).int()
    values = torch.empty((rows, columns), dtype=torch.float32, device=data.device)
    sizes = torch.tensor([*E2M1, *(-value for value in E2M1)], device=data.device)
    exponents = torch.empty((rows, columns // BLOCK), dtype=torch.int32, device=data.device)
    exponents[:, _blocks_of(columns, data.device)] = scales.transpose(0, 1).int() - MOVED - EXPONENT_BIAS
    for start, size in runs_of(columns):
        count, words = shape_of(columns, start, size)
        part = halves[:, start // 4 : start // 4 + count * words * 2].view(rows, count, words, 2).transpose(2, 3)
        fields = [part << 3 * field for field in range(3)]
        codes = [(each >> 15 & 1) << 3 | each >> 6 & 7 for each in fields]
        codes.append((part >> 14 & 1) << 3 | (part >> 10 & 3) << 1 | part >> 13 & 1)
        values[:, start : start + count * size] = sizes[torch.stack(codes, dim=2)].reshape(rows, -1)
    return torch.ldexp(values.view(rows, -1, BLOCK), exponents.unsqueeze(-1)).view(rows, columns)


def quantize_mxfp4(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [R, K] rounded to MXFP4 as OCP's specification does it: the largest of a block becomes 4 to 8, beyond 6
    is 6. As files have it: codes uint8 [R, K / 2], exponents uint8 [R, K / 32].
    """
    rows, columns = matrix.shape
    parts = matrix.float().view(rows, -1, BLOCK)
    exponent = torch.frexp(parts.abs().amax(-1))[1] - 3
    exponent = exponent.clamp(-EXPONENT_BIAS, LARGEST_EXPONENT - EXPONENT_BIAS)
    small = torch.ldexp(parts, -exponent.unsqueeze(-1))
    edges = torch.tensor([(low + high) / 2 for low, high in pairwise(E2M1)], device=matrix.device)
    below, above = (torch.bucketize(small.abs(), edges, right=right) for right in (False, True))
    size = torch.where(below % 2 == 0, below, above).to(torch.uint8)  # half-way: the even code
    codes = (size + 8 * (small < 0).to(torch.uint8)).view(rows, columns // 2, 2)
    return codes[..., 0] | codes[..., 1] << 4, (exponent + EXPONENT_BIAS).to(torch.uint8)


def _blocks_of(columns: int, device: torch.device) -> Tensor:
    """The block of each code place of each step, [S, 8]."""
    steps = torch.tensor(steps_of(columns), device=device)
    places = torch.arange(PLACES, device=device)
    return steps[:, :1] // BLOCK + places * steps[:, 1:] // STEP


def _bits(device: torch.device) -> Tensor:
    """Where a code's bits lie in half a word, by field and code: [4, 16]."""
    code = torch.arange(16, dtype=torch.int32, device=device)
    field = (code >> 3) << 15 | (code & 7) << 6
    last = (code >> 3) << 14 | (code & 1) << 13 | (code >> 1 & 3) << 10
    return torch.stack([field, field >> 3, field >> 6, last])
