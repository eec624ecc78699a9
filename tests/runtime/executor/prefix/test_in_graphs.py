"""Steps with a shared prefix on a GPU, in graphs, with the widths of a 7B model: the tokens are the plain model's."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from stoker_kernels.attention import prefix_refusal
from stoker_kernels.launch.dispatch import sm_of
from stoker_runtime.bench.verify import TOLERANCE_BF16, TOLERANCE_FP8_KV, Tolerance, verify_greedy
from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.executor.executor import Executor
from stoker_runtime.executor.prefix import steps
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import Request, SamplingParams
from stoker_runtime.scheduler.sequence import Sequence

pytestmark = pytest.mark.gpu
SHARED, ROWS = 3001, 27


@pytest.fixture(autouse=True)
def whatever_it_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps share what they can, so that few rows of a short prefix show what many of a long one do."""
    monkeypatch.setattr(steps, "prefix_pays", lambda rows, keys, **_: keys > 0)


def build(**fields: Any) -> Executor:
    if (refusal := prefix_refusal(sm_of(torch.device("cuda", 0)), torch.bfloat16, torch.bfloat16)) is not None:
        pytest.skip(f"gpu: attention with a shared prefix is {refusal}")
    sizes = {"max_model_len": 8192, "max_num_seqs": 40, "num_gpu_blocks": 2000}
    asked: dict[str, Any] = {"disable_cascade_attn": False} | sizes | fields
    return build_executor(EngineConfig(model="shape:qwen2.5-7b@3", device="cuda", **asked))


def run(loop: StepLoop, texts: list[tuple[int, ...]], counts: list[int]) -> list[Sequence]:
    """The first request alone until it is cached, then all others; to the end."""
    requests = [
        Request(str(at), text, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True))
        for at, (text, count) in enumerate(zip(texts, counts, strict=True))
    ]
    sequences = [loop.add(requests[0])]
    for _ in range(4):
        loop.step()
    sequences += map(loop.add, requests[1:])
    while loop.has_work:
        loop.step()
    return sequences


@pytest.mark.parametrize(
    ("fields", "tolerance"),
    [
        ({}, TOLERANCE_BF16),
        ({"kv_cache_dtype": "fp8"}, TOLERANCE_FP8_KV),
        ({"page_size": 16}, TOLERANCE_BF16),
        ({"enforce_eager": True}, TOLERANCE_BF16),
    ],
    ids=str,
)
def test_graphs_of_any_prefix_generate_what_the_model_does(fields: dict[str, Any], tolerance: Tolerance) -> None:
    """Rows that share much, rows that share less, one that shares nothing: the graphs serve all of these steps."""
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    trunk = [rng.randrange(100, 100_000) for _ in range(SHARED)]
    texts = [tuple(trunk + [rng.randrange(100, 100_000) for _ in range(rng.randrange(1, 300))]) for _ in range(ROWS)]
    counts = [rng.randrange(60, 120) for _ in range(ROWS)]
    texts += [(*trunk[:2000], 7, 8, 9), tuple(range(500, 560))]
    counts += [40, 20]
    executor = build(**fields)
    loop = StepLoop(executor, executor.config)
    sequences = run(loop, texts, counts)
    shared = loop.stats().shared_prefix_steps
    assert shared > 30
    captured = [shape for shape in executor.graphs._graphs if shape.shared]
    assert bool(captured) == (not executor.config.enforce_eager)
    outputs = [(list(each.request.prompt_token_ids), each.tokens[each.prompt_length :]) for each in sequences]
    verdict = verify_greedy(executor.decoder.spec, executor.decoder.weights, outputs, tolerance, 8192)
    assert verdict.passed, verdict
    assert verdict.positions == sum(counts)
    executor.close()


def test_the_flag_leaves_each_row_to_itself() -> None:
    executor = build(disable_cascade_attn=True)
    loop = StepLoop(executor, executor.config)
    run(loop, [(*range(100, 100 + SHARED), at) for at in range(200, 220)], [30] * 20)
    assert loop.stats().shared_prefix_steps == 0
    assert not any(shape.shared for shape in executor.graphs._graphs)
    executor.close()
