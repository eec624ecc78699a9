"""A tile of our own GEMMs, for few tokens (`gemm_small`) or for many (`gemm_wide`): whether it takes operands, its run.

Invariants: those of the two. Does not know: which tile is fastest (`gemm_table`).
"""

from __future__ import annotations

from stoker_kernels.gemm import small as gemm_small
from stoker_kernels.gemm import wide as gemm_wide
from stoker_kernels.gemm.small import Operands, Tile
from stoker_kernels.gemm.wide import WideTile
from stoker_kernels.launch.pdl import pdl_on


def refusal(tile: Tile | WideTile, o: Operands) -> str | None:
    """None where the tile takes x [M, K], weight [N, K] and out [M, N] ([M, N / 2] if gated), else why not."""
    return gemm_wide.refusal(tile, o) if isinstance(tile, WideTile) else gemm_small.refusal(tile, o)


def launch(tile: Tile | WideTile, o: Operands, *, pdl: bool) -> None:
    """Run `tile`, fitted to the weight, on the current stream for operands that `refusal` accepts.

    Raises CubinMissing.
    """
    if isinstance(tile, WideTile):
        gemm_wide.launch(tile, o, pdl=pdl)
    else:
        gemm_small.launch(gemm_small.fitted(tile, o.weight), o, pdl=pdl)


def taken(tile: Tile | WideTile, o: Operands) -> bool:
    """Run `tile` if it takes the operands; whether it did."""
    if refusal(tile, o) is not None:
        return False
    launch(tile, o, pdl=pdl_on(o.x.device))
    return True
