"""GEMM of 128 tokens × 256 or 288 weight rows a CTA, in pairs of CTAs that share x: host side of sm90_bf16_gemm_wide.

For more tokens than bytes of the weight alone decide: 65 to 128 where one wave of 288-row tiles covers the weight, and
beyond. `gated` multiplies with gate and up stacked and stores silu(gate) · up.
Invariants: nothing is allocated; a row of the result does not depend on the number of tokens; no K is split.
Does not know: where it is faster than cuBLAS.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from stoker_kernels import cuda
from stoker_kernels.gemm_small import SHARED_LIMIT

TOKENS = 128  # of a CTA's tile
CLUSTER = 2
THREADS = 3 * 128
LAG = 2  # k blocks that a CTA's second warpgroup stays behind its first
STEM, ARCH = "sm90_bf16_gemm_wide", "sm_90a"


@dataclass(frozen=True, slots=True)
class WideTile:
    """`rows` (224, 256 or 288; gated not 224) of the weight a CTA; `gated` as above; `by_tokens` as in Pairing, or None: the faster way."""

    rows: int
    gated: bool
    by_tokens: bool | None = None

    @property
    def stage_bytes(self) -> int:
        """128 bytes of K of weight and tokens."""
        return (self.rows + TOKENS) * 128

    @property
    def stages(self) -> int:
        """As many as fit."""
        return (SHARED_LIMIT - 1024 - 8) // (self.stage_bytes + 16)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: alignment, ring, two barriers a stage and one more."""
        return 1024 + self.stages * (self.stage_bytes + 16) + 8

    @property
    def kernel_name(self) -> str:
        """The function's name in its cubin."""
        return f"{STEM}_{'gated_' if self.gated else ''}n{self.rows}"


class _Arguments(ctypes.Structure):
    """WideArguments of csrc/sm90_gemm_wide.cuh."""

    _fields_ = [("out", ctypes.c_void_p)] + [
        (name, ctypes.c_int)
        for name in ("m", "n", "ld_out", "row_blocks", "token_blocks", "k_blocks", "stages", "by_tokens", "lag")
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
    by_rows = Pairing(False, -(-n // (CLUSTER * tile.rows)), -(-m // TOKENS))
    by_tokens = Pairing(True, -(-n // tile.rows), -(-m // (CLUSTER * TOKENS)))
    faster = m > TOKENS and -(-by_tokens.tiles // pairs) <= -(-by_rows.tiles // pairs)
    return by_tokens if (faster if tile.by_tokens is None else tile.by_tokens) else by_rows


def refusal(tile: WideTile, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> str | None:
    """None where the kernel takes x [M, K], weight [N, K] and out [M, N] ([M, N / 2] if gated), else why not."""
    (n, k), m = weight.shape, x.shape[0]
    if any(t.dtype != torch.bfloat16 for t in (x, weight, out)):
        return "takes bf16"
    if k % 64 or n % (16 if tile.gated else 8) or m == 0:
        return f"K = {k} is not a multiple of 64, N = {n} not of {16 if tile.gated else 8}, or M is 0"
    if x.stride(1) != 1 or out.stride(1) != 1 or not weight.is_contiguous():
        return "rows have to be contiguous"
    if any(v % 16 for v in (x.stride(0) * 2, out.stride(0) * 2, x.data_ptr(), weight.data_ptr(), out.data_ptr())):
        return "rows have to start on multiples of 16 bytes"
    return None


@functools.cache
def _weight_map(address: int, n: int, k: int, tile: WideTile) -> ctypes.Array[ctypes.c_char]:
    if tile.gated:
        return cuda.paired_map_at(address, n, k, 2, tile.rows // 2)
    return cuda.tensor_map_at(address, n, k, k, 2, tile.rows // 2)


def launch(tile: WideTile, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, pdl: bool) -> None:
    """Run `tile` on the current stream for operands that `refusal` accepts. Raises CubinMissing."""
    (n, k), m, device = weight.shape, x.shape[0], x.device
    chosen = cuda.kernel(STEM, ARCH, tile.kernel_name, tile.shared_bytes, THREADS, device.index or 0)
    resident = cuda.resident_clusters(chosen, CLUSTER, SHARED_LIMIT)
    dealt = pairing(tile, n, m, resident)
    clusters = min(dealt.tiles, resident)
    arguments = _Arguments(
        out.data_ptr(), m, out.shape[1], out.stride(0), dealt.row_blocks, dealt.token_blocks, k // 64,
        tile.stages, dealt.by_tokens, LAG,
    )  # fmt: skip
    maps = [_weight_map(weight.data_ptr(), n, k, tile), cuda.tensor_map(x, TOKENS // CLUSTER)]
    cuda.launch(chosen, clusters * CLUSTER, [*maps, arguments], device, pdl=pdl, cluster=CLUSTER)
