"""The reference of mixtures of experts, which CPUs serve with, against plain loops."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.moe.oracle import chosen, mixed, random_experts
from tests.kernels.moe.routings import ROUTINGS, draw

from stoker_kernels.moe import ExpertWeights, Routes, Routing, experts, quantize_experts, route

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", range(len(ROUTINGS)))
def test_choices_are_those_of_the_definition(case: int) -> None:
    routing, count, with_bias = ROUTINGS[case]
    logits, bias = draw(case, 23, count, with_bias)
    counts = torch.full((count,), 99, dtype=torch.int32)
    found = route(logits, routing, bias=bias, counts=counts)
    for row, ids, weights in zip(logits.tolist(), found.ids.tolist(), found.weights.tolist(), strict=True):
        expected = chosen(row, routing, None if bias is None else bias.tolist())
        assert ids == [expert for expert, _ in expected]
        assert weights == pytest.approx([weight for _, weight in expected], rel=1e-5)
    assert counts.tolist() == [int((found.ids == expert).sum()) for expert in range(count)]


def test_padding_chooses_nothing() -> None:
    slots = torch.tensor([7, -1, 0, -1])
    counts = torch.empty(6, dtype=torch.int32)
    found = route(torch.randn(4, 6), Routing(3), slot_mapping=slots, counts=counts)
    assert found.ids[1].tolist() == found.ids[3].tolist() == [-1, -1, -1]
    assert found.ids[0].min() >= 0
    assert int(counts.sum()) == 6


@pytest.mark.parametrize("activation", ["silu", "clamped"])
@pytest.mark.parametrize("tokens", [1, 13])
def test_experts_give_the_weighted_sum(tokens: int, activation: str) -> None:
    weights = random_experts(6, 10, 14, torch.float32, CPU, bias=activation == "clamped", seed=tokens)
    x, shared, gate = torch.randn(tokens, 14), torch.randn(tokens, 14), torch.randn(tokens, 1)
    found = route(torch.randn(tokens, 6), Routing(3, renormalize=True))
    for beside, by in ((None, None), (shared, None), (shared, gate)):
        got = experts(x, found, weights, activation=activation, limit=0.7, shared=beside, shared_gate=by)  # type: ignore[arg-type]
        expected = mixed(x, found.ids, found.weights, weights, activation, 0.7, beside, by)  # type: ignore[arg-type]
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["fp8_channel", "fp8_block"])
def test_quantized_experts_stay_near_their_own(kind: str) -> None:
    dense = random_experts(4, 150, 200, torch.float32, CPU)
    x, found = torch.randn(9, 200), route(torch.randn(9, 4), Routing(2))
    quantized = quantize_experts(dense, kind)  # type: ignore[arg-type]
    exact = experts(x, found, dense)
    got = experts(x, found, quantized)
    error = ((got - exact).norm() / exact.norm()).item()
    assert 0.01 < error < 0.08  # e4m3 keeps four bits


def test_what_does_not_fit_is_refused() -> None:
    weights = random_experts(4, 8, 6, torch.float32, CPU)
    with pytest.raises(ValueError, match="gate_up is"):
        ExpertWeights(weights.gate_up[:, :-2], weights.down)
    with pytest.raises(ValueError, match="have scales"):
        ExpertWeights(weights.gate_up, weights.down, "fp8_channel")
    with pytest.raises(ValueError, match="cannot be chosen"):
        route(torch.randn(2, 4), Routing(5))
    with pytest.raises(ValueError, match="cannot be chosen"):
        route(torch.randn(2, 12), Routing(5, groups=3, top_groups=1))
    with pytest.raises(ValueError, match="counts is"):
        route(torch.randn(2, 4), Routing(2), counts=torch.empty(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="x is"):
        experts(torch.randn(3, 5), route(torch.randn(3, 4), Routing(2)), weights)
    with pytest.raises(ValueError, match="neither groups"):
        Routing(2, "sparsemixer", renormalize=True)


def test_a_token_without_experts_gets_what_is_shared() -> None:
    weights = random_experts(4, 8, 6, torch.float32, CPU)
    nothing = Routes(torch.full((2, 3), -1, dtype=torch.int32), torch.full((2, 3), float("nan")))
    shared = torch.randn(2, 6)
    assert torch.equal(experts(torch.randn(2, 6), nothing, weights), torch.zeros(2, 6))
    assert torch.equal(experts(torch.randn(2, 6), nothing, weights, shared=shared), shared)
