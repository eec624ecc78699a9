"""A device without a GPU for the kernels of four-bit weights: their host code launches the emulator.

Invariants: only the driver's part is replaced (maps, loading, launches, the number of SMs).
Knows nothing of what a kernel computes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.emulator.build import compile_emulated, tensor_map

from stoker_kernels.gemm.small import SHARED_LIMIT
from stoker_kernels.integer_gemm import sm90_int4
from stoker_kernels.launch import cuda

SOURCES = (
    *("sm90_int4_gemm.cu", "sm90_int4_few.cuh", "sm90_int4_wide.cuh", "sm90_int4_dequantize.cuh"),
    *("int4_fragments.cuh", "silu.cuh"),
)


class Launch(ctypes.Structure):
    """Launch of emulator/int4.cpp."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("ctas", "cluster", "threads", "seed", "resident")),
        *(("x", ctypes.c_void_p), ("x_bytes", ctypes.c_int64), ("out", ctypes.c_void_p), ("out_bytes", ctypes.c_int64)),
    ]


def compile_int4(folder: Path) -> ctypes.CDLL:
    """The library of int4.cpp; skips the test where there is no g++."""
    compiled = compile_emulated(SOURCES, "int4.cpp", folder)
    assert compiled.int4_arguments_size() == ctypes.sizeof(sm90_int4.Int4Arguments)
    return compiled


@dataclass
class Machine:
    """A device of `sms` SMs with kernels from `library`, random orders by `seed`.

    `x` and `out`: the memory that the kernel before each launch still writes and reads.
    """

    library: ctypes.CDLL
    sms: int = 2
    seed: int = 0
    x: torch.Tensor | None = None
    out: torch.Tensor | None = None

    def kernel(self, stem: str, arch: str, name: str, shared_bytes: int, threads: int, device: int) -> cuda.Kernel:
        assert arch == "sm_90a"
        return cuda.Kernel(name, getattr(self.library, name), shared_bytes, threads)

    def launch(self, kernel: cuda.Kernel, grid: int, arguments: list[Any], device: Any, *, pdl: bool,
               cluster: int = 1) -> None:  # fmt: skip
        assert kernel.shared_bytes <= SHARED_LIMIT
        tensors = [torch.empty(0) if t is None else t for t in (self.x, self.out)]
        spaces = [(t.data_ptr(), t.numel() * t.element_size()) for t in tensors]
        named = (tile.ctas for tile in sm90_int4.TILES if tile.kernel_name(False)[:-6] in kernel.name)
        resident = next(named, 1)  # what dequantizes has no tile
        launch = Launch(grid, cluster, kernel.threads, self.seed, resident, *spaces[0], *spaces[1])
        x_map = ctypes.byref(arguments[0]) if len(arguments) > 1 else None
        self.library.run_int4(kernel.handle, x_map, ctypes.byref(arguments[-1]), ctypes.byref(launch))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the CUDA device of `sm90_int4`."""
        monkeypatch.setattr(cuda, "_encoded", tensor_map)
        monkeypatch.setattr(cuda, "kernel", self.kernel)
        monkeypatch.setattr(cuda, "launch", self.launch)
        monkeypatch.setattr(cuda, "resident_clusters", lambda _, size, __: max(1, self.sms // size))
        monkeypatch.setattr(sm90_int4, "sm_count", lambda _: self.sms)
        monkeypatch.setattr(sm90_int4, "pdl_on", lambda _: True)
