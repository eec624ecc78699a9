"""Products on a CPU whose sums have one order, for batch-invariant ops: host side of csrc/cpu_dot.c.

Invariants: sums are fp32, over 16 lanes in turn, in one order for every number of rows of x and of threads. What the C
function gets is contiguous and lies within its tensors.
Does not know: what is multiplied, nor how the library was compiled (`cc.py`).
"""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional

from stoker_kernels.launch import cc
from stoker_kernels.launch.compiled import refuse_tape

LIBRARY = "cpu_dot"
LANES = 16
# Bytes of a weight below which a second thread costs more than it brings.
THREAD_BYTES = 128 * 1024


def refusal() -> str | None:
    """Why there are no such products on this machine; None where there are."""
    return cc.refusal(LIBRARY)


def padded(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] as `dot_into` reads it."""
    return functional.pad(x.float(), (0, -x.shape[1] % LANES)).contiguous()


def dot(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] · weightᵀ, [N, K] fp32 or bf16 → [T, N] fp32."""
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32)
    dot_into(y, 0, padded(x), weight)
    return y


def dot_into(y: torch.Tensor, first: int, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Columns of y [T, …] fp32 from `first` on: x · weightᵀ, of x that is `padded`."""
    refuse_tape("products in one order")
    weight = weight.contiguous()
    rows, columns = weight.shape
    threads = torch.get_num_threads() if weight.nbytes >= THREAD_BYTES else 1
    long = ctypes.c_long
    cc.library(LIBRARY).stoker_dot_product(
        ctypes.c_void_p(weight.data_ptr()), int(weight.dtype is torch.bfloat16), long(rows), long(columns),
        ctypes.c_void_p(x.data_ptr()), long(x.shape[1]), long(len(x)), ctypes.c_void_p(y.data_ptr() + first * 4),
        long(y.shape[1]), threads,
    )  # fmt: skip
