"""Ways to choose experts, with numbers of experts that fit them, for the tests of both routers."""

from __future__ import annotations

import random

import torch

from stoker_kernels.moe import Routing

# Routing, experts, whether a correction bias moves the choice.
ROUTINGS = [
    (Routing(2), 5, False),
    (Routing(3, renormalize=True), 24, False),
    (Routing(1, scale=0.5), 2, False),
    (Routing(4, "sigmoid", renormalize=True, scale=2.5), 19, True),
    (Routing(3, "sigmoid"), 12, False),
    (Routing(3, "softmax", groups=5, top_groups=2, scale=1.7), 30, False),
    (Routing(4, "sigmoid", renormalize=True, groups=4, top_groups=2, group_score="top2", scale=1.3), 24, True),
    (Routing(2, "sparsemixer", jitter=0.01), 16, False),
    (Routing(2, "sparsemixer", jitter=0.37), 7, False),
    (Routing(5, "softmax"), 40, True),
]


def draw(seed: int, tokens: int, experts: int, with_bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits whose order is beyond rounding, and a bias large enough to move it."""
    shuffled = random.Random(seed)
    rows = [shuffled.sample(range(-4 * experts, 4 * experts), experts) for _ in range(tokens)]
    logits = (torch.tensor(rows, dtype=torch.float32) + 0.25) * (3.0 / experts)
    generator = torch.Generator().manual_seed(seed)
    return logits, torch.rand(experts, generator=generator) if with_bias else None
