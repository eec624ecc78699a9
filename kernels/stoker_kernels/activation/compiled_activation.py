"""SwiGLU on a CPU by csrc/cpu_activation.c.

Invariants: as of the public op; rows of no whole vectors and strided tensors are left to the reference.
Knows nothing of dispatch.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from stoker_kernels.activation import reference
from stoker_kernels.launch import cc
from stoker_kernels.launch.compiled import LANES, TYPES


def silu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x [T,2F]` → `silu(x[:, :F]) * x[:, F:]` `[T,F]`."""
    columns = x.shape[-1] // 2
    if x.dim() != 2 or columns % LANES or x.shape[-1] % 2 or not x.is_contiguous():
        return reference.silu_and_mul(x, out=out)
    fits = out is not None and out.dtype == x.dtype and out.is_contiguous() and out.shape == (len(x), columns)
    y = out if fits and out is not None else torch.empty((x.shape[0], columns), dtype=x.dtype)
    _function()(x.data_ptr(), x.shape[0], columns, y.data_ptr(), TYPES[x.dtype])
    return y if out is None or y is out else out.copy_(y)


@functools.cache
def _function() -> ctypes._NamedFuncPointer:
    found = cc.library("cpu_activation").stoker_silu_and_mul
    found.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_int]
    found.restype = None
    return found
