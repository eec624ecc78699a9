"""What tests of batch invariance share: the logits that a sampler sees, by request and position.

Invariants: a request is known by its seed, so requests of one test have seeds of their own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from torch import Tensor, uint8

from stoker_runtime.request import SamplingParams
from stoker_runtime.sampling.sampler import Sampler
from stoker_runtime.step.batch import SlotAssign

Logits = dict[tuple[int, int], bytes]


def watch_logits(monkeypatch: pytest.MonkeyPatch) -> Logits:
    """The logits of each (request's seed, position), checked to be the same whenever they are computed."""
    found: Logits = {}
    seeds: dict[tuple[Sampler, int], int] = {}
    assign, call = Sampler.assign, Sampler.__call__

    def assigned(self: Sampler, assigns: Sequence[SlotAssign]) -> None:
        seeds.update({(self, each.slot): each.seed for each in assigns})
        assign(self, assigns)

    def called(self: Sampler, logits: Tensor, row_slots: Tensor, positions: Tensor, mode: str) -> Tensor:
        for row, slot in enumerate(row_slots.tolist()):
            if (self, slot) in seeds:  # no padding, and no rehearsal before the first request
                key = seeds[self, slot], int(positions[row])
                bits = logits[row].clone().view(uint8).cpu().numpy().tobytes()
                assert found.setdefault(key, bits) == bits, f"seed and position {key}"
        return call(self, logits, row_slots, positions, mode)

    monkeypatch.setattr(Sampler, "assign", assigned)
    monkeypatch.setattr(Sampler, "__call__", called)
    return found


def bit_workload(rng: random.Random, count: int, vocab: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share prefixes, each with a seed of its own, greedy or sampled."""
    shared = [rng.randrange(3, vocab) for _ in range(40)]
    prompts = [
        shared[: rng.choice([0, 16, 33, 40])] + [rng.randrange(3, vocab) for _ in range(rng.randint(1, 30))]
        for _ in range(count)
    ]
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 40), temperature=rng.choice([0.0, 1.0]), seed=seed, ignore_eos=rng.random() < 0.5,
            top_k=rng.choice([0, 7]), presence_penalty=rng.choice([0.0, 0.7]), logprobs=rng.choice([None, 3]),
        )
        for seed in range(count)
    ]  # fmt: skip
    return prompts, params
