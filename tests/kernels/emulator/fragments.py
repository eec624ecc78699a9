"""The device of the kernels of weights in fragments, on the emulator.

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

from stoker_kernels.fragment_gemm import sm90
from stoker_kernels.fragment_gemm.tiles import NUMBERS
from stoker_kernels.gemm.small import HOPPER_SHARED
from stoker_kernels.launch import cuda

SOURCES = (
    *("fragments.cuh", "fragments_few.cuh", "fragments_wide.cuh", "fragments_dequantize.cuh", "fragments_kernels.cuh"),
    *("four_bits.cuh", "integer_numbers.cuh", "fp4_numbers.cuh", "silu.cuh"),
)
SHARED_OF_SM = 228 * 1024  # of which each CTA takes a KB more than it asks for


def compile_fragments(stem: str, folder: Path) -> ctypes.CDLL:
    """The library of fragments.cpp with the kernels of csrc/`stem`.cu; skips the test where there is no g++."""
    compiled = compile_emulated((f"{stem}.cu", *SOURCES), "fragments.cpp", folder)
    assert compiled.fragment_arguments_size() == ctypes.sizeof(sm90.FragmentArguments)
    return compiled


@dataclass
class FragmentMachine(Machine):
    """A device of `sms` SMs."""

    sms: int = 2

    def launch(self, kernel: cuda.Kernel, grid: int, arguments: list[Any], device: Any, *, pdl: bool,
               cluster: int = 1) -> None:  # fmt: skip
        assert kernel.shared_bytes <= HOPPER_SHARED
        tiles = {numbers.kernel_name(tile): tile for numbers in NUMBERS for tile in numbers.tiles}
        resident = tiles[kernel.name].ctas if kernel.name in tiles else 1  # what dequantizes has no tile
        assert (kernel.shared_bytes + 1024) * resident <= SHARED_OF_SM
        launch = self.told(kernel, grid, cluster)
        x_map = ctypes.byref(arguments[0]) if len(arguments) > 1 else None
        self.library.run_fragments(kernel.handle, x_map, ctypes.byref(arguments[-1]), resident, ctypes.byref(launch))

    def residents(self, size: int) -> int:
        return max(1, self.sms // size)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the CUDA device of `fragment_gemm`."""
        super().install(monkeypatch)
        monkeypatch.setattr(sm90, "sm_count", lambda _: self.sms)
        monkeypatch.setattr(sm90, "pdl_on", lambda _: True)
