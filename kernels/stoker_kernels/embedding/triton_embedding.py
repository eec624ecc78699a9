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
def _embed_kernel(ids, table, out, hidden, vocab, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr):
    pdl_settle(LAUNCH_PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    token = tl.load(ids + row).to(tl.int64)
    known = (token >= 0) & (token < vocab)
    value = tl.load(table + token * hidden + column, mask=inside & known, other=0.0)
    tl.store(out + row * hidden + column, value, mask=inside)


def embed(ids: Tensor, table: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`embedding.embed` on CUDA."""
    rows, (vocab, hidden) = ids.shape[0], table.shape
    out = torch.empty((rows, hidden), dtype=table.dtype, device=table.device) if out is None else out
    if not (table.is_contiguous() and out.is_contiguous()):
        raise ValueError("embed takes a contiguous table and a contiguous out")
    if rows:
        _embed_kernel[(rows, triton.cdiv(hidden, _BLOCK))](
            ids, table, out, hidden, vocab, BLOCK=_BLOCK, **launch_options(table.device)
        )
    return out


for _dtype in (BF16, FP16, FP32):
    register_aot(
        _embed_kernel,
        {
            "ids": f"*{I32}",
            "table": f"*{_dtype}",
            "out": f"*{_dtype}",
            "hidden": I32_DIVISIBLE,
            "vocab": I32,
        },
        [{"BLOCK": _BLOCK}],
        compact=_dtype == BF16,
    )
