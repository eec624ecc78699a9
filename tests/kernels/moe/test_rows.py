"""Batch-invariant mixtures on a CPU: a token's bits are the same alone and among any others, and right."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.moe.oracle import random_experts
from tests.kernels.moe.routings import ROUTINGS, draw

from stoker_kernels.moe import ExpertActivation, ExpertKind, Routes, Routing, quantize_experts, reference, rows

PARTS = ((0, 1), (22, 23), (5, 9), (3, 23), (0, 22))


@pytest.mark.parametrize("case", range(len(ROUTINGS)))
def test_choices_do_not_depend_on_other_tokens(case: int) -> None:
    routing, count, with_bias = ROUTINGS[case]
    _, bias = draw(case, 23, count, with_bias)
    logits = torch.randn(23, count, generator=torch.Generator().manual_seed(case)) * 2
    slots = torch.arange(23)
    slots[4::5] = -1
    counts = torch.full((count,), 99, dtype=torch.int32)
    whole = rows.route(logits, routing, bias=bias, slot_mapping=slots, counts=counts)
    want = reference.route(logits, routing, bias=bias, slot_mapping=slots)
    assert torch.equal(whole.ids, want.ids)
    torch.testing.assert_close(whole.weights, want.weights)
    assert counts.tolist() == [int((whole.ids == expert).sum()) for expert in range(count)]
    for first, last in PARTS:
        part = rows.route(logits[first:last], routing, bias=bias, slot_mapping=slots[first:last])
        assert torch.equal(part.ids, whole.ids[first:last])
        assert torch.equal(part.weights, whole.weights[first:last])
    assert rows.route(logits[:0], routing, bias=bias).ids.shape == (0, routing.top_k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "activation", "limit"),
    [
        ("dense", "silu", 0.0),
        ("dense", "clamped", 1.5),
        ("fp8_channel", "silu", 0.0),
        ("fp8_block", "silu", 0.0),
        ("mxfp4", "clamped", 2.0),
    ],
)
def test_experts_do_not_depend_on_other_tokens(
    kind: ExpertKind, activation: ExpertActivation, limit: float, dtype: torch.dtype
) -> None:
    hidden, ffn = (96, 64) if kind == "mxfp4" else (83, 37)
    generator = torch.Generator().manual_seed(hidden + ffn)
    dense = random_experts(5, ffn, hidden, dtype, torch.device("cpu"), bias=activation == "clamped")
    weights = quantize_experts(dense, kind)
    x, shared = (torch.randn(23, hidden, generator=generator).to(dtype) for _ in range(2))
    gate = torch.randn(23, 1, generator=generator).to(dtype)
    slots = torch.arange(23)
    slots[4::7] = -1
    routes = rows.route(torch.randn(23, 5, generator=generator), Routing(2), slot_mapping=slots)
    asked = {"activation": activation, "limit": limit}
    whole = rows.experts(x, routes, weights, shared=shared, shared_gate=gate, **asked)
    want = reference.experts(x, routes, weights, shared=shared, shared_gate=gate, **asked).float()
    error = (whole.float() - want).norm() / want.norm()
    assert error < (1e-5 if dtype is torch.float32 else 1.5e-2) + (3e-2 if kind.startswith("fp8") else 0)
    for first, last in PARTS:
        few = Routes(routes.ids[first:last], routes.weights[first:last])
        part = rows.experts(
            x[first:last], few, weights, shared=shared[first:last], shared_gate=gate[first:last], **asked
        )
        assert torch.equal(part, whole[first:last]), (first, last)
