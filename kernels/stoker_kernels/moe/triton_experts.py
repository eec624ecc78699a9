"""The experts' products in Triton: gate and up with their activation, down, and the weighted sum.

The weight is the left side of every product, so that few tokens still make a full tile of the tensor cores. Gate-up
reads activations through the order of the plan, down writes each pair's row to its token's place, and the sum goes over
a token's choices in their order.
Invariants: fp32 sums, one rounding to the result's dtype after the activation, one after down, one after the sum. A
tile without tokens ends at once. Correct for every shape.
Knows nothing of how experts were chosen.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.dispatch import interpreting
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.moe import triton_fp4, triton_int4, triton_int8
from stoker_kernels.moe.operands import groups_of_steps, in_words, read_by_products, step_of, tile_of_rows
from stoker_kernels.moe.tiles import RowTile
from stoker_kernels.moe.types import CLAMPED_SLOPE, ExpertActivation, ExpertWeights, Plan, Routes

DENSE, CHANNEL, BLOCKED, MXFP4, INT4, NVFP4, INT8, INT8_CHANNEL = range(8)
KINDS = {
    "dense": DENSE, "fp8_channel": CHANNEL, "fp8_block": BLOCKED, "mxfp4": MXFP4, "int4": INT4, "nvfp4": NVFP4,
    "int8": INT8, "int8_channel": INT8_CHANNEL,
}  # fmt: skip
SUM_COLUMNS, SUM_WARPS = 1024, 4


@triton.jit
def _part(
    weight, scale, x, row, source, rows, columns, x_stride, inside,
    K: tl.constexpr, BLOCKS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Weight rows [ROWS] × x rows [TOKENS] → fp32 sums [ROWS, TOKENS]; `scale` is of the rows' block, if BLOCKS."""
    sums = tl.zeros((row.shape[0], source.shape[0]), tl.float32)
    for start in range(0, columns, K):
        column = start + tl.arange(0, K)
        a = tl.load(
            weight + row[:, None] * columns + column[None, :],
            mask=(row[:, None] < rows) & (column[None, :] < columns), other=0.0,
        )  # fmt: skip
        b = tl.load(
            x + source[None, :] * x_stride + column[:, None],
            mask=inside[None, :] & (column[:, None] < columns), other=0.0,
        )  # fmt: skip
        if WIDEN:  # Triton's interpreter multiplies fp32 only
            a, b = a.to(tl.float32), b.to(tl.float32)
        if BLOCKS:
            sums += tl.dot(a, b, input_precision="ieee") * tl.load(scale + start // 128)
        else:
            sums = tl.dot(a, b, sums, input_precision="ieee")
    return sums


@triton.jit
def _both(
    gate, gate_scale, up, up_scale, x, row, source, rows, columns, x_stride, inside,
    K: tl.constexpr, BLOCKS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """As `_part` of two weights at once, which read x together."""
    first = tl.zeros((row.shape[0], source.shape[0]), tl.float32)
    second = tl.zeros((row.shape[0], source.shape[0]), tl.float32)
    for start in range(0, columns, K):
        column = start + tl.arange(0, K)
        there = (row[:, None] < rows) & (column[None, :] < columns)
        place = row[:, None] * columns + column[None, :]
        a = tl.load(gate + place, mask=there, other=0.0)
        c = tl.load(up + place, mask=there, other=0.0)
        b = tl.load(
            x + source[None, :] * x_stride + column[:, None],
            mask=inside[None, :] & (column[:, None] < columns), other=0.0,
        )  # fmt: skip
        if WIDEN:
            a, b, c = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
        if BLOCKS:
            first += tl.dot(a, b, input_precision="ieee") * tl.load(gate_scale + start // 128)
            second += tl.dot(c, b, input_precision="ieee") * tl.load(up_scale + start // 128)
        else:
            first = tl.dot(a, b, first, input_precision="ieee")
            second = tl.dot(c, b, second, input_precision="ieee")
    return first, second


@triton.jit
def _settled(sums, scale, x_scale, factor, bias, row, rows, source, inside, KIND: tl.constexpr):
    """The sums with what was left out: channels' and tokens' scales, rows' factors, and the bias."""
    if factor is not None:
        sums *= tl.load(factor + row, mask=row < rows, other=0.0)[:, None]
    if KIND == 1 or KIND == 7:
        sums *= tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
    if KIND == 1 or KIND == 2 or KIND == 7:
        sums *= tl.load(x_scale + source, mask=inside, other=0.0)[None, :]
    if bias is not None:
        sums += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    return sums


@kernel
def gate_up_kernel(
    x, x_scale, weight, scale, factor, bias, order, tiles, out, ffn, hidden, group, x_stride, top_k, limit, slope,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, TOGETHER: tl.constexpr,
    PARTS: tl.constexpr, CLAMPED: tl.constexpr, WIDEN: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    tile = tiles + tl.program_id(1) * 3
    expert, begin, end = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if begin >= end:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = begin + tl.arange(0, TOKENS)
    inside = place < end
    source = (tl.load(order + place, mask=inside, other=0) // top_k).to(tl.int64)
    tall = PARTS * ffn
    if KIND >= 3 and KIND <= 5:
        weight += expert * tall * (hidden // 8)
    else:
        weight += expert * tall * hidden
    gate_scale, up_scale = scale, scale
    if KIND == 1 or KIND == 7:
        gate_scale += expert * tall
        up_scale = gate_scale + ffn
    elif KIND == 2:
        wide, high = tl.cdiv(ffn, 128), tl.cdiv(hidden, 128)
        gate_scale += (expert * PARTS * wide + tl.program_id(0) * ROWS // 128) * high
        up_scale = gate_scale + wide * high
    elif KIND == 3 or KIND == 5:
        gate_scale += expert * triton_fp4.steps_of(hidden, 16 if KIND == 5 else 32) * tall
        up_scale = gate_scale + ffn
    elif KIND == 4 or KIND == 6:
        gate_scale += expert * tl.cdiv(hidden, group) * tall
        up_scale = gate_scale + ffn
    gate_factor, up_factor = factor, factor
    if factor is not None:
        gate_factor += expert * tall
        up_factor = gate_factor + ffn
    gate_bias, up_bias = bias, bias
    if bias is not None:
        gate_bias += expert * tall
        up_bias = gate_bias + ffn
    if PARTS == 1:
        if KIND == 3 or KIND == 5:
            sums = triton_fp4.part(
                weight, gate_scale, x, row, source, ffn, tall, hidden, x_stride, inside, WIDEN, 16 if KIND == 5 else 32
            )
        elif KIND == 4:
            sums = triton_int4.part(
                weight, gate_scale, x, row, source, ffn, tall, hidden, group, x_stride, inside, TOGETHER, WIDEN
            )
        elif KIND == 7:
            sums = triton_int8.product(weight, x, row, source, ffn, hidden, x_stride, inside, K)
        elif KIND == 6:
            sums = triton_int8.part(
                weight, gate_scale, x, row, source, ffn, tall, hidden, group, x_stride, inside, K, WIDEN
            )
        else:
            sums = _part(weight, gate_scale, x, row, source, ffn, hidden, x_stride, inside, K, KIND == 2, WIDEN)
        sums = tl.maximum(
            _settled(sums, gate_scale, x_scale, gate_factor, gate_bias, row, ffn, source, inside, KIND), 0.0
        )
        result = sums * sums
    else:
        if KIND == 3 or KIND == 5:
            gate, up = triton_fp4.both(
                weight, gate_scale, weight + ffn.to(tl.int64) * (hidden // 8), up_scale, x, row, source, ffn, tall,
                hidden, x_stride, inside, WIDEN, 16 if KIND == 5 else 32,
            )  # fmt: skip
        elif KIND == 4:
            gate, up = triton_int4.both(
                weight, gate_scale, weight + ffn.to(tl.int64) * (hidden // 8), up_scale, x, row, source, ffn, tall,
                hidden, group, x_stride, inside, TOGETHER, WIDEN,
            )  # fmt: skip
        elif KIND == 7:
            gate, up = triton_int8.products(
                weight, weight + ffn.to(tl.int64) * hidden, x, row, source, ffn, hidden, x_stride, inside, K
            )
        elif KIND == 6:
            gate, up = triton_int8.both(
                weight, gate_scale, weight + ffn.to(tl.int64) * hidden, up_scale, x, row, source, ffn, tall, hidden,
                group, x_stride, inside, K, WIDEN,
            )  # fmt: skip
        else:
            gate, up = _both(
                weight, gate_scale, weight + ffn.to(tl.int64) * hidden, up_scale, x, row, source, ffn, hidden,
                x_stride, inside, K, KIND == 2, WIDEN,
            )  # fmt: skip
        gate = _settled(gate, gate_scale, x_scale, gate_factor, gate_bias, row, ffn, source, inside, KIND)
        up = _settled(up, up_scale, x_scale, up_factor, up_bias, row, ffn, source, inside, KIND)
        if CLAMPED:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
            result = up * gate * tl.sigmoid(slope * gate)
        else:
            result = gate * tl.sigmoid(gate) * up
    target = out + place[None, :].to(tl.int64) * ffn + row[:, None]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside[None, :] & (row[:, None] < ffn))


@kernel
def down_kernel(
    x, x_scale, weight, scale, factor, bias, order, tiles, out, hidden, ffn, group,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, TOGETHER: tl.constexpr,
    WIDEN: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    tile = tiles + tl.program_id(1) * 3
    expert, begin, end = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if begin >= end:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = begin + tl.arange(0, TOKENS)
    inside = place < end
    pair = tl.load(order + place, mask=inside, other=0).to(tl.int64)
    if KIND >= 3 and KIND <= 5:
        weight += expert * hidden * (ffn // 8)
    else:
        weight += expert * hidden * ffn
    if KIND == 3 or KIND == 5:
        scale += expert * triton_fp4.steps_of(ffn, 16 if KIND == 5 else 32) * hidden
    elif KIND == 4 or KIND == 6:
        scale += expert * tl.cdiv(ffn, group) * hidden
    elif KIND == 1 or KIND == 7:
        scale += expert * hidden
    elif KIND == 2:
        scale += (expert * tl.cdiv(hidden, 128) + tl.program_id(0) * ROWS // 128) * tl.cdiv(ffn, 128)
    if factor is not None:
        factor += expert * hidden
    if bias is not None:
        bias += expert * hidden
    source = place.to(tl.int64)
    if KIND == 3 or KIND == 5:
        sums = triton_fp4.part(
            weight, scale, x, row, source, hidden, hidden, ffn, ffn, inside, WIDEN, 16 if KIND == 5 else 32
        )
    elif KIND == 4:
        sums = triton_int4.part(weight, scale, x, row, source, hidden, hidden, ffn, group, ffn, inside, TOGETHER, WIDEN)
    elif KIND == 7:
        sums = triton_int8.product(weight, x, row, source, hidden, ffn, ffn, inside, K)
    elif KIND == 6:
        sums = triton_int8.part(weight, scale, x, row, source, hidden, hidden, ffn, group, ffn, inside, K, WIDEN)
    else:
        sums = _part(weight, scale, x, row, source, hidden, ffn, ffn, inside, K, KIND == 2, WIDEN)
    sums = _settled(sums, scale, x_scale, factor, bias, row, hidden, source, inside, KIND)
    target = out + pair[None, :] * hidden + row[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=inside[None, :] & (row[:, None] < hidden))


@kernel
def sum_kernel(
    rows, ids, weights, shared, shared_gate, out, hidden, shared_stride,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    sums = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        # A row of no expert was never written.
        there = inside & (tl.load(ids + pair) >= 0)
        row = tl.load(rows + pair * hidden + column, mask=there, other=0.0).to(tl.float32)
        sums += tl.load(weights + pair) * row
    if shared is not None:
        beside = tl.load(shared + token * shared_stride + column, mask=inside, other=0.0).to(tl.float32)
        if shared_gate is not None:
            beside *= tl.sigmoid(tl.load(shared_gate + token).to(tl.float32))
        sums += beside
    tl.store(out + token * hidden + column, sums.to(out.dtype.element_ty), mask=inside)


def experts(
    x: Tensor,
    routes: Routes,
    weights: ExpertWeights,
    *,
    activation: ExpertActivation = "silu",
    limit: float = 0.0,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    out: Tensor | None = None,
    tile: RowTile | None = None,
) -> Tensor:
    """`moe.experts` on CUDA; `routes` has the plan of this package's `route`. `tile`: else it goes by the tokens."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if x.shape[0] == 0:
        return y
    rows = pair_rows(x, routes, weights, activation=activation, limit=limit, tile=tile)
    return sum_pairs(rows, routes, y, shared=shared, shared_gate=shared_gate)


def pair_rows(
    x: Tensor,
    routes: Routes,
    weights: ExpertWeights,
    *,
    activation: ExpertActivation = "silu",
    limit: float = 0.0,
    tile: RowTile | None = None,
) -> Tensor:
    """What each chosen expert gives, at its pair's place: [T·K, H]; rows of no expert are not written."""
    if routes.plan is None:
        raise ValueError("experts on CUDA read the plan of route on CUDA: --kernel route=reference has none")
    inner = _gate_up(x, routes.plan, weights, routes.ids.shape[1], activation, limit, tile)
    return _down(inner, routes.plan, weights, tile)


def sum_pairs(
    rows: Tensor, routes: Routes, out: Tensor, *, shared: Tensor | None = None, shared_gate: Tensor | None = None
) -> Tensor:
    """out [T, H] = the weighted sum of each token's rows, and what is shared."""
    tokens, hidden = out.shape
    sum_kernel[(tokens, triton.cdiv(hidden, SUM_COLUMNS))](
        rows, routes.ids, routes.weights, shared, shared_gate, out, hidden,
        hidden if shared is None else shared.stride(0), TOP_K=routes.ids.shape[1], BLOCK=SUM_COLUMNS,
        num_warps=SUM_WARPS, **launch_options(out.device),
    )  # fmt: skip
    return out


def _gate_up(
    x: Tensor,
    plan: Plan,
    weights: ExpertWeights,
    top_k: int,
    activation: ExpertActivation,
    limit: float,
    tile: RowTile | None,
) -> Tensor:
    """What down reads of each pair, in the plan's order: [T·K, F] of x's dtype."""
    ffn, device = weights.ffn, x.device
    inner = torch.empty((plan.order.shape[0], ffn), dtype=x.dtype, device=device)
    data, scale = read_by_products(x, weights)
    tiles = plan.tiles.shape[0]
    shape = tile or tile_of_rows(weights, plan.tokens, tiles, ffn, device, gated=weights.gated)
    group, together = groups_of_steps(weights, weights.hidden)
    gate_up_kernel[(triton.cdiv(ffn, shape.rows), tiles)](
        data, scale, *in_words(weights.gate_up, weights.gate_up_scale, x.dtype, weights.kind), weights.gate_up_factor,
        weights.gate_up_bias, plan.order, plan.tiles, inner, ffn, weights.hidden, group, data.stride(0), top_k, limit,
        CLAMPED_SLOPE, TOKENS=plan.tokens, ROWS=shape.rows, K=step_of(weights, weights.hidden, shape.columns),
        KIND=KINDS[weights.kind], TOGETHER=together, PARTS=2 if weights.gated else 1, CLAMPED=activation == "clamped",
        WIDEN=interpreting() and x.device.type == "cpu", num_warps=shape.warps, num_stages=shape.stages,
        **launch_options(device),
    )  # fmt: skip
    return inner


def _down(inner: Tensor, plan: Plan, weights: ExpertWeights, tile: RowTile | None) -> Tensor:
    """Each pair's row of down, at the pair's place: [T·K, H]."""
    hidden, device = weights.hidden, inner.device
    rows = torch.empty((inner.shape[0], hidden), dtype=inner.dtype, device=device)
    data, scale = read_by_products(inner, weights)
    tiles = plan.tiles.shape[0]
    shape = tile or tile_of_rows(weights, plan.tokens, tiles, hidden, device, gated=False)
    group, together = groups_of_steps(weights, weights.ffn)
    down_kernel[(triton.cdiv(hidden, shape.rows), tiles)](
        data, scale, *in_words(weights.down, weights.down_scale, inner.dtype, weights.kind), weights.down_factor,
        weights.down_bias, plan.order, plan.tiles, rows, hidden, weights.ffn, group,
        TOKENS=plan.tokens, ROWS=shape.rows, K=step_of(weights, weights.ffn, shape.columns),
        KIND=KINDS[weights.kind], TOGETHER=together, WIDEN=interpreting() and inner.device.type == "cpu",
        num_warps=shape.warps, num_stages=shape.stages, **launch_options(device),
    )  # fmt: skip
    return rows
