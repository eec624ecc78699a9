"""What the benchmark says of a mixture's experts is what the steps of an engine read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stoker_runtime.bench.engine_mode import experts_touched, time_row
from stoker_runtime.bench.rounds import Work, run_round
from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.models.shapes import SHAPES
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.terminal.info import describe_model

SHAPE: dict[str, Any] = SHAPES["tiny"] | {
    "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 20, "num_experts": 9, "num_experts_per_tok": 3,
    "moe_intermediate_size": 44, "num_hidden_layers": 3, "mlp_only_layers": [0],
}  # fmt: skip


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """An engine of a tiny mixture with random weights, on the CPU."""
    monkeypatch.setitem(SHAPES, "few-experts", SHAPE)
    return EngineConfig(
        model="shape:few-experts", device="cpu", dtype="float32", max_model_len=64, cpu_kv_gb=0.01, max_num_seqs=8
    )


def test_distinct_experts_of_the_last_step(config: EngineConfig) -> None:
    executor = build_executor(config)
    try:
        loop = StepLoop(executor, executor.config)
        run_round(loop, Work.fixed(1, 7, 5), executor.vocab_size, seed=1)
        alone = experts_touched(executor)
        run_round(loop, Work.fixed(6, 7, 5), executor.vocab_size, seed=1)
        together = experts_touched(executor)
        mixture = executor.decoder.mixture
    finally:
        executor.close()
    assert alone is not None
    assert together is not None
    assert mixture is not None
    assert (alone.tokens, alone.experts, alone.least, alone.mean, alone.most) == (1, 9, 3, 3.0, 3)
    assert together.tokens == 6
    assert 3 <= together.least <= together.mean <= together.most <= 9
    assert mixture.counts.sum(1).tolist() == [0, 18, 18]
    assert together.mean == float((mixture.counts[1:] > 0).sum(1).float().mean())


def test_a_row_says_what_a_step_of_all_requests_reads(config: EngineConfig) -> None:
    """Prompts take several steps here, so that the last step has some of the requests alone."""
    executor = build_executor(replace(config, max_num_batched_tokens=16))
    try:
        work = Work.fixed(6, 15, 20)
        row, _ = time_row(executor, work, "key")
        run_round(StepLoop(executor, executor.config), work, executor.vocab_size, seed=2)
        last = experts_touched(executor)
    finally:
        executor.close()
    assert row.experts is not None
    assert last is not None
    assert row.experts.tokens == 6
    assert last.tokens < 6


def test_info_counts_what_a_token_reads(config: EngineConfig) -> None:
    lines = dict(describe_model(config, torch.device("cpu"))[0])
    assert lines["experts"] == "3 of 9 for each token in 2 of 3 layers"
    assert "of which a token reads" in lines["parameters"]
