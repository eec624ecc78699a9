"""What is shared may be a function: who runs the chosen experts as launches of their own asks for it behind them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.kernels.moe.oracle import random_experts
from torch import Tensor

from stoker_kernels.launch.dispatch import pin, unpin
from stoker_kernels.moe import Routing, mixture, triton_experts


@pytest.fixture
def pins() -> Iterator[None]:
    yield
    for name in ("route", "experts"):
        unpin(name)


@pytest.mark.usefixtures("pins")
@pytest.mark.parametrize("way", ["own", "triton", "reference"])
def test_what_is_shared_is_asked_for_once_and_late(
    way: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(8)
    x, logits = (torch.randn(7, wide, device=device).bfloat16() for wide in (80, 9))
    weights = random_experts(9, 48, 80, torch.bfloat16, device, seed=8)
    pin("route", "triton")
    pin("experts", way)
    shared, order = torch.randn_like(x), []
    products = triton_experts.pair_rows

    def noted(*operands: Any, **more: Any) -> Tensor:
        order.append("products")
        return products(*operands, **more)

    def late() -> Tensor:
        order.append("shared")
        return shared

    monkeypatch.setattr(triton_experts, "pair_rows", noted)
    routing = Routing(3)
    expected = mixture(x, logits, routing, weights, shared=shared)
    order.clear()
    assert torch.equal(mixture(x, logits, routing, weights, shared=late), expected)
    assert order == {"own": ["products", "shared"], "triton": ["shared", "products"], "reference": ["shared"]}[way]
    with pytest.raises(ValueError, match="shared is"):
        mixture(x, logits, routing, weights, shared=lambda: shared[:, 1:])
