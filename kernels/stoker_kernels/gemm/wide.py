"""A GEMM of 64 to 192 tokens × 112 to 288 weight rows a CTA, pairs of which share x: host side of sm90_*_gemm_wide.

For more tokens than bytes of the weight alone decide: 65 to 128 where one wave of 288-row tiles covers the weight, and
beyond. Tiles of 64 tokens leave the ring more room, those of 192 read a weight once that is read twice by blocks of
128. `gated` multiplies with gate and up stacked and stores silu(gate) · up. Operands are bf16, or e4m3 or int8 with a
scale for each row of the weight and each token.
Invariants: nothing is allocated; a row of the result does not depend on the number of tokens; no K is split.
Does not know: where it is faster than cuBLAS.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace

import torch

from stoker_kernels.gemm.small import Operands, refused_rows, stem_of
from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import HOPPER_SHARED
from stoker_kernels.quant import FP8

TOKENS, FEW_TOKENS = 128, 64  # of a CTA's tile, where it has no other number; the least
CLUSTER = 2
ARCH = "sm_90a"
ROWS = (128, 160, 192, 224, 256, 288)
PLAIN_ROWS = (128, 160, 192, 224)
GATED_ROWS = {TOKENS: (*ROWS[:-1], 272, 288), 192: (112, 128, 144, 160, 192)}
BF16_GATED_ROWS = {FEW_TOKENS: (224, 256, 272, 288), **GATED_ROWS}


@dataclass(frozen=True, slots=True)
class WideTile:
    """`rows` of the weight and `tokens` a CTA (as `rows_of` has them); `gated` as above.

    `by_tokens` as in Pairing, or None: the faster way. `parts`: bits are those of a `fixed` small tile that cuts K
    into so many; 0: any.
    """

    rows: int
    gated: bool
    by_tokens: bool | None = None
    parts: int = 0
    tokens: int = TOKENS

    @property
    def halved(self) -> bool:
        """Whether each CTA of a pair can load half of the rows: of gate and up they go by sixteen. Else x is shared."""
        return not self.gated or self.rows % 32 == 0

    @property
    def threads(self) -> int:
        """A warpgroup for 64 tokens, and one that loads."""
        return (self.tokens // 64 + 1) * 128

    @property
    def stage_bytes(self) -> int:
        """128 bytes of K of weight and tokens."""
        return (self.rows + self.tokens) * 128

    @property
    def stages(self) -> int:
        """As many as fit."""
        return (HOPPER_SHARED - 1024) // (self.stage_bytes + 16)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: alignment, ring, two barriers a stage."""
        return 1024 + self.stages * (self.stage_bytes + 16)

    def kernel_name(self, dtype: torch.dtype) -> str:
        """The function's name in its cubin."""
        kind = "gated_" if self.gated else "parts_" if self.parts > 1 else ""
        of = f"_m{self.tokens}" if self.tokens != TOKENS else ""
        return f"{stem(dtype, fixed=self.parts > 0)}_{kind}n{self.rows}{of}"


def wide_tiles(gated: bool, fp8: bool, m: int, parts: int = 0) -> list[WideTile]:
    """Every compiled tile, both ways where there are two for m tokens."""
    sizes = rows_of(gated, fp8, parts).items()
    by_rows = [WideTile(rows, gated, False, parts, tokens) for tokens, every in sizes for rows in every]
    by_tokens = [replace(tile, by_tokens=True) for tile in by_rows if tile.halved and m > tile.tokens]
    return [*by_rows, *by_tokens]


def tiles_for(gated: bool, fp8: bool, m: int, parts: int = 0) -> list[WideTile]:
    """Those of them that may be fastest: up to FEW_TOKENS tiles of so many, beyond those of more."""
    return [tile for tile in wide_tiles(gated, fp8, m, parts) if (tile.tokens == FEW_TOKENS) == (m <= FEW_TOKENS)]


def rows_of(gated: bool, fp8: bool, parts: int = 0) -> dict[int, tuple[int, ...]]:
    """The compiled numbers of rows, by the tokens of a CTA."""
    if gated and not parts:
        return GATED_ROWS if fp8 else BF16_GATED_ROWS
    if parts > 1:
        return {TOKENS: (128,) if fp8 else (128, 160)}
    return {TOKENS: ROWS if gated or (fp8 and not parts) else PLAIN_ROWS}


def of_integers(tile: WideTile) -> bool:
    """Whether the tile is compiled for int8: an instruction for integers has a multiple of 16 rows, so none of 136."""
    rows = rows_of(tile.gated, fp8=True).get(tile.tokens, ())
    return not tile.parts and tile.rows in rows and tile.rows != 272


def stem(dtype: torch.dtype, *, fixed: bool = False) -> str:
    """csrc file, and cubin, that holds the kernels for weights of this dtype."""
    return stem_of(dtype, "fixed" if fixed else "wide")


class _Arguments(ctypes.Structure):
    """WideArguments of csrc/sm90_gemm_wide.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "bias", "w_scale", "x_scale")),
        *((name, ctypes.c_int) for name in
          ("m", "n", "ld_out", "row_blocks", "token_blocks", "k_blocks", "stages", "by_tokens", "w_scale_step",
           "parts")),
    ]


@dataclass(frozen=True, slots=True)
class Pairing:
    """How the tiles of a product are dealt to pairs of CTAs: blocks of rows × blocks of tokens, a tile a pair.

    `by_tokens`: the CTAs of a pair take neighbouring tokens and share the weight, else neighbouring rows and share x.
    """

    by_tokens: bool
    row_blocks: int
    token_blocks: int

    @property
    def tiles(self) -> int:
        """All tiles of the product."""
        return self.row_blocks * self.token_blocks


def pairing(tile: WideTile, n: int, m: int, pairs: int) -> Pairing:
    """As the tile says; else by tokens where there are some for both CTAs and no more rounds of `pairs` pairs.

    By tokens L2 gives a quarter less, and a tile that one CTA has no part of costs as much as a whole one.
    """
    by_rows = Pairing(False, -(-n // (CLUSTER * tile.rows)), -(-m // tile.tokens))
    by_tokens = Pairing(True, -(-n // tile.rows), -(-m // (CLUSTER * tile.tokens)))
    faster = tile.halved and m > tile.tokens and -(-by_tokens.tiles // pairs) <= -(-by_rows.tiles // pairs)
    return by_tokens if (faster if tile.by_tokens is None else tile.by_tokens) else by_rows


def refusal(tile: WideTile, o: Operands) -> str | None:
    """None where the kernel takes x [M, K], weight [N, K] and out [M, N] ([M, N / 2] if gated), else why not."""
    if len(o.x) == 0:
        return "M is 0"
    if o.weight.dtype == torch.int8 and not of_integers(tile):
        return f"has no tile of {tile.rows} rows for integers"
    if tile.by_tokens and not tile.halved:
        return f"{tile.rows} rows of gate and up cannot be halved, so pairs by tokens cannot share them"
    if cuda.address_of(o.bias) % 16 or cuda.address_of(o.w_scale) % 16:
        return "scales and bias have to start on multiples of 16 bytes"
    return refused_rows(o, 16 if tile.gated else 8) or _refused_scales(tile, o)


def _refused_scales(tile: WideTile, o: Operands) -> str | None:
    if o.weight.dtype not in (FP8, torch.int8):
        scaled = o.w_scale is not None or o.x_scale is not None
        biased = o.bias is not None and not tile.parts
        return "takes scales and a bias with eight bits alone" if scaled or biased else None
    scales = (len(o.weight), 1) if tile.parts else (len(o.weight),)
    if o.w_scale is None or o.x_scale is None or o.w_scale.numel() not in scales or o.x_scale.numel() != len(o.x):
        return "takes a scale for each row of the weight and for each token"
    return "takes no bias with gate and up" if o.bias is not None and tile.gated else None


@functools.cache
def _weight_map(address: int, n: int, k: int, element_size: int, tile: WideTile) -> ctypes.Array[ctypes.c_char]:
    if tile.gated:
        return cuda.paired_map_at(address, n, k, element_size, tile.rows // 2 if tile.halved else tile.rows)
    return cuda.tensor_map_at(address, n, k, k, element_size, tile.rows // 2)


def launch(tile: WideTile, o: Operands, *, pdl: bool) -> None:
    """Run `tile` on the current stream for operands that `refusal` accepts. Raises CubinMissing."""
    (n, k), m, device, dtype = o.weight.shape, o.x.shape[0], o.x.device, o.weight.dtype
    name = stem(dtype, fixed=tile.parts > 0)
    chosen = cuda.kernel(name, ARCH, tile.kernel_name(dtype), tile.shared_bytes, tile.threads, device.index or 0)
    resident = cuda.resident_clusters(chosen, CLUSTER, HOPPER_SHARED)
    dealt = pairing(tile, n, m, resident)
    clusters = min(dealt.tiles, resident)
    arguments = _Arguments(
        o.out.data_ptr(), cuda.address_of(o.bias), cuda.address_of(o.w_scale), cuda.address_of(o.x_scale),
        m, o.out.shape[1], o.out.stride(0), dealt.row_blocks, dealt.token_blocks, k * dtype.itemsize // 128,
        tile.stages, dealt.by_tokens, o.w_scale is not None and o.w_scale.numel() > 1, tile.parts,
    )  # fmt: skip
    w_map = _weight_map(o.weight.data_ptr(), n, k, dtype.itemsize, tile)
    maps = [w_map, cuda.tensor_map(o.x, tile.tokens // CLUSTER)]
    cuda.launch(chosen, clusters * CLUSTER, [*maps, arguments], device, pdl=pdl, cluster=CLUSTER)
