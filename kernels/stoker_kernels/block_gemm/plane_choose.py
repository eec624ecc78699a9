"""`plane_linear` and `plane_rows` on CUDA. In bf16 on Hopper few tokens are multiplied with planes, most formats by
kernels of our own (`sm90_few`); from WIDE_FROM on with planes too, decoded within the product (`sm90_wide`), up to
WIDE_TO; and prompts, and from 65 tokens on weights that those kernels do not take, with decoded rows (`decoded`). All
else is in Triton (`plane_launch`): fused products up to a few hundred tokens, beyond them dequantized rows and cuBLAS.

Invariants: one call outside of a capture makes every later one of its shape capturable. What a call takes of memory
beside its result is at most SCRATCH_BYTES, here or of `decoded`, or one row, of weights in the dtype of x, or where K
is split the parts of its sums in fp32.
Does not know: which layer it serves.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from stoker_kernels.launch.rehearsal import rehearsing
from stoker_kernels.quant import BlockWeight, PlaneRows

WIDE_FROM, WIDE_TO = 33, 1024
"""Tokens that are multiplied with planes by `sm90_wide`, which decodes them once for each tile of tokens."""
FUSED_TOKENS = 256
SCRATCH_BYTES = 32 << 20
"""Dequantized rows at a time: they stay in the L2 until they are read."""


def plane_linear(x: Tensor, weight: BlockWeight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias, with decoded rows or a piece of the weight after the other."""
    from stoker_kernels.block_gemm import decoded

    y = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype, device=x.device) if out is None else out
    if x.shape[0] == 0:
        return y
    if wide_refusal(x, weight, bias, y) is None:
        _wide(x, weight, bias, y)
        return y
    if decoded.decodes(x, weight):
        decoded.linear(x, weight, bias, y)
        return y
    row = 0
    for piece in weight.planes:
        own = slice(row, row + piece.rows)
        _product(x, piece, None if bias is None else bias[own], y[:, own])
        row += piece.rows
    return y


def wide_refusal(x: Tensor, weight: BlockWeight, bias: Tensor | None, out: Tensor) -> str | None:
    """None where x [T, K] is multiplied by `sm90_wide` with every piece, else why not."""
    from stoker_kernels.block_gemm import sm90_wide

    if not WIDE_FROM <= len(x) <= WIDE_TO:
        return f"{len(x)} tokens, not {WIDE_FROM} to {WIDE_TO}"
    begins = [0, *itertools.accumulate(piece.rows for piece in weight.planes)]
    if any(begin % sm90_wide.ROW_MULTIPLE for begin in begins):
        return f"pieces have to begin at multiples of {sm90_wide.ROW_MULTIPLE} rows"
    return sm90_wide.refusal(x, weight.planes, bias, out)


def _wide(x: Tensor, weight: BlockWeight, bias: Tensor | None, out: Tensor) -> None:
    from stoker_kernels.block_gemm import sm90_wide

    row = 0
    for piece in weight.planes:
        own = slice(row, row + piece.rows)
        sm90_wide.linear(x, piece, None if bias is None else bias[own], out[:, own])
        row += piece.rows


def silu_mul(x: Tensor, weight: BlockWeight) -> Tensor | None:
    """silu(x · gateᵀ) · (x · upᵀ) [T, F] by one kernel, of a weight [2F, K], gate first; None where none takes it."""
    from stoker_kernels.block_gemm import sm90_wide

    spans = sm90_wide.gated_spans(weight.planes) if WIDE_FROM <= len(x) <= WIDE_TO else None
    if spans is None:
        return None
    out = torch.empty((len(x), weight.out_features // 2), dtype=x.dtype, device=x.device)
    if wide_refusal(x, weight, None, out) is not None:
        return None
    sm90_wide.silu_mul(x, *spans, out)
    return out


def _product(x: Tensor, piece: PlaneRows, bias: Tensor | None, out: Tensor) -> None:
    from stoker_kernels.block_gemm import plane_launch, sm90_few

    if sm90_few.refusal(x, piece, bias, out) is None:
        sm90_few.linear(x, piece, bias, out)
        return
    if x.shape[0] <= FUSED_TOKENS:
        plane_launch.linear(x, piece, bias, out)
        return
    by_rows(x, piece, bias, out)


def by_rows(x: Tensor, piece: PlaneRows, bias: Tensor | None, out: Tensor) -> None:
    """out = x · Wᵀ + bias by cuBLAS, rows of the weight dequantized before, SCRATCH_BYTES at a time."""
    from stoker_kernels.block_gemm import plane_launch

    at_once = max(1, SCRATCH_BYTES // (piece.columns * x.itemsize))
    scratch = torch.empty((min(at_once, piece.rows), piece.columns), dtype=x.dtype, device=x.device)
    for first in range(0, piece.rows, at_once):
        part = scratch[: min(at_once, piece.rows - first)]
        plane_launch.rows(piece, part, first=first)
        own = slice(first, first + len(part))
        if rehearsing():
            continue
        if bias is None:
            torch.mm(x, part.t(), out=out[:, own])
        else:
            torch.addmm(bias[own], x, part.t(), out=out[:, own])


def plane_rows(ids: Tensor, table: BlockWeight, dtype: torch.dtype) -> Tensor:
    """Rows of a table of one piece by id."""
    from stoker_kernels.block_gemm import plane_launch

    (piece,) = table.planes
    out = torch.empty((ids.shape[0], piece.columns), dtype=dtype, device=ids.device)
    if ids.shape[0]:
        plane_launch.rows(piece, out, ids=ids)
    return out
