"""Argmax on a CPU by csrc/cpu_argmax.c: one thread reads a row as it lies, where torch makes it fp32 first, by threads
that it has to wake.

Invariants: tokens are the reference's. Strided rows are left to it.
Knows nothing of dispatch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from stoker_kernels.launch.compiled import TYPES, Kernel
from stoker_kernels.sampling import reference

_argmax = Kernel("cpu_argmax", "stoker_argmax")


class _Work(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "tokens")),
        *((name, ctypes.c_long) for name in ("rows", "columns")),
        ("type", ctypes.c_int),
    )


def argmax(logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`logits [R,V]` → `[R]` int32, as of the public op."""
    rows, columns = logits.shape
    if not logits.is_contiguous() or not columns:
        return reference.argmax(logits, out=out)
    direct = out is not None and out.is_contiguous() and out.dtype == torch.int32 and out.shape == (rows,)
    tokens = out if direct and out is not None else torch.empty(rows, dtype=torch.int32)
    _argmax(_Work(logits.data_ptr(), tokens.data_ptr(), rows, columns, TYPES[logits.dtype]))
    return tokens if out is None or tokens is out else out.copy_(tokens)
