"""On a CPU, too, pages that were given up are never read: `test_out_of_sight_on_device.py` says what that means."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.attention.batches import Shape
from tests.kernels.attention.test_out_of_sight_on_device import Attention, check

from stoker_kernels.attention import compiled_attention, cpu_attention, reference
from stoker_kernels.launch import cc


@pytest.mark.parametrize("attention", [
    reference.reference_attention, cpu_attention.paged_attention,
    pytest.param(cpu_attention.attend_rows, marks=pytest.mark.skipif(
        cc.refusal("cpu_rows") is not None, reason="cpu_rows is not compiled")),
    pytest.param(compiled_attention.paged_attention, marks=pytest.mark.skipif(
        cc.refusal("cpu_attention") is not None, reason="cpu_attention is not compiled")),
], ids=["reference", "torch", "rows", "compiled"])  # fmt: skip
@pytest.mark.parametrize("window", [1, 33, 64, 130])
def test_on_a_cpu(attention: Attention, window: int) -> None:
    check(attention, Shape(16, 2, 4, 32, torch.float32, torch.float32), window, torch.device("cpu"))
