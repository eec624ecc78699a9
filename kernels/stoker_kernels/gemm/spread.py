"""A GEMM of 65 to 256 tokens in one round of CTAs, a tile of rows × a part of K each: host side of sm90_*_gemm_spread.

For weights whose rows neither wide tiles nor those of 64 and 128 rows deal evenly to the SMs: rows go by eights, and K
is cut over a cluster, which adds its parts' sums. Operands are bf16, or e4m3 or int8 with scales.
Invariants: nothing is allocated; results are the same bit for bit from launch to launch, and a token's do not depend on
others of the same tile.
Does not know: where it is faster than other tiles (`table.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from stoker_kernels.gemm import small
from stoker_kernels.gemm.small import RESIDENT, Operands
from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import HOPPER_SHARED

ARCH = "sm_90a"
TOKENS = (128, 192, 256)  # of a tile: all tokens of the product
_ROWS = (*range(64, 145, 8), 160)
ROWS = {128: (*_ROWS, *range(176, 257, 16)), 192: (*_ROWS, 176, 192, 208), 256: _ROWS}
"""The compiled numbers of rows, by tokens."""
_HALVED = ((192, 208), (256, 144))
INTEGER_ROWS = {
    tokens: tuple(rows for rows in every if rows % 16 == 0 and (tokens, rows) not in _HALVED)
    for tokens, every in ROWS.items()
}
"""Those of int8: an instruction for integers has a multiple of 16 rows, also where it has half of a tile's."""
SHARES, MOST_CTAS = (1, 2, 4), 8
SMS_AT_WORK = 96  # CTAs that a tile worth timing has at least
_SUM_BYTES = 2048  # of eight rows × 64 tokens


@dataclass(frozen=True, slots=True)
class SpreadTile:
    """`rows` of the weight × `tokens`, K cut into `parts`; `share` neighbouring tiles read x together."""

    rows: int
    tokens: int
    parts: int
    share: int = 1

    gated = False

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.share * self.parts

    @property
    def threads(self) -> int:
        """A warpgroup for 64 tokens, and a warp that loads, or a warpgroup whose registers others take."""
        return self.tokens * 2 + (32 if self.tokens == TOKENS[0] else 128)

    @property
    def box(self) -> int:
        """Tokens of one box of x: a CTA loads two, or one for all that share it."""
        return self.tokens // max(self.share, 2)

    @property
    def stage_bytes(self) -> int:
        """128 bytes of K of weight and tokens."""
        return (self.rows + self.tokens) * 128

    @property
    def stages(self) -> int:
        """As many as fit."""
        return (HOPPER_SHARED - 1024 - 32) // (self.stage_bytes + 16)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: alignment, ring (sums lie on it in the end), two barriers a stage, one a warpgroup."""
        owned = -(-self.rows // 8 // self.parts)
        sums = self.parts * owned * self.tokens // 64 * _SUM_BYTES
        return 1024 + max(self.stages * self.stage_bytes, sums) + 16 * self.stages + 32

    @property
    def compiled(self) -> bool:
        """Whether there is such a kernel, and room for its ring."""
        whole = self.share in SHARES and self.parts >= 1 and self.cluster <= MOST_CTAS
        return whole and self.rows in ROWS.get(self.tokens, ()) and self.shared_bytes <= HOPPER_SHARED

    def kernel_name(self, dtype: torch.dtype) -> str:
        """The function's name in its cubin."""
        return f"{stem(dtype)}_n{self.rows}_m{self.tokens}"

    def clusters(self, n: int) -> int:
        """Clusters of a product of n rows."""
        return -(-n // (self.rows * self.share))

    def busy_share(self, n: int) -> float:
        """The part of an H200's SMs that works on rows that are there, in one round."""
        return n * self.parts / (self.rows * RESIDENT[0])

    def at_once(self, n: int) -> bool:
        """Whether an H200 holds all clusters of n rows at once."""
        return self.clusters(n) <= RESIDENT[self.cluster - 1]


def stem(dtype: torch.dtype) -> str:
    """csrc file, and cubin, that holds the kernels for weights of this dtype."""
    return small.stem_of(dtype, "spread")


def token_tile(m: int) -> int | None:
    """The tokens of a tile for a product of m; None where there is none."""
    return next((tokens for tokens in TOKENS if m <= tokens), None) if m > TOKENS[0] // 2 else None


def spread_tiles(n: int, row_bytes: int, m: int) -> Iterator[SpreadTile]:
    """The tiles worth timing for m tokens: of each cluster the fewest rows with which one round is enough."""
    tokens = token_tile(m)
    if tokens is None:
        return
    for share, parts in itertools.product(SHARES, range(1, MOST_CTAS + 1)):
        every = (SpreadTile(rows, tokens, parts, share) for rows in ROWS[tokens])
        fitting = next((tile for tile in every if tile.compiled and tile.at_once(n)), None)
        if fitting is None or row_bytes // 128 < 2 * parts:
            continue
        if fitting.clusters(n) * fitting.cluster >= SMS_AT_WORK:  # fewer rows than can be had leave SMs idle
            yield fitting


def refusal(tile: SpreadTile, o: Operands) -> str | None:
    """None where the kernel takes x [M, K], weight [N, K] and out [M, N], else why not."""
    m, k = o.x.shape
    if not 0 < m <= tile.tokens:
        return f"M = {m} is not in 1…{tile.tokens}"
    if o.weight.dtype == torch.int8 and tile.rows not in INTEGER_ROWS[tile.tokens]:
        return f"has no tile of {tile.rows} rows for integers"
    if k * o.weight.element_size() // 128 < tile.parts:
        return f"K = {k} cannot be cut into {tile.parts} parts"
    if cuda.address_of(o.bias) % 4:
        return "a bias has to start on a multiple of 4 bytes"
    return small.refused_rows(o, 8)


def launch(tile: SpreadTile, o: Operands, *, pdl: bool) -> None:
    """Run `tile` on the current stream for operands that `refusal` accepts. Raises CubinMissing."""
    (n, k), device, dtype = o.weight.shape, o.x.device, o.weight.dtype
    chosen = cuda.kernel(stem(dtype), ARCH, tile.kernel_name(dtype), tile.shared_bytes, tile.threads, device.index or 0)
    given = [
        small.weight_map(o.weight.data_ptr(), n, k, dtype.itemsize, tile.rows, False),
        cuda.tensor_map(o.x, tile.box),
        small.arguments_of(o, -(-n // tile.rows), k * dtype.itemsize // 128, tile.stages, share=tile.share),
    ]
    cuda.launch(chosen, tile.clusters(n) * tile.cluster, given, device, pdl=pdl, cluster=tile.cluster)
