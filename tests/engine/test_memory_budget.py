"""What an engine takes of a GPU is what its flags say, to 1% of the device: built, its graphs captured, under load."""

from __future__ import annotations

import gc

import pytest
import torch

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.executor.build import build_executor
from stoker_runtime.request import Request, SamplingParams

pytestmark = pytest.mark.gpu
GIB = 1024**3
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def used_and_total() -> tuple[int, int]:
    """Bytes of the device in use by anyone, and all of them."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free, total


def used_under_load(config: EngineConfig) -> tuple[int, int, int]:
    """Bytes in use before and while an engine of `config` serves long prompts, and its pages."""
    gc.collect()
    torch.cuda.empty_cache()
    before, _ = used_and_total()
    built = build_executor(config)
    try:
        built.capture()
        loop = StepLoop(built, config)
        for i in range(64):
            loop.add(Request(str(i), tuple((i * 7919 + j) % 50000 + 100 for j in range(512)), PARAMS))
        while loop.has_work:
            loop.step()
        return before, used_and_total()[0], built.num_pages
    finally:
        built.close()


@pytest.mark.parametrize(("utilization", "reserve_gb"), [(0.3, 0.0), (1.0, 40.0)])
def test_the_budget_is_used_and_kept(utilization: float, reserve_gb: float) -> None:
    total = used_and_total()[1]
    config = EngineConfig(
        model="shape:qwen3-0.6b",
        max_model_len=4096,
        gpu_memory_utilization=utilization,
        gpu_memory_reserve_gb=reserve_gb,
    )
    _, used, _ = used_under_load(config)
    assert used == pytest.approx(min(utilization * total, total - reserve_gb * GIB), abs=0.01 * total)


def test_pages_that_were_asked_for_are_there_and_no_more() -> None:
    took = {}
    for pages in (1000, 3000):
        config = EngineConfig(model="shape:qwen3-0.6b", max_model_len=4096, num_gpu_blocks=pages)
        before, used, there = used_under_load(config)
        assert there == pages
        took[pages] = used - before
    # 28 layers x 2 x 8 heads x 128 x 2 bytes a token, 64 tokens a page.
    assert took[3000] - took[1000] == pytest.approx(2000 * 64 * 114688, rel=0.01)
