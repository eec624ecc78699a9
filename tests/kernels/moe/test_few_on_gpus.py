"""The Hopper kernels of experts for few tokens on a GPU, at the sizes of published models and others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.kernels.moe.oracle import random_experts

from stoker_kernels.launch import pdl
from stoker_kernels.moe import ExpertWeights, Routing, quantize_experts, reference, sm90_few, triton_route

pytestmark = pytest.mark.gpu
SHAPES = [(128, 8, 768, 2048), (32, 4, 2880, 2880), (23, 3, 416, 1120)]


@pytest.fixture
def chained(device: torch.device) -> Iterator[None]:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs sm_90")
    pdl.enable_pdl(True)
    yield
    pdl.enable_pdl(False)


@pytest.mark.usefixtures("chained")
@pytest.mark.parametrize("kind", ["dense", "fp8_channel", "fp8_block"])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
@pytest.mark.parametrize(("experts", "top_k", "ffn", "hidden"), SHAPES)
def test_a_chain_of_them_gives_the_weighted_sum(
    experts: int, top_k: int, ffn: int, hidden: int, tokens: int, kind: str, device: torch.device
) -> None:
    """Forty launches that overlap, with equal bits: a stage that is read too early would show."""
    dense = random_experts(experts, ffn, hidden, torch.bfloat16, device, bias=True, seed=tokens)
    weights = quantize_experts(dense, kind)  # type: ignore[arg-type]
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    logits = torch.randn(tokens, experts, device=device)
    routes = triton_route.route(logits, Routing(top_k, renormalize=True))
    reason = sm90_few.refusal(x, routes, weights, None)
    if reason is not None and "shared memory" in reason:
        pytest.skip(reason)
    assert reason is None
    outs = [torch.empty_like(x) for _ in range(40)]
    sm90_few.experts(x, routes, weights, outs[0], activation="clamped", limit=7.0)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        for out in outs:
            sm90_few.experts(x, routes, weights, out, activation="clamped", limit=7.0)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, outs[0]) for out in outs)
    exact = weights
    if kind == "dense":
        exact = ExpertWeights(dense.gate_up.float(), dense.down.float(), gate_up_bias=dense.gate_up_bias,
                              down_bias=dense.down_bias)  # fmt: skip
    expected = reference.experts(x.float(), routes, exact, activation="clamped", limit=7.0)
    bound = 8e-3 if kind == "dense" else 3e-2
    assert ((outs[0].float() - expected).norm() / expected.norm()).item() < bound
