"""A device that runs the kernels of csrc/sm90_few_experts.cuh on the CPU, by `emulator/`."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.kernels.emulator.build import compile_emulated, tensor_map

from stoker_kernels.launch import cuda
from stoker_kernels.moe.hopper import sm90_few

KINDS = ["dense", "fp8_channel", "fp8_block"]
SOURCES = (
    "sm90_few_experts.cuh", "few_arguments.cuh", "few_choice.cuh", "few_plan.cuh", "few_products.cuh", "few_rows.cuh",
)  # fmt: skip


def compiled_kernels(folder: Path) -> ctypes.CDLL:
    """The library of the kernels."""
    compiled = compile_emulated(SOURCES, "few_experts.cpp", folder)
    assert compiled.arguments_size() == ctypes.sizeof(sm90_few.FewArguments)
    return compiled


class Machine:
    """A device of `sms` SMs, whose warps, CTAs and copies run at speeds by `seed`."""

    host: ModuleType = sm90_few
    kinds = KINDS
    entry = "few_experts"

    def __init__(self, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, sms: int, seed: int) -> None:
        self.library, self.seed = library, seed
        monkeypatch.setattr(cuda, "_encoded", tensor_map)
        monkeypatch.setattr(cuda, "kernel", self.kernel)
        monkeypatch.setattr(cuda, "launch", self.launch)
        monkeypatch.setattr(self.host, "sm_count", lambda _: sms)
        sm90_few._map.cache_clear()  # by address

    def kernel(self, stem: str, arch: str, name: str, shared_bytes: int, threads: int, device: int) -> cuda.Kernel:
        kind, gated = next(kind for kind in self.kinds if name.endswith(kind)), "gate_up" in name
        return cuda.Kernel(name, (self.kinds.index(kind), int(gated)), shared_bytes, threads)

    def launch(self, kernel: cuda.Kernel, grid: int, arguments: list[Any], device: Any, *, pdl: bool) -> None:
        run = getattr(self.library, self.entry)
        run(*kernel.handle, grid, self.seed, *(ctypes.byref(each) for each in arguments))
