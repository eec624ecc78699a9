"""Steps that attend once what all their rows begin with: which ones do, and that they generate the same tokens.

Never on a CPU by the rule, so here the rule is another: any prefix pays. What attends it is the oracle of the kernels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.runtime.executor.published_configs import PUBLISHED

from stoker_kernels.attention import attention_workspace_bytes, prefix_pays, prefix_refusal
from stoker_runtime.bench.verify import Tolerance, verify_greedy
from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.executor.executor import Executor
from stoker_runtime.executor.prefix import steps
from stoker_runtime.executor.prefix.plan import model_refusal, prefix_bytes
from stoker_runtime.executor.resolve import resolve
from stoker_runtime.executor.state import state_bytes
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import ModelSource, SourceKind, read_source
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import Request, SamplingParams
from stoker_runtime.scheduler.sequence import Sequence

PAGE = 16
LAYERS = {"num_hidden_layers": 4}
SYSTEM = 6 * PAGE + 5  # tokens of a prompt that all requests begin with


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any two rows that share a page share a step's attention, on a CPU, too."""
    monkeypatch.setattr(steps, "prefix_refusal", lambda *_: None)
    monkeypatch.setattr(steps, "prefix_pays", lambda rows, keys, **_: keys > 0)


Build = Callable[..., Executor]


@pytest.fixture
def build(anywhere: None) -> Iterator[Build]:
    built: list[Executor] = []

    def make(**fields: Any) -> Executor:
        asked: dict[str, Any] = {"disable_cascade_attn": False} | fields
        config = EngineConfig(
            model="shape:tiny", device="cpu", dtype="float32", max_model_len=256, page_size=PAGE, **asked
        )
        built.append(build_executor(config))
        return built[-1]

    yield make
    for each in built:
        each.close()


def prompts(count: int, seed: int, system: int = SYSTEM) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(system)]
    return [tuple(shared + [rng.randrange(256) for _ in range(rng.randrange(1, 30))]) for _ in range(count)]


def run(loop: StepLoop, requests: list[Request], between: Callable[[int], None] = lambda step: None) -> list[Sequence]:
    """The first request alone, until its prompt is cached, then all others at once; to the end."""
    sequences = [loop.add(requests[0])]
    for _ in range(3):
        loop.step()
    sequences += map(loop.add, requests[1:])
    step = 0
    while loop.has_work:
        loop.step()
        loop.scheduler.check()
        between(step := step + 1)
    return sequences


def check(executor: Executor, sequences: list[Sequence]) -> None:
    """Every token is the plain model's."""
    outputs = [(list(each.request.prompt_token_ids), each.tokens[each.prompt_length :]) for each in sequences]
    verdict = verify_greedy(executor.decoder.spec, executor.decoder.weights, outputs, Tolerance(1e-4, 1e-4))
    assert verdict.passed, verdict


def requests_of(texts: list[tuple[int, ...]], tokens: int = 20) -> list[Request]:
    return [Request(str(at), text, greedy(tokens + 3 * at)) for at, text in enumerate(texts)]


def test_steps_over_one_system_prompt_share_it_and_generate_the_same(build: Build) -> None:
    shared, apart = build(max_num_seqs=8), build(max_num_seqs=8, disable_cascade_attn=True)
    texts = {}
    for executor in (shared, apart):
        loop = StepLoop(executor, executor.config)
        sequences = run(loop, requests_of(prompts(6, 1)))
        check(executor, sequences)
        texts[executor] = [list(each.tokens) for each in sequences]
        # Rows end one after the other; alone the last one shares with nobody.
        steps_taken = loop.stats().shared_prefix_steps
        assert (steps_taken > 20) if executor is shared else (steps_taken == 0)
    assert texts[shared] == texts[apart]


def test_how_many_keys_a_step_shares_follows_its_rows(build: Build) -> None:
    """A row that shares less, one that shares nothing, and rows that come and go."""
    executor = build(max_num_seqs=8)
    loop = StepLoop(executor, executor.config)
    texts = prompts(4, 2)
    texts.append((*texts[0][: 2 * PAGE], 7, 7, 7))
    texts.append((9, 9, 9, 9))
    requests = [Request(str(at), text, greedy(tokens)) for at, (text, tokens) in enumerate(
        zip(texts, (60, 58, 56, 54, 30, 12), strict=True))]  # fmt: skip
    counted: list[int] = []
    taken = [0]

    def note(_: int) -> None:
        now = loop.stats().shared_prefix_steps
        counted.append(int(executor.body.sharing.space.keys) if now > taken[0] else 0)  # type: ignore[union-attr]
        taken[0] = now

    check(executor, run(loop, requests, note))
    assert set(counted) == {0, 2 * PAGE, 6 * PAGE}
    # None while the one without a common page runs, little while the one with two does, then all of the prompt's.
    first = {keys: counted.index(keys) for keys in (2 * PAGE, 6 * PAGE)}
    assert 0 < first[2 * PAGE] < first[6 * PAGE]
    assert not any(counted[: first[2 * PAGE]])


def test_preempted_rows_come_back_to_what_they_shared(build: Build) -> None:
    executor = build(max_num_seqs=6, num_gpu_blocks=19, max_num_batched_tokens=64)
    loop = StepLoop(executor, executor.config)
    check(executor, run(loop, requests_of(prompts(6, 3), tokens=50)))
    stats = loop.stats()
    assert stats.preemptions > 0, "the pool was meant to be too small"
    assert stats.shared_prefix_steps > 0


def test_crowds_that_share_at_random_generate_what_the_model_does(build: Build) -> None:
    executor = build(max_num_seqs=5, num_gpu_blocks=40, max_num_batched_tokens=48)
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    trunk, other = (prompts(1, seed + at)[0][:SYSTEM] for at in range(2))
    trunks = [trunk, trunk[: 2 * PAGE + 3] + other[2 * PAGE + 3 :]]
    requests = []
    for at in range(14):
        head = rng.choice(trunks)[: 0 if at == 9 else rng.choice([PAGE, 3 * PAGE, SYSTEM])]
        tail = tuple(rng.randrange(256) for _ in range(rng.randrange(1, 12)))
        requests.append(Request(str(at), head + tail, greedy(rng.randrange(1, 40))))
    loop = StepLoop(executor, executor.config)
    check(executor, run(loop, requests))
    assert loop.stats().shared_prefix_steps > 0


def test_rows_of_one_prompt_share_all_but_the_page_of_its_end(build: Build) -> None:
    """The page that a prompt's last token is in is each row's own, though it is cached whole."""
    executor = build(max_num_seqs=4)
    loop = StepLoop(executor, executor.config)
    text = prompts(1, 5, 4 * PAGE)[0][: 4 * PAGE]
    sequences = run(loop, [Request(str(at), text, greedy(9)) for at in range(4)])
    check(executor, sequences)
    assert len({tuple(each.tokens) for each in sequences}) == 1
    assert loop.stats().shared_prefix_steps > 0
    assert executor.body.sharing.space is not None
    assert int(executor.body.sharing.space.keys) == 3 * PAGE


def test_a_cpu_attends_each_row_by_itself_and_says_so() -> None:
    asked = EngineConfig(model="shape:tiny", device="cpu", max_model_len=256, disable_cascade_attn=False)
    executor = build_executor(asked)
    loop = StepLoop(executor, executor.config)
    run(loop, requests_of(prompts(4, 6)))
    assert loop.stats().shared_prefix_steps == 0
    assert executor.describe()["kernel.shared_prefix_attention"] == "each row by itself: made for SM 9.0"
    executor.close()


@pytest.mark.parametrize(
    ("model", "fields", "reason"),
    [
        ("Llama-2-7B", {}, None),
        ("Falcon-40B", {}, None),
        ("Nemotron-H-8B", {}, None),
        ("Llama-2-7B", {"batch_invariant": True}, "--batch-invariant"),
        ("Llama-2-7B", {"disable_cascade_attn": True}, "--disable-cascade-attn"),
        ("Llama-2-7B", {"kernels": (("attention", "triton"),)}, "--kernel pins"),
        ("Llama-2-7B", {"kernels": (("linear", "cublas"),)}, None),
        ("Gemma-2-27B", {}, "a window, a soft-cap"),
        ("BLOOM-7B1", {}, "slopes"),
        ("Phi-3-small", {}, "pattern of blocks"),
    ],
)
def test_models_of_plain_attention_may_share(model: str, fields: dict[str, Any], reason: str | None) -> None:
    spec = build_spec(ModelSource(model, SourceKind.SHAPE, None, PUBLISHED[model] | LAYERS))
    asked: dict[str, Any] = {"disable_cascade_attn": False} | fields
    config = resolve(EngineConfig(model="shape:x", device="cuda", max_model_len=1024, **asked), spec, "cuda")
    said = model_refusal(config, spec)
    assert (said is None) if reason is None else reason in (said or "")
    assert (prefix_bytes(config, spec) > 0) == (reason is None)


def test_what_they_keep_is_counted_among_what_rests_on_the_device() -> None:
    spec = build_spec(read_source("shape:qwen2.5-7b"))
    asked = EngineConfig(model="shape:x", device="cuda", max_model_len=4096, max_num_seqs=48)
    with_it, without = (resolve(replace(asked, disable_cascade_attn=off), spec, "cuda") for off in (False, True))
    took = state_bytes(with_it, spec) - state_bytes(without, spec)
    assert took == prefix_bytes(with_it, spec) > 0
    assert took < attention_workspace_bytes(48, spec.heads, spec.head_dim)


@pytest.mark.parametrize(
    ("rows", "keys", "kv_bytes", "pays"),
    [
        (1, 100_000, 2, False),
        (2, 0, 2, False),
        (70, 9000, 2, True),
        (19, 5000, 2, True),
        (3, 100, 2, False),
        (19, 5000, 1, False),
        (70, 9000, 1, True),
    ],
)
def test_it_pays_from_so_many_rows_and_keys_on(rows: int, keys: int, kv_bytes: int, pays: bool) -> None:
    assert prefix_pays(rows, keys, num_kv_heads=4, head_dim=128, kv_bytes=kv_bytes) == pays


def test_gpus_and_types_without_the_kernels_are_told() -> None:
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    assert prefix_refusal(90, bf16, fp8) is None
    assert prefix_refusal(90, torch.float16, torch.float16) is None
    for sm in (0, 80, 89, 120):
        assert prefix_refusal(sm, bf16, bf16) == "made for SM 9.0"
    assert "float16" in (prefix_refusal(90, torch.float32, torch.float32) or "")
