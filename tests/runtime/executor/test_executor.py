"""The real executor on the CPU, behind the real scheduler: what it generates is what the plain model says."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stoker_kernels.launch import cc
from stoker_runtime.bench.reference.model import reference_logits
from stoker_runtime.bench.verify import Tolerance, Verdict, verify_greedy
from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.executor.build import warn_without_bytecode
from stoker_runtime.executor.executor import Executor
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import FinishReason, Request, SamplingParams
from stoker_runtime.scheduler.sequence import Sequence

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def executor(**fields: object) -> Executor:
    config = EngineConfig(model="shape:tiny", device="cpu", max_model_len=256, page_size=16, **fields)  # type: ignore[arg-type]
    return build_executor(config)


@pytest.fixture(scope="module")
def tight() -> Iterator[Executor]:
    """Few pages and a small token budget: preemption and chunked prefill at every turn."""
    built = executor(num_gpu_blocks=20, max_num_seqs=8, max_num_batched_tokens=24)
    yield built
    built.close()


def run(loop: StepLoop, requests: list[Request], arrivals: random.Random) -> list[Sequence]:
    """Add the requests a few at a time between steps, and run until all ended."""
    sequences: list[Sequence] = []
    queue = list(requests)
    while queue or loop.has_work:
        for _ in range(min(len(queue), arrivals.randrange(3))):
            sequences.append(loop.add(queue.pop(0)))
        loop.step()
        loop.scheduler.check()
    return sequences


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf"])
def test_any_schedule_generates_what_the_reference_does(tight: Executor, policy: str) -> None:
    generator = random.Random(policy)
    shared = [generator.randrange(256) for _ in range(40)]
    requests = []
    for i in range(24):
        prompt = shared[: generator.choice((0, 16, 33, 40))] + [generator.randrange(256) for _ in range(i + 1)]
        requests.append(Request(str(i), tuple(prompt), GREEDY, priority=generator.randrange(3)))
    loop = StepLoop(tight, EngineConfig(model="shape:tiny", scheduling_policy=policy))
    sequences = run(loop, requests, generator)
    stats = loop.stats()
    assert stats.preemptions > 0, "the pool was meant to be too small"
    assert stats.prefix_hits > 0, "the prompts were meant to share prefixes"
    assert all(sequence.finish is FinishReason.LENGTH for sequence in sequences)
    outputs = [(list(s.request.prompt_token_ids), s.tokens[s.prompt_length :]) for s in sequences]
    verdict = verify_greedy(tight.decoder.spec, tight.decoder.weights, outputs, Tolerance(1e-4, 1e-4))
    assert verdict.passed, verdict
    assert verdict.positions == 24 * GREEDY.max_tokens


def test_a_wrong_token_fails_the_check(tight: Executor) -> None:
    loop = StepLoop(tight, EngineConfig(model="shape:tiny"))
    sequence = run(loop, [Request("a", (5, 6, 7), GREEDY)], random.Random(0))[0]
    output = sequence.tokens[3:]
    output[10] = (output[10] + 1) % 256
    verdict = verify_greedy(tight.decoder.spec, tight.decoder.weights, [([5, 6, 7], output)], Tolerance(1e-4, 1e-4))
    assert not verdict.passed


def test_losses_that_each_pass_fail_the_check_together(tight: Executor) -> None:
    loop = StepLoop(tight, EngineConfig(model="shape:tiny"))
    sequence = run(loop, [Request("a", (5, 6, 7), GREEDY)], random.Random(0))[0]
    output = [(token + 1) % 256 for token in sequence.tokens[3:]]
    decoder = tight.decoder

    def check(tokens: list[int], tolerance: Tolerance) -> Verdict:
        return verify_greedy(decoder.spec, decoder.weights, [([5, 6, 7], tokens)], tolerance)

    loose = check(output, Tolerance(math.inf, math.inf))
    assert loose.passed
    assert loose.mean > 0.01
    bounded = check(output, Tolerance(loose.worst, 0.01))
    assert bounded.wrong == 0
    assert not bounded.passed
    assert check(output[:1], Tolerance(loose.worst, 0.01)).passed, "one token may lose what one may"


def test_logprobs_are_the_references(tight: Executor) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    prompt = tuple(range(10, 70))
    loop = StepLoop(tight, EngineConfig(model="shape:tiny"))
    loop.add(Request("scored", prompt, params))
    loop.add(Request("plain", (1, 2, 3), GREEDY))
    tokens: list[int] = []
    logprobs, prompt_logprobs = [], []
    while loop.has_work:
        output = loop.step()
        for i, sequence in enumerate(output.sequences):
            if sequence.request.id == "scored":
                tokens.append(output.tokens[i])
                logprobs.append(output.logprobs[i])
            elif output.logprobs:
                assert output.logprobs[i] is None
        for sequence, values in output.prompt_logprobs:
            assert sequence.request.id == "scored"
            prompt_logprobs += values
    assert len(prompt_logprobs) == len(prompt) - 1
    ids = [*prompt, *tokens]
    expected = torch.log_softmax(reference_logits(tight.decoder.spec, tight.decoder.weights, ids[:-1], 0), dim=-1)
    for position, value in enumerate([*prompt_logprobs, *logprobs]):
        assert value is not None
        row, token = expected[position], ids[position + 1]
        assert value.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert value.rank == int((row > row[token]).sum()) + 1
        best = row.topk(2)
        assert [number for _, number in value.top[:2]] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert len(value.top) == (2 if position < len(prompt_logprobs) else 3)


def test_the_executor_says_what_it_is(tight: Executor) -> None:
    run(StepLoop(tight, EngineConfig(model="shape:tiny")), [Request("a", (5, 6, 7), GREEDY)], random.Random(0))
    described = tight.describe()
    assert described["device"] == "cpu"
    assert described["kernel.paged_attention"] == ("cpu" if cc.refusal("cpu_attention") else "compiled")
    assert described["pages"] == "20"


def test_a_start_without_bytecode_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bytecode = tmp_path / "torch.pyc"
    monkeypatch.setattr(torch.__spec__, "cached", str(bytecode))
    warn_without_bytecode()
    assert f"python -m compileall {Path(torch.__file__).parent}" in caplog.text
    caplog.clear()
    bytecode.touch()
    warn_without_bytecode()
    assert not caplog.text
