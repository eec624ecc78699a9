"""The products by definition: a large weight is widened in parts."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels.gemm import reference
from stoker_kernels.quant import quantize_weight


def test_a_large_weight_is_widened_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = quantize_weight(torch.randn(700, 48), "fp8_channel"), torch.randn(3, 48)
    whole = reference.linear(x, weight)
    monkeypatch.setattr(reference, "WIDENED_AT_ONCE", 48 * 300)
    torch.testing.assert_close(reference.linear(x, weight), whole)
