"""Experts for many tokens on Hopper, where operations are the limit, or the bytes of all experts: host side of
csrc/sm90_grouped_experts.

Three launches: gate-up with its activation, which reads rows of x where the tokens are; down, each pair's row at its
place; the weighted sum of `triton_experts`. Activations of experts in FP8 are quantized by kernels of their own, and
experts in four bits become bf16 before, some at a time (`sm90_unpacked`). CTAs find their tiles on the device from the
plan, whatever number of tokens its own tiles hold.
Invariants: a launch never synchronises and can be captured after one launch of its kind; a token's bits depend on its
own row and choices alone.
Does not know: for how many tokens other kernels are faster (`choose`).
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.launch.dispatch import sm_count
from stoker_kernels.launch.pdl import pdl_on
from stoker_kernels.moe.hopper import sm90_packed, sm90_unpacked
from stoker_kernels.moe.hopper.operands import KINDS, operands_refusal
from stoker_kernels.moe.operands import read_by_products
from stoker_kernels.moe.types import CLAMPED_SLOPE, ExpertActivation, ExpertKind, ExpertWeights, Plan, Routes

STEM, ARCH = "sm90_grouped_experts", "sm_90a"
TOKENS = 128  # of a CTA's tile
ROWS = 256  # of a weight in a tile: of gate and of up half as many each
THREADS = 3 * 128
MOST_EXPERTS = 2048
_STAGES = 4  # of 128 bytes of rows of x and of the weight


class GroupedArguments(ctypes.Structure):
    """GroupedArguments of csrc/grouped_arguments.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "x", "bias", "w_scale", "x_scale", "order", "tiles")),
        *((name, ctypes.c_float) for name in ("limit", "slope")),
        *((name, ctypes.c_int) for name in ("clamped", "num_tiles", "experts", "top_k", "n", "rows")),
        *((name, ctypes.c_int) for name in ("row_blocks", "k_blocks", "stages", "x_bytes", "ld_x", "first_expert")),
    ]


@dataclass(frozen=True, slots=True)
class Product:
    """Gate and up, or down, of the experts from `first` on; `fresh`: written by the launch before."""

    weight: Tensor
    kind: ExpertKind
    scale: Tensor | None
    bias: Tensor | None
    first: int = 0
    fresh: bool = False


def tokens_an_expert(routes: Routes) -> float:
    """In the mean; `routes` has a plan."""
    assert routes.plan is not None
    return routes.ids.numel() / routes.plan.experts


def tiles_of(weights: ExpertWeights, tokens: float) -> int:
    """Tiles of the smaller product for so many tokens an expert."""
    rows = min(weights.gate_up.shape[1], weights.hidden)
    return weights.experts * math.ceil(tokens / TOKENS) * math.ceil(rows / ROWS)


def shared_bytes(experts: int) -> int:
    """Dynamic shared memory: the ring on a multiple of 1024 bytes, two barriers a stage, the experts' places."""
    return 1024 + _STAGES * ((ROWS + TOKENS) * 128 + 16) + 8 * experts


def refusal(x: Tensor, routes: Routes, weights: ExpertWeights, shared: Tensor | None) -> str | None:
    """None where `experts` takes these operands, else why not."""
    if routes.plan is None:
        return "reads the plan of route on CUDA: --kernel route=reference has none"
    reason = operands_refusal(x, weights, shared, (*KINDS, *sm90_packed.KINDS))
    if reason is None and weights.in_four_bits:
        reason = sm90_unpacked.refusal(weights)
    if reason is not None:
        return reason
    if weights.experts > MOST_EXPERTS:
        return f"{weights.experts} experts are more than {MOST_EXPERTS}"
    return cuda.missing_cubin(STEM, ARCH)


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
) -> Tensor:
    """`moe.experts` by these kernels. Raises ValueError with the reason for operands that `refusal` refuses."""
    from stoker_kernels.moe import triton_experts

    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if x.shape[0] == 0:
        return y
    reason = refusal(x, routes, weights, shared)
    if reason is not None:
        raise ValueError(f"--kernel experts=grouped {reason}")
    rows = pair_rows(x, routes, weights, activation=activation, limit=limit)
    return triton_experts.sum_pairs(rows, routes, y, shared=shared, shared_gate=shared_gate)


def pair_rows(
    x: Tensor, routes: Routes, weights: ExpertWeights, *, activation: ExpertActivation = "silu", limit: float = 0.0
) -> Tensor:
    """What each chosen expert gives, at its pair's place: [T·K, H]; rows of no expert are not written.

    For operands that `refusal` accepts. Raises CubinMissing.
    """
    plan, top_k = routes.plan, routes.ids.shape[1]
    assert plan is not None
    inner = torch.empty((plan.order.shape[0], weights.ffn), dtype=x.dtype, device=x.device)
    _multiply(inner, x, plan, weights, top_k, gated=True, limit=limit, clamped=int(activation == "clamped"))
    rows = torch.empty((plan.order.shape[0], weights.hidden), dtype=x.dtype, device=x.device)
    _multiply(rows, inner, plan, weights, top_k, gated=False)
    return rows


def _multiply(
    out: Tensor, x: Tensor, plan: Plan, weights: ExpertWeights, top_k: int, *, gated: bool, **activation: float
) -> None:
    """One of the two products; what it made of weights is gone afterwards."""
    data, x_scale = read_by_products(x, weights)
    for product in _products(weights, gated=gated):
        arguments = _arguments(out, data, x_scale, plan, product, top_k)
        for name, value in activation.items():
            setattr(arguments, name, value)
        _launch(product, arguments, data, gated=gated)


def _products(weights: ExpertWeights, *, gated: bool) -> Iterator[Product]:
    weight, scale, bias = (
        (weights.gate_up, weights.gate_up_scale, weights.gate_up_bias)
        if gated
        else (weights.down, weights.down_scale, weights.down_bias)
    )
    if not weights.in_four_bits:
        yield Product(weight, weights.kind, scale, bias)
        return
    for first, some in sm90_unpacked.unpacked(weights, gated=gated):
        yield Product(some, "dense", None, None if bias is None else bias[first:], first, fresh=True)


def _arguments(
    out: Tensor, x: Tensor, x_scale: Tensor | None, plan: Plan, product: Product, top_k: int
) -> GroupedArguments:
    weight, size = product.weight, x.element_size()
    experts, height, columns = weight.shape
    return GroupedArguments(
        out=out.data_ptr(), x=x.data_ptr(), bias=cuda.address_of(product.bias),
        w_scale=cuda.address_of(product.scale), x_scale=cuda.address_of(x_scale), order=plan.order.data_ptr(),
        tiles=plan.tiles.data_ptr(), slope=CLAMPED_SLOPE, num_tiles=plan.tiles.shape[0], experts=experts, top_k=top_k,
        n=out.shape[1], rows=height, row_blocks=-(-height // ROWS), k_blocks=-(-columns * size // 128), stages=_STAGES,
        x_bytes=columns * size, ld_x=x.stride(0) * size, first_expert=product.first,
    )  # fmt: skip


def _launch(product: Product, arguments: GroupedArguments, x: Tensor, *, gated: bool) -> None:
    device, weight = x.device, product.weight
    name = f"{STEM}_{'gate_up' if gated else 'down'}_{product.kind}"
    chosen = cuda.kernel(STEM, ARCH, name, shared_bytes(len(weight)), THREADS, device.index or 0)
    w_map = _weight_map(weight.data_ptr(), tuple(weight.shape), weight.element_size(), gated)
    # Gate-up reads x by no map, but a kernel has two.
    x_map = w_map if gated else cuda.tensor_map(x, 64)
    # Rows of the weight are asked for before the wait for the launch before, which may not be the one that writes them.
    pdl = pdl_on(device) and not product.fresh
    cuda.launch(chosen, sm_count(device), [w_map, x_map, arguments], device, pdl=pdl)


@functools.cache
def _weight_map(
    address: int, shape: tuple[int, int, int], element_size: int, gated: bool
) -> ctypes.Array[ctypes.c_char]:
    """Of boxes of 256 rows, of gate and up by eights in turn."""
    experts, height, columns = shape
    if gated:
        return cuda.paired_map_at(address, height, columns, element_size, ROWS, experts)
    return cuda.tensor_map_at(address, experts * height, columns, columns, element_size, ROWS)
