"""CUDA graphs that give way to others leave results and memory as they were."""

from __future__ import annotations

import random

import pytest

from stoker_runtime.executor.graphs.step_shape import StepShape

pytestmark = pytest.mark.gpu


def test_graphs_that_give_way_change_no_result_and_hold_no_memory() -> None:
    """Random shapes, far more than may stand: each step's result is that of its shape, and memory is flat."""
    import torch

    from stoker_runtime.executor.cuda_graphs import StepGraphs

    device = torch.device("cuda")
    draw = random.Random(3)
    x, out = torch.zeros(64, 64, device=device), torch.zeros(64, 64, device=device)

    def step(shape: StepShape) -> torch.Tensor:
        value = x
        for _ in range(shape.tokens):
            value = value + shape.decodes
        out.copy_(value)
        return out

    graphs = StepGraphs(step, device, 1 << 20, enabled=True, spare=5)
    graphs.prepare(StepShape(1, 0, 1, "greedy"))
    used, most = [], 0
    for at in range(3_000):
        # Which shapes are frequent changes, so that graphs come and go.
        rows = 1 + (int(draw.paretovariate(0.8)) + at // 300 * 17) % 60
        shape = StepShape(rows, 8, 1 + rows % 7, "greedy")
        x.fill_(at)
        graphs.run(shape)
        assert bool((out == at + rows * shape.tokens).all())
        most = max(most, graphs.captured)
        if at % 300 == 299:
            used.append(torch.cuda.mem_get_info(device)[0])
    assert most == 6
    assert max(used[2:]) - min(used[2:]) <= 4 << 20
