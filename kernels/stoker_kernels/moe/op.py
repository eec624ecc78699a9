"""Mixtures of experts: `route` chooses each token's experts, `experts` runs them and adds up what they give; `mixture`
does both.

Invariants: a token's result depends on its own row and on how many tokens and experts there are, never on what the
other rows hold; sums have a fixed order and no atomics. Launch sizes follow from shapes alone and nothing waits for the
host, so a CUDA graph may capture both.
Does not know: which layer it serves, nor how the router's logits were made.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stoker_kernels.launch import cpu_dot, cuda
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import (
    Target,
    cpu_supports,
    reference_supports,
    register,
    register_invariant,
    select,
    triton_supports,
)
from stoker_kernels.moe import choose
from stoker_kernels.moe.types import ExpertActivation, ExpertWeights, Routes, Routing, given
from stoker_kernels.quant import FP8

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
register("route", "own", "stoker_kernels.moe.choose:route", triton_supports(torch.bfloat16, min_sm=90))
register("route", "triton", "stoker_kernels.moe.triton_route:route", triton_supports(*_FLOATS))
register("route", "reference", "stoker_kernels.moe.reference:route", reference_supports)
for _name, _path, _supports in (
    ("triton", "triton_keep", triton_supports(torch.int32)),
    ("reference", "reference", reference_supports),
):
    register("keep_experts", _name, f"stoker_kernels.moe.{_path}:keep_experts", _supports, invariant=True)
_STORED = (FP8, torch.uint8, torch.int8)


def _grouped_support(target: Target) -> str | None:
    if target.device != "cuda" or not chip_of(target.sm).wgmma:
        return "needs sm_90"
    if target.dtype not in (torch.bfloat16, FP8):
        return "takes bfloat16, float8_e4m3fn"
    return cuda.missing_cubin("sm90_grouped_experts", "sm_90a")


register("experts", "own", "stoker_kernels.moe.choose:experts", triton_supports(*_FLOATS, *_STORED))
register("experts", "triton", "stoker_kernels.moe.triton_experts:experts", triton_supports(*_FLOATS, *_STORED))
register("experts", "grouped", "stoker_kernels.moe.hopper.sm90_grouped:experts", _grouped_support)
register("experts", "reference", "stoker_kernels.moe.reference:experts", reference_supports)
register("mixture", "fused", "stoker_kernels.moe.fused:fused", triton_supports(torch.bfloat16, FP8, min_sm=90))
register("mixture", "split", "stoker_kernels.moe.fused:split", lambda _: None, invariant=True)


def _rows_support(target: Target) -> str | None:
    return cpu_supports(torch.bfloat16, torch.float32, *_STORED)(target) or cpu_dot.refusal()


register_invariant("route", "fixed", "stoker_kernels.moe.fixed:route", triton_supports(*_FLOATS))
register_invariant("route", "rows", "stoker_kernels.moe.rows:route", cpu_supports(*_FLOATS))
register_invariant(
    "experts", "fixed", "stoker_kernels.moe.fixed:experts", triton_supports(torch.bfloat16, *_STORED, min_sm=90)
)
register_invariant("experts", "rows", "stoker_kernels.moe.rows:experts", _rows_support)


def route(
    logits: Tensor,
    routing: Routing,
    *,
    bias: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    counts: Tensor | None = None,
) -> Routes:
    """The experts of each token: logits [T, E] → `Routes`, best first; of equals the first.

    bias: the correction, [E] fp32, added to the scores for the choice alone. slot_mapping: [T] int64; a token whose
    slot is negative is padding and gets no expert. counts: [E] int32, set to the tokens that each expert gets.
    Raises ValueError for shapes that do not fit.
    """
    _check_choice(logits, routing, bias, slot_mapping, counts)
    found: Routes = select("route", logits.device, logits.dtype)(
        logits, routing, bias=bias, slot_mapping=slot_mapping, counts=counts
    )
    return found


def keep_experts(routes: Routes, first: int, count: int) -> Routes:
    """The routes to the experts [first, first + count), which have the numbers from 0 on in it; others are left out.

    What a token's left-out experts would give is missing from its sum: for ranks that add up theirs.
    """
    found: Routes = select("keep_experts", routes.ids.device, routes.ids.dtype)(routes, first, count)
    return found


def experts(
    x: Tensor,
    routes: Routes,
    weights: ExpertWeights,
    *,
    activation: ExpertActivation = "silu",
    limit: float = 0.0,
    shared: Tensor | Callable[[], Tensor] | None = None,
    shared_gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Σ over a token's experts of weight · down(act(gate) · up): x [T, H] float → [T, H] of x's dtype.

    Experts in FP8, and those in INT8 by channels, read x, and the product of gate and up, quantized per token. shared:
    [T, H], added to the sum, times sigmoid(shared_gate) [T, 1] where that is given; a function that gives it is called
    once, behind what does not read it. `limit` is the bound of the activation "clamped".
    A token without experts gets what is shared, or zeros. Experts without a gate give down(relu(up)²), "relu2". Raises
    ValueError for shapes that do not fit, KernelUnavailable where nothing takes the weights' dtype.
    """
    _check_experts(x, routes.ids, weights, activation)
    run = select("experts", x.device, weights.down.dtype)
    late = shared if callable(shared) and run is choose.experts else given(shared, x)
    y: Tensor = run(
        x, routes, weights, activation=activation, limit=limit, shared=late, shared_gate=shared_gate, out=out
    )
    return y


def mixture(
    x: Tensor,
    logits: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    *,
    bias: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    counts: Tensor | None = None,
    activation: ExpertActivation = "silu",
    limit: float = 0.0,
    shared: Tensor | Callable[[], Tensor] | None = None,
    shared_gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`experts` with what `route` chooses from logits [T, E]: [T, H]. Arguments and errors are theirs."""
    _check_choice(logits, routing, bias, slot_mapping, counts)
    _check_experts(x, logits, weights, activation)
    if logits.shape[1] != weights.experts:
        raise ValueError(f"logits are {tuple(logits.shape)}, of {weights.experts} experts")
    y: Tensor = select("mixture", x.device, weights.down.dtype)(
        x, logits, routing, weights, bias=bias, slot_mapping=slot_mapping, counts=counts, activation=activation,
        limit=limit, shared=shared, shared_gate=shared_gate, out=out,
    )  # fmt: skip
    return y


def _check_choice(
    logits: Tensor, routing: Routing, bias: Tensor | None, slot_mapping: Tensor | None, counts: Tensor | None
) -> None:
    if logits.dim() != 2:
        raise ValueError(f"logits are {tuple(logits.shape)}, not [T, E]")
    routing.check(logits.shape[1])
    for name, other, length in (("bias", bias, 1), ("slot_mapping", slot_mapping, 0), ("counts", counts, 1)):
        if other is not None and other.shape != logits.shape[length : length + 1]:
            raise ValueError(f"{name} is {tuple(other.shape)}, the logits are {tuple(logits.shape)}")


def _check_experts(x: Tensor, choices: Tensor, weights: ExpertWeights, activation: ExpertActivation) -> None:
    """`choices`: [T, …]."""
    if weights.gated == (activation == "relu2"):
        raise ValueError(f"experts {'with' if weights.gated else 'without'} a gate have no activation {activation!r}")
    if x.dim() != 2 or x.shape[1] != weights.hidden or choices.shape[0] != x.shape[0]:
        raise ValueError(
            f"x is {tuple(x.shape)}, choices {tuple(choices.shape)}, down [E, H, F] = {tuple(weights.down.shape)}"
        )
