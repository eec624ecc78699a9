"""Launches one kernel of one cubin with as little Python as there can be: pack, set grid and stream, call the driver.

Invariants: everything that does not change from launch to launch is built once. Arguments are packed into one buffer
that the launch owns, and the driver has read it when the call returns: one thread at a time.
Knows nothing of how the cubin was chosen.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stoker_kernels.launch import cuda
from stoker_kernels.launch.aot_index import Cubin, split_type

# How `struct` packs an argument; every other type is a pointer.
_FORMATS = {"i1": "i", "i32": "i", "i64": "q", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"}
# Triton gives each kernel two more pointers, to scratch memory that ours do not use (`aot` refuses those that do).
_SCRATCH_POINTERS = 2
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with an integer value."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class CubinLaunch:
    """One kernel, ready on one device. `positions`: where each of the cubin's arguments stands in a call's."""

    def __init__(self, path: Path, cubin: Cubin, positions: Sequence[int], device: int) -> None:
        kinds = [split_type(kind)[0] for kind in cubin.arguments.values()]
        self._picks = [(position, kind.startswith("*")) for position, kind in zip(positions, kinds, strict=True)]
        formats = [_FORMATS[kind] if not kind.startswith("*") else "Q" for kind in kinds] + ["Q"] * _SCRATCH_POINTERS
        self._struct = struct.Struct("@" + "".join(formats))
        self._buffer = ctypes.create_string_buffer(self._struct.size)
        base = ctypes.addressof(self._buffer)
        self._pointers = (ctypes.c_void_p * len(formats))(*(base + offset for offset in _offsets(formats)))
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1, b"")
        self._config = _Config(0, 0, 0, cubin.threads, 1, 1, cubin.shared, None, ctypes.pointer(self._attribute), 0)
        self._config.num_attributes = int(cubin.launch_pdl)
        self._config_at = ctypes.byref(self._config)
        self._function = ctypes.c_void_p(int(cuda.load_cubin(path, cubin.entry, cubin.shared, device)))
        self._name = cubin.entry
        self._call = _cu_launch_kernel_ex()

    def __call__(self, grid: Sequence[int], device: int, arguments: Sequence[Any]) -> None:
        """Launch on torch's current stream of `device`. Raises CudaError."""
        self.pack(arguments)
        config = self._config
        config.grid_x, config.grid_y, config.grid_z = (*grid, 1, 1)[:3]
        config.stream = torch._C._cuda_getCurrentRawStream(device)
        status = self._call(self._config_at, self._function, self._pointers, None)
        if status != 0:
            raise cuda.CudaError(f"cuLaunchKernelEx gave {status} for {self._name} with grid {tuple(grid)}")

    def pack(self, arguments: Sequence[Any]) -> None:
        """Write a call's arguments where the driver will read them."""
        values = [arguments[at].data_ptr() if pointer else arguments[at] for at, pointer in self._picks]
        self._struct.pack_into(self._buffer, 0, *values, 0, 0)


def _offsets(formats: Sequence[str]) -> list[int]:
    """Where each value of a native struct starts."""
    ends = [struct.calcsize("@" + "".join(formats[: at + 1])) for at in range(len(formats))]
    return [end - struct.calcsize(kind) for end, kind in zip(ends, formats, strict=True)]


@functools.cache
def _cu_launch_kernel_ex() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.restype = ctypes.c_int
    return function
