"""Products of a few tokens with GGUF's planes on Hopper: host side of csrc/sm90_blocks_few.cu.

A launch has up to 32 tokens; more take several, which each read the weight.

Invariants: codes and scales are multiplied as their format defines them, exactly, and summed in fp32; sums are added in
a fixed order, so equal calls give equal bits. A launch never synchronises and can be captured after one of its kind; it
takes no memory beside its result.
Does not know: which layer it serves, nor which products come here (`plane_choose`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import HOPPER_SHARED, chip_of
from stoker_kernels.launch.dispatch import sm_count, sm_of
from stoker_kernels.launch.pdl import pdl_on
from stoker_kernels.quant import PLANE_KINDS, STEP, PlaneRows, plane_row_bytes

STEM, ARCH = "sm90_blocks_few", "sm_90a"
FORMATS = ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_K", "Q5_0", "Q5_1", "IQ4_XS", "IQ4_NL")
MOST_TOKENS = 64  # for which reading the weight anew is faster than what else there is
UNIT_ROWS, MOST_DEPTH = 16, 3
MAX_SPLIT = 8  # CTAs of a portable cluster
MOST_COLUMNS = MAX_SPLIT * 16 * STEP  # of which a cluster holds x of eight tokens
SHARED_BYTES = {1: HOPPER_SHARED, 2: 113 * 1024}  # of a CTA, where one or two share an SM
# What a warp takes for a unit where a CTA has an SM, and what adding up in a cluster does: the order of choices is what
# they are for.
UNIT_US, CLUSTER_US = 0.6, 1.2
# CTAs of an SM that a launch fills, of the two that find room: with one, the next launch's fill their rings meanwhile.
FILLED = 2


class BlockArguments(ctypes.Structure):
    """BlockArguments of csrc/sm90_blocks_few.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "x", "bias", "low", "high", "scale", "factor")),
        *((name, ctypes.c_int) for name in ("m", "n", "steps", "ld_x", "ld_out", "split", "depth")),
    ]


def device_refusal(dtype: torch.dtype, sm: int) -> str | None:
    """None where the kernels run, else why not."""
    if not chip_of(sm).wgmma or dtype != torch.bfloat16:
        return "needs sm_90 and bfloat16"
    return cuda.missing_cubin(STEM, ARCH)


def refusal(x: Tensor, piece: PlaneRows, bias: Tensor | None, out: Tensor) -> str | None:
    """None where the kernels take these operands, else why not."""
    if piece.format not in FORMATS:
        return f"takes {', '.join(FORMATS)}, not {piece.format}"
    if x.shape[0] > MOST_TOKENS:
        return f"takes up to {MOST_TOKENS} tokens"
    if piece.columns % STEP or piece.rows % UNIT_ROWS or piece.columns > MOST_COLUMNS:
        return f"takes multiples of {UNIT_ROWS} rows and {STEP} columns, at most {MOST_COLUMNS} of these"
    if {x.dtype, out.dtype, x.dtype if bias is None else bias.dtype} != {torch.bfloat16}:
        return "takes bfloat16 throughout"
    if x.stride(1) != 1 or out.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        return "rows of x have to be contiguous and start on multiples of 16 bytes"
    if out.stride(0) % 4 or out.data_ptr() % 8:
        return "rows of the result have to start on multiples of 8 bytes"
    planes = (piece.low, piece.high, piece.scale, piece.factor)
    if any(cuda.address_of(tensor) % 16 for tensor in planes):
        return "planes have to start on multiples of 16 bytes"
    return device_refusal(x.dtype, sm_of(x.device))


def unit_bytes(name: str) -> int:
    """Bytes of 16 rows of a step."""
    kind = PLANE_KINDS[name]
    codes = sum(plane_row_bytes(bits, kind.words, STEP) for bits in (kind.low, kind.high) if bits)
    return UNIT_ROWS * (codes + 8 * kind.scale_words + (4 if kind.bytes_ else 0))


@dataclass(frozen=True, slots=True)
class FewTile:
    """One compiled kernel of a format, for up to `tokens` tokens; `ctas` find room in an SM.

    With `slices` the `warps` of a CTA share its columns, each keeps so many steps of x in registers, and a cluster adds
    up `chunk` tiles of rows at a time (csrc/blocks_few.cuh). Else warps take whole tiles, of x in shared memory
    (csrc/blocks_some.cuh).
    """

    tokens: int
    warps: int
    ctas: int
    slices: int = 0
    chunk: int = 0

    def room(self, name: str, steps: int) -> tuple[int, int]:
        """Dynamic shared memory of a CTA with so many steps, and units of a warp's ring: none where x does not fit."""
        unit, limit = unit_bytes(name), SHARED_BYTES[self.ctas]
        if self.slices:
            depth = self.slices if steps <= self.slices * self.warps else 0
            sums = 4 * self.tokens * (2 * self.warps * (UNIT_ROWS + 4) + self.chunk * UNIT_ROWS)
            fitting = (limit - sums) // (depth * self.warps * unit) if depth else 0
            return sums + fitting * depth * self.warps * unit, fitting * depth
        kind = PLANE_KINDS[name]
        each = self.tokens * STEP * 2 + self.tokens * kind.places * 4  # of x, and two bf16 numbers of each place's sum
        held = 4 * self.warps * self.tokens * UNIT_ROWS + steps * each
        depth = max(0, min(MOST_DEPTH, (limit - held) // (self.warps * unit)))
        return held + depth * self.warps * unit, depth

    def rounds(self, tiles: int, steps: int, clusters: int) -> int:
        """Units that follow each other in a warp."""
        if self.slices:
            return -(-tiles // clusters) * -(-steps // self.warps)
        return -(-tiles // (clusters * self.warps)) * steps


TILES = (FewTile(8, 8, 2, 2, 16), FewTile(16, 8, 2, 1, 12), FewTile(32, 16, 1))


def split_for(tile: FewTile, name: str, rows: int, steps: int, residents: Callable[[int], int]) -> int:
    """CTAs of a cluster that share the columns: what takes least by units that follow each other in a warp, and sums.

    `residents`: of clusters of so many CTAs. Raises ValueError where no cluster holds x.
    """

    def cost_us(split: int) -> float:
        rounds = tile.rounds(rows // UNIT_ROWS, -(-steps // split), max(1, residents(split)))
        warps = tile.warps * min(FILLED, tile.ctas)
        return rounds * UNIT_US * warps / 8 + (CLUSTER_US if split > 1 else 0.0)

    fitting = [split for split in range(1, MAX_SPLIT + 1) if tile.room(name, -(-steps // split))[1]]
    if not fitting:
        raise ValueError(f"rows of {steps * STEP} columns are more than a cluster holds for {tile.tokens} tokens")
    return min(fitting, key=cost_us)


def tile_for(name: str, tokens: int, columns: int) -> FewTile:
    """The kernel of the fewest tokens that takes so many, or of the most that a cluster holds x of."""
    each = -(-columns // (STEP * MAX_SPLIT))
    fitting = [tile for tile in TILES if tile.room(name, each)[1]]
    return next((tile for tile in fitting if tokens <= tile.tokens), fitting[-1])


def linear(x: Tensor, piece: PlaneRows, bias: Tensor | None, out: Tensor, *, split: int = 0) -> None:
    """out = x · Wᵀ + bias on the current stream, for operands that `refusal` accepts; |x| below 2^63.

    `split` CTAs share the columns, where it is given. Raises CubinMissing.
    """
    while len(x):
        tile = tile_for(piece.format, len(x), piece.columns)
        _launch(tile, x[: tile.tokens], piece, bias, out[: tile.tokens], split)
        x, out = x[tile.tokens :], out[tile.tokens :]


def _launch(tile: FewTile, x: Tensor, piece: PlaneRows, bias: Tensor | None, out: Tensor, split: int) -> None:
    steps = piece.columns // STEP
    split = split or _split(tile, piece.format, piece.rows, steps, x.device)
    each = -(-steps // split)
    chosen = _kernel(tile, piece.format, each, x.device)
    arguments = BlockArguments(
        out.data_ptr(), x.data_ptr(), cuda.address_of(bias), piece.low.data_ptr(), cuda.address_of(piece.high),
        piece.scale.data_ptr(), cuda.address_of(piece.factor), x.shape[0], piece.rows, steps, x.stride(0),
        out.stride(0), split, tile.room(piece.format, each)[1],
    )  # fmt: skip
    clusters = min(piece.rows // UNIT_ROWS, _residents(tile, piece.format, steps, x.device, split))
    cuda.launch(chosen, clusters * split, [arguments], x.device, pdl=pdl_on(x.device), cluster=split)


def _kernel(tile: FewTile, name: str, steps: int, device: torch.device) -> cuda.Kernel:
    entry = f"{STEM}_{name.lower()}_m{tile.tokens}"
    return cuda.kernel(STEM, ARCH, entry, tile.room(name, steps)[0], 32 * tile.warps, device.index or 0)


def _residents(tile: FewTile, name: str, steps: int, device: torch.device, split: int) -> int:
    filled = min(FILLED, tile.ctas)
    if split == 1:
        return sm_count(device) * filled
    each = -(-steps // split)
    shared, _ = tile.room(name, each)
    found = cuda.resident_clusters(_kernel(tile, name, each, device), split, shared)
    return max(1, found * filled // tile.ctas)


@functools.cache
def _split(tile: FewTile, name: str, rows: int, steps: int, device: torch.device) -> int:
    return split_for(tile, name, rows, steps, functools.partial(_residents, tile, name, steps, device))
