"""A device without a GPU for the kernels of GGUF's blocks: their host code launches the emulator.

Invariants: only the driver's part is replaced (loading, launches, the number of SMs).
Knows nothing of what a kernel computes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.emulator.build import compile_emulated

from stoker_kernels.block_gemm import sm90_few
from stoker_kernels.launch import cuda

SOURCES = ("sm90_blocks_few.cu", "blocks_few.cuh", "blocks_some.cuh", "block_copies.cuh", "block_units.cuh")


class Launch(ctypes.Structure):
    """Launch of emulator/blocks.cpp."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("ctas", "cluster", "threads", "seed")),
        *(("x", ctypes.c_void_p), ("x_bytes", ctypes.c_int64), ("out", ctypes.c_void_p), ("out_bytes", ctypes.c_int64)),
    ]


def compile_blocks(folder: Path) -> ctypes.CDLL:
    """The library of blocks.cpp; skips the test where there is no g++."""
    compiled = compile_emulated(SOURCES, "blocks.cpp", folder)
    assert compiled.block_arguments_size() == ctypes.sizeof(sm90_few.BlockArguments)
    return compiled


@dataclass
class Machine:
    """A device of `sms` SMs with kernels from `library`, random orders by `seed`.

    `x` and `out`: the memory that the kernel before each launch still writes and reads.
    """

    library: ctypes.CDLL
    sms: int = 3
    seed: int = 0
    x: torch.Tensor | None = None
    out: torch.Tensor | None = None

    def kernel(self, stem: str, arch: str, name: str, shared_bytes: int, threads: int, device: int) -> cuda.Kernel:
        assert arch == "sm_90a"
        return cuda.Kernel(name, getattr(self.library, name), shared_bytes, threads)

    def launch(self, kernel: cuda.Kernel, grid: int, arguments: list[Any], device: Any, *, pdl: bool,
               cluster: int = 1) -> None:  # fmt: skip
        assert kernel.shared_bytes <= max(sm90_few.SHARED_BYTES.values())
        tensors = [torch.empty(0) if t is None else t for t in (self.x, self.out)]
        spaces = [(t.data_ptr(), t.numel() * t.element_size()) for t in tensors]
        launch = Launch(grid, cluster, kernel.threads, self.seed, *spaces[0], *spaces[1])
        self.library.run_blocks(kernel.handle, ctypes.byref(arguments[0]), ctypes.byref(launch))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the CUDA device of `sm90_few`."""
        monkeypatch.setattr(cuda, "kernel", self.kernel)
        monkeypatch.setattr(cuda, "launch", self.launch)
        monkeypatch.setattr(cuda, "resident_clusters", lambda _, size, __: max(1, 2 * self.sms // size))
        monkeypatch.setattr(sm90_few, "sm_count", lambda _: self.sms)
        monkeypatch.setattr(sm90_few, "pdl_on", lambda _: True)
