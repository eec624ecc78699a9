"""The shared expert beside the chosen ones: asked for once by steps of any size, joined before the sum reads it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stoker_kernels.moe import ExpertWeights
from stoker_kernels.quant import LinearWeight
from stoker_runtime.models.decoder_weights import MixtureWeights
from stoker_runtime.models.layers.beside import Beside
from stoker_runtime.models.layers.mixture import BESIDE, Mixture
from stoker_runtime.models.moe_spec import MoeSpec

SIZES = (1, 2, *random.sample(BESIDE, 3), BESIDE.start, BESIDE[-1], BESIDE.stop)
EXPERTS, HIDDEN, FFN = 6, 96, 160


class Shared:
    """What a shared expert does, how often it was asked for, and on which stream."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden, self.calls, self.stream = hidden, 0, 0
        self.weight = torch.randn(HIDDEN, HIDDEN, device=hidden.device, dtype=hidden.dtype) * HIDDEN**-0.5

    def __call__(self) -> Tensor:
        self.calls += 1
        if self.hidden.is_cuda:
            self.stream = torch.cuda.current_stream().cuda_stream
        return self.hidden @ self.weight


def layer(device: torch.device, dtype: torch.dtype) -> tuple[Mixture, MixtureWeights]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype) * shape[-1] ** -0.5

    experts = ExpertWeights(draw(EXPERTS, 2 * FFN, HIDDEN), draw(EXPERTS, HIDDEN, FFN))
    router = LinearWeight(draw(EXPERTS, HIDDEN) * HIDDEN**0.5)
    return Mixture(MoeSpec(frozenset({0}), EXPERTS, 2, FFN), 1, device), MixtureWeights(router, experts)


def forward(
    mixture: Mixture, weights: MixtureWeights, hidden: Tensor, shared: Callable[[], Tensor] | None = None
) -> Tensor:
    slots = torch.arange(len(hidden), device=hidden.device)
    return mixture.forward(0, weights, hidden, slots, shared)


@pytest.mark.parametrize("tokens", SIZES)
def test_a_step_asks_for_it_once_and_adds_it(tokens: int) -> None:
    mixture, weights = layer(torch.device("cpu"), torch.float32)
    hidden = torch.randn(tokens, HIDDEN)
    shared = Shared(hidden)
    with_it, without = (forward(mixture, weights, hidden, each) for each in (shared, None))
    assert shared.calls == 1
    torch.testing.assert_close(with_it - without, hidden @ shared.weight, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", SIZES)
def test_a_graph_joins_the_branch_before_the_sum(tokens: int) -> None:
    """Replays with other inputs give each time what plain launches, one after another, give."""
    device = torch.device("cuda")
    mixture, weights = layer(device, torch.bfloat16)
    hidden = torch.empty(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
    shared, slow = Shared(hidden), torch.randn(2048, 2048, device=device)

    def late() -> Tensor:
        """Long after the experts are done."""
        wait = slow
        for _ in range(8):
            wait = wait @ slow
        return shared() + 0 * wait.clamp(0, 0)[:1, :HIDDEN].to(hidden.dtype)

    hidden.normal_()
    forward(mixture, weights, hidden, late)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream().cuda_stream
        found = forward(mixture, weights, hidden, late)
    assert (shared.stream != main) == (tokens in BESIDE)
    for _ in range(5):
        hidden.normal_()
        graph.replay()
        torch.cuda.synchronize()
        expected = forward(mixture, weights, hidden).float() + (hidden @ shared.weight).float()
        torch.testing.assert_close(found.float(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
def test_work_beside_sees_what_was_launched_before_and_is_joined() -> None:
    beside, device = Beside(torch.device("cuda")), torch.device("cuda")
    slow, value = torch.randn(4096, 4096, device=device) / 64, torch.zeros(1, device=device)

    def late() -> Tensor:
        return value + 0 * (slow @ slow @ slow)[:1, 0]

    for turn in range(1, 6):
        value += 1 + 0 * (slow @ slow @ slow)[:1, 0]
        assert float(beside.begin(late)()) == turn
