"""What the bytes of GGUF's blocks hold: codes, scales, and what is taken off, before they become numbers.

Blocks are uint8 [B, bytes]. Invariants: nothing is rounded; `codes` are unsigned and in the order of columns.
Knows nothing of products and of layouts for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fields:
    """Of blocks: codes uint8 [B, K]; fp16 factors [B, 1] of scales and of what is taken off; and those, integers [B, G]
    of groups of K / G columns. Without `scales` the factor is the scale; without `lows`, `low_factor` is what is added.
    """

    codes: Tensor
    factor: Tensor
    low_factor: Tensor | None = None
    scales: Tensor | None = None
    lows: Tensor | None = None


def fields_of(blocks: Tensor, name: str) -> Fields:
    """The fields of blocks of a format. Raises KeyError for an unknown one."""
    return _FIELDS[name](blocks)


def _half(blocks: Tensor, at: int) -> Tensor:
    """fp16 at a byte, [B, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


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


def _signed(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.int8)


def _q3_k(b: Tensor) -> Fields:
    low, high = _bits(b[:, 96:104], (0, 4), 15), _bits(b[:, 104:108], (0, 2, 4, 6), 3)
    codes = torch.cat([_bits(b[:, at : at + 32], (0, 2, 4, 6), 3) for at in (32, 64)], dim=1)
    codes |= _bits(b[:, 0:32], tuple(range(8)), 1) << 2
    return Fields(codes, _half(b, 108), scales=(low | high << 4).to(torch.int8) - 32)


def _scales_and_lows(s: Tensor) -> tuple[Tensor, Tensor]:
    """Twelve bytes → eight scales and eight offsets of six bits."""
    first, second, last = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scales = torch.cat([first & 63, (last & 15) | (first >> 2 & 48)], dim=1)
    lows = torch.cat([second & 63, (last >> 4) | (second >> 2 & 48)], dim=1)
    return scales, lows


def _scaled_less(b: Tensor, codes: Tensor) -> Fields:
    return Fields(codes, _half(b, 0), _half(b, 2), *_scales_and_lows(b[:, 4:16]))


def _q4_k(b: Tensor) -> Fields:
    return _scaled_less(b, torch.cat([_nibbles(b[:, at : at + 32]) for at in range(16, 144, 32)], dim=1))


def _q5_k(b: Tensor) -> Fields:
    low = torch.cat([_nibbles(b[:, at : at + 32]) for at in range(48, 176, 32)], dim=1)
    return _scaled_less(b, low | _bits(b[:, 16:48], tuple(range(8)), 1) << 4)


def _q6_k(b: Tensor) -> Fields:
    low = torch.cat([_nibbles(b[:, at : at + 64]) for at in (0, 64)], dim=1)
    high = torch.cat([_bits(b[:, at : at + 32], (0, 2, 4, 6), 3) for at in (128, 160)], dim=1)
    return Fields(low | high << 4, _half(b, 208), scales=_signed(b[:, 192:208]))


def _q2_k(b: Tensor) -> Fields:
    codes = torch.cat([_bits(b[:, at : at + 32], (0, 2, 4, 6), 3) for at in (16, 48)], dim=1)
    return Fields(codes, _half(b, 80), _half(b, 82), b[:, 0:16] & 15, b[:, 0:16] >> 4)


def _iq4_xs(b: Tensor) -> Fields:
    low = torch.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], dim=-1).flatten(1)
    high = torch.stack([b[:, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(1)
    codes = torch.cat([_nibbles(b[:, at : at + 16]) for at in range(8, 136, 16)], dim=1)
    return Fields(codes, _half(b, 0), scales=(low | high << 4).to(torch.int8) - 32)


_FIELDS: dict[str, Callable[[Tensor], Fields]] = {
    "Q8_0": lambda b: Fields(b[:, 2:] ^ 128, _half(b, 0)),
    "Q4_0": lambda b: Fields(_nibbles(b[:, 2:]), _half(b, 0)),
    "Q4_1": lambda b: Fields(_nibbles(b[:, 4:]), _half(b, 0), _half(b, 2)),
    "Q5_0": lambda b: Fields(_nibbles(b[:, 6:]) | _fifth(b, 2), _half(b, 0)),
    "Q5_1": lambda b: Fields(_nibbles(b[:, 8:]) | _fifth(b, 4), _half(b, 0), _half(b, 2)),
    "IQ4_NL": lambda b: Fields(_nibbles(b[:, 2:]), _half(b, 0)),
    "IQ4_XS": _iq4_xs,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
