"""What the log of a start says of kernels: attention by those behind it."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels.launch import dispatch
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
