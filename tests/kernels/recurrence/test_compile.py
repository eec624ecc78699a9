"""The chunks of recurrences compiled with no GPU: that they fit Hopper, and multiply where products are multiplied."""

from __future__ import annotations

from typing import Any

import pytest

from stoker_kernels.launch import aot


@pytest.mark.parametrize("kernel", ["mamba2_chunk_kernel", "delta_chunk_kernel", "delta_solve_kernel"])
def test_the_widest_chunk_compiles_and_fits(kernel: str) -> None:
    found = [each for each in aot.variants(90) if each.spec.kernel.__name__ == kernel and "bf16" in str(each.arguments)]
    widest = max(found, key=lambda each: sum(value for value in each.constants.values() if isinstance(value, int)))
    compiled: Any = aot.compile_variant(widest)
    assert compiled.metadata.shared <= 227 * 1024
    assert "mma" in compiled.asm["ptx"]
    assert "griddepcontrol.wait" in compiled.asm["ptx"]
