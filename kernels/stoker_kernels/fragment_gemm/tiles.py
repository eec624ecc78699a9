"""The compiled kernels of weights in fragments, by form of numbers, and which of them takes a product.

Invariants: sizes are those of csrc/fragments_kernels.cuh; the choice depends on shapes and on the device alone.
Knows nothing of tensors and launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from stoker_kernels.fragment_gemm.order import COLUMNS, ROWS, CodeForm

MAX_SPLIT = 8  # CTAs of a portable cluster
FEW_WARPS = 8
SM_BYTES_PER_US = 31e3  # that an SM of 132 gets of memory


@dataclass(frozen=True, slots=True)
class Tile:
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
    def kernel_name(self) -> str:
        """What tells it from others of the same numbers."""
        return f"wide_m{self.tokens}_r{self.rows}" if self.groups else f"few_m{self.tokens}"


@dataclass(frozen=True, slots=True)
class Numbers:
    """A form of numbers, with kernels of its own: `name` in the cubin `stem`.

    `scale_bytes`: of a row's 64 columns, zero points included, as shared memory holds them.
    """

    stem: str
    name: str
    form: CodeForm
    scale_bytes: int
    tiles: tuple[Tile, ...] = field(repr=False)

    @property
    def code_bytes(self) -> int:
        """Of a row's 64 columns."""
        return COLUMNS if self.form == "int8" else COLUMNS // 2

    def columns_at_once(self, tile: Tile) -> int:
        """Columns that a CTA works on side by side: of warps by themselves each has 2 KB of codes."""
        return COLUMNS if tile.groups else FEW_WARPS * (COLUMNS // 2 if self.form == "int8" else COLUMNS)

    def kernel_name(self, tile: Tile) -> str:
        """The function's name in the cubin."""
        return f"{self.stem}_{tile.kernel_name}_{self.name}"

    def shared_bytes(self, tile: Tile) -> int:
        """Dynamic shared memory: the ring, in whose place the sums lie in the end, what is stored, and barriers."""
        if not tile.groups:
            return FEW_WARPS * tile.tokens * tile.rows * 4
        stage = tile.tokens * 128 + tile.rows * (self.code_bytes + self.scale_bytes)
        low = max(tile.stages * -(-stage // 1024) * 1024, tile.rows * tile.tokens * 4)
        return 1024 + low + tile.groups * tile.tokens * ROWS * 2 + 16 * tile.stages

    def step_us(self, tile: Tile) -> float:
        """A step's time, and not less than that of its bytes."""
        steps = self.columns_at_once(tile) // COLUMNS * tile.rows * tile.ctas
        return max(tile.step_us, steps * self.code_bytes / SM_BYTES_PER_US)


# Every kernel of a cubin, the smallest first. Times are those of four bits.
FOUR_BITS = (
    Tile(8, step_us=1.2),
    Tile(16, 128, 2, 11, 2, 0.49), Tile(16, 320, 5, 12, 1, 0.60),
    Tile(32, 128, 2, 10, 2, 0.53), Tile(32, 320, 5, 10, 1, 0.62),
    Tile(64, 128, 2, 7, 2, 0.49), Tile(64, 320, 5, 8, 1, 0.70),
    Tile(128, 128, 2, 8, 1, 0.43), Tile(128, 256, 2, 7, 1, 0.76), Tile(128, 320, 2, 6, 1, 0.97),
)  # fmt: skip
# With the scales of small groups 64 tokens have a stage less, or an SM would not hold two CTAs.
FOUR_BITS_SMALL = tuple(
    replace(tile, stages=6) if (tile.tokens, tile.rows) == (64, 128) else tile for tile in FOUR_BITS
)
EIGHT_BITS = (
    Tile(8, step_us=1.2),
    Tile(16, 128, 2, 8, 2, 0.49), Tile(16, 320, 5, 8, 1, 0.60),
    Tile(32, 128, 2, 7, 2, 0.53), Tile(32, 320, 5, 7, 1, 0.62),
    Tile(64, 128, 2, 5, 2, 0.49), Tile(64, 320, 5, 5, 1, 0.70),
    Tile(128, 128, 2, 7, 1, 0.43), Tile(128, 256, 2, 5, 1, 0.76), Tile(128, 320, 2, 4, 1, 0.97),
)  # fmt: skip
# Integers in groups of a block of columns or more, and smaller ones; floats by the size of their blocks.
INT4, INT4_SMALL, INT8, INT8_SMALL, MXFP4, NVFP4 = NUMBERS = (
    Numbers("sm90_int4_gemm", "large", "int4", 3, FOUR_BITS),
    Numbers("sm90_int4_gemm", "small", "int4", 12, FOUR_BITS_SMALL),
    Numbers("sm90_int8_gemm", "large", "int8", 3, EIGHT_BITS),
    Numbers("sm90_int8_gemm", "small", "int8", 12, EIGHT_BITS),
    Numbers("sm90_fp4_gemm", "mxfp4", "fp4", 2, FOUR_BITS), Numbers("sm90_fp4_gemm", "nvfp4", "fp4", 4, FOUR_BITS),
)  # fmt: skip
START_US, CLUSTER_US, CLUSTER_US_PER_KB = 1.5, 1.0, 0.035

Residents = Callable[[Tile, int], int]
"""(tile, CTAs of a cluster) → how many such clusters the device holds at once."""


def choice_for(
    numbers: Numbers, tokens: int, n: int, k: int, residents: Residents, split: int = 0
) -> tuple[Tile, int]:
    """The kernel, and how many CTAs share the columns: what takes least by waves of clusters, steps, starts and sums.

    With `split` that many share them, and the kernel is the best one so.

    Times are those of one weight of four bits, 37888 × 3584, on an H100, and of its sums in clusters: the order of
    choices is what they are for.
    """
    tiles = numbers.tiles
    size = next((tile.tokens for tile in tiles if tokens <= tile.tokens), tiles[-1].tokens)
    fitting = [tile for tile in tiles if tile.tokens == size]
    steps = {tile: -(-k // numbers.columns_at_once(tile)) for tile in fitting}
    splits = {tile: [split] if split else range(1, min(MAX_SPLIT, steps[tile]) + 1) for tile in fitting}
    choices = [(tile, each) for tile in fitting for each in splits[tile]]

    def cost_us(choice: tuple[Tile, int]) -> float:
        tile, parts = choice
        tiles = -(-n // tile.rows) * -(-tokens // tile.tokens)
        waves = -(-tiles // max(1, residents(tile, parts)))
        cluster = CLUSTER_US + CLUSTER_US_PER_KB * tile.rows * tile.tokens * 4 / 1024 if parts > 1 else 0.0
        return waves * (-(-steps[tile] // parts) * numbers.step_us(tile) + START_US + cluster)

    return min(choices, key=cost_us)
