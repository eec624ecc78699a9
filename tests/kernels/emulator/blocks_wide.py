"""The device of the kernels of many tokens with GGUF's blocks, on the emulator.

Knows nothing of what a kernel computes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.emulator.build import TensorMap, compile_emulated
from tests.kernels.emulator.machine import Machine

from stoker_kernels.block_gemm import sm90_wide
from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import HOPPER_SHARED

SOURCES = (
    *("sm90_blocks_wide.cu", "blocks_wide.cuh", "wide_units.cuh", "wide_ring.cuh", "plane_numbers.cuh", "silu.cuh"),
)


def compile_blocks_wide(folder: Path) -> ctypes.CDLL:
    """The library of blocks_wide.cpp; skips the test where there is no g++."""
    compiled = compile_emulated(SOURCES, "blocks_wide.cpp", folder)
    assert compiled.wide_block_arguments_size() == ctypes.sizeof(sm90_wide.WideBlockArguments)
    assert compiled.plane_maps_size() == 4 * ctypes.sizeof(TensorMap)
    return compiled


@dataclass
class WideBlockMachine(Machine):
    """A device of `sms` SMs."""

    sms: int = 2

    def launch(self, kernel: cuda.Kernel, grid: int, arguments: list[Any], device: Any, *, pdl: bool,
               cluster: int = 1) -> None:  # fmt: skip
        assert kernel.shared_bytes <= HOPPER_SHARED
        launch = self.told(kernel, grid, cluster)
        given = (ctypes.byref(argument) for argument in arguments)
        self.library.run_blocks_wide(kernel.handle, *given, ctypes.byref(launch))
        assert not sm90_wide._done(torch.device("cpu")).any(), "words are zeros between launches"

    def residents(self, size: int) -> int:
        return max(1, self.sms // size)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the CUDA device of `sm90_wide`."""
        super().install(monkeypatch)
        sm90_wide._choice.cache_clear()
        sm90_wide._clusters.cache_clear()
        sm90_wide._plane_maps_at.cache_clear()
        monkeypatch.setattr(sm90_wide, "sm_count", lambda _: self.sms)
        monkeypatch.setattr(sm90_wide, "pdl_on", lambda _: True)
