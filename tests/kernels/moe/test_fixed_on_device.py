"""Batch-invariant mixtures on a GPU: a token's bits are the same in tiles of any size, and right."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.moe.oracle import random_experts
from tests.kernels.moe.routings import ROUTINGS

from stoker_kernels.launch.dispatch import interpreting
from stoker_kernels.moe import ExpertActivation, ExpertKind, Routing, fixed, quantize_experts, reference, triton_experts
from stoker_kernels.moe.tiles import fixed_sizes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.matrix(take=4)
@pytest.mark.parametrize("case", range(len(ROUTINGS)))
def test_choices_do_not_depend_on_other_tokens(case: int, device: torch.device) -> None:
    routing, count, with_bias = ROUTINGS[case]
    generator = torch.Generator().manual_seed(case)
    logits = (torch.randn(41, count, generator=generator) * 2).to(device)
    bias = torch.rand(count, generator=generator).to(device) if with_bias else None
    whole = fixed.route(logits, routing, bias=bias)
    want = reference.route(logits.cpu(), routing, bias=None if bias is None else bias.cpu())
    assert torch.equal(whole.ids.cpu(), want.ids)
    torch.testing.assert_close(whole.weights.cpu(), want.weights, rtol=1e-4, atol=1e-6)
    for first, last in ((0, 1), (40, 41), (7, 9), (3, 20), (1, 41)):
        part = fixed.route(logits[first:last].clone(), routing, bias=bias)
        assert torch.equal(part.ids, whole.ids[first:last])
        assert torch.equal(part.weights, whole.weights[first:last])
        assert part.plan is not None
        covered = sum(max(0, end - begin) for _, begin, end in part.plan.tiles.tolist())
        assert covered == part.ids.numel()


def check(
    kind: ExpertKind, tokens: int, counts: tuple[int, ...], hidden: int, ffn: int, count: int, routing: Routing,
    activation: ExpertActivation, device: torch.device,
) -> None:  # fmt: skip
    """Some tokens among `tokens`, and by themselves."""
    generator = torch.Generator().manual_seed(tokens)
    dtype = torch.bfloat16
    dense = random_experts(count, ffn, hidden, dtype, device, bias=activation == "clamped")
    weights = quantize_experts(dense, kind)
    x, shared = (torch.randn(tokens, hidden, generator=generator).to(dtype).to(device) for _ in range(2))
    logits = torch.randn(tokens, count, generator=generator).to(device)
    asked = {"activation": activation, "limit": 2.0}
    routes = fixed.route(logits, routing)
    whole = fixed.experts(x, routes, weights, shared=shared, **asked)
    usual = triton_experts.experts(x, routes, weights, shared=shared, **asked)
    assert (whole.float() - usual.float()).norm() < 1e-2 * usual.float().norm()
    seen = set()
    for few in counts:
        for first in {0, (tokens - few) // 2, tokens - few}:
            part = slice(first, first + few)
            own = fixed.route(logits[part].clone(), routing)
            got = fixed.experts(x[part].clone(), own, weights, shared=shared[part].clone(), **asked)
            assert torch.equal(got, whole[part]), f"{kind}: {few} tokens from {first}"
        seen.add(fixed_sizes(few, routing.top_k, count).tile)
    assert len(seen | {fixed_sizes(tokens, routing.top_k, count).tile}) > 1, "tiles of one size prove nothing"


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "activation"), [("dense", "silu"), ("dense", "clamped"), ("mxfp4", "clamped")])
def test_experts_do_not_depend_on_other_tokens(
    kind: ExpertKind, activation: ExpertActivation, device: torch.device
) -> None:
    hidden, ffn = (96, 64) if kind == "mxfp4" else (80, 48)
    check(kind, 40, (1, 3, 17), hidden, ffn, 3, Routing(2, renormalize=True), activation, device)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "fp8_channel", "fp8_block", "mxfp4", "nvfp4"])
@pytest.mark.parametrize(
    ("hidden", "ffn", "count", "top_k"), [(2048, 768, 128, 8), (2880, 2880, 32, 4), (384, 192, 6, 2)]
)
def test_experts_of_published_sizes(
    kind: ExpertKind, hidden: int, ffn: int, count: int, top_k: int, device: torch.device
) -> None:
    activation: ExpertActivation = "clamped" if kind == "mxfp4" else "silu"
    counts = (1, 2, 8, 16, 17, 33, 64, 100, 256, 500)
    check(kind, 1500, counts, hidden, ffn, count, Routing(top_k, renormalize=True), activation, device)


def test_it_interprets_or_runs(device: torch.device) -> None:
    assert interpreting() == (device.type == "cpu")
