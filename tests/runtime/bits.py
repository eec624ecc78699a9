"""What tests of batch invariance share: the logits that a sampler sees, by request and position.

Invariants: a request is known by its seed, so requests of one test have seeds of their own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from torch import Tensor, uint8

from stoker_runtime.parallel.sampler import RankSampler
from stoker_runtime.request import SamplingParams
from stoker_runtime.sampling.sampler import Sampler
from stoker_runtime.step.batch import SlotAssign

Logits = dict[tuple[int, int], bytes]


def watch_logits(monkeypatch: pytest.MonkeyPatch, columns: int | None = None) -> Logits:
    """The logits of each (request's seed, position), checked to be the same whenever they are computed.

    Of several ranks the leader has the first `columns` by itself: those are what is given back, and of all logits it is
    checked whenever it has them.
    """
    found: Logits = {}
    whole: Logits = {}
    seeds: dict[tuple[Sampler, int], int] = {}
    assign, call, of_part = Sampler.assign, Sampler.__call__, RankSampler.of_part

    def assigned(self: Sampler, assigns: Sequence[SlotAssign]) -> None:
        seeds.update({(self, each.slot): each.seed for each in assigns})
        assign(self, assigns)

    def look(self: Sampler, logits: Tensor, row_slots: Tensor, positions: Tensor, known: Logits) -> None:
        for row, slot in enumerate(row_slots.tolist()):
            if (self, slot) in seeds:  # no padding, and no rehearsal before the first request
                key = seeds[self, slot], int(positions[row])
                bits = logits[row].clone().view(uint8).cpu().numpy().tobytes()
                assert known.setdefault(key, bits) == bits, f"seed and position {key}"

    def called(self: Sampler, logits: Tensor, row_slots: Tensor, positions: Tensor, mode: str) -> Tensor:
        look(self, logits, row_slots, positions, whole)
        look(self, logits[:, :columns], row_slots, positions, found)
        return call(self, logits, row_slots, positions, mode)

    def called_together(self: RankSampler, own: Tensor, row_slots: Tensor, positions: Tensor, mode: str) -> Tensor:
        look(self, own[:, :columns], row_slots, positions, found)
        return of_part(self, own, row_slots, positions, mode)

    monkeypatch.setattr(Sampler, "assign", assigned)
    monkeypatch.setattr(Sampler, "__call__", called)
    monkeypatch.setattr(RankSampler, "of_part", called_together)
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
