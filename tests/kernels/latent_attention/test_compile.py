"""The latent kernels compiled with no GPU: that the widest tiles fit, and use what they are meant to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker_kernels.launch import aot, nvcc

SHARED_MEMORY = {86: 99, 90: 227}


def widest(kernel: str, sm: int, *, fp8: bool = False) -> aot.Variant:
    """A kernel for DeepSeek V3 in bf16, and of a cache in bf16 or e4m3."""
    found = [
        each
        for each in aot.variants(sm)
        if each.spec.kernel.__name__ == kernel
        and "bf16" in str(each.arguments)
        and ("u8" in str(each.arguments)) == fp8
    ]
    return max(found, key=lambda each: (each.constants["BLOCK_P"], each.constants["BLOCK_M"]))


@pytest.mark.parametrize(
    ("kernel", "sm", "fp8"),
    [
        ("latent_context_kernel", 90, False), ("latent_decode_kernel", 86, False), ("latent_decode_kernel", 90, True),
        ("latent_context_kernel", 86, True),
    ],
)  # fmt: skip
def test_it_compiles_and_fits(kernel: str, sm: int, fp8: bool) -> None:
    compiled: Any = aot.compile_variant(widest(kernel, sm, fp8=fp8))
    assert compiled.metadata.shared <= SHARED_MEMORY[sm] * 1024
    assert ("wgmma.mma_async" in compiled.asm["ptx"]) == (sm == 90)
    assert "cp.async" in compiled.asm["ptx"]
    assert ("griddepcontrol.wait" in compiled.asm["ptx"]) == (sm == 90)


def test_chunks_on_hopper_use_wgmma() -> None:
    compiled: Any = aot.compile_variant(widest("latent_prefill_kernel", 90))
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_MEMORY[90] * 1024


@pytest.mark.matrix
@pytest.mark.parametrize("stem", ["sm90_latent", "sm90_latent_e4m3"])
def test_hoppers_own_kernels_keep_their_sums_in_registers(stem: str, tmp_path: Path) -> None:
    try:
        remarks = nvcc.compile_cubin(stem, "sm_90a", tmp_path)
    except nvcc.NvccMissing as missing:
        pytest.skip(str(missing))
    assert "spill" not in remarks
    assert "serialized" not in remarks
