"""Own GEMMs for M ≤ 128 tokens, where the bytes of the weight are the limit: host side of csrc/*_gemm_*.

A `Tile` names one compiled kernel and its ring; `launch` runs it for tensors that `refusal` has accepted. Families, for
SM 9.0: `cluster` deals tiles to clusters that sum in distributed shared memory; `multicast` (more than 32 tokens) has a
tile a CTA and reads x once for several tiles of a cluster.
Invariants: nothing is allocated; results are the same bit for bit from launch to launch, and the K partition does not
depend on M.
Does not know: which tile is fastest (`table.py`), nor quantization beyond its scales.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from stoker_kernels.gemm.cluster_split import ClusterSplit, MulticastSplit
from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import HOPPER_SHARED
from stoker_kernels.quant import FP8

MAX_TOKENS = 128
TOKEN_TILES = (8, 16, 32, 64, 128)
GROUP_ROWS = 64
STAGING_PITCH = GROUP_ROWS * 2 + 16
PAIR_BYTES = 115_000  # shared memory of a CTA that leaves room for a second one on its SM
# Clusters of so many CTAs (1 to 8) that an H200 holds, each CTA with an SM of its own.
RESIDENT = (132, 66, 39, 30, 22, 17, 15, 15)
PAIR_LIST_BYTES = 264  # PairList of csrc/gemm_adapters.cuh

_NAMES = {FP8: "e4m3", torch.int8: "s8"}  # of weights in a kernel's name

Family = Literal["cluster", "multicast"]


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel: `rows` of the weight × `chunks` · 128 bytes of K a stage, for up to `tokens` tokens.

    `ctas_per_sm` bounds the grid; `cluster` CTAs share what is left of a deal of whole tiles (family `cluster`), or are
    `share` tiles with one x × `split` parts of K (family `multicast`). A `gated` tile (family `cluster`, bf16)
    multiplies with gate and up stacked and stores silu(gate) · up. One with `shrunk_bytes`, of A·x of its tokens, adds
    what adapters do (bf16; `multicast` up to 64 tokens). A `fixed` one of family `cluster` cuts every tile's K, and its
    gated results have the same bits whatever token is beside.
    """

    family: Family
    rows: int
    chunks: int
    tokens: int
    stages: int
    ctas_per_sm: int = 1
    cluster: int = 1
    gated: bool = False
    share: int = 1
    shrunk_bytes: int = 0
    fixed: bool = False

    @property
    def split(self) -> int:
        """CTAs of a cluster that a tile's K is cut over."""
        return self.cluster // self.share

    @property
    def groups(self) -> int:
        """Groups of four warps, 64 rows each."""
        return self.rows // GROUP_ROWS

    @property
    def stage_bytes(self) -> int:
        """Weights and activations of one stage."""
        return (self.rows + self.tokens) * 128 * self.chunks

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ring, aligned to 1024 bytes, staging, others' sums, barriers; what adapters take."""
        ring, staging = self.stages * self.stage_bytes, self.groups * self.tokens * STAGING_PITCH
        of_a_part = self.groups * -(-(self.tokens // 8) // self.split) * 2048
        barriers = 1024 + 16 * self.stages + 32 + (self.shrunk_bytes and PAIR_LIST_BYTES + self.shrunk_bytes)
        if self.family == "multicast":  # sums and staging lie on the ring, which is free by then
            return max(ring, self.split * of_a_part + staging) + barriers
        return ring + staging + (self.split - 1) * of_a_part + barriers

    @property
    def threads(self) -> int:
        """Threads of a CTA; on sm90 one producer warp more."""
        return 2 * self.rows + 32

    def kernel_name(self, dtype: torch.dtype) -> str:
        """The function's name in its cubin."""
        return f"{self.stem(dtype)}_n{self.rows}_c{self.chunks}_m{self.tokens}"

    def stem(self, dtype: torch.dtype) -> str:
        """csrc file, and cubin, that holds the kernel."""
        kind = "gated" if self.gated else self.family
        return stem_of(dtype, f"{kind}_adapted" if self.shrunk_bytes else kind)


class _Arguments(ctypes.Structure):
    """GemmArguments of csrc/gemm_epilogue.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "bias", "w_scale", "x_scale")),
        *((name, ctypes.c_int) for name in
          ("m", "n", "ld_out", "w_scale_step", "tiles", "k_blocks", "stages", "share", "apart")),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """One product. x [M, K], weight [N, K] (both bf16, e4m3 or int8), out [M, N] bf16; scales fp32, or None.

    For a gated tile out is [M, N / 2], and there is no bias; nor are there scales but with a wide tile.
    """

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None = None
    w_scale: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None


def stem_of(dtype: torch.dtype, kind: str) -> str:
    """csrc file, and cubin, that holds the kernels of a kind for weights of this dtype."""
    return f"sm90_{_NAMES.get(dtype, 'bf16')}_gemm_{kind}"


def token_tile(tokens: int) -> int:
    """The smallest compiled token tile that holds `tokens`."""
    return next(tile for tile in TOKEN_TILES if tokens <= tile)


def refusal(tile: Tile, o: Operands) -> str | None:
    """None where the kernel takes these operands, else why not."""
    if not 0 < len(o.x) <= tile.tokens:
        return f"M = {len(o.x)} is not in 1…{tile.tokens}"
    if tile.gated and o.weight.dtype != torch.bfloat16:
        return f"takes bf16 with gate and up, not {o.weight.dtype}"
    return refused_rows(o, 16 if tile.gated else 8)


def refused_rows(o: Operands, rows: int) -> str | None:
    """None where a kernel whose weight has a multiple of `rows` rows takes these types and places, else why not."""
    n, k = o.weight.shape
    chunk = 128 // o.weight.element_size()
    if k % chunk or n % rows:
        return f"K = {k} is not a multiple of {chunk}, or N = {n} not of {rows}"
    types = (torch.bfloat16, FP8, torch.int8)
    if o.out.dtype != torch.bfloat16 or o.x.dtype != o.weight.dtype or o.x.dtype not in types:
        return f"takes bf16, e4m3 or int8 operands and a bf16 result, not {o.x.dtype}, {o.weight.dtype}, {o.out.dtype}"
    if o.bias is not None and o.bias.dtype != torch.bfloat16:
        return f"takes a bf16 bias, not {o.bias.dtype}"
    if o.x.stride(1) != 1 or o.out.stride(1) != 1 or not o.weight.is_contiguous():
        return "rows have to be contiguous"
    strides = (o.x.stride(0) * o.x.element_size(), o.out.stride(0) * 2)
    if any(value % 16 for value in (*strides, o.x.data_ptr(), o.out.data_ptr(), o.weight.data_ptr())):
        return "rows have to start on multiples of 16 bytes"
    return None


def partition(tile: Tile, n: int, row_bytes: int, slots: Callable[[], int]) -> ClusterSplit | MulticastSplit:
    """How a tile cuts an [n, row_bytes] weight; the same for every number of tokens.

    `slots`: clusters that run at once; only `cluster` asks. Raises ValueError for a cut that the family does not have.
    """
    tiles, k_blocks = -(-n // tile.rows), -(-row_bytes // (128 * tile.chunks))
    if tile.family == "multicast":
        return MulticastSplit(tiles, k_blocks, tile.share, tile.split)
    clusters = tiles if tile.fixed and tile.cluster > 1 else min(slots(), tiles)
    return ClusterSplit(tiles, k_blocks, clusters, tile.cluster)


def arguments_of(
    o: Operands, tiles: int, k_blocks: int, stages: int, *, share: int = 1, apart: bool = False
) -> ctypes.Structure:
    """The kernels' third argument, for a weight of so many tiles of rows and blocks of K."""
    return _Arguments(
        o.out.data_ptr(), cuda.address_of(o.bias), cuda.address_of(o.w_scale), cuda.address_of(o.x_scale),
        len(o.x), o.out.shape[1], o.out.stride(0), o.w_scale is not None and o.w_scale.numel() > 1, tiles, k_blocks,
        stages, share, apart,
    )  # fmt: skip


@functools.cache
def weight_map(
    address: int, n: int, k: int, element_size: int, rows: int, gated: bool
) -> ctypes.Array[ctypes.c_char]:
    if gated:
        return cuda.paired_map_at(address, n, k, element_size, rows)
    return cuda.tensor_map_at(address, n, k, k, element_size, rows)


def load(tile: Tile, dtype: torch.dtype, device: torch.device) -> cuda.Kernel:
    """The tile's kernel, loaded. Raises CubinMissing."""
    return cuda.kernel(tile.stem(dtype), "sm_90a", tile.kernel_name(dtype), tile.shared_bytes, tile.threads,
                       device.index or 0)


def cut(tile: Tile, weight: torch.Tensor) -> ClusterSplit | MulticastSplit:
    """`partition` of this weight on its device."""
    n, k = weight.shape
    return _cut(tile, n, k, weight.dtype, weight.device)


def _cut(tile: Tile, n: int, k: int, dtype: torch.dtype, device: torch.device) -> ClusterSplit | MulticastSplit:
    room = HOPPER_SHARED if tile.ctas_per_sm == 1 else PAIR_BYTES
    return partition(tile, n, k * dtype.itemsize,
                     lambda: cuda.resident_clusters(load(tile, dtype, device), tile.cluster, room))


def fitted(tile: Tile, weight: torch.Tensor) -> Tile:
    """`tile`, or with the largest smaller split of K that can cut this weight on its device."""
    return _fitted(tile, *weight.shape, weight.dtype, weight.device)


@functools.cache
def _fitted(tile: Tile, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Tile:
    for split in range(tile.split, 0, -1):
        smaller = replace(tile, cluster=tile.share * split)
        try:
            _cut(smaller, n, k, dtype, device)
        except ValueError:
            continue
        return smaller
    return replace(tile, cluster=2, share=2)  # of `multicast`, whose clusters have two CTAs at least


def with_shrunk(tile: Tile, size: int) -> Tile | None:
    """`tile` for adapters whose A·x of all its tokens has `size` bytes, with fewer stages if need be; None: no room."""
    budget = PAIR_BYTES if tile.shared_bytes <= PAIR_BYTES else HOPPER_SHARED
    fewer = (replace(tile, stages=stages, shrunk_bytes=size) for stages in range(tile.stages, 1, -1))
    return next((each for each in fewer if each.shared_bytes <= budget), None)


def launch(
    tile: Tile, o: Operands, *, pdl: bool, adapters: tuple[ctypes.Array[ctypes.c_char], ctypes.Structure] | None = None
) -> None:
    """Run `tile` on the current stream for operands that `refusal` accepts. Raises CubinMissing.

    `adapters`: of a tile with `shrunk_bytes` the map of B and the further argument.
    """
    device, (n, k) = o.x.device, o.weight.shape
    part = cut(tile, o.weight)
    arguments = arguments_of(o, part.tiles, part.k_blocks, tile.stages, share=tile.share, apart=tile.fixed)
    chosen = load(tile, o.weight.dtype, device)
    w_map = weight_map(o.weight.data_ptr(), n, k, o.weight.element_size(), tile.rows, tile.gated)
    x_map = cuda.tensor_map(o.x, tile.tokens // tile.share)
    given = [w_map, x_map, arguments] if adapters is None else [w_map, x_map, adapters[0], arguments, adapters[1]]
    cuda.launch(chosen, part.ctas, given, device, pdl=pdl, cluster=tile.cluster)
