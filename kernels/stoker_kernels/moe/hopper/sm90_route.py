"""Choosing experts and sorting tokens by them in one launch of one CTA: host side of csrc/sm90_route.

Invariants: a launch never synchronises and can be captured after one launch of its kind. The plan is the one that
triton_route.py makes, but for the order of its tiles: those with tokens come first.
Does not know: for how many tokens it is faster (`choose`).
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import sm_of
from stoker_kernels.launch.pdl import pdl_on
from stoker_kernels.moe.hopper.sm90_few import ARCH, MOST_EXPERTS, FewArguments, choice_refusal, fill_choice
from stoker_kernels.moe.tiles import plan_sizes
from stoker_kernels.moe.types import Plan, Routes, Routing

STEM = "sm90_route"
MOST_TOKENS = 128
MOST_TOP_K = 32  # a lane each
_WARPS, _MOST_WARPS = 8, 32  # at least as many as MOST_EXPERTS have lanes


class RouteArguments(ctypes.Structure):
    """RouteArguments of csrc/sm90_route.cuh."""

    _fields_ = [
        ("choice", FewArguments),
        *((name, ctypes.c_void_p) for name in ("ids", "weights", "order", "tiles")),
        *((name, ctypes.c_int) for name in ("tile", "most")),
    ]


def refusal(
    logits: Tensor,
    routing: Routing,
    *,
    bias: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    counts: Tensor | None = None,
) -> str | None:
    """None where `route` takes these operands, else why not."""
    if not chip_of(sm_of(logits.device)).wgmma:
        return "runs on sm_90"
    reason = choice_refusal(logits, routing, bias, slot_mapping, counts)
    if reason is not None:
        return reason
    if not 0 < len(logits) <= MOST_TOKENS or routing.top_k > MOST_TOP_K:
        return f"{routing.top_k} choices of {len(logits)} tokens are not 1 to {MOST_TOP_K} of 1 to {MOST_TOKENS}"
    return cuda.missing_cubin(STEM, ARCH)


def shared_bytes(tokens: int, top_k: int, experts: int) -> int:
    """Dynamic shared memory: ids and weights of pairs, a bit a pair and expert, where experts begin, sums of warps."""
    pairs = tokens * top_k
    return 8 * pairs + 4 * (experts * -(-pairs // 32) + experts + _MOST_WARPS)


def route(
    logits: Tensor,
    routing: Routing,
    *,
    bias: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    counts: Tensor | None = None,
) -> Routes:
    """`moe.route` for operands that `refusal` accepts. Raises CubinMissing."""
    (tokens, experts), top_k, device = logits.shape, routing.top_k, logits.device
    sizes = plan_sizes(tokens, top_k, experts, packed=routing.packed)
    routes = Routes(
        torch.empty((tokens, top_k), dtype=torch.int32, device=device),
        torch.empty((tokens, top_k), dtype=torch.float32, device=device),
        Plan(
            torch.empty(tokens * top_k, dtype=torch.int32, device=device),
            torch.empty((sizes.most, 3), dtype=torch.int32, device=device),
            sizes.tile,
            experts,
        ),
    )
    choice = FewArguments(tokens=tokens, top_k=top_k)
    fill_choice(choice, logits, routing, bias, slot_mapping, counts)
    assert routes.plan is not None
    arguments = RouteArguments(
        choice=choice, ids=routes.ids.data_ptr(), weights=routes.weights.data_ptr(), tile=sizes.tile, most=sizes.most,
        order=routes.plan.order.data_ptr(), tiles=routes.plan.tiles.data_ptr(),
    )  # fmt: skip
    warps = min(max(tokens, _WARPS), _MOST_WARPS)
    space = shared_bytes(tokens, top_k, experts)
    chosen = cuda.kernel(STEM, ARCH, STEM, space, 32 * warps, device.index or 0)
    cuda.launch(chosen, 1, [arguments], device, pdl=pdl_on(device))
    return routes


assert MOST_EXPERTS <= 32 * _WARPS
