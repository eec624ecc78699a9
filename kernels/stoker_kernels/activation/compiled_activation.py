"""SwiGLU on a CPU by csrc/cpu_activation.c.

Invariants: as of the public op; rows of no whole vectors and strided tensors are left to the reference.
Knows nothing of dispatch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from stoker_kernels.activation import reference
from stoker_kernels.launch.compiled import LANES, TYPES, Kernel

_silu_and_mul = Kernel("cpu_activation", "stoker_silu_and_mul")


class _Work(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_long) for name in ("rows", "columns")),
        ("type", ctypes.c_int),
    )


def silu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x [T,2F]` → `silu(x[:, :F]) * x[:, F:]` `[T,F]`."""
    columns = x.shape[-1] // 2
    if x.dim() != 2 or columns % LANES or x.shape[-1] % 2 or not x.is_contiguous():
        return reference.silu_and_mul(x, out=out)
    fits = out is not None and out.dtype == x.dtype and out.is_contiguous() and out.shape == (len(x), columns)
    y = out if fits and out is not None else torch.empty((x.shape[0], columns), dtype=x.dtype)
    _silu_and_mul(_Work(x.data_ptr(), y.data_ptr(), x.shape[0], columns, TYPES[x.dtype]))
    return y if out is None or y is out else out.copy_(y)
