"""Experts in NVFP4 and integers of eight bits, and those without a gate, compiled with no GPU: that they fit, and
multiply where products are.
"""

from __future__ import annotations

from typing import Any

import pytest

from stoker_kernels.launch import aot
from stoker_kernels.moe import triton_experts


@pytest.mark.parametrize(
    ("sm", "kernel", "kind", "parts"),
    [
        (80, "gate_up_kernel", triton_experts.NVFP4, 2),
        (90, "down_kernel", triton_experts.NVFP4, None),
        (90, "gate_up_kernel", triton_experts.NVFP4, 1),
        (90, "gate_up_kernel", triton_experts.DENSE, 1),
        (80, "gate_up_kernel", triton_experts.INT8, 2),
        (90, "down_kernel", triton_experts.INT8, None),
        (80, "gate_up_kernel", triton_experts.INT8_CHANNEL, 2),
        (90, "gate_up_kernel", triton_experts.INT8_CHANNEL, 2),
    ],
)
def test_the_widest_tile_compiles_and_fits(sm: int, kernel: str, kind: int, parts: int | None) -> None:
    found = [
        each
        for each in aot.variants(sm)
        if each.spec.kernel.__name__ == kernel
        and (each.constants["KIND"], each.constants.get("PARTS")) == (kind, parts)
        and each.constants["TOKENS"] == 128
    ]
    compiled: Any = aot.compile_variant(found[0])
    assert compiled.metadata.shared <= (227 if sm == 90 else 163) * 1024
    assert "mma" in compiled.asm["ptx"]
