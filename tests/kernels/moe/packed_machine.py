"""A device that runs the kernels of csrc/sm90_packed_experts.cuh on the CPU, by `emulator/`."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from tests.kernels.emulator.build import compile_emulated

from stoker_kernels.launch import cuda
from stoker_kernels.moe.hopper import sm90_packed

SOURCES = ("sm90_packed_experts.cuh", "packed_codes.cuh", "few_arguments.cuh", "few_choice.cuh", "few_plan.cuh")


def compiled_kernels(folder: Path) -> ctypes.CDLL:
    """The library of the kernels."""
    compiled = compile_emulated(SOURCES, "packed_experts.cpp", folder)
    assert compiled.arguments_size() == ctypes.sizeof(sm90_packed.PackedArguments)
    return compiled


class Machine:
    """A device of `sms` SMs, whose warps, CTAs and copies run at speeds by `seed`."""

    def __init__(self, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, sms: int, seed: int) -> None:
        self.library, self.seed = library, seed
        monkeypatch.setattr(cuda, "kernel", self.kernel)
        monkeypatch.setattr(cuda, "launch", self.launch)
        monkeypatch.setattr(sm90_packed, "sm_count", lambda _: sms)

    def kernel(self, stem: str, arch: str, name: str, shared_bytes: int, threads: int, device: int) -> cuda.Kernel:
        kinds = sm90_packed.KINDS
        kind, gated = next(kind for kind in kinds if name.endswith(kind)), "gate_up" in name
        return cuda.Kernel(name, (kinds.index(kind), int(gated)), shared_bytes, threads)

    def launch(self, kernel: cuda.Kernel, grid: int, arguments: list[Any], device: Any, *, pdl: bool) -> None:
        self.library.packed_experts(*kernel.handle, grid, self.seed, *(ctypes.byref(each) for each in arguments))
