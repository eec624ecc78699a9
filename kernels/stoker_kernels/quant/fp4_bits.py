"""Floats of four bits where bf16 wants their bits, and scales of NVFP4 that a kernel makes numbers of by one step.

Half a word has four codes. Sign, exponent and mantissa of code f are bits 15 and 8 to 6, where bf16 has its own, moved
down by 3 · f; f = 3 has the rest, the sign in bit 14, the mantissa in 13, the exponent in 11 and 10. A scale of NVFP4
has five bits of exponent + 10, which is above zero for what is e4m3's least, too, and three of mantissa.
Invariants: exact both ways.
Does not know: in which order codes lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIELDS = 4
SCALE_BIAS = 10  # of a widened scale's exponent
_MANTISSA, _HIDDEN = 3, 8
_SIGN, _NAN = 0x80, 0x7F
_MORE_BIAS = SCALE_BIAS - 7  # than e4m3 has


def place_codes(codes: Tensor) -> Tensor:
    """uint8 codes [..., 4], those of a half word → int16 [...]."""
    wide = codes.to(torch.int16)
    sign, size = wide & 8, wide & 7
    found = sign[..., 0] << 12 | size[..., 0] << 6
    found |= sign[..., 1] << 9 | size[..., 1] << 3
    found |= sign[..., 2] << 6 | size[..., 2]
    return found.bitwise_or_(sign[..., 3] << 11 | (size[..., 3] & 1) << 13 | (size[..., 3] & 6) << 9)


def placed_codes(halves: Tensor) -> Tensor:
    """What `place_codes` was given."""
    bits = halves.int()
    codes = [(bits << 3 * field >> 12 & 8) | (bits << 3 * field >> 6 & 7) for field in range(FIELDS - 1)]
    codes.append((bits >> 11 & 8) | (bits >> 9 & 6) | (bits >> 13 & 1))
    return torch.stack(codes, dim=-1).to(torch.uint8)


def field_mask(fields: tuple[int, ...]) -> int:
    """The bits of some codes of a half word, as int16 has them."""
    all_bits = torch.tensor([15 if field in fields else 0 for field in range(FIELDS)], dtype=torch.uint8)
    return int(place_codes(all_bits))


def without_signs(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4's uint8 codes [R, K] and e4m3 as uint8 [R, K / 16] → codes of the same numbers under positive scales,
    widened: a scale's sign is in its codes, and those under a scale of zero are zero.

    Raises ValueError for a scale that is no number.
    """
    size = scale & ~_SIGN
    if bool((size == _NAN).any()):
        raise ValueError("has a scale that is no number")
    blocks = codes.view(*scale.shape, -1)
    blocks = torch.where((scale & _SIGN > 0)[..., None], blocks ^ 8, blocks)
    blocks = torch.where((size == 0)[..., None], 0, blocks).to(torch.uint8)
    return blocks.flatten(1), _widened(size)


def widened_scales(bits: Tensor) -> Tensor:
    """The values of widened scales, fp32; what stands for a scale of zero has only codes that are zero."""
    mantissa = (bits.int() & _HIDDEN - 1 | _HIDDEN).float()
    return torch.ldexp(mantissa, (bits.int() >> _MANTISSA) - SCALE_BIAS - _MANTISSA)


def _widened(size: Tensor) -> Tensor:
    """Bits of e4m3 without signs → five bits of exponent and three of mantissa, none below the least; 0 is 0."""
    exponent, mantissa = size >> _MANTISSA, size & _HIDDEN - 1
    # Below the least exponent the first bit of the mantissa is the number's.
    drop = torch.where(mantissa >= 4, 1, torch.where(mantissa >= 2, 2, 3)).to(torch.uint8)
    below = _MORE_BIAS + 1 - drop << _MANTISSA | mantissa << drop & _HIDDEN - 1
    normal = exponent + _MORE_BIAS << _MANTISSA | mantissa
    return torch.where(exponent > 0, normal, torch.where(mantissa > 0, below, 0)).to(torch.uint8)
