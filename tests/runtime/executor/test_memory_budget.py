"""What an engine takes of a GPU is what its memory flags say, to 1%: once started, and after every kind of step."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.executor.executor import Executor
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import Request, SamplingParams

pytestmark = pytest.mark.gpu
GIB, MIB = 1024**3, 1024**2
# Sequences, tokens of a prompt, and what they want beside 4 greedy tokens.
LOADS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (64, 512, {}),
    (1024, 8, {}),
    (1024, 8, {"temperature": 1.0}),
    (1024, 8, {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1, "logprobs": 5}),
    (1024, 8, {"temperature": 1.0, "typical_p": 0.9}),
    (2, 4000, {"prompt_logprobs": 5}),
    (64, 1001, {}),
    (300, 37, {}),
)


@dataclass(frozen=True)
class Taken:
    """Bytes of the GPU in use: before the engine, when it was built, and after each load and every graph.

    `grown` is what torch took from the driver since it was built.
    """

    total: int
    before: int
    built: int
    loaded: list[int]
    grown: int
    pages: int


def used() -> int:
    """Bytes of the GPU in use by anyone."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def serve(executor: Executor, count: int, length: int, wanted: dict[str, Any]) -> None:
    """Prefill and decode `count` prompts of `length` tokens."""
    loop = StepLoop(executor, executor.config)
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **wanted})
    for i in range(count):
        loop.add(Request(str(i), tuple((i * 7919 + j * 31) % 50000 + 100 for j in range(length)), params))
    while loop.has_work:
        loop.step()


def measure(config: EngineConfig) -> Taken:
    """Start an engine, serve LOADS, capture every graph."""
    before = used()
    executor = build_executor(config)
    built, held, loaded = used(), torch.cuda.memory_reserved(), []
    for load in LOADS:
        serve(executor, *load)
        loaded.append(used())
    while executor.idle():
        pass
    loaded.append(used())
    grown = torch.cuda.memory_reserved() - held
    return Taken(torch.cuda.mem_get_info()[1], before, built, loaded, grown, executor.num_pages)


def in_a_process_of_its_own(config: EngineConfig) -> Taken:
    """`measure` where no other engine has been, like the engine of a pod."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, config).result()


@pytest.mark.parametrize(
    ("shape", "utilization", "reserve_gb", "fields"),
    [
        ("qwen3-0.6b", 0.3, 0.0, {}),
        ("qwen3-0.6b", 0.3, 0.0, {"quantize_head": "fp8"}),
        ("qwen3-0.6b", 0.3, 0.0, {"enable_lora": True, "max_loras": 7, "max_lora_rank": 64, "lora_embeddings": True}),
        ("qwen2.5-7b", 1.0, 40.0, {"kernels": (("linear_silu_mul", "split"),)}),
        ("qwen2.5-7b", 0.9, 0.0, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
        ("gpt-oss-20b", 0.5, 0.0, {}),
        ("gpt-oss-20b", 0.4, 0.0, {"cpu_offload_experts": 5.0}),
    ],
)
def test_the_budget_is_used_and_kept(
    shape: str, utilization: float, reserve_gb: float, fields: dict[str, Any]
) -> None:
    taken = in_a_process_of_its_own(
        EngineConfig(
            model=f"shape:{shape}",
            max_model_len=8192,
            gpu_memory_utilization=utilization,
            gpu_memory_reserve_gb=reserve_gb,
            **fields,
        )
    )
    budget = min(utilization * taken.total, taken.total - reserve_gb * GIB)
    off = [f"{(each - budget) / budget:+.2%}" for each in (taken.built, *taken.loaded)]
    print(f"{shape}: {', '.join(off)} of {budget / GIB:.1f} GiB; grown by {taken.grown / MIB:.0f} MiB")
    assert max(taken.loaded) <= budget
    assert taken.loaded[-1] >= 0.99 * budget
    # All is allocated by then but cuBLAS's workspaces and what small tensors take.
    assert taken.grown <= 128 * MIB


def test_pages_that_were_asked_for_are_there_and_no_more() -> None:
    took = []
    for pages in (1000, 3000):
        config = EngineConfig(model="shape:qwen3-0.6b", max_model_len=4096, num_gpu_blocks=pages)
        taken = in_a_process_of_its_own(config)
        assert taken.pages == pages
        took.append(taken.loaded[-1] - taken.before)
    # 28 layers x 2 x 8 heads x 128 x 2 bytes a token, 64 tokens a page.
    assert took[1] - took[0] == pytest.approx(2000 * 64 * 114688, rel=0.01)
