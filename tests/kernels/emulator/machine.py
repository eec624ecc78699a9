"""A device without a GPU: what host code launches runs on the emulator.

Invariants: only the driver's part is replaced (maps, loading, launches, what is resident); every kernel that a test
launches is compiled from csrc/.
Knows nothing of what a kernel computes, nor of its arguments.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.kernels.emulator.build import tensor_map

from stoker_kernels.launch import cuda


class Launch(ctypes.Structure):
    """Launch of emulator/launch.h."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("ctas", "cluster", "threads", "seed")),
        *((f"{name}{end}", kind) for name in ("x", "out", "words", "shrunk")
          for end, kind in (("", ctypes.c_void_p), ("_bytes", ctypes.c_int64))),
    ]


@dataclass
class Machine(ABC):
    """A device with kernels from `library`, random orders by `seed`.

    `x` and `out`, where given: the memory that the kernel before each launch still writes and reads.
    """

    library: ctypes.CDLL
    seed: int = 0
    x: torch.Tensor | None = None
    out: torch.Tensor | None = None

    def kernel(self, stem: str, arch: str, name: str, shared_bytes: int, threads: int, device: int) -> cuda.Kernel:
        """The one of that name."""
        assert arch == "sm_90a"
        return cuda.Kernel(name, getattr(self.library, name), shared_bytes, threads)

    @abstractmethod
    def launch(self, kernel: cuda.Kernel, grid: int, arguments: list[Any], device: Any, *, pdl: bool,
               cluster: int = 1) -> None:  # fmt: skip
        """Run it."""

    @abstractmethod
    def residents(self, size: int) -> int:
        """How many clusters of so many CTAs there are at once."""

    def told(self, kernel: cuda.Kernel, grid: int, cluster: int, words: torch.Tensor | None = None) -> Launch:
        """What the emulator is told. With `words` these, and all of `out`, are still written."""
        tensors = (self.x, self.out, None, None) if words is None else (self.x, None, words, self.out)
        spaces = [(0, 0) if t is None else (t.data_ptr(), t.numel() * t.element_size()) for t in tensors]
        return Launch(grid, cluster, kernel.threads, self.seed, *(value for space in spaces for value in space))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the CUDA device."""
        monkeypatch.setattr(cuda, "_encoded", tensor_map)
        monkeypatch.setattr(cuda, "kernel", self.kernel)
        monkeypatch.setattr(cuda, "launch", self.launch)
        monkeypatch.setattr(cuda, "resident_clusters", lambda _, size, __: self.residents(size))
