"""RMS norm on a CPU by csrc/cpu_norm.c: one call for the sum with the residual stream and the norm.

Invariants: as of the public ops. What the C does not take (rows of no whole vectors, strided tensors, a norm of x
itself before it is added) is left to `cpu_norm`.
Knows nothing of dispatch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from stoker_kernels.launch.compiled import LANES, TYPES, Kernel
from stoker_kernels.norm import cpu_norm

_rms_norm = Kernel("cpu_norm", "stoker_rms_norm")


class _Work(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "residual", "out")),
        *((name, ctypes.c_long) for name in ("rows", "columns")),
        *((name, ctypes.c_float) for name in ("eps", "multiplier")),
        *((name, ctypes.c_int) for name in ("type", "weight_type")),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """RMS norm over the last dimension of `x [T,H]`."""
    y = torch.empty_like(x) if out is None else out
    if not _takes(x, x, weight, y):
        return cpu_norm.rms_norm(x, weight, eps, out=out)
    _run(x, None, weight, eps, 1.0, y)
    return y


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    post: Tensor | None = None,
    multiplier: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """`residual += multiplier · x` in place, then the norm of the rounded sum."""
    y = torch.empty_like(x) if out is None else out
    if post is not None or not _takes(x, residual, weight, y):
        return cpu_norm.add_rms_norm(x, residual, weight, eps, post=post, multiplier=multiplier, out=out)
    _run(x, residual, weight, eps, multiplier, y)
    return y


def _takes(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor) -> bool:
    return (
        x.shape[-1] % LANES == 0
        and x.dim() == 2
        and x.shape == residual.shape == out.shape
        and x.dtype == residual.dtype == out.dtype
        and weight.dtype in TYPES
        and weight.shape == x.shape[-1:]
        and x.is_contiguous()
        and residual.is_contiguous()
        and out.is_contiguous()
        and weight.is_contiguous()
    )


def _run(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, multiplier: float, out: Tensor) -> None:
    rows, columns = x.shape
    beside = None if residual is None else residual.data_ptr()
    _rms_norm(
        _Work(
            x.data_ptr(), weight.data_ptr(), beside, out.data_ptr(), rows, columns, eps, multiplier, TYPES[x.dtype],
            TYPES[weight.dtype],
        )
    )  # fmt: skip
