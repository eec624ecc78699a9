"""What the log of a start says of kernels, attention by those behind it, and what a kind of GPU does not multiply."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_kernels.launch import cuda, dispatch
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor import kernel_names
from stoker_runtime.executor.device import gpu_bf16
from stoker_runtime.executor.resolve import resolve
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.settings.parse import parse

QWEN = build_spec(read_source("shape:qwen2.5-7b"))
dispatch.ops()  # each is there once its folder is imported


@pytest.mark.parametrize(
    ("device", "chosen", "shown"),
    [
        ("cuda", "triton", "bfloat16, 128, 7, 0.0"),
        ("cuda", "reference", "reference"),
        ("cpu", "triton", "triton"),
    ],
)
def test_attention_on_a_gpu_stands_by_its_kernels(
    device: str, chosen: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names(
        _: torch.device, *, kv_dtype: torch.dtype, head_dim: int, group: int, softcap: float, slopes: bool,
        patterns: bool,
    ) -> str:  # fmt: skip
        assert (slopes, patterns) == (False, False)
        return f"{dispatch.dtype_name(kv_dtype)}, {head_dim}, {group}, {softcap}"

    monkeypatch.setattr(dispatch, "chosen", lambda: {"paged_attention": chosen, "rms_norm": "triton"})
    monkeypatch.setattr(kernel_names, "attention_kernels", names)
    found = kernel_names.kernels_in_use(QWEN, torch.device(device), torch.bfloat16)
    assert found == {"paged_attention": shown, "rms_norm": "triton"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"enable_lora": True}, "enable_lora"),
        ({"runner": "pooling"}, "runner pooling"),
        ({"kernels": (("linear", "reference"),)}, "kernel"),
    ],
)
def test_settings_that_batch_invariance_refuses(settings: dict[str, Any], named: str) -> None:
    kernel_names.refuse_settings(EngineConfig(model="m", **settings))
    with pytest.raises(ConfigError, match=f"batch_invariant cannot go with.*{named}"):
        kernel_names.refuse_settings(EngineConfig(model="m", batch_invariant=True, **settings))


@pytest.mark.parametrize(
    ("shape", "device", "quantization", "named"),
    [
        ("deepseek-v2-lite", "cuda", "none", "latent_attention.*not batch-invariant"),
        ("hybrid", "cpu", "none", "layers with a state"),
        ("odd", "cuda", "none", "head .*N = 151937"),
        ("odd experts", "cuda", "none", r"router \[99, 2048\].*N = 99 not of 8"),
    ],
)
def test_models_that_batch_invariance_refuses(
    shape: str, device: str, quantization: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "sm_of", lambda device: 90)
    monkeypatch.setattr(cuda, "missing_cubin", lambda stem, arch: None)
    spec = refused_spec(shape)
    config = EngineConfig(model="m", dtype="bfloat16", quantization=quantization, batch_invariant=True)
    kernel_names.refuse_variant(replace(config, batch_invariant=False), spec, torch.device(device))
    with pytest.raises(ConfigError, match=named):
        kernel_names.refuse_variant(config, spec, torch.device(device))


def refused_spec(shape: str) -> ModelSpec:
    if shape == "odd":
        return replace(QWEN, vocab=151937)
    if shape == "hybrid":
        return replace(QWEN, recurrent=object())  # type: ignore[arg-type]
    if shape == "odd experts":
        spec = build_spec(read_source("shape:qwen3-30b-a3b"))
        assert spec.moe is not None
        return replace(spec, moe=replace(spec.moe, experts=99))
    return build_spec(read_source(f"shape:{shape}"))


@pytest.mark.parametrize(
    ("shape", "device", "quantization"),
    [
        ("qwen3-30b-a3b", "cpu", "none"),
        ("qwen3-30b-a3b", "cuda", "fp8"),
        ("gpt-oss-20b", "cuda", "auto"),
        ("deepseek-v2-lite", "cpu", "none"),
        ("qwen2.5-7b", "cpu", "w4"),
        ("llama-3.1-8b", "cuda", "w4"),
    ],
)
def test_models_that_are_batch_invariant(
    shape: str, device: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "sm_of", lambda device: 90)
    monkeypatch.setattr(cuda, "missing_cubin", lambda stem, arch: None)
    monkeypatch.setattr(dispatch, "_selected", {})
    spec = build_spec(read_source(f"shape:{shape}"))
    config = EngineConfig(model="m", dtype="bfloat16", quantization=quantization, batch_invariant=True)
    kernel_names.refuse_variant(config, spec, torch.device(device))
    assert not dispatch.invariance_demanded(), "who asks demands nothing for good"


def test_every_example_of_the_flag_names_what_there_is() -> None:
    """Those of documents, and the one by which a wrong value is refused."""
    root = Path(__file__).parents[3]
    pages = [root / "README.md", root / "ARCHITECTURE.md", *root.glob("docs/**/*.md"), *root.glob("*/README.md")]
    with pytest.raises(ConfigError) as wrong:
        parse(["m", "--kernel", f"{random.randrange(10**6)}"], {})
    texts = [wrong.value.message.replace("such as ", "--kernel "), *(page.read_text() for page in pages)]
    found = [re.findall(r"--kernel ([a-z0-9_]+)=([a-z0-9_]+)", text) for text in texts]
    assert found[0]
    for op, name in {each for some in found for each in some} - {("op", "implementation"), ("op", "name")}:
        assert op in dispatch.ops(), op
        assert name in dispatch.implementations(op), (op, name)


GPU = torch.device("cuda", 0)


def started(monkeypatch: pytest.MonkeyPatch, sm: int, model: str = "qwen2.5-7b", **asked: Any) -> EngineConfig:
    """What a start on a GPU of capability `sm` resolves and then refuses, or not."""
    monkeypatch.setattr(dispatch, "sm_of", lambda device: sm)
    monkeypatch.setattr(cuda, "missing_cubin", lambda stem, arch: None)
    spec = build_spec(read_source(f"shape:{model}"))
    config = EngineConfig(model=f"shape:{model}", **asked)
    config = resolve(config, spec, "cuda", gpu_bf16=gpu_bf16(GPU))
    kernel_names.refuse_kind(config, spec, GPU)
    return config


@pytest.mark.parametrize("sm", [75, 80, 86, 87, 89, 90, 100, 120])
def test_a_model_of_bfloat16_starts_on_every_kind_of_gpu(sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    selected = dict(dispatch._selected)
    for model, quantization in (("qwen3-30b-a3b", "auto"), ("llama-3.1-8b", "w4"), ("gpt-oss-20b", "auto")):
        config = started(monkeypatch, sm, model, quantization=quantization)
        assert (config.dtype, config.kv_cache_dtype) == 2 * (("bfloat16" if sm >= 80 else "float16"),)
    assert dispatch._selected == selected, "only what a step uses is named in the log"


@pytest.mark.parametrize(
    ("sm", "model", "asked", "param", "words"),
    [
        (75, "qwen2.5-7b", {"dtype": "bfloat16"}, "dtype", r"bfloat16 needs sm_80 or newer.*give it as float16"),
        (75, "deepseek-v2-lite", {}, "model", "latent attention.*needs sm_80.*Ampere or newer"),
        (86, "qwen2.5-7b", {"quantization": "fp8"}, "quantization", r"needs sm_89.*Ada, .*--quantization w4\)"),
        (80, "llama-3.1-8b", {"isq": "fp8"}, "isq", r"bfloat16 \(AWQ, GPTQ, --isq w4\)"),
        (80, "qwen3-30b-a3b", {"quantization": "fp8"}, "quantization", r"FP8 products want Ada.*--quantization w4\)"),
        (70, "qwen2.5-7b", {"quantization": "w4", "dtype": "float32"}, "device", "sm_70, and kernels are for sm_75"),
    ],
)
def test_what_a_gpu_does_not_multiply_is_refused_before_weights_are_read(
    sm: int, model: str, asked: dict[str, Any], param: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=words) as wrong:
        started(monkeypatch, sm, model, **asked)
    assert wrong.value.param == param
    assert started(monkeypatch, 89, model, **asked).model == f"shape:{model}"


def test_what_is_pinned_is_left_to_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_pins", {"linear": "reference"})
    assert started(monkeypatch, 75, dtype="bfloat16").dtype == "bfloat16"
    monkeypatch.setattr(dispatch, "_pins", {"linear": "table"})
    assert started(monkeypatch, 80).dtype == "bfloat16"
    with pytest.raises(dispatch.KernelUnavailable, match="table: needs sm_90"):
        dispatch.select("linear", GPU, torch.bfloat16)


@pytest.mark.parametrize("sm", [75, 80])
def test_int8_on_both_sides_wants_ampere(sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "sm_of", lambda device: sm)
    monkeypatch.setattr(kernel_names, "stored_kind", lambda parameter, quantization: "int8_channel")
    config = resolve(EngineConfig(model="m"), QWEN, "cuda", gpu_bf16=gpu_bf16(GPU))
    if sm >= 80:
        kernel_names.refuse_kind(config, QWEN, GPU)
        return
    with pytest.raises(ConfigError, match=r"rests in int8_channel.*needs sm_80.*INT8 products want Ampere"):
        kernel_names.refuse_kind(config, QWEN, GPU)
