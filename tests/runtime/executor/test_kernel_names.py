"""What the log of a start says of kernels: attention by those behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stoker_kernels.launch import dispatch
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor import kernel_names
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source

QWEN = build_spec(read_source("shape:qwen2.5-7b"))


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
    def names(_: torch.device, *, kv_dtype: torch.dtype, head_dim: int, group: int, softcap: float) -> str:
        return f"{dispatch.dtype_name(kv_dtype)}, {head_dim}, {group}, {softcap}"

    monkeypatch.setattr(dispatch, "chosen", lambda: {"paged_attention": chosen, "rms_norm": "triton"})
    monkeypatch.setattr(kernel_names, "attention_kernels", names)
    found = kernel_names.kernels_in_use(QWEN, torch.device(device), torch.bfloat16)
    assert found == {"paged_attention": shown, "rms_norm": "triton"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"enable_lora": True}, "enable_lora"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
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
        ("qwen3-30b-a3b", "cpu", "none", "mixtures of experts"),
        ("deepseek-v2-lite", "cpu", "none", "mixtures of experts|latent attention"),
        ("qwen2.5-7b", "cpu", "w4", "weights in int4"),
        ("llama-3.1-8b", "cuda", "w4", "weights in int4"),
        ("odd", "cuda", "none", "head .*N = 151937"),
    ],
)
def test_models_that_batch_invariance_refuses(shape: str, device: str, quantization: str, named: str) -> None:
    spec = replace(QWEN, vocab=151937) if shape == "odd" else build_spec(read_source(f"shape:{shape}"))
    config = EngineConfig(model="m", dtype="bfloat16", quantization=quantization, batch_invariant=True)
    kernel_names.refuse_variant(replace(config, batch_invariant=False), spec, torch.device(device))
    with pytest.raises(ConfigError, match=named):
        kernel_names.refuse_variant(config, spec, torch.device(device))
