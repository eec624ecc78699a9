"""MXFP4: blocks of 32 numbers of four bits that share an exponent, as checkpoints of gpt-oss hold their experts.

GGUF's blocks have the exponent before the numbers, and the first half of these in the lower halves of bytes.

A number is e2m1, the first of two in a byte in the lower half; a block's scale is 2^(e − 127) of one byte. Both are
powers of two and small integers, so 16 bits hold every value exactly.
Format: OCP Microscaling Formats (MX) v1.0.
Invariants: pure, but for reading the scales of the rows that are decoded.
Knows nothing of where numbers go.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from stoker_runtime.checkpoint.read_entry import read_entry
from stoker_runtime.checkpoint.tensor_entry import TensorEntry

BLOCK = 32
BYTES = BLOCK // 2
EXPONENT_BIAS = 127
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """Bytes of whole blocks, uint8 [n · 16], and their exponents, uint8 [n] → fp32 [n · 32]."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)])
    packed = blocks.view(-1, BYTES)
    numbers = torch.stack((table[(packed & 0xF).long()], table[(packed >> 4).long()]), dim=-1).view(-1, BLOCK)
    return torch.ldexp(numbers, scales.view(-1, 1).to(torch.int32) - EXPONENT_BIAS).view(-1)


def from_gguf(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """GGUF's blocks, uint8 [rows, n · 17] → codes uint8 [rows, n · 16] and exponents uint8 [rows, n] as above."""
    rows = blocks.view(len(blocks), -1, BYTES + 1)
    codes = rows[..., 1:]
    numbers = torch.cat((codes & 0xF, codes >> 4), dim=-1)
    return (numbers[..., ::2] | numbers[..., 1::2] << 4).flatten(1), rows[..., 0].contiguous()


def read_bytes(entry: TensorEntry) -> Tensor:
    """The bytes of a tensor. Raises ModelError where the file ends before it does."""
    found = torch.empty(entry.num_bytes, dtype=torch.uint8)
    descriptor = os.open(entry.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        read_entry(descriptor, entry, 0, found.numpy().data)
    finally:
        os.close(descriptor)
    return found
