"""`block_linear`: y = x · Wᵀ + bias for weights in GGUF's blocks; `block_rows`: rows of a table in them, by id.

Implementations: `compiled` (C, on the CPU) and `reference`. Weights in planes, which a GPU has, are ops of their own,
`plane_linear` and `plane_rows`: `own` (CUDA on Hopper and Triton, as `plane_choose` says) and `reference`.
Invariants: a weight's values are those of its format's definition, in fp32; products accumulate in fp32 and are rounded
once. Before that a weight is rounded to the dtype of x where it is decoded for a product of many tokens: on a CPU from
32 on, unless it is packed; on a GPU by `sm90_wide`, by rows that are decoded first, and by Triton's tiles of more than
32. Each row of the result depends on its own row of x alone.
Does not know: which layer it serves, nor how weights reached memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch import cc
from stoker_kernels.launch.dispatch import Target, reference_supports, register, select, triton_supports
from stoker_kernels.quant import BlockWeight

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def compiled_supports(target: Target) -> str | None:
    """Why the compiled kernels do not run; None where they do."""
    if target.device != "cpu":
        return "needs a CPU"
    return cc.refusal("cpu_blocks") if target.dtype in _FLOATS else "takes bfloat16, float16, float32"


for _op in ("block_linear", "block_rows"):
    register(_op, "compiled", f"stoker_kernels.block_gemm.cpu:{_op}", compiled_supports)
    register(_op, "reference", f"stoker_kernels.block_gemm.reference:{_op}", reference_supports)

_HALVES = (torch.bfloat16, torch.float16)
for _op, _function in (("plane_linear", "block_linear"), ("plane_rows", "block_rows")):
    register(_op, "own", f"stoker_kernels.block_gemm.plane_choose:{_op}", triton_supports(*_HALVES))
    register(_op, "reference", f"stoker_kernels.block_gemm.reference:{_function}", reference_supports)


def block_linear(x: Tensor, weight: BlockWeight, *, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [T, K] float, weight [N, K] → [T, N] of x's dtype; bias [N]; `out` is written and returned where given.

    Raises ValueError for shapes that do not fit, KernelUnavailable where nothing takes x's dtype.
    """
    if x.dim() != 2 or x.shape[1] != weight.in_features:
        raise ValueError(f"x is {tuple(x.shape)}, the weight [N, K] = {(weight.out_features, weight.in_features)}")
    op = "plane_linear" if weight.in_planes else "block_linear"
    y: Tensor = select(op, x.device, x.dtype)(x, weight, bias=bias, out=out)
    return y


def block_rows(ids: Tensor, table: BlockWeight, dtype: torch.dtype) -> Tensor:
    """Rows `ids` [T] of a table of one piece → [T, K] of `dtype`; ids lie in `[0, N)`.

    As `embedding.embed` does, it settles what was written before it (`pdl.pdl_settle`).
    Raises ValueError for a table of several pieces.
    """
    if len(table.pieces) != 1:
        raise ValueError(f"a table of {len(table.pieces)} pieces cannot be looked up; it must be one")
    rows: Tensor = select("plane_rows" if table.in_planes else "block_rows", table.device, dtype)(ids, table, dtype)
    return rows
