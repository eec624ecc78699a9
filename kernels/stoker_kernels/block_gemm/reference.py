"""GGUF's blocks in plain PyTorch: oracle, and what runs where nothing is compiled.

A block of K columns is read as uint8 [B, bytes] and becomes fp32 [B, K], in the steps of its format's definition.
Invariants: each step is rounded to fp32. Knows nothing of dispatch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stoker_kernels.quant import BLOCK_FORMATS, BlockWeight

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def block_linear(x: Tensor, weight: BlockWeight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias, in fp32 with one rounding."""
    values = torch.cat([decode_blocks(piece.data, piece.format) for piece in weight.pieces])
    y = torch.nn.functional.linear(x.float(), values, None if bias is None else bias.float())
    return y.to(x.dtype) if out is None else out.copy_(y)


def block_rows(ids: Tensor, table: BlockWeight, dtype: torch.dtype) -> Tensor:
    """Rows of a table by id."""
    (piece,) = table.pieces
    return decode_blocks(piece.data[ids.long()], piece.format).to(dtype)


def decode_blocks(data: Tensor, name: str) -> Tensor:
    """Rows of blocks, uint8 [N, row bytes] → their values, fp32 [N, K]. Raises KeyError for an unknown format."""
    columns, size = BLOCK_FORMATS[name]
    blocks = data.reshape(-1, size)
    return _DECODERS[name](blocks).reshape(data.shape[0], data.shape[1] // size * columns)


def _half(blocks: Tensor, at: int) -> Tensor:
    """fp16 at a byte → fp32 [B, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(part: Tensor) -> Tensor:
    """The lower halves of all bytes, then the upper ones."""
    return torch.cat([part & 15, part >> 4], dim=-1)


def _bits(part: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """[B, n] → [B, shifts · n]: all bytes shifted by each in turn."""
    return torch.cat([part >> shift & mask for shift in shifts], dim=-1)


def _fifth(blocks: Tensor, at: int) -> Tensor:
    """32 single bits in four bytes → [B, 32] of 0 or 16."""
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return (blocks[:, at : at + 4].unsqueeze(-1) >> places & 1).flatten(1) << 4


def _spread(scales: Tensor, values: Tensor) -> Tensor:
    """[B, G] against [B, K]: the scale of each value's group."""
    return scales.repeat_interleave(values.shape[1] // scales.shape[1], dim=1)


def _levels(nibbles: Tensor) -> Tensor:
    return torch.tensor(LEVELS, dtype=torch.float32, device=nibbles.device)[nibbles.long()]


def _q3_k(b: Tensor) -> Tensor:
    low, high = _bits(b[:, 96:104], (0, 4), 15), _bits(b[:, 104:108], (0, 2, 4, 6), 3)
    scale = _half(b, 108) * ((low | high << 4).float() - 32)
    codes = torch.cat([_bits(b[:, at : at + 32], (0, 2, 4, 6), 3) for at in (32, 64)], dim=1)
    absent = 1 - _bits(b[:, 0:32], tuple(range(8)), 1)
    codes = codes.float() - 4 * absent.float()
    return _spread(scale, codes) * codes


def _scales_and_lows(s: Tensor) -> tuple[Tensor, Tensor]:
    """Twelve bytes → eight scales and eight offsets of six bits, fp32."""
    first, second, last = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scales = torch.cat([first & 63, (last & 15) | (first >> 2 & 48)], dim=1)
    lows = torch.cat([second & 63, (last >> 4) | (second >> 2 & 48)], dim=1)
    return scales.float(), lows.float()


def _scaled_less(b: Tensor, codes: Tensor) -> Tensor:
    scales, lows = _scales_and_lows(b[:, 4:16])
    values = codes.float()
    return _spread(_half(b, 0) * scales, values) * values - _spread(_half(b, 2) * lows, values)


def _q4_k(b: Tensor) -> Tensor:
    return _scaled_less(b, torch.cat([_nibbles(b[:, at : at + 32]) for at in range(16, 144, 32)], dim=1))


def _q5_k(b: Tensor) -> Tensor:
    low = torch.cat([_nibbles(b[:, at : at + 32]) for at in range(48, 176, 32)], dim=1)
    return _scaled_less(b, low | _bits(b[:, 16:48], tuple(range(8)), 1) << 4)


def _q6_k(b: Tensor) -> Tensor:
    low = torch.cat([_nibbles(b[:, at : at + 64]) for at in (0, 64)], dim=1)
    high = torch.cat([_bits(b[:, at : at + 32], (0, 2, 4, 6), 3) for at in (128, 160)], dim=1)
    values = (low | high << 4).float() - 32
    return _spread(_half(b, 208) * b[:, 192:208].contiguous().view(torch.int8).float(), values) * values


def _q2_k(b: Tensor) -> Tensor:
    values = torch.cat([_bits(b[:, at : at + 32], (0, 2, 4, 6), 3) for at in (16, 48)], dim=1).float()
    scales = _half(b, 80) * (b[:, 0:16] & 15).float()
    return _spread(scales, values) * values - _spread(_half(b, 82) * (b[:, 0:16] >> 4).float(), values)


def _iq4_xs(b: Tensor) -> Tensor:
    low = torch.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], dim=-1).flatten(1)
    high = torch.stack([b[:, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(1)
    scales = _half(b, 0) * ((low | high << 4).float() - 32)
    values = _levels(torch.cat([_nibbles(b[:, at : at + 16]) for at in range(8, 136, 16)], dim=1))
    return _spread(scales, values) * values


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": lambda b: b[:, 2:].contiguous().view(torch.int8).float() * _half(b, 0),
    "Q4_0": lambda b: _half(b, 0) * (_nibbles(b[:, 2:]).float() - 8),
    "Q4_1": lambda b: _half(b, 0) * _nibbles(b[:, 4:]).float() + _half(b, 2),
    "Q5_0": lambda b: _half(b, 0) * ((_nibbles(b[:, 6:]) | _fifth(b, 2)).float() - 16),
    "Q5_1": lambda b: _half(b, 0) * (_nibbles(b[:, 8:]) | _fifth(b, 4)).float() + _half(b, 2),
    "IQ4_NL": lambda b: _half(b, 0) * _levels(_nibbles(b[:, 2:])),
    "IQ4_XS": _iq4_xs,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
