"""Products with four-bit weights on Hopper: host side of csrc/sm90_int4_*.

Up to 8 tokens each warp streams the weight's fragments by itself; for more warpgroups multiply what others stream
through shared memory, tile after tile of tokens. `dequantize` writes the weight in 16 bits instead, which costs 2.5
bytes a number once for all tokens (`choose.DENSE_FROM`).

Invariants: a launch never synchronises and can be captured after one launch of its kind; sums are added in a fixed
order, so equal calls give equal bits.
Does not know: which layer it serves, nor how the weight came to be in fragments.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoker_kernels.integer_gemm.fragments import COLUMNS, ROWS
from stoker_kernels.launch import cuda
from stoker_kernels.launch.dispatch import sm_count
from stoker_kernels.launch.pdl import pdl_on
from stoker_kernels.quant import IntegerWeight

STEM, ARCH = "sm90_int4_gemm", "sm_90a"
MAX_SPLIT = 8  # CTAs of a portable cluster
WHOLE_ROW = 30  # a group_shift beyond every column
STEP = 16  # columns of a step of a tensor core
FEW_WARPS = 8
PLAIN, PAIRED, GATED = range(3)  # Int4Rows of csrc/int4_fragments.cuh


class Int4Arguments(ctypes.Structure):
    """Int4Arguments of csrc/int4_fragments.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "x", "bias", "codes", "scale", "zero")),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "ld_x", "ld_out", "group_shift", "split", "rows")),
    ]


@dataclass(frozen=True, slots=True)
class Int4Tile:
    """One compiled kernel: up to `tokens` tokens and `rows` weight rows a CTA; `ctas` are resident on an SM.

    `groups` warpgroups multiply what another one streams through a ring of `stages`, and several tiles of tokens may
    follow; 0: every warp is by itself, on 64 rows. `step_us`: what a step of columns took where every SM was busy.
    """

    tokens: int
    rows: int = ROWS
    groups: int = 0
    stages: int = 0
    ctas: int = 2
    step_us: float = 0.5

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 128 * (self.groups + 1) if self.groups else 32 * FEW_WARPS

    @property
    def blocks_at_once(self) -> int:
        """Blocks of columns that a CTA works on side by side."""
        return 1 if self.groups else FEW_WARPS

    def kernel_name(self, small_groups: bool) -> str:
        """The function's name in the cubin, for groups of less than a block of columns or others."""
        kind = f"wide_m{self.tokens}_r{self.rows}" if self.groups else f"few_m{self.tokens}"
        return f"{STEM}_{kind}_{'small' if small_groups else 'large'}"

    def shared_bytes(self, small_groups: bool) -> int:
        """Dynamic shared memory: the ring, in whose place the sums lie in the end, what is stored, and barriers."""
        if not self.groups:
            return FEW_WARPS * self.tokens * self.rows * 4
        stage = self.tokens * 128 + self.rows * (COLUMNS // 2 + 3 * (COLUMNS // STEP if small_groups else 1))
        low = max(self.stages * -(-stage // 1024) * 1024, self.rows * self.tokens * 4)
        return 1024 + low + self.groups * self.tokens * ROWS * 2 + 16 * self.stages


# Every kernel of the cubin, the smallest first.
TILES = (
    Int4Tile(8, step_us=1.2),
    Int4Tile(16, 128, 2, 11, 2, 0.49), Int4Tile(16, 320, 5, 12, 1, 0.60),
    Int4Tile(32, 128, 2, 10, 2, 0.53), Int4Tile(32, 320, 5, 10, 1, 0.62),
    Int4Tile(64, 128, 2, 7, 2, 0.49), Int4Tile(64, 320, 5, 8, 1, 0.70),
    Int4Tile(128, 128, 2, 8, 1, 0.43), Int4Tile(128, 256, 2, 7, 1, 0.76), Int4Tile(128, 320, 2, 6, 1, 0.97),
)  # fmt: skip
START_US, CLUSTER_US, CLUSTER_US_PER_KB = 1.5, 1.0, 0.035


Residents = Callable[[Int4Tile, int], int]
"""(tile, CTAs of a cluster) → how many such clusters the device holds at once."""


def choice_for(tokens: int, n: int, k: int, residents: Residents, split: int = 0) -> tuple[Int4Tile, int]:
    """The kernel, and how many CTAs share the columns: what takes least by waves of clusters, steps, starts and sums.

    With `split` that many share them, and the kernel is the best one so.

    Times are those of one weight, 37888 × 3584, on an H100, and of its sums in clusters: the order of choices is what
    they are for.
    """
    size = next((tile.tokens for tile in TILES if tokens <= tile.tokens), TILES[-1].tokens)
    fitting = [tile for tile in TILES if tile.tokens == size]
    splits = {tile: [split] if split else range(1, min(MAX_SPLIT, _steps(tile, k)) + 1) for tile in fitting}
    choices = [(tile, each) for tile in fitting for each in splits[tile]]

    def cost_us(choice: tuple[Int4Tile, int]) -> float:
        tile, parts = choice
        return _cost_us(tile, parts, tokens, n, k, residents(tile, parts))

    return min(choices, key=cost_us)


def _steps(tile: Int4Tile, k: int) -> int:
    return -(-k // (COLUMNS * tile.blocks_at_once))


def _cost_us(tile: Int4Tile, split: int, tokens: int, n: int, k: int, resident: int) -> float:
    tiles = -(-n // tile.rows) * -(-tokens // tile.tokens)
    waves = -(-tiles // max(1, resident))
    cluster = CLUSTER_US + CLUSTER_US_PER_KB * tile.rows * tile.tokens * 4 / 1024 if split > 1 else 0.0
    return waves * (-(-_steps(tile, k) // split) * tile.step_us + START_US + cluster)


def choice(tokens: int, weight: IntegerWeight, device: torch.device, split: int = 0) -> tuple[Int4Tile, int]:
    """`choice_for` on this device. Raises CubinMissing."""
    most = TILES[-1].tokens
    if tokens > most:
        tokens = -(-tokens // most) * most  # whole tiles: the same choice, which is made once
    return _choice(tokens, weight.out_features, weight.in_features, _small_groups(weight), device, split)


@functools.cache
def _choice(tokens: int, n: int, k: int, small_groups: bool, device: torch.device, split: int) -> tuple[Int4Tile, int]:
    def residents(tile: Int4Tile, parts: int) -> int:
        if parts == 1:
            return sm_count(device) * tile.ctas
        shared = tile.shared_bytes(small_groups)
        return cuda.resident_clusters(_kernel(tile, small_groups, device), parts, shared)

    return choice_for(tokens, n, k, residents, split)


def refusal(x: Tensor, weight: IntegerWeight, bias: Tensor | None, out: Tensor) -> str | None:
    """None where the kernels take these operands, else why not."""
    if weight.layout == "rows":
        return "the weight is not in fragments"
    if {x.dtype, out.dtype, weight.scale.dtype, bias.dtype if bias is not None else x.dtype} != {torch.bfloat16}:
        return f"takes bfloat16 throughout, not {x.dtype}, {weight.scale.dtype}, {out.dtype}"
    if x.stride(1) != 1 or out.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        return "rows of x have to be contiguous and start on multiples of 16 bytes"
    starts = (out, weight.data, weight.scale, weight.zero)
    if out.stride(0) % 8 or any(cuda.address_of(tensor) % 16 for tensor in starts):
        return "rows of the result, codes, scales and zero points have to start on multiples of 16 bytes"
    return None


def multiply(
    x: Tensor, weight: IntegerWeight, bias: Tensor | None, out: Tensor, tile: Int4Tile | None = None, split: int = 1,
    *, gated: bool = False,
) -> None:  # fmt: skip
    """out = x · Wᵀ + bias on the current stream, for operands that `refusal` accepts. Raises CubinMissing.

    `gated`: out [M, N / 2] = silu(x · gateᵀ) · (x · upᵀ), of a weight in pairs and without bias. `tile` and `split`
    (1 to 8) are chosen where no tile is given.
    """
    assert not gated or (weight.layout == "pairs" and bias is None), "gated products are of pairs, without bias"
    m, n = x.shape[0], weight.out_features
    if tile is None:
        tile, split = choice(m, weight, x.device)
    arguments: list[Any] = [_arguments(weight, out, x=x, bias=bias, split=split, gated=gated)]
    if tile.groups:
        arguments.insert(0, cuda.tensor_map(x, tile.tokens))
    ctas = -(-n // tile.rows) * -(-m // tile.tokens) * split
    if tile.groups and split == 1:
        ctas = min(ctas, sm_count(x.device) * tile.ctas)
    chosen = _kernel(tile, _small_groups(weight), x.device)
    cuda.launch(chosen, ctas, arguments, x.device, pdl=pdl_on(x.device), cluster=split)


def dequantize(weight: IntegerWeight, out: Tensor) -> None:
    """out [N, K] = the weight in bf16, gate before up, columns in the weight's own order. Raises CubinMissing."""
    chosen = cuda.kernel(STEM, ARCH, "sm90_int4_dequantize", 0, 256, out.device.index or 0)
    blocks = (weight.out_features // ROWS) * (weight.in_features // COLUMNS)
    cuda.launch(chosen, -(-blocks // 8), [_arguments(weight, out)], out.device, pdl=pdl_on(out.device))


def _small_groups(weight: IntegerWeight) -> bool:
    return weight.group < min(COLUMNS, weight.in_features)


def _kernel(tile: Int4Tile, small_groups: bool, device: torch.device) -> cuda.Kernel:
    shared = tile.shared_bytes(small_groups)
    return cuda.kernel(STEM, ARCH, tile.kernel_name(small_groups), shared, tile.threads, device.index or 0)


def _arguments(
    weight: IntegerWeight, out: Tensor, *, x: Tensor | None = None, bias: Tensor | None = None, split: int = 1,
    gated: bool = False,
) -> Int4Arguments:  # fmt: skip
    rows = (GATED if gated else PAIRED) if weight.layout == "pairs" else PLAIN
    shift = WHOLE_ROW if weight.group >= weight.in_features else (weight.group // STEP).bit_length() - 1
    return Int4Arguments(
        out.data_ptr(), cuda.address_of(x), cuda.address_of(bias), weight.data.data_ptr(), weight.scale.data_ptr(),
        cuda.address_of(weight.zero), 0 if x is None else x.shape[0], weight.out_features, weight.in_features,
        0 if x is None else x.stride(0), out.stride(0), shift, split, rows,
    )  # fmt: skip
