"""Compiles a kernel's source for the CPU, with the emulator in place of its PTX.

Invariants: the kernel's own sources are compiled as they are; only the headers that name PTX are replaced.
Knows nothing of what a kernel computes.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.kernels.attention.batches import AttentionBatch

from stoker_kernels.launch import nvcc

EMULATOR = Path(__file__).parent


class TensorMap(ctypes.Structure):
    """CUtensorMap of cuda.h beside this file."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rank", "element_bytes")),
        *((name, ctypes.c_int64 * 5) for name in ("sizes", "strides", "box")),
    ]


def tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], element_size: int, box: tuple[int, ...],
    line: int = 128,
) -> TensorMap:  # fmt: skip
    """What `cuda._encoded` makes, refusing what the driver refuses."""
    rank = len(sizes)
    in_bytes = tuple(stride * element_size for stride in strides)
    assert rank == len(strides) + 1 == len(box) + 1 <= 5
    assert address % 16 == 0
    assert line in (32, 64, 128)
    assert all(stride % 16 == 0 and 0 < stride < 2**40 for stride in in_bytes)
    assert all(0 < size <= 2**32 for size in sizes)
    assert all(0 < length <= 256 for length in box)
    of_five = ctypes.c_int64 * 5
    return TensorMap(address, rank, element_size, of_five(*sizes), of_five(element_size, *in_bytes),
                     of_five(line // element_size, *box))  # fmt: skip


def compile_emulated(kernels: tuple[str, ...], entry: str, folder: Path) -> ctypes.CDLL:
    """The library of `entry`, which includes the files `kernels` of csrc/; skips the test where there is no g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    files = {path.name: path for path in [*nvcc.headers(), *nvcc.sources().values()]}
    for path in [*EMULATOR.glob("*.*"), *(files[kernel] for kernel in kernels)]:
        shutil.copy(path, folder)
    # g++ takes most of the time that these tests take, and with -O3 twice as much, which they do not give back.
    # Libraries of one process share nothing: what is inline in headers would be unique among them otherwise.
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-fno-gnu-unique", "-I.", "-include", "builtins.h"]
    subprocess.run([compiler, *flags, "-o", "kernels.so", entry], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernels.so"))


def cache_maps(batch: AttentionBatch, box: int = 64) -> list[TensorMap]:
    """The maps of K and V: boxes of up to `box` rows."""
    pages, kv_heads, page, dim = batch.k.shape
    sizes, size = (dim, pages * kv_heads * page), batch.k.element_size()
    return [tensor_map(t.data_ptr(), sizes, (dim,), size, (min(box, page),)) for t in (batch.k, batch.v)]
