"""The device of the kernels of four-bit weights, on the emulator.

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

from stoker_kernels.gemm.small import SHARED_LIMIT
from stoker_kernels.integer_gemm import sm90_int4
from stoker_kernels.launch import cuda

SOURCES = (
    *("sm90_int4_gemm.cu", "sm90_int4_few.cuh", "sm90_int4_wide.cuh", "sm90_int4_dequantize.cuh"),
    *("int4_fragments.cuh", "silu.cuh"),
)


def compile_int4(folder: Path) -> ctypes.CDLL:
    """The library of int4.cpp; skips the test where there is no g++."""
    compiled = compile_emulated(SOURCES, "int4.cpp", folder)
    assert compiled.int4_arguments_size() == ctypes.sizeof(sm90_int4.Int4Arguments)
    return compiled


@dataclass
class Int4Machine(Machine):
    """A device of `sms` SMs."""

    sms: int = 2

    def launch(self, kernel: cuda.Kernel, grid: int, arguments: list[Any], device: Any, *, pdl: bool,
               cluster: int = 1) -> None:  # fmt: skip
        assert kernel.shared_bytes <= SHARED_LIMIT
        named = (tile.ctas for tile in sm90_int4.TILES if tile.kernel_name(False)[:-6] in kernel.name)
        resident = next(named, 1)  # what dequantizes has no tile
        launch = self.told(kernel, grid, cluster)
        x_map = ctypes.byref(arguments[0]) if len(arguments) > 1 else None
        self.library.run_int4(kernel.handle, x_map, ctypes.byref(arguments[-1]), resident, ctypes.byref(launch))

    def residents(self, size: int) -> int:
        return max(1, self.sms // size)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the CUDA device of `sm90_int4`."""
        super().install(monkeypatch)
        monkeypatch.setattr(sm90_int4, "sm_count", lambda _: self.sms)
        monkeypatch.setattr(sm90_int4, "pdl_on", lambda _: True)
