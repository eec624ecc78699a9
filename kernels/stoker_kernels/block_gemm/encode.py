"""Rounds matrices to GGUF's blocks: Q8_0 as its publisher does, bit for bit, and Q4_K by its method.

Q8_0: the largest of 32 numbers becomes 127 steps. Q4_K: each 32 numbers get a scale and a minimum by least squares over
a few divisors of their range, weighed by size as in ggml's make_qkx2_quants; the 256 numbers' eight scales and minima
then become six bits each, and codes are found once more with what these stand for.
Invariants: numbers are finite; the result is uint8 [N, row bytes], as a file has it.
Knows nothing of files and of layouts on a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.quant import block_row_bytes

GROUP, GROUPS = 32, 8  # of Q4_K
LARGEST_CODE, LARGEST_SCALE = 15, 63
# How far from the whole range a group's steps may be: ggml tries these, the first one being its first guess.
CANDIDATES = tuple(-1.0 + 0.2 * step for step in range(11))
_SMALL = 1e-30


def encode_blocks(matrix: Tensor, name: str) -> Tensor:
    """[N, K] float → blocks uint8 [N, row bytes]. Raises ValueError for a format that is not made here, or columns
    that fill no whole blocks.
    """
    if name not in _ENCODERS:
        raise ValueError(f"{name} is not made of numbers here; {', '.join(_ENCODERS)} are")
    row_bytes = block_row_bytes(name, matrix.shape[1])
    return _ENCODERS[name](matrix.float()).view(matrix.shape[0], row_bytes)


def _round(x: Tensor) -> Tensor:
    """To the nearest integer, halves away from zero."""
    size = x.abs()
    whole = size.floor()
    return whole.add_(size.sub_(whole).mul_(2).floor_()).copysign_(x)


def _bytes(half: Tensor) -> Tensor:
    """fp32 [B] → the bytes of fp16 [B, 2]."""
    return half.half().view(-1, 1).view(torch.uint8)


def _q8_0(matrix: Tensor) -> Tensor:
    blocks = matrix.reshape(-1, 32)
    step = blocks.abs().amax(1) / 127
    inverse = torch.where(step == 0, 0.0, 1 / step)
    codes = _round(blocks * inverse.unsqueeze(1)).to(torch.int8)
    return torch.cat([_bytes(step), codes.view(torch.uint8)], dim=1)


def _steps(x: Tensor) -> tuple[Tensor, Tensor]:
    """Groups [B, 32] → the scale [B] and the minimum (0 or below) [B] that lose least."""
    low, high = x.amin(1).clamp(max=0.0), x.amax(1)
    span = (high - low).clamp(min=_SMALL)
    weight = x.square().mean(1, keepdim=True).sqrt() + x.abs()
    best_scale, best_low = span / LARGEST_CODE, low
    best = torch.full_like(span, float("inf"))
    sum_w, sum_xw = weight.sum(1), (weight * x).sum(1)
    for candidate in CANDIDATES:
        inverse = (LARGEST_CODE + candidate) / span
        codes = ((x - low.unsqueeze(1)) * inverse.unsqueeze(1)).round().clamp(0, LARGEST_CODE)
        wl = weight * codes
        sum_l, sum_l2, sum_xl = wl.sum(1), (wl * codes).sum(1), (wl * x).sum(1)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        fits = determinant > 0
        scale = torch.where(fits, (sum_w * sum_xl - sum_xw * sum_l) / determinant, span / LARGEST_CODE)
        least = torch.where(fits, (sum_l2 * sum_xw - sum_l * sum_xl) / determinant, low)
        # A minimum above zero is none: the scale alone then fits best.
        above = least > 0
        scale = torch.where(above & (sum_l2 > 0), sum_xl / sum_l2.clamp(min=_SMALL), scale)
        least = least.clamp(max=0.0)
        loss = (weight * (scale.unsqueeze(1) * codes + least.unsqueeze(1) - x).square()).sum(1)
        better = (loss < best) & (scale > 0)
        best = torch.where(better, loss, best)
        best_scale, best_low = torch.where(better, scale, best_scale), torch.where(better, least, best_low)
    return best_scale, best_low


def _six_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Eight numbers of a block [B, 8], none negative → the fp16 that they are multiples of, in fp32 [B], and codes."""
    step = (values.amax(1) / LARGEST_SCALE).half().float()
    codes = torch.where(step.unsqueeze(1) > 0, values / step.unsqueeze(1).clamp(min=_SMALL), 0.0).round()
    return step, codes.clamp(0, LARGEST_SCALE)


def _q4_k(matrix: Tensor) -> Tensor:
    groups = matrix.reshape(-1, GROUP)
    scale, low = (each.view(-1, GROUPS) for each in _steps(groups))
    step, scales = _six_bits(scale)
    low_step, lows = _six_bits(-low)
    ds, dl = step.unsqueeze(1) * scales, low_step.unsqueeze(1) * lows
    shifted = groups.view(-1, GROUPS, GROUP) + dl.unsqueeze(2)
    codes = torch.where(ds.unsqueeze(2) > 0, shifted / ds.unsqueeze(2).clamp(min=_SMALL), 0.0)
    codes = codes.round().clamp(0, LARGEST_CODE).to(torch.uint8).view(-1, GROUPS // 2, 2, GROUP)
    nibbles = (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1)
    return torch.cat([_bytes(step), _bytes(low_step), _twelve(scales, lows), nibbles], dim=1)


def _twelve(scales: Tensor, lows: Tensor) -> Tensor:
    """Eight scales and eight minima of six bits in twelve bytes."""
    s, m = scales.to(torch.uint8), lows.to(torch.uint8)
    first = s[:, :4] | (s[:, 4:] >> 4) << 6
    second = m[:, :4] | (m[:, 4:] >> 4) << 6
    return torch.cat([first, second, (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4], dim=1)


_ENCODERS = {"Q8_0": _q8_0, "Q4_K": _q4_k}
