"""Embedding lookup in Triton: a copy of rows by id.

Invariants: an id outside the table gives zeros, never a read outside it. What was written before the lookup is settled
for the kernels behind it (`pdl_settle`): it is the first of a step's layers.
Knows nothing of vocabulary sharding.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32, I32_DIVISIBLE, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_settle
from stoker_kernels.launch.triton_kernel import kernel

_BLOCK = 1024


@kernel
def _embed_kernel(
    ids, table, out, scale, positions, position_table, hidden, vocab, most_positions,
    BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    pdl_settle(LAUNCH_PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    token = tl.load(ids + row).to(tl.int64)
    known = (token >= 0) & (token < vocab)
    value = tl.load(table + token * hidden + column, mask=inside & known, other=0.0)
    if scale is not None:
        value = value.to(tl.float32) * scale
    if positions is not None:
        place = tl.load(positions + row).to(tl.int64)
        placed = inside & (place >= 0) & (place < most_positions)
        value = value.to(tl.float32)
        value += tl.load(position_table + place * hidden + column, mask=placed, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + column, value.to(out.dtype.element_ty), mask=inside)


def embed(
    ids: Tensor,
    table: Tensor,
    *,
    scale: float = 1.0,
    positions: Tensor | None = None,
    position_table: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`embedding.embed` on CUDA."""
    rows, (vocab, hidden) = ids.shape[0], table.shape
    out = torch.empty((rows, hidden), dtype=table.dtype, device=table.device) if out is None else out
    if not (table.is_contiguous() and out.is_contiguous()):
        raise ValueError("embed takes a contiguous table and a contiguous out")
    if position_table is not None and not position_table.is_contiguous():
        raise ValueError("embed takes a contiguous position_table")
    if rows:
        _embed_kernel[(rows, triton.cdiv(hidden, _BLOCK))](
            ids, table, out, None if scale == 1.0 else scale, positions, position_table, hidden, vocab,
            0 if position_table is None else len(position_table), BLOCK=_BLOCK, **launch_options(table.device),
        )  # fmt: skip
    return out


def _register() -> None:
    for dtype in (BF16, FP16, FP32):
        for scaled, placed in ((False, False), (True, False), (False, True)):
            optional = {
                "scale": FP32 if scaled else None,
                "positions": f"*{I32}" if placed else None,
                "position_table": f"*{dtype}" if placed else None,
            }
            signature = {"ids": f"*{I32}", "table": f"*{dtype}", "out": f"*{dtype}", "hidden": I32_DIVISIBLE}
            signature |= {"vocab": I32, "most_positions": I32}
            register_aot(
                _embed_kernel,
                signature | {name: kind for name, kind in optional.items() if kind is not None},
                [{"BLOCK": _BLOCK} | {name: None for name, kind in optional.items() if kind is None}],
                compact=dtype == BF16 and not scaled,
            )


_register()
