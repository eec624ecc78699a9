"""Drafts for models whose layers keep a state: states go back to the last token that counts, so no answer differs."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.executor.hybrid_models import NEMOTRON, QWEN, drafts_of, save_hybrid
from tests.runtime.executor.test_speculation import requests, serve

from stoker_runtime.config import EngineConfig
from stoker_runtime.executor.executor import Executor
from stoker_runtime.executor.resolve import resolve
from stoker_runtime.executor.states.drafted import DraftedStates
from stoker_runtime.executor.states.plan import drafted_bytes
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.ranks.build import build_executor

ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def build(model: str, drafts: dict[str, Any] | None, device: str, **sizes: Any) -> Executor:
    given = {"dtype": "float32", "max_model_len": 96, "page_size": 16, **sizes}
    return build_executor(
        EngineConfig(model=model, device=device, speculative_config=json.dumps(drafts) if drafts else "", **given)
    )


@pytest.mark.matrix(take=3)
@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize(
    ("kind", "method"),
    [(NEMOTRON, "ngram"), (QWEN, "suffix"), (NEMOTRON, "draft_model"), (QWEN, "draft_model"), (QWEN, "eagle3")],
)
def test_drafts_change_no_answer(kind: str, method: str, device: str, tmp_path: Path) -> None:
    """Every parameter, in a crowd: drafts beside chunks, preemption, and prefixes that others go on from. On a GPU in
    graphs.
    """
    seed = 6
    model = save_hybrid(kind, tmp_path, seed)
    plain = build(model, None, "cpu", max_num_seqs=8, max_num_batched_tokens=64, num_gpu_blocks=80)
    asked = requests(random.Random(seed), plain.vocab_size, 24)
    expected, _ = serve(plain, asked, seed, enable_prefix_caching=False)
    sizes = {"max_num_seqs": 7, "max_num_batched_tokens": 31, "num_gpu_blocks": 14, "num_state_snapshots": 5}
    drafting = build(model, drafts_of(method, model, seed), device, **sizes)
    if device == "cuda":
        drafting.capture()
        while drafting.idle():
            pass
    got, stats = serve(drafting, asked, seed + 1, scheduling_policy="priority")
    for request in asked:
        mine, theirs = got[request.id], expected[request.id]
        assert (mine.tokens, mine.finish) == (theirs.tokens, theirs.finish), request
        pairs = zip(mine.logprobs, theirs.logprobs, strict=True)
        assert all(math.isclose(a.logprob, b.logprob, abs_tol=1e-3) for a, b in pairs), request
    assert stats.draft_tokens > stats.accepted_tokens > 8
    assert min(stats.preemptions, stats.prefix_hits) > 0, "the device was meant to be crowded"
    assert (drafting.graphs.captured > 0) == (device == "cuda")
    for each in (plain, drafting):
        each.close()


def test_what_drafts_take_beside_states_is_counted(tmp_path: Path) -> None:
    for kind in (NEMOTRON, QWEN):
        model = save_hybrid(kind, tmp_path / kind, 3)
        spec = build_spec(read_source(model))
        asked = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
        for dtype in ("float32", "bfloat16"):
            config = resolve(EngineConfig(model, dtype=dtype, speculative_config=asked, max_num_seqs=5), spec, "cpu")
            states = tuple(torch.empty(spec.recurrent.layers if spec.recurrent else 0, 1) for _ in range(2))
            held = DraftedStates(config, spec, getattr(torch, dtype), states)
            assert sum(each.nbytes for each in held.tensors) == drafted_bytes(config, spec) > 0
        assert drafted_bytes(resolve(EngineConfig(model), spec, "cpu"), spec) == 0
