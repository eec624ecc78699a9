"""Batch invariance over several ranks: sums have the order of the ranks, whatever there is to sum."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.bits import bit_workload, watch_logits
from tests.runtime.models import test_zoo
from tests.runtime.ranks.test_kinds import EVEN, SHARED

from stoker_kernels.launch import dispatch
from stoker_runtime import LLM
from stoker_runtime.parallel.place import even_part


@pytest.fixture(autouse=True)
def usual_again() -> Iterator[None]:
    yield
    dispatch.demand_invariance(False)


@pytest.mark.matrix(take=2)
@pytest.mark.parametrize(
    ("name", "tensors", "stages", "whole_experts", "dtype"),
    [
        ("Qwen3ForCausalLM", 4, 1, False, "float32"),
        ("Qwen3ForCausalLM", 2, 2, False, "bfloat16"),
        ("Qwen2MoeForCausalLM", 4, 1, True, "bfloat16"),
        ("Olmo2ForCausalLM", 2, 1, False, "bfloat16"),
    ],
)
def test_no_schedule_changes_a_bit_of_logits(
    name: str, tensors: int, stages: int, whole_experts: bool, dtype: str, ranks: Callable[..., LLM], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    print(f"seed {test_zoo.SEED}")
    row, sizes = test_zoo.ROWS[name], SHARED if "Moe" in name else EVEN
    changed = test_zoo.Row(row.config, lambda rng: row.changes(rng) | sizes, row.published, row.settings)
    monkeypatch.setitem(test_zoo.ROWS, name, changed)
    test_zoo.save_random(name, tmp_path)
    seen, rng = watch_logits(monkeypatch, len(even_part(131, tensors, 0))), random.Random(test_zoo.SEED)
    prompts, params = bit_workload(rng, 8, 131)
    # Four at a time want more pages than there are, whatever was drawn.
    params[:4] = [replace(one, max_tokens=40, ignore_eos=True) for one in params[:4]]
    cut: dict[str, Any] = {
        "tensor_parallel_size": tensors, "pipeline_parallel_size": stages, "enable_expert_parallel": whole_experts,
        "runner": "generate", "max_model_len": 128, "batch_invariant": True, "dtype": dtype,
    }  # fmt: skip
    roomy = {"max_num_seqs": 1, "max_num_batched_tokens": 128, "num_gpu_blocks": 8, "enable_prefix_caching": False}
    with ranks(str(tmp_path), **cut, **roomy) as llm:
        alone = [llm.generate_tokens([prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    known = len(seen)
    with ranks(str(tmp_path), **cut, max_num_seqs=6, max_num_batched_tokens=21, num_gpu_blocks=10) as llm:
        assert llm.generate_tokens(prompts, params) == alone
        at = max(range(len(prompts)), key=lambda i: len(prompts[i]))
        for _ in range(2):  # of what follows itself the pages are there, whatever the crowd left
            assert llm.generate_tokens([prompts[at]], [params[at]]) == [alone[at]]
        stats = llm.engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert len(seen) - known <= len(prompts)
