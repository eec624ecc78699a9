"""Experts in host memory: which layers', what that leaves on the device, and the same tokens."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.models.test_mixtures import QWEN

from stoker_runtime import LLM, SamplingParams
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor import build
from stoker_runtime.executor.resolve import resolve
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.hosted_experts import (
    device_bytes,
    hosted_bytes,
    layer_bytes,
    staged_bytes,
    with_hosted,
)
from stoker_runtime.models.layers.staged import CHOICES_AN_EXPERT
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.terminal.mixture_lines import mixture_lines
from stoker_runtime.weights.layout import WeightArena

GIB = 1024**3
LAYERS = 7


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE of seven layers, one of them without experts."""
    import transformers

    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(5)
    config = transformers.Qwen3MoeConfig(**QWEN | {"num_hidden_layers": LAYERS, "initializer_range": 0.2})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def of_shape(name: str, **options: Any) -> tuple[EngineConfig, ModelSpec]:
    config = EngineConfig(model=f"shape:{name}", max_model_len=4096, **options)
    spec = build_spec(read_source(config.model))
    return resolve(config, spec, "cuda"), spec


@pytest.mark.parametrize("quantization", ["auto", "fp8", "w4"])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v2-lite"])
def test_the_last_layers_as_far_as_the_memory_goes(name: str, quantization: str) -> None:
    rng = random.Random(name + quantization)
    for _ in range(4):
        asked = rng.uniform(1.5, 50.0)
        config, plain = of_shape(name, quantization=quantization, cpu_offload_experts=asked)
        spec = with_hosted(config, plain, lambda: 60 * GIB)
        assert spec.moe is not None
        kinds = (config.dtype, config.quantization)
        sparse = sorted(spec.moe.layers)
        hosted = sparse[len(sparse) - len(spec.moe.hosted) :]
        assert spec.moe.hosted == frozenset(hosted)
        sizes = {layer: layer_bytes(spec, layer, *kinds) for layer in sparse}
        assert hosted_bytes(spec, *kinds) == sum(sizes[layer] for layer in hosted) <= asked * GIB
        if len(hosted) < len(sparse):
            assert hosted_bytes(spec, *kinds) + sizes[sparse[len(sparse) - len(hosted) - 1]] > asked * GIB
        whole = plain.parameter_bytes(*kinds)
        assert device_bytes(spec, *kinds) == whole - hosted_bytes(spec, *kinds) + staged_bytes(spec, *kinds)
        told = mixture_lines(spec, config)[-1][1]
        assert told.startswith(f"{hosted_bytes(spec, *kinds) / GIB:.2f} GiB of {len(hosted)} layers;")


def test_nothing_is_hosted_unless_asked_for() -> None:
    config, spec = of_shape("qwen3-30b-a3b")
    assert with_hosted(config, spec, lambda: 0) is spec
    assert device_bytes(spec, "bfloat16", "none") == spec.parameter_bytes("bfloat16", "none")
    assert len(mixture_lines(spec, config)) == 2


@pytest.mark.parametrize(
    ("name", "asked", "device", "free", "told"),
    [
        ("qwen3-0.6b", 3.5, "cuda", 90, "has no experts; leave --cpu-offload-experts out"),
        ("qwen3-30b-a3b", 0.9, "cuda", 90, "take 1.125; raise --cpu-offload-experts"),
        ("qwen3-30b-a3b", 31.0, "cuda", 17, "take 30.38, but 17.00 of host memory are free; lower "),
        ("qwen3-30b-a3b", 2.5, "cpu", 90, "on a CPU all weights are in host memory; leave --cpu-offload-experts out"),
    ],
)
def test_what_cannot_be_is_said(name: str, asked: float, device: str, free: int, told: str) -> None:
    config, spec = of_shape(name, cpu_offload_experts=asked)
    with pytest.raises(ConfigError, match="cpu_offload_experts is") as refused:
        with_hosted(replace(config, device=device), spec, lambda: free * GIB)
    assert told in str(refused.value)
    assert refused.value.param == "cpu_offload_experts"


def test_models_that_pool_have_none() -> None:
    with pytest.raises(ConfigError, match="cpu_offload_experts is for models that generate"):
        LLM("shape:tiny", device="cpu", runner="pooling", cpu_offload_experts=1.5)


def with_layers(monkeypatch: pytest.MonkeyPatch, hosted: set[int]) -> None:
    """Have a CPU's engine take these layers for hosted ones, which it refuses by itself."""

    def chosen(config: EngineConfig, spec: ModelSpec, free: object) -> ModelSpec:
        assert spec.moe is not None
        return replace(spec, moe=replace(spec.moe, hosted=frozenset(hosted)))

    monkeypatch.setattr(build, "with_hosted", chosen)


def opened(model: Path, quantization: str) -> LLM:
    return LLM(
        str(model), device="cpu", dtype="float32", quantization=quantization, max_model_len=200, cpu_threads=1,
        max_num_seqs=4, enable_sleep_mode=True,
    )  # fmt: skip


@pytest.mark.parametrize("quantization", ["none", "fp8", "w4"])
def test_the_same_tokens_and_nothing_is_read_before_it_is_there(
    checkpoint: Path, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts want a layer's experts copied to their place, the tokens after them do not; asleep they stay."""
    rng = random.Random(quantization)
    asked = [[rng.randrange(3, 110) for _ in range(rng.choice((1, 2, 40, 90)))] for _ in range(9)]
    params = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)
    with opened(checkpoint, quantization) as llm:
        expected = llm.generate_tokens(asked, params)
        weights = llm.engine.executor.plan.weights
    sparse = [layer for layer in range(LAYERS) if layer != 1]
    hosted = set(rng.sample(sparse, 4))
    with_layers(monkeypatch, hosted)
    with opened(checkpoint, quantization) as llm:
        decoder = llm.engine.executor.decoder
        mixtures = {at: layer.mixture for at, layer in enumerate(decoder.weights.layers) if layer.mixture}
        assert {at for at, each in mixtures.items() if each.staged} == hosted
        assert {at for at, each in mixtures.items() if each.experts.hosted} == hosted
        size = layer_bytes(decoder.spec, sparse[0], "float32", quantization)
        assert llm.engine.executor.plan.weights == weights - 3 * size
        assert llm.generate_tokens(asked, params) == expected
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert llm.generate_tokens(asked, params) == expected
        # 5 experts, of which 2 are chosen: from 5 tokens on. The model's last layer has none but those sampled from.
        few = [[17, 5, 90, 3]]
        last = decoder.weights.layers[max(hosted - {LAYERS - 1})].mixture
        assert last is not None
        assert last.staged is not None
        assert CHOICES_AN_EXPERT == 2
        with torch.inference_mode():
            last.staged.down.zero_()
        llm.generate_tokens(few, params)
        assert not last.staged.down.any()
        llm.generate_tokens([[*few[0], 9]], params)
        for field in fields(last.experts):
            here, there = getattr(last.experts, field.name), getattr(last.staged, field.name)
            assert not isinstance(here, torch.Tensor) or torch.equal(here, there)


def test_experts_lie_in_their_block_alone(checkpoint: Path) -> None:
    plain = build_spec(read_source(str(checkpoint)))
    assert plain.moe is not None
    for quantization in ("none", "fp8", "w4"):
        spec = replace(plain, moe=replace(plain.moe, hosted=frozenset({4, 6})))
        arena = WeightArena(spec, torch.device("cpu"), torch.float32, quantization)
        host = arena._memory._host.storage
        assert host.numel() == hosted_bytes(spec, "float32", quantization) > 0
        assert arena.num_bytes == arena._memory.used == spec.parameter_bytes("float32", quantization)
        range_of = range(host.data_ptr(), host.data_ptr() + host.numel())
        for index, layer in enumerate(arena.assemble().layers):
            if layer.mixture is None:
                continue
            inside = index in (4, 6)
            assert (layer.mixture.experts.gate_up.data_ptr() in range_of) is inside
            assert (layer.mixture.experts.down.data_ptr() in range_of) is inside
            assert layer.mixture.router.data.data_ptr() not in range_of
