"""Where the codes of experts in floats of four bits (e2m1) lie in words: where bf16 wants their bits.

Codes lie in words as `steps.py` says, so that one code place of a step's words is columns that share a scale. The
places 2f and 2f + 1 lie in a word's lower and upper half alike: for f = 0, 1, 2 sign, exponent and mantissa of e2m1 are
bits 15 and 8 to 6, where bf16 has its own, moved down by 3 · f; f = 3 has the rest, the sign in bit 14, the mantissa in
13, the exponent in 11 and 10.
Invariants: exact both ways. Knows nothing of scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.moe.steps import PLACES, runs_of, steps_of
from stoker_kernels.quant import E2M1


def pack_words(codes: Tensor, block: int) -> Tensor:
    """uint8 codes [R, K], of which `block` columns share a scale, as they rest: uint8 [R, K / 2]."""
    rows, columns = codes.shape
    table = _bits(codes.device)
    found = torch.empty((rows, columns // 4), dtype=torch.int16, device=codes.device)
    for start, count, words in runs_of(columns, block):
        part = codes[:, start : start + count * words * PLACES].reshape(rows, count, 4, 2, words)
        halves = sum(table[field][part[:, :, field].int()] for field in range(4))  # [R, count, 2, words]
        assert isinstance(halves, Tensor)
        at = start // 4
        found[:, at : at + count * words * 2] = halves.transpose(2, 3).reshape(rows, -1).to(torch.int16)
    return found.view(torch.uint8)


def unpack_words(data: Tensor, block: int) -> Tensor:
    """The numbers of codes that rest so, scales left out: fp32 [R, K]."""
    rows, columns = data.shape[0], data.shape[1] * 2
    halves = data.view(torch.int16).int()
    values = torch.empty((rows, columns), dtype=torch.float32, device=data.device)
    sizes = torch.tensor([*E2M1, *(-value for value in E2M1)], device=data.device)
    for start, count, words in runs_of(columns, block):
        part = halves[:, start // 4 : start // 4 + count * words * 2].view(rows, count, words, 2).transpose(2, 3)
        fields = [part << 3 * field for field in range(3)]
        codes = [(each >> 15 & 1) << 3 | each >> 6 & 7 for each in fields]
        codes.append((part >> 14 & 1) << 3 | (part >> 10 & 3) << 1 | part >> 13 & 1)
        values[:, start : start + count * words * PLACES] = sizes[torch.stack(codes, dim=2)].reshape(rows, -1)
    return values


def blocks_of(columns: int, block: int, device: torch.device) -> Tensor:
    """The block of each code place of each step, [S, 8]."""
    steps = torch.tensor(steps_of(columns, block), device=device)
    places = torch.arange(PLACES, device=device)
    return steps[:, :1] // block + places * steps[:, 1:] // (block * PLACES)


def _bits(device: torch.device) -> Tensor:
    """Where a code's bits lie in half a word, by field and code: [4, 16]."""
    code = torch.arange(16, dtype=torch.int32, device=device)
    field = (code >> 3) << 15 | (code & 7) << 6
    last = (code >> 3) << 14 | (code & 1) << 13 | (code >> 1 & 3) << 10
    return torch.stack([field, field >> 3, field >> 6, last])
