"""The Hopper kernels of experts for many tokens on a GPU, at the sizes of published models and others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.kernels.moe.test_few_on_gpus import KINDS, SHAPES, dense_of, weights_of

from stoker_kernels.launch import pdl
from stoker_kernels.moe import ExpertKind, ExpertWeights, Routing, keep_experts, reference, triton_route
from stoker_kernels.moe.hopper import sm90_grouped, sm90_packed, sm90_unpacked

pytestmark = pytest.mark.gpu
BOUNDS: dict[ExpertKind, float] = dict.fromkeys(KINDS, 3e-2) | dict.fromkeys(("dense", *sm90_packed.KINDS), 8e-3)


@pytest.fixture(autouse=True)
def _chained(device: torch.device) -> Iterator[None]:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs sm_90")
    pdl.enable_pdl(True)
    yield
    pdl.enable_pdl(False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "skew"), [(37, 0.0), (260, 9.0), (1499, 0.5), (3001, 40.0)])
@pytest.mark.parametrize(("experts", "top_k", "ffn", "hidden"), SHAPES)
def test_a_chain_of_them_gives_the_weighted_sum(
    experts: int, top_k: int, ffn: int, hidden: int, tokens: int, skew: float, kind: ExpertKind,
    device: torch.device,
) -> None:  # fmt: skip
    """Twenty in a graph that overlap, with equal bits: a stage that is read too early would show. `skew` sends most
    tokens to the last experts."""
    dense, weights = dense_of(experts, ffn, hidden, device), weights_of(experts, ffn, hidden, kind, device)
    x, shared = (torch.randn(tokens, hidden, device=device).bfloat16() for _ in range(2))
    logits = torch.randn(tokens, experts, device=device) + torch.linspace(0, skew, experts, device=device)
    routes = triton_route.route(logits, Routing(top_k, renormalize=True))
    asked = {"activation": "clamped", "limit": 7.0, "shared": shared}
    outs = [torch.empty_like(x) for _ in range(20)]
    sm90_grouped.experts(x, routes, weights, out=outs[0], **asked)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        for out in outs:
            sm90_grouped.experts(x, routes, weights, out=out, **asked)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, outs[0]) for out in outs)
    exact = weights
    if kind == "dense":
        exact = ExpertWeights(dense.gate_up.float(), dense.down.float(), gate_up_bias=dense.gate_up_bias,
                              down_bias=dense.down_bias)  # fmt: skip
    expected = reference.experts(x.float(), routes, exact, **asked)
    assert ((outs[0].float() - expected).norm() / expected.norm()).item() < BOUNDS[kind]


def test_a_rank_s_experts_alone(device: torch.device) -> None:
    """Pairs of other ranks' experts stand in the order, and in no tile."""
    weights = weights_of(23, 416, 1120, "dense", device)
    x = torch.randn(700, 1120, device=device).bfloat16()
    routes = triton_route.route(torch.randn(700, 23, device=device), Routing(3, renormalize=True))
    mine = ExpertWeights(weights.gate_up[6:15], weights.down[6:15])
    kept = keep_experts(routes, 6, 9)
    found = sm90_grouped.experts(x, kept, mine)
    expected = reference.experts(x.float(), kept, ExpertWeights(mine.gate_up.float(), mine.down.float()))
    assert ((found.float() - expected).norm() / expected.norm()).item() < 8e-3


@pytest.mark.parametrize("kind", sm90_packed.KINDS)
@pytest.mark.parametrize("at_once", [1, 5, 22])
def test_some_experts_at_a_time_give_the_same_bits(
    kind: ExpertKind, at_once: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What becomes bf16 takes no more than its room, whatever the last part has."""
    weights = weights_of(23, 416, 1120, kind, device)
    x = torch.randn(900, 1120, device=device).bfloat16()
    routes = triton_route.route(torch.randn(900, 23, device=device), Routing(3, renormalize=True, packed=True))
    whole = sm90_grouped.experts(x, routes, weights, activation="clamped", limit=7.0)
    monkeypatch.setattr(sm90_unpacked, "SCRATCH_BYTES", at_once * 2 * 832 * 1120 + 500)
    assert sm90_unpacked.scratch_bytes(23, 416, 1120, gated=True) <= sm90_unpacked.SCRATCH_BYTES
    torch.cuda.reset_peak_memory_stats()
    # What is asked for: the allocator's blocks may be a MiB larger.
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    found = sm90_grouped.experts(x, routes, weights, activation="clamped", limit=7.0)
    taken = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    pairs = 900 * 3 * (416 + 1120) * 2
    assert taken <= sm90_unpacked.SCRATCH_BYTES + pairs + x.nbytes + 4096
    assert torch.equal(found, whole)
