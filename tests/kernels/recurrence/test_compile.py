"""Recurrences compiled with no GPU: that chunks fit Hopper, and multiply where products are multiplied; that a state in
registers stays there.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton

from stoker_kernels.launch import aot


@pytest.mark.parametrize("kernel", ["mamba2_chunk_kernel", "delta_chunk_kernel", "delta_solve_kernel"])
def test_the_widest_chunk_compiles_and_fits(kernel: str) -> None:
    found = [each for each in aot.variants(90) if each.spec.kernel.__name__ == kernel and "bf16" in str(each.arguments)]
    widest = max(found, key=lambda each: sum(value for value in each.constants.values() if isinstance(value, int)))
    compiled: Any = aot.compile_variant(widest)
    assert compiled.metadata.shared <= 227 * 1024
    assert "mma" in compiled.asm["ptx"]
    assert "griddepcontrol.wait" in compiled.asm["ptx"]


def stack_of(compiled: Any, folder: Path) -> int:
    """Bytes of a thread's stack, where what no register holds goes."""
    file = folder / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    said = subprocess.run([str(dump), "-res-usage", str(file)], capture_output=True, text=True, check=True)
    print(said.stdout)
    return int(re.findall(r"STACK:(\d+)", said.stdout + said.stderr)[0])


@pytest.mark.parametrize("recurrence", ["mamba2", "delta"])
@pytest.mark.parametrize("part", ["try", "settle"])
def test_states_of_drafts_stay_in_registers(part: str, recurrence: str, tmp_path: Path) -> None:
    kernel = f"{part}_{recurrence}_kernel"
    found = [each for each in aot.variants(90) if each.spec.kernel.__name__ == kernel and "bf16" in str(each.arguments)]
    assert found
    for each in found:
        compiled: Any = aot.compile_variant(each)
        assert "griddepcontrol.wait" in compiled.asm["ptx"]
        assert stack_of(compiled, tmp_path) == 0, each.constants
