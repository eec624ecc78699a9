"""A tile of our own GEMMs, for few tokens (`small.py`), for many (`wide.py`) or between (`spread.py`): whether it takes
operands, its run.

Invariants: those of the three. Does not know: which tile is fastest (`table.py`).
"""

from __future__ import annotations

from stoker_kernels.gemm import small, spread, wide
from stoker_kernels.gemm.small import Operands, Tile
from stoker_kernels.gemm.spread import SpreadTile
from stoker_kernels.gemm.wide import WideTile
from stoker_kernels.launch.pdl import pdl_on

AnyTile = Tile | WideTile | SpreadTile


def refusal(tile: AnyTile, o: Operands) -> str | None:
    """None where the tile takes x [M, K], weight [N, K] and out [M, N] ([M, N / 2] if gated), else why not."""
    if isinstance(tile, SpreadTile):
        return spread.refusal(tile, o)
    return wide.refusal(tile, o) if isinstance(tile, WideTile) else small.refusal(tile, o)


def launch(tile: AnyTile, o: Operands, *, pdl: bool) -> None:
    """Run `tile`, fitted to the weight, on the current stream for operands that `refusal` accepts.

    Raises CubinMissing.
    """
    if isinstance(tile, SpreadTile):
        spread.launch(tile, o, pdl=pdl)
    elif isinstance(tile, WideTile):
        wide.launch(tile, o, pdl=pdl)
    else:
        small.launch(small.fitted(tile, o.weight), o, pdl=pdl)


def taken(tile: AnyTile, o: Operands) -> bool:
    """Run `tile` if it takes the operands; whether it did."""
    if refusal(tile, o) is not None:
        return False
    launch(tile, o, pdl=pdl_on(o.x.device))
    return True
