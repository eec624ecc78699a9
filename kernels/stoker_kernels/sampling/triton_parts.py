"""`parts.py` on CUDA: the peaks of tiles, then a row's peak as digits; and the best of all parts' peaks.

Invariants: grids depend on the number of rows, the part's width and the number of parts alone.
Knows nothing of dispatch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP32, I32, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.sampling.parts import PEAK_DIGITS, PEAKS_DTYPE
from stoker_kernels.sampling.state import padded_tiles, tiles_ahead
from stoker_kernels.sampling.triton_kernels import row_peak
from stoker_kernels.sampling.triton_sampling import tile_peaks

_WORD = tl.constexpr(PEAK_DIGITS // 2)  # digits of a logit, and of an id
# Parts that kernels are compiled for ahead, as powers of two.
_PARTS = (2, 4, 8)


@kernel(do_not_specialize=["first", "part", "parts", "tiles"])
def _part_peak_kernel(
    tile_max, tile_arg, peaks, first, part, parts, tiles,
    TILES: tl.constexpr, COLUMNS: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """A row's peak, from its tiles', as digits in the part's columns."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0)
    best, token = row_peak(tile_max, tile_arg, row, tiles, TILES)
    bits = tl.where(best == 0.0, 0.0, best).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    column = tl.arange(0, COLUMNS)
    digit = column % (2 * _WORD)
    word = tl.where(digit < _WORD, ordered, first + token)
    value = (word >> (8 * (digit % _WORD))) & 255
    value = tl.where(column // (2 * _WORD) == part, value, 0).to(tl.float32)
    width = parts * 2 * _WORD
    tl.store(peaks + row * width + column, value.to(tl.bfloat16), mask=column < width)


@kernel(do_not_specialize=["parts"])
def _best_peak_kernel(peaks, tokens, parts, PARTS: tl.constexpr, LAUNCH_PDL: tl.constexpr):
    """The id of a row's highest peak, the lowest id of equals."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    here = part < parts
    digits = peaks + (row * parts + part) * 2 * _WORD
    ordered = part * 0
    token = part * 0
    for digit in tl.static_range(_WORD):
        ordered |= tl.load(digits + digit, mask=here, other=0.0).to(tl.float32).to(tl.int32) << (8 * digit)
        token |= tl.load(digits + _WORD + digit, mask=here, other=0.0).to(tl.float32).to(tl.int32) << (8 * digit)
    highest = tl.max(tl.where(here, ordered, -0x80000000), axis=0)
    tl.store(tokens + row, tl.min(tl.where(here & (ordered == highest), token, 0x7FFFFFFF), axis=0))


def part_peaks(logits: Tensor, first: int, part: int, parts: int) -> Tensor:
    """`parts.part_peaks` on CUDA."""
    rows, device = len(logits), logits.device
    peaks = torch.empty((rows, parts * PEAK_DIGITS), dtype=PEAKS_DTYPE, device=device)
    if rows == 0:
        return peaks
    tile_max, tile_arg = tile_peaks(logits)
    tiles = tile_max.shape[1]
    constants = {"TILES": padded_tiles(tiles), "COLUMNS": triton.next_power_of_2(parts * PEAK_DIGITS)}
    options = {"num_warps": 1, **launch_options(device)}
    _part_peak_kernel[(rows,)](tile_max, tile_arg, peaks, first, part, parts, tiles, **constants, **options)
    return peaks


def best_peak(peaks: Tensor) -> Tensor:
    """`parts.best_peak` on CUDA."""
    rows, device = len(peaks), peaks.device
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    if rows:
        parts = peaks.shape[1] // PEAK_DIGITS
        padded = triton.next_power_of_2(parts)
        _best_peak_kernel[(rows,)](peaks, tokens, parts, PARTS=padded, num_warps=1, **launch_options(device))
    return tokens


def _register() -> None:
    numbers = dict.fromkeys(("first", "part", "parts", "tiles"), I32)
    register_aot(
        _part_peak_kernel,
        {"tile_max": f"*{FP32}", "tile_arg": f"*{I32}", "peaks": f"*{BF16}"} | numbers,
        [
            {"TILES": tiles, "COLUMNS": parts * PEAK_DIGITS}
            for tiles, parts in itertools.product(tiles_ahead(wide=True), _PARTS)
        ],
        options={"num_warps": 1},
    )
    register_aot(
        _best_peak_kernel,
        {"peaks": f"*{BF16}", "tokens": f"*{I32}", "parts": I32},
        [{"PARTS": parts} for parts in _PARTS],
        options={"num_warps": 1},
    )


_register()
