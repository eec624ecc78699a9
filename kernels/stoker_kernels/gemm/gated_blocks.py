"""`block_silu_mul` on Hopper: silu(gate) · up within the product of many tokens with a weight in GGUF's blocks.

Where no kernel of the blocks' own takes both, rows of gate and of up are decoded beside each other, and multiplied by
the gated tile that a dense weight of so many rows gets.
Invariants: as of `block_gemm`; the result is rounded once, where two kernels round gate and up first.
Does not know: which layer it serves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.block_gemm import decode_rows, decodes, part_rows, planes_silu_mul
from stoker_kernels.gemm import gated, table, tiles
from stoker_kernels.gemm.small import Operands
from stoker_kernels.quant import BlockWeight


def own(x: Tensor, weight: BlockWeight) -> Tensor:
    """One kernel of planes or gated tiles on decoded rows, where some take the operands, else `split`."""
    found = planes_silu_mul(x, weight)
    if found is None and decodes(x, weight):
        found = _decoded(x, weight)
    if found is not None:
        return found
    product = gated.split(x, weight)
    assert isinstance(product, Tensor), "a float x gives floats"
    return product


def _decoded(x: Tensor, weight: BlockWeight) -> Tensor | None:
    """The result, rows of gate and as many of up at a time; None where no tile takes a part."""
    half, columns = weight.out_features // 2, weight.in_features
    at_once = part_rows(half, columns, spans=2)
    scratch = torch.empty((2 * at_once, columns), dtype=x.dtype, device=x.device)
    out = torch.empty((len(x), half), dtype=x.dtype, device=x.device)
    firsts = range(0, half, at_once)
    parts = [Operands(x, scratch[: 2 * min(at_once, half - at)], out[:, at : at + at_once]) for at in firsts]
    chosen = [table.gated_tile(False, len(part.weight), columns, len(x)) for part in parts]
    taken = [(tile, part) for tile, part in zip(chosen, parts, strict=True) if tile and not tiles.refusal(tile, part)]
    if len(taken) < len(parts):
        return None
    for first, (tile, part) in zip(firsts, taken, strict=True):
        gate, up = part.weight.chunk(2)
        decode_rows(weight, gate, first=first)
        decode_rows(weight, up, first=half + first)
        # A product asks for its weight before it waits: it is launched when the rows are there.
        tiles.launch(tile, part, pdl=False)
    return out
