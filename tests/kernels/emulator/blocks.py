"""The device of the kernels of GGUF's blocks, on the emulator.

Knows nothing of what a kernel computes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.kernels.emulator.build import compile_emulated
from tests.kernels.emulator.machine import Machine

from stoker_kernels.block_gemm import sm90_few, sm90_rows
from stoker_kernels.launch import cuda

SOURCES = (
    "sm90_blocks_few.cu", "blocks_few.cuh", "blocks_some.cuh", "block_copies.cuh", "block_units.cuh",
    "sm90_block_rows.cu", "block_rows.cuh", "plane_numbers.cuh",
)  # fmt: skip


def compile_blocks(folder: Path) -> ctypes.CDLL:
    """The library of blocks.cpp; skips the test where there is no g++."""
    compiled = compile_emulated(SOURCES, "blocks.cpp", folder)
    assert compiled.block_arguments_size() == ctypes.sizeof(sm90_few.BlockArguments)
    assert compiled.rows_arguments_size() == ctypes.sizeof(sm90_rows.RowsArguments)
    return compiled


@dataclass
class BlockMachine(Machine):
    """A device of `sms` SMs."""

    sms: int = 3

    def launch(self, kernel: cuda.Kernel, grid: int, arguments: list[Any], device: Any, *, pdl: bool,
               cluster: int = 1) -> None:  # fmt: skip
        assert kernel.shared_bytes <= max(sm90_few.SHARED_BYTES.values())
        launch = self.told(kernel, grid, cluster)
        decoding = isinstance(arguments[0], sm90_rows.RowsArguments)
        run = self.library.run_block_rows if decoding else self.library.run_blocks
        run(kernel.handle, ctypes.byref(arguments[0]), ctypes.byref(launch))

    def residents(self, size: int) -> int:
        return max(1, 2 * self.sms // size)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the CUDA device of `sm90_few` and of `sm90_rows`."""
        super().install(monkeypatch)
        monkeypatch.setattr(sm90_few, "sm_count", lambda _: self.sms)
        for module in (sm90_few, sm90_rows):
            monkeypatch.setattr(module, "pdl_on", lambda _: True)
