"""Sizes by arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.resolve import GIB, DeviceMemory, plan_memory, resolve
from stoker_runtime.executor.state import sequence_state_bytes, state_bytes
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.spec import ModelSpec

H200 = DeviceMemory(total=141 * GIB, used=1 * GIB)


@pytest.fixture
def qwen() -> ModelSpec:
    return build_spec(read_source("shape:qwen2.5-7b"))


def test_nothing_is_auto_after_resolve(qwen: ModelSpec) -> None:
    config = resolve(EngineConfig(model="shape:qwen2.5-7b"), qwen, "cuda")
    assert (config.dtype, config.kv_cache_dtype, config.quantization) == ("bfloat16", "bfloat16", "none")
    assert min(config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens, config.page_size) > 0
    assert resolve(config, qwen, "cuda") == config


@pytest.mark.parametrize(
    ("device", "gpu", "steps"),
    [("cuda", 141, (1024, 8192)), ("cuda", 36, (1024, 8192)), ("cuda", 35.9, (256, 2048)), ("cpu", 0, (32, 512))],
)
def test_steps_are_as_wide_as_the_gpu_is_large(
    qwen: ModelSpec, device: str, gpu: float, steps: tuple[int, int]
) -> None:
    config = resolve(EngineConfig(model="m"), qwen, device, int(gpu * GIB))
    assert (config.max_num_seqs, config.max_num_batched_tokens) == steps
    given = resolve(EngineConfig(model="m", max_num_seqs=7, max_num_batched_tokens=99), qwen, device, int(gpu * GIB))
    assert (given.max_num_seqs, given.max_num_batched_tokens) == (7, 99)


@pytest.mark.parametrize(("gpu", "shape"), [(141, "nemotron-h-8b"), (79, "qwen3-next-80b-a3b"), (23, "nemotron-h-8b")])
def test_states_of_sequences_leave_room_for_the_rest(gpu: int, shape: str) -> None:
    """Nobody has to know what a state takes; who says how many sequences gets them, or is told which flag to lower."""
    spec = build_spec(read_source(f"shape:{shape}"))
    memory = DeviceMemory(total=gpu * GIB, used=0)
    config = resolve(EngineConfig(model="m"), spec, "cuda", memory.total)
    held = sequence_state_bytes(config, spec)
    assert memory.total / 8 < held * config.max_num_seqs <= memory.total / 4
    assert config.max_num_batched_tokens >= config.max_num_seqs
    asked = resolve(EngineConfig(model="m", max_num_seqs=1500), spec, "cuda", memory.total)
    assert asked.max_num_seqs == 1500
    lower = rf"lower --max-num-seqs \(the states of 1500 take {held / 2**20:.1f} MiB each"
    with pytest.raises(ConfigError, match=lower):
        plan_memory(asked, spec, memory, weights=0, state=state_bytes(asked, spec))


def test_every_byte_of_the_budget_is_counted(qwen: ModelSpec) -> None:
    config = resolve(EngineConfig(model="m", gpu_memory_utilization=0.8), qwen, "cuda")
    plan = plan_memory(config, qwen, H200, weights=15 * GIB, state=GIB)
    spent = H200.used + plan.weights + plan.workspace + plan.graphs + plan.state + plan.kv_bytes
    budget = 0.8 * H200.total
    assert spent <= budget
    assert spent > 0.99 * budget
    # Loaded kernels take 400 MiB, and each of the 66 prepared graphs and 128 others 0.75, as measured with this shape.
    assert budget - spent >= (400 + (66 + 128) * 0.75) * 2**20
    # 28 layers x 2 x 4 heads x 128 x 2 bytes a token.
    assert plan.page_bytes == 57344 * config.page_size


def test_a_reserve_bounds_like_utilization(qwen: ModelSpec) -> None:
    config = resolve(EngineConfig(model="m", gpu_memory_utilization=1.0, gpu_memory_reserve_gb=41), qwen, "cuda")
    plan = plan_memory(config, qwen, H200, weights=15 * GIB, state=GIB)
    assert H200.used + plan.weights + plan.workspace + plan.graphs + plan.state + plan.kv_bytes <= 100 * GIB


def test_on_a_cpu_the_faster_type_is_taken(qwen: ModelSpec) -> None:
    def dtype(spec: ModelSpec, asked: str = "auto", *, cpu_bf16: bool) -> tuple[str, str]:
        config = resolve(EngineConfig(model="m", dtype=asked), spec, "cpu", cpu_bf16=cpu_bf16)
        return config.dtype, config.kv_cache_dtype

    assert dtype(qwen, cpu_bf16=True) == ("bfloat16", "bfloat16")
    assert dtype(qwen, cpu_bf16=False) == ("float32", "float32")
    assert dtype(qwen, "float32", cpu_bf16=True) == ("float32", "float32")
    # bf16 has three bits less than float16, so weights that have them keep them.
    assert dtype(replace(qwen, dtype="float16"), cpu_bf16=True) == ("float32", "float32")
    assert dtype(replace(qwen, dtype="float32"), cpu_bf16=True) == ("float32", "float32")


@pytest.mark.parametrize("kv", ["float16", "float32"])
def test_a_cache_of_another_type_is_refused_on_a_gpu(qwen: ModelSpec, kv: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_dtype is {kv}, but the model runs in bfloat16") as wrong:
        resolve(EngineConfig(model="m", kv_cache_dtype=kv), qwen, "cuda")
    assert wrong.value.param == "kv_cache_dtype"
    assert resolve(EngineConfig(model="m", kv_cache_dtype=kv), qwen, "cpu").kv_cache_dtype == kv
    assert resolve(EngineConfig(model="m", dtype=kv, kv_cache_dtype=kv), qwen, "cuda").kv_cache_dtype == kv


@pytest.mark.parametrize(
    ("fields", "named", "words"),
    [
        ({"max_model_len": 40000}, "max_model_len", "32768 or less"),
        ({"num_gpu_blocks": 10**6}, "num_gpu_blocks", "lower --num-gpu-blocks"),
        ({"gpu_memory_utilization": 0.1}, "gpu_memory_utilization", "No memory is left"),
        ({"gpu_memory_utilization": 0.135}, "max_model_len", "set --max-model-len to"),
        ({"device": "cpu", "cpu_kv_gb": 0.0001}, "cpu_kv_gb", "raise --cpu-kv-gb"),
    ],
)
def test_what_does_not_fit_names_the_flag(qwen: ModelSpec, fields: dict[str, Any], named: str, words: str) -> None:
    def start() -> None:
        config = resolve(EngineConfig(model="m", **fields), qwen, fields.get("device", "cuda"))
        plan_memory(config, qwen, H200, weights=15 * GIB, state=0)

    with pytest.raises(ConfigError, match=words) as caught:
        start()
    assert caught.value.param == named


def test_the_workspace_holds_a_copy_of_the_logits_however_short_the_steps(qwen: ModelSpec) -> None:
    def workspace(tokens: int) -> int:
        config = resolve(EngineConfig(model="m", max_num_batched_tokens=tokens, max_num_seqs=tokens), qwen, "cuda")
        return plan_memory(config, qwen, H200, weights=15 * GIB, state=GIB).workspace

    assert workspace(4096) > 4096 * qwen.vocab * 2
    assert workspace(2048) > 2048 * qwen.vocab * 2


def test_graphs_take_nothing_where_there_are_none(qwen: ModelSpec) -> None:
    graphed = resolve(EngineConfig(model="m"), qwen, "cuda")
    eager = resolve(EngineConfig(model="m", enforce_eager=True), qwen, "cuda")
    plans = [plan_memory(config, qwen, H200, weights=15 * GIB, state=GIB) for config in (graphed, eager)]
    assert plans[0].graphs > plans[1].graphs == 0
    assert plans[0].pages < plans[1].pages
