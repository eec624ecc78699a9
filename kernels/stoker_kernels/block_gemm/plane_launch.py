"""Launches the kernels of planes: which tile, how many splits of K, and their arguments.

A tile is chosen by the tokens, its ring by the kind of GPU, splits by rows, columns and the device's SMs, so every
shape finds a kernel that was compiled ahead.
Invariants: `arrivals` of a device are zeros between launches, so launches follow each other on one stream; all that a
call allocates is what `linear` says.
Does not know: which weights are multiplied so (`plane_choose`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stoker_kernels.block_gemm import triton_planes as kernels
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import sm_count, sm_of
from stoker_kernels.launch.pdl import launch_options
from stoker_kernels.quant import PLANE_KINDS, PlaneRows, element_bits, steps_and_tails

MOST_TILES = 8192
"""Tiles of a launch that may be split: what `arrivals` have room for."""


@dataclass(frozen=True, slots=True)
class PlaneTile:
    """`rows` of a weight × `tokens`; `many` makes weights of 16 bits first. An SM wants `programs` of them."""

    tokens: int
    rows: int
    warps: int
    stages: int
    many: bool
    programs: int


TILES = (
    PlaneTile(8, 32, 2, 4, False, 8),
    PlaneTile(16, 32, 2, 4, False, 6),
    PlaneTile(32, 32, 2, 4, False, 4),
    PlaneTile(64, 64, 4, 3, True, 1),
    PlaneTile(128, 64, 4, 2, True, 1),
)
ROWS_AT_ONCE, ROW_WARPS = 16, 4  # of the kernel that only decodes


def tile_for(tokens: int) -> PlaneTile:
    """The tile for so many tokens: the smallest that holds them, or the largest."""
    return next((tile for tile in TILES if tokens <= tile.tokens), TILES[-1])


def fitted(tile: PlaneTile, sm: int) -> PlaneTile:
    """`tile` as a chip holds it: where a block has less shared memory, the ring of weights in 16 bits is shorter."""
    return replace(tile, stages=2) if tile.many and not chip_of(sm).large_shared else tile


def splits_for(tile: PlaneTile, tokens: int, rows: int, columns: int, sms: int) -> int:
    """Parts of K: as many as bring every SM its programs, each of two steps or more.

    Tiles of many tokens are bound by their products: no SM is given more programs than it wants, for the others would
    wait for it.
    """
    tiles = -(-rows // tile.rows) * -(-tokens // tile.tokens)
    steps, _ = steps_and_tails(columns)
    if tiles > MOST_TILES:
        return 1
    wanted = tile.programs * sms // tiles if tile.many else -(-tile.programs * sms // tiles)
    most = max(1, min(wanted, steps // 2, 16))
    # Each part has ceil(steps / splits) steps: fewer parts of the same length do as well.
    each = -(-steps // most) if steps else 1
    return max(1, -(-steps // each))


def constants(name: str) -> dict[str, Any]:
    """What of the kernels follows from a format."""
    kind = PLANE_KINDS[name]
    each = element_bits(kind.high, kind.words) // kind.high if kind.high else 1
    return {
        "WORDS": kind.words, "PLACES": kind.places, "LOW": kind.low, "HIGH": kind.high,
        "LOW_EACH": element_bits(kind.low, kind.words) // kind.low, "HIGH_EACH": each, "OFFSET": kind.offset,
        "BYTES": kind.bytes_, "MINS": kind.mins, "NIBBLES": kind.nibbles, "LEVELS": kind.levels,
        "SCALE_WORDS": kind.scale_words,
    }  # fmt: skip


def elements(name: str) -> tuple[torch.dtype, torch.dtype]:
    """How the kernels read both planes of a format."""
    kind = PLANE_KINDS[name]
    return torch.int16, torch.int16 if element_bits(kind.high, kind.words) == 16 else torch.uint8


@functools.cache
def _arrivals(device: torch.device) -> Tensor:
    """Counts of the splits that are done, zeros between launches."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def _planes(piece: PlaneRows) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    low_type, high_type = elements(piece.format)
    high = None if piece.high is None else piece.high.view(high_type)
    return piece.low.view(low_type), high, piece.scale, piece.factor


def linear(
    x: Tensor,
    piece: PlaneRows,
    bias: Tensor | None,
    out: Tensor,
    *,
    tile: PlaneTile | None = None,
    splits: int = 0,
    widen: bool = False,
) -> None:
    """out = x · Wᵀ + bias. `out` may be columns of a wider tensor. Takes `splits` times the result in fp32 where K is
    split. `widen` multiplies in fp32; tile and splits are chosen where they are not given.
    """
    (m, k), n = x.shape, piece.rows
    tile = tile or fitted(tile_for(m), sm_of(x.device))
    splits = splits or splits_for(tile, m, n, k, sm_count(x.device))
    tiles = (-(-n // tile.rows), -(-m // tile.tokens))
    arrivals = _arrivals(x.device)
    size = tiles[0] * tiles[1] * tile.rows * tile.tokens * splits if splits > 1 else 0
    partial = torch.empty(size, dtype=torch.float32, device=x.device) if size else arrivals.view(torch.float32)
    low, high, scale, factor = _planes(piece)
    kernels.plane_linear_kernel[(*tiles, splits)](
        x, low, high, scale, factor, out if bias is None else bias, out, partial, arrivals, m, n, k, low.stride(0),
        0 if high is None else high.stride(0), x.stride(0), out.stride(0), int(bias is not None), splits,
        **constants(piece.format), ROWS=tile.rows, TOKENS=tile.tokens, MANY=tile.many, WIDEN=widen,
        num_warps=tile.warps, num_stages=tile.stages, **launch_options(x.device),
    )  # fmt: skip


def rows(piece: PlaneRows, out: Tensor, *, ids: Tensor | None = None, first: int = 0, widen: bool = False) -> None:
    """out [R, K], contiguous = rows `ids` [R] of a piece, or those from `first` on."""
    steps, tails = steps_and_tails(piece.columns)
    low, high, scale, factor = _planes(piece)
    kernels.plane_rows_kernel[(-(-out.shape[0] // ROWS_AT_ONCE), steps + tails)](
        ids, low, high, scale, factor, out, out.shape[0], first, piece.rows, piece.columns, low.stride(0),
        0 if high is None else high.stride(0), **constants(piece.format), ROWS=ROWS_AT_ONCE, WIDEN=widen,
        num_warps=ROW_WARPS, **launch_options(out.device),
    )  # fmt: skip
