"""Compiles a kernel's source for the CPU, with the emulator in place of its PTX.

Invariants: the kernel's own header is compiled as it is; only the headers that it includes are replaced.
Knows nothing of what a kernel computes.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from stoker_kernels import nvcc
from stoker_kernels.attention_batches import AttentionBatch

EMULATOR = Path(__file__).parent


class TensorMap(ctypes.Structure):
    """CUtensorMap of cuda.h beside this file."""

    _fields_ = [("base", ctypes.c_void_p)] + [
        (name, ctypes.c_int64)
        for name in (
            *("rows", "row_bytes", "row_stride", "box_rows", "element_bytes"),
            *("outer", "outer_stride", "box_outer"),
        )
    ]


def compile_emulated(kernel: str, entry: str, folder: Path) -> ctypes.CDLL:
    """The library of `entry`, which includes csrc/`kernel`; skips the test where there is no g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    for path in [*EMULATOR.glob("*.*"), nvcc.SOURCES / kernel]:
        shutil.copy(path, folder)
    command = [compiler, "-std=c++20", "-O2", "-fPIC", "-shared", "-I.", "-o", "kernels.so", entry]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernels.so"))


def cache_maps(batch: AttentionBatch) -> list[TensorMap]:
    """The maps of K and V: boxes of up to 64 rows."""
    pages, kv_heads, page, dim = batch.k.shape
    size = batch.k.element_size()
    return [
        TensorMap(t.data_ptr(), pages * kv_heads * page, dim * size, dim * size, min(64, page), size)
        for t in (batch.k, batch.v)
    ]
