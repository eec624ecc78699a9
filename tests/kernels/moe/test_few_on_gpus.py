"""The Hopper kernels of experts for few tokens on a GPU, at the sizes of published models and others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.kernels.moe.oracle import random_experts
from tests.kernels.moe.test_on_device import check_plan
from tests.kernels.moe.test_sm90_few_choice import KINDS_OF_LOGITS, WAYS, drawn

from stoker_kernels.gemm import linear
from stoker_kernels.launch import pdl
from stoker_kernels.moe import ExpertKind, ExpertWeights, Routing, quantize_experts, reference, triton_route
from stoker_kernels.moe.hopper import sm90_few, sm90_packed, sm90_route
from stoker_kernels.norm import add_rms_norm
from stoker_kernels.quant import LinearWeight

pytestmark = pytest.mark.gpu
KINDS: tuple[ExpertKind, ...] = ("dense", "fp8_channel", "fp8_block", *sm90_packed.KINDS)
SHAPES = [(128, 8, 768, 2048), (32, 4, 2880, 2880), (23, 3, 416, 1120)]


@pytest.fixture
def chained(device: torch.device) -> Iterator[None]:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs sm_90")
    pdl.enable_pdl(True)
    yield
    pdl.enable_pdl(False)


@functools.lru_cache(maxsize=1)
def dense_of(experts: int, ffn: int, hidden: int, device: torch.device) -> ExpertWeights:
    """Drawn once for all tests of a shape: it takes seconds."""
    return random_experts(experts, ffn, hidden, torch.bfloat16, device, bias=True, seed=experts)


@functools.lru_cache(maxsize=3)
def weights_of(experts: int, ffn: int, hidden: int, kind: ExpertKind, device: torch.device) -> ExpertWeights:
    """The same in this kind."""
    group = {768: 128, 2880: 32}.get(ffn, 0)  # of integers; else whole rows
    return quantize_experts(dense_of(experts, ffn, hidden, device), kind, group)


@pytest.mark.usefixtures("chained")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
@pytest.mark.parametrize(("experts", "top_k", "ffn", "hidden"), SHAPES)
def test_a_chain_of_them_gives_the_weighted_sum(
    experts: int, top_k: int, ffn: int, hidden: int, tokens: int, kind: ExpertKind, whole: bool, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Forty launches that overlap, with equal bits: a stage that is read too early would show."""
    monkeypatch.setattr(sm90_few, "WHOLE_ROWS", range(1, 9) if whole else range(0))
    dense, weights = dense_of(experts, ffn, hidden, device), weights_of(experts, ffn, hidden, kind, device)
    kernels = sm90_packed if weights.in_four_bits else sm90_few
    if whole and kernels is sm90_packed:
        pytest.skip("takes whole rows always")
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    logits = torch.randn(tokens, experts, device=device)
    routes = triton_route.route(logits, Routing(top_k, renormalize=True))
    reason = kernels.refusal(x, routes, weights, None)
    if reason is not None and "shared memory" in reason:
        pytest.skip(reason)
    assert reason is None
    outs = [torch.empty_like(x) for _ in range(40)]
    kernels.experts(x, routes, weights, outs[0], activation="clamped", limit=7.0)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        for out in outs:
            kernels.experts(x, routes, weights, out, activation="clamped", limit=7.0)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, outs[0]) for out in outs)
    exact = weights
    if kind == "dense":
        exact = ExpertWeights(dense.gate_up.float(), dense.down.float(), gate_up_bias=dense.gate_up_bias,
                              down_bias=dense.down_bias)  # fmt: skip
    expected = reference.experts(x.float(), routes, exact, activation="clamped", limit=7.0)
    bound = 3e-2 if kind in ("fp8_channel", "fp8_block") else 8e-3
    assert ((outs[0].float() - expected).norm() / expected.norm()).item() < bound


@pytest.mark.usefixtures("chained")
@pytest.mark.parametrize("way", KINDS_OF_LOGITS)
@pytest.mark.parametrize(("routing", "experts", "with_bias"), WAYS)
def test_they_choose_as_the_reference(
    routing: Routing, experts: int, with_bias: bool, way: str, device: torch.device
) -> None:
    """And give what these give. `counts` names the experts."""
    for seed in range(8):
        generator, tokens = torch.Generator().manual_seed(seed), 1 + seed % min(4, 32 // routing.top_k)
        logits = drawn(way, tokens, experts, generator).to(device)
        bias = (torch.randint(-8, 8, (experts,), generator=generator) / 8).to(device) if with_bias else None
        weights = random_experts(experts, 64, 160, torch.bfloat16, device, seed=seed)
        x = torch.randn(tokens, 160, generator=generator).bfloat16().to(device)
        routes = reference.route(logits, routing, bias=bias)
        counts, out = torch.full((experts,), -7, dtype=torch.int32, device=device), torch.empty_like(x)
        assert sm90_few.mixture_refusal(x, logits, routing, weights, None) is None
        sm90_few.mixture(x, logits, routing, weights, out, bias=bias, counts=counts)
        assert torch.equal(counts, torch.bincount(routes.ids.flatten(), minlength=experts).int())
        exact = ExpertWeights(weights.gate_up.float(), weights.down.float())
        expected = reference.experts(x.float(), routes, exact)
        assert ((out.float() - expected).norm() <= 8e-3 * expected.norm()).item()


@pytest.mark.usefixtures("chained")
@pytest.mark.parametrize("kind", ["dense", "fp8_channel", "fp8_block"])
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize(("experts", "top_k", "ffn", "hidden"), SHAPES)
def test_a_chain_that_chooses_has_the_bits_of_its_steps(
    experts: int, top_k: int, ffn: int, hidden: int, tokens: int, kind: ExpertKind, device: torch.device
) -> None:
    """Norm, router, experts, thirty times in a graph, and one by one: logits that are read too early would show."""
    weights = weights_of(experts, ffn, hidden, kind, device)
    routers = [LinearWeight(torch.randn(experts, hidden, device=device).bfloat16() / hidden**0.5) for _ in range(30)]
    x, ones = torch.randn(tokens, hidden, device=device).bfloat16(), torch.ones(hidden, device=device).bfloat16()
    routing, slots = Routing(top_k, renormalize=True), torch.arange(tokens, device=device)

    def chain(residual: torch.Tensor, wait: Callable[[], None]) -> list[torch.Tensor]:
        found, out = [], x
        for router in routers:
            normed = add_rms_norm(out, residual, ones, 1e-6)
            wait()
            logits, out = linear(normed, router), torch.empty_like(x)
            wait()
            counts = torch.full((experts,), -7, dtype=torch.int32, device=device)
            assert sm90_few.mixture_refusal(normed, logits, routing, weights, None) is None
            sm90_few.mixture(normed, logits, routing, weights, out, slot_mapping=slots, counts=counts)
            wait()
            found += [out, counts]
        return found

    pdl.enable_pdl(False)
    expected = chain(x.clone(), torch.cuda.synchronize)
    pdl.enable_pdl(True)
    chain(x.clone(), torch.cuda.synchronize)  # loads what a graph cannot
    residual, stream, graph = x.clone(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        got = chain(residual, lambda: None)
    for _ in range(3):
        residual.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))
    assert all(int(counts.sum()) == tokens * top_k for counts in expected[1::2])


@pytest.mark.usefixtures("chained")
@pytest.mark.parametrize("way", KINDS_OF_LOGITS)
@pytest.mark.parametrize(("routing", "experts", "with_bias"), WAYS)
def test_one_launch_chooses_and_sorts_as_the_reference(
    routing: Routing, experts: int, with_bias: bool, way: str, device: torch.device
) -> None:
    """In a graph that writes the logits right before, so that a choice made too early would show."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        tokens = int(torch.randint(1, sm90_route.MOST_TOKENS + 1, (1,), generator=generator))
        source = drawn(way, tokens, experts, generator).contiguous().to(device)
        bias = (torch.randint(-8, 8, (experts,), generator=generator) / 8).to(device) if with_bias else None
        logits, counts = torch.zeros_like(source), torch.full((experts,), -7, dtype=torch.int32, device=device)
        assert sm90_route.refusal(logits, routing, bias=bias, counts=counts) is None
        sm90_route.route(logits, routing, bias=bias, counts=counts)  # loads what a graph cannot
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
            logits.copy_(source)
            found = sm90_route.route(logits, routing, bias=bias, counts=counts)
        for _ in range(3):
            logits.zero_()
            graph.replay()
        torch.cuda.synchronize()
        expected = reference.route(source, routing, bias=bias)
        assert torch.equal(found.ids, expected.ids)
        torch.testing.assert_close(found.weights, expected.weights, rtol=1e-4, atol=1e-7)
        check_plan(found, experts)
        assert torch.equal(counts, torch.bincount(expected.ids.flatten(), minlength=experts).int())
