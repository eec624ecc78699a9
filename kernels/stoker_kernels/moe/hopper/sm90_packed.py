"""Experts in four bits for few tokens on Hopper: host side of csrc/sm90_packed_experts.

Two launches, as of `sm90_few`: gate-up with its activation, and down with the weighted sum. Codes become bf16 in
registers.
Invariants: a launch never synchronises and can be captured after one launch of its kind; a token's bits depend on its
own row and choices alone.
Does not know: for how many tokens other kernels are faster (`choose`).
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.launch.dispatch import sm_count
from stoker_kernels.launch.pdl import pdl_on
from stoker_kernels.moe.hopper.operands import few_refusal, room_refusal
from stoker_kernels.moe.hopper.sm90_few import THREADS, FewArguments, fill_activation, fill_plan, fill_shared
from stoker_kernels.moe.layouts.int4 import columns_of, groups_of
from stoker_kernels.moe.steps import steps_of
from stoker_kernels.moe.types import ExpertActivation, ExpertKind, ExpertWeights, Routes
from stoker_kernels.quant import FP4_BLOCKS

STEM, ARCH = "sm90_packed_experts", "sm_90a"
KINDS: tuple[ExpertKind, ...] = ("mxfp4", "nvfp4", "int4")
MOST_TOKENS = 8
_WARPS, _TILE, _BOX, _PITCH = THREADS // 32, 16, 256, 20
_SCALE_BYTES = {"mxfp4": 8, "nvfp4": 8, "int4": 4}  # of a row and a line
_CTAS = 3  # that an SM holds
_WHOLE_ROWS = 31  # a shift that leaves nothing of a column


class PackedArguments(ctypes.Structure):
    """PackedArguments of csrc/packed_codes.cuh."""

    _fields_ = [
        ("few", FewArguments),
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "factor", "next")),
        *((name, ctypes.c_int) for name in ("next_rows", "ld_out", "lines", "group_shift")),
    ]


def lines_of(kind: ExpertKind, columns: int, group: int) -> int:
    """Lines of scales of a row: of steps, or of groups."""
    if kind == "mxfp4" or kind == "nvfp4":
        return len(steps_of(columns, FP4_BLOCKS[kind]))
    return groups_of(group, columns)


def parts_of(jobs: int, columns: int) -> int:
    """Into how many parts so many jobs' columns are cut, so that every warp of a CTA has one, if there are no more."""
    parts, most = 1, min(_WARPS, -(-columns // _BOX))
    while jobs * parts < _WARPS and 2 * parts <= most:
        parts *= 2
    return parts


def shared_bytes(tokens: int, top_k: int, columns: int, lines: int, kind: ExpertKind, *, gated: bool) -> int:
    """Dynamic shared memory: the plan, rows of x, scales of a job a warp, sums of parts."""
    pairs = tokens * top_k
    x_rows, sums = (tokens, _WARPS * tokens) if gated else (pairs, pairs * parts_of(pairs, columns))
    plan = 16 + 16 * pairs + 3 * 16 * -(-pairs // 4)
    rows = x_rows * (-(-columns // _BOX) * _BOX * 2 + 64)
    return plan + rows + _WARPS * lines * _TILE * _SCALE_BYTES[kind] + sums * _PITCH * 4


def group_refusal(weights: ExpertWeights) -> str | None:
    """None where rows of these experts are as csrc/packed_codes.cuh reads them, else why not."""
    if weights.ffn % 32 or weights.hidden % 32:
        return f"rows of {weights.ffn} and {weights.hidden} columns are no whole blocks of 32"
    for columns in (weights.hidden, weights.ffn) if weights.kind == "int4" else ():
        group = columns_of(weights.group, columns)
        if group != columns and group & (group - 1):
            return f"groups of {group} columns are no power of two"
    return None


def group_shift(weights: ExpertWeights, columns: int) -> int:
    """By how much a column is shifted to give its group, of integers."""
    group = columns_of(weights.group, columns) if weights.kind == "int4" else columns
    return _WHOLE_ROWS if group == columns else group.bit_length() - 1


def refusal(x: Tensor, routes: Routes, weights: ExpertWeights, shared: Tensor | None) -> str | None:
    """None where `experts` takes these operands, else why not."""
    if routes.plan is None:
        return "reads the plan of route on CUDA"
    (tokens, top_k), sizes = routes.ids.shape, ((weights.hidden, True), (weights.ffn, False))
    reason = few_refusal(x, weights, shared, MOST_TOKENS, KINDS)
    if reason is not None:
        return reason
    reason = group_refusal(weights)
    if reason is not None:
        return reason
    room = 0
    for columns, gated in sizes:
        lines = lines_of(weights.kind, columns, weights.group)
        room = max(room, shared_bytes(tokens, top_k, columns, lines, weights.kind, gated=gated))
    return room_refusal(room, tokens, top_k, weights.ffn) or cuda.missing_cubin(STEM, ARCH)


def experts(
    x: Tensor,
    routes: Routes,
    weights: ExpertWeights,
    out: Tensor,
    *,
    activation: ExpertActivation = "silu",
    limit: float = 0.0,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """`moe.experts` for operands that `refusal` accepts, into `out` [T, H], contiguous. Raises CubinMissing."""
    tokens, top_k, ffn, hidden = *routes.ids.shape, weights.ffn, weights.hidden
    inner = torch.empty((tokens * top_k, -(-ffn // _BOX) * _BOX), dtype=x.dtype, device=x.device)
    gate_up = _arguments(inner, x, routes, (ffn, ffn // 8, hidden))
    fill_activation(gate_up, activation, limit)
    grid = _CTAS * sm_count(x.device)
    gate_up.chunks = parts_of(tokens * top_k * gate_up.row_tiles // grid, hidden)
    _launch(weights, gate_up, x.device, grid, gated=True)
    down = _arguments(out, inner, routes, (hidden, hidden // _TILE, ffn))
    fill_shared(down, shared, shared_gate)
    down.chunks = parts_of(tokens * top_k, ffn)
    _launch(weights, down, x.device, min(grid, down.row_tiles), gated=False)
    return out


def _arguments(out: Tensor, x: Tensor, routes: Routes, sizes: tuple[int, int, int]) -> FewArguments:
    """`sizes`: rows of an expert, the tiles that they make, and its columns."""
    (tokens, top_k), (rows, row_tiles, columns) = routes.ids.shape, sizes
    arguments = FewArguments(
        out=out.data_ptr(), x=x.data_ptr(), slope=1.0, tokens=tokens, top_k=top_k, rows=rows, columns=columns,
        tile_rows=_TILE, row_tiles=row_tiles, boxes=-(-columns // _BOX), ld_x=x.stride(0),
    )  # fmt: skip
    fill_plan(arguments, routes)
    return arguments


def _launch(weights: ExpertWeights, few: FewArguments, device: torch.device, grid: int, *, gated: bool) -> None:
    kind, columns = weights.kind, few.columns
    weight, scale, bias, factor = (
        (weights.gate_up, weights.gate_up_scale, weights.gate_up_bias, weights.gate_up_factor)
        if gated
        else (weights.down, weights.down_scale, weights.down_bias, weights.down_factor)
    )
    few.bias = cuda.address_of(bias)
    arguments = PackedArguments(
        few=few, weight=weight.data_ptr(), scales=cuda.address_of(scale), factor=cuda.address_of(factor),
        lines=lines_of(kind, columns, weights.group), next=weights.down.data_ptr() if gated else 0,
        next_rows=weights.hidden if gated else 0, ld_out=-(-few.rows // _BOX) * _BOX,
        group_shift=group_shift(weights, columns),
    )  # fmt: skip
    space = shared_bytes(few.tokens, few.top_k, columns, arguments.lines, kind, gated=gated)
    name = f"{STEM}_{'gate_up' if gated else 'down'}_{kind}"
    chosen = cuda.kernel(STEM, ARCH, name, space, THREADS, device.index or 0)
    cuda.launch(chosen, grid, [arguments], device, pdl=pdl_on(device))
