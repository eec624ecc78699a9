"""Steps on a GPU, plain and with drafts of every kind: the host launches and reads back, and waits for nothing else."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.runtime.executor.test_drafts_in_graphs import build, drafted_by, llama
from tests.runtime.executor.test_speculation import requests, serve

CAPTURE = "cuda_graphs.py"
"""Before a graph is captured the device is waited for, once a shape."""


@contextmanager
def waits() -> Iterator[set[str]]:
    """→ the files and lines of all calls that made the host wait for the device, complete at the end."""
    found: set[str] = set()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found |= {f"{Path(each.filename).name}:{each.lineno}" for each in told if "synchroniz" in str(each.message)}


@pytest.mark.gpu
@pytest.mark.parametrize("method", [None, "ngram", "suffix", "draft_model", "eagle3", "mtp"])
def test_no_step_waits_for_the_device(method: str | None, tmp_path: Path) -> None:
    """Sampled by every parameter, log-probabilities of tokens and of prompts among them."""
    seed = random.randrange(10**6)
    model, drafts = drafted_by(method, tmp_path, seed) if method else (llama(tmp_path, seed), None)
    drafting = build(model, drafts, device="cuda", max_num_seqs=9, max_num_batched_tokens=57, num_gpu_blocks=60)
    asked = requests(random.Random(seed), drafting.vocab_size, 60)
    asked += [
        replace(
            each, id=f"{each.id} scored", family="",
            params=replace(each.params, prompt_logprobs=at % 4, max_tokens=3, min_tokens=0),
        )
        for at, each in enumerate(asked[:9])
    ]
    serve(drafting, asked, seed)
    with waits() as planted:
        torch.ones(1, device="cuda").item()
    assert planted, "a wait is seen"
    with waits() as found:
        answers, stats = serve(drafting, asked, seed)
    drafting.close()
    assert {each for each in found if not each.startswith(CAPTURE)} == set(), f"seed {seed}"
    assert (stats.draft_tokens > 0) == (method is not None)
    assert all(answer.finish[0] for answer in answers.values())
