"""Ranks that sample together choose what one rank chooses from all logits, on every one of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from stoker_runtime.parallel.collectives import Collectives
from stoker_runtime.parallel.meeting import Meeting
from stoker_runtime.parallel.place import DEALT, dealt_part, places
from stoker_runtime.parallel.sampler import RankSampler
from stoker_runtime.parallel.store import open_store
from stoker_runtime.request import SamplingParams
from stoker_runtime.sampling.modes import GREEDY, SAMPLE
from stoker_runtime.sampling.sampler import Sampler
from stoker_runtime.step.batch import SlotAssign

CPU, SLOTS, STEPS = torch.device("cpu"), 23, 25


def assigns(rng: random.Random, mode: str) -> list[SlotAssign]:
    """What takes the slots; in the sampled mode some of it is greedy."""
    params = [
        SamplingParams(
            temperature=0.0 if mode == GREEDY or rng.random() < 0.3 else rng.uniform(0.3, 2.0),
            top_k=rng.choice([0, 3, 40]),
            top_p=rng.choice([1.0, 0.7]),
            min_p=rng.choice([0.0, 0.05]),
        )
        for _ in range(SLOTS)
    ]
    return [SlotAssign(slot, each, rng.getrandbits(31), (), (), 1) for slot, each in enumerate(params)]


def logits_of(rng: random.Random, rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of which several are often the highest, on several ranks."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rng.getrandbits(30))) * 2
    if rng.random() < 0.5:
        logits = logits.round()
    for value in rng.sample([float("nan"), float("inf"), -float("inf"), -0.0], rng.randint(0, 2)):
        logits[rng.randrange(rows), [rng.randrange(vocab) for _ in range(3)]] = value
    return logits.to(dtype)


def sample_together(rank: int, store: str, tensors: int, stages: int, ordered: bool, seed: int) -> None:
    place, rng = places(tensors, stages)[rank], random.Random(seed)
    ends = Collectives(place, CPU, open_store(Meeting(store), place), ordered=ordered)
    vocab = rng.choice([67, 301, 4 * tensors])
    alone, together = Sampler(SLOTS, vocab, CPU), RankSampler(SLOTS, vocab, CPU, collectives=ends)
    ends.warm(24, vocab, torch.bfloat16)
    gathered: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "gather", lambda *_, **__: gathered.append(1))
        for _ in range(STEPS):
            mode, dtype = rng.choice([GREEDY, SAMPLE]), rng.choice([torch.bfloat16, torch.float32])
            taken = assigns(rng, mode)
            alone.assign(taken)
            together.assign(taken)
            rows = rng.randint(1, SLOTS)
            slots = torch.tensor(rng.sample(range(SLOTS), rows), dtype=torch.int32)
            slots[torch.rand(rows, generator=torch.Generator().manual_seed(rows)) < 0.1] = -1
            positions = torch.tensor([rng.randrange(500) for _ in range(rows)], dtype=torch.int32)
            logits = logits_of(rng, rows, vocab, dtype)
            columns = place.rows(vocab)
            own = logits[:, columns.start : columns.stop].contiguous()
            # Before the last stage nobody has any.
            own = own if place.is_last else torch.full_like(own, torch.nan)
            tokens = together.of_part(own, slots, positions, mode)
            assert tokens.dtype == torch.int32
            assert tokens.tolist() == alone(logits, slots, positions, mode).tolist(), (mode, rows, vocab)
    assert not gathered
    ends.close()


@pytest.mark.matrix(take=1)
@pytest.mark.parametrize(("tensors", "stages", "ordered"), [(3, 1, False), (2, 1, True), (2, 2, False)])
def test_ranks_choose_the_tokens_of_one(tensors: int, stages: int, ordered: bool, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    spawn(sample_together, (str(tmp_path / "store"), tensors, stages, ordered, seed), nprocs=tensors * stages)


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_rows_are_dealt_once_and_begin_at_sixteen_bytes(parts: int) -> None:
    for count in range(1, 150):
        dealt = [dealt_part(count, parts, index) for index in range(parts)]
        assert [row for rows in dealt for row in rows] == list(range(count))
        assert all(rows.start % DEALT == 0 for rows in dealt if rows)
        assert max(map(len, dealt)) < count / parts + DEALT
