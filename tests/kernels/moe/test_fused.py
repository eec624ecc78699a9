"""`mixture`: which way a call goes, and that the ways agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.kernels.moe.oracle import chosen, mixed, random_experts
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.launch.dispatch import pin, unpin
from stoker_kernels.moe import ExpertWeights, Routing, choose, experts, fused, mixture, op, route
from stoker_kernels.moe.hopper import operands, sm90_few

CPU = torch.device("cpu")


@pytest.fixture
def pins() -> Iterator[None]:
    yield
    for name in ("mixture", "route", "experts"):
        unpin(name)


def of_size(tokens: int, count: int, ffn: int, hidden: int, seed: int) -> tuple[Tensor, Tensor, ExpertWeights]:
    """x and logits in bf16, and experts."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    logits = torch.randn(tokens, count, generator=generator).bfloat16()
    return x, logits, random_experts(count, ffn, hidden, torch.bfloat16, CPU, seed=seed)


def test_it_is_what_the_chosen_experts_give() -> None:
    x, logits, weights = of_size(5, 11, 24, 40, 3)
    routing, slots = Routing(3, renormalize=True, scale=1.7), torch.tensor([0, 1, -1, 3, 4])
    counts, again = torch.empty(11, dtype=torch.int32), torch.empty(11, dtype=torch.int32)
    shared, gate = torch.randn(5, 40).bfloat16(), torch.randn(5, 1).bfloat16()
    got = mixture(x, logits, routing, weights, slot_mapping=slots, counts=counts, shared=shared, shared_gate=gate)
    routes = route(logits, routing, slot_mapping=slots, counts=again)
    assert torch.equal(got, experts(x, routes, weights, shared=shared, shared_gate=gate))
    assert torch.equal(counts, again)
    pairs = [chosen(row.tolist(), routing, None) for row in logits.double()]
    ids = torch.tensor([[-1 if token == 2 else each for each, _ in of] for token, of in enumerate(pairs)])
    shares = torch.tensor([[weight for _, weight in of] for of in pairs])
    expected = mixed(x, ids, shares, weights, "silu", 0.0, shared, gate)
    torch.testing.assert_close(got.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("pins")
def test_few_tokens_are_fused_for_who_asks_unless_they_ask_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are stand-ins; the operands go to them as they came. Without being asked nothing is fused."""
    seen: list[dict[str, Any]] = []

    def kernels(
        x: Tensor, logits: Tensor, routing: Routing, weights: ExpertWeights, out: Tensor, **more: Any
    ) -> Tensor:
        seen.append({"logits": logits, "routing": routing} | more)
        return out.fill_(2.0)

    monkeypatch.setattr(sm90_few, "mixture", kernels)
    monkeypatch.setattr(operands, "sm_of", lambda _: 90)
    monkeypatch.setattr(cuda, "missing_cubin", lambda *_: None)
    on_gpu = {"route": choose.route, "experts": choose.experts}
    monkeypatch.setattr(fused, "select", lambda name, *_: on_gpu[name])
    routing, bias = Routing(2, "sigmoid"), torch.rand(9)
    for tokens, expected in ((1, True), (2, True), (3, False)):
        x, logits, weights = of_size(tokens, 9, 24, 40, tokens)
        counts, out = torch.empty(9, dtype=torch.int32), torch.empty_like(x)
        got = fused.fused(x, logits, routing, weights, bias=bias, counts=counts, limit=0.5, out=out)
        assert got is out
        assert bool((got == 2.0).all()) == expected
        assert len(seen) == expected
        if seen:
            last = seen.pop()
            assert (last["logits"], last["bias"], last["counts"], last["limit"]) == (logits, bias, counts, 0.5)
            assert last["routing"] is routing
    x, logits, weights = of_size(1, 9, 24, 40, 8)
    for name, usual in list(on_gpu.items()):
        on_gpu[name] = getattr(op, name)  # another one, as if pinned
        assert not (fused.fused(x, logits, routing, weights, bias=bias) == 2.0).all()
        assert not seen
        on_gpu[name] = usual
    pin("mixture", "split")
    assert not (mixture(x, logits, routing, weights, bias=bias) == 2.0).all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, logits, weights = of_size(2, 9, 24, 40, 0)
    with pytest.raises(ValueError, match=r"logits are \(2, 8\), of 9 experts"):
        mixture(x, logits[:, :8], Routing(2), weights)
    with pytest.raises(ValueError, match=r"choices \(1, 9\)"):
        mixture(x, logits[:1], Routing(2), weights)
    with pytest.raises(ValueError, match="bias is"):
        mixture(x, logits, Routing(2), weights, bias=torch.rand(8))
