"""Launches of csrc/sm90_all_reduce: sums over ranks on SM 9.0, with what may follow.

Invariants: the number of CTAs depends on the rows alone and is the same on all ranks; all CTAs of a launch fit on the
GPU at once.
Knows nothing of how inboxes came to be mapped, nor of who chose the number of shots.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_kernels.all_reduce.memory import ARCH, STEM, Inboxes
from stoker_kernels.all_reduce.rule import MOST_CTAS, MOST_RANKS, VECTOR_BYTES
from stoker_kernels.launch import cuda
from stoker_kernels.launch.pdl import pdl_on

MOST_THREADS, WARP = 1024, 32
SHARED_BYTES = MOST_THREADS // WARP * 4  # AllReduceShared
NAMES = {
    (shots, after): f"sm90_all_reduce_{text}{after}"
    for shots, text in ((1, "one"), (2, "two"))
    for after in ("", "_norm", "_norm_e4m3")
}


class AllReduceArguments(ctypes.Structure):
    """AllReduceArguments of csrc/sm90_all_reduce.cuh."""

    _fields_ = [
        ("inboxes", ctypes.c_void_p * MOST_RANKS),
        *((name, ctypes.c_void_p) for name in ("x", "out", "residual", "weight", "scales", "state")),
        ("capacity", ctypes.c_int64),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("ranks", "rank", "rows", "vectors", "wide_weight")),
    ]


def threads_for(vectors: int) -> int:
    """Of a CTA: a vector each, or two of rows that are wider."""
    return min(MOST_THREADS, -(-vectors // WARP) * WARP)


@dataclass(frozen=True, slots=True)
class Norm:
    """What follows the sum: `residual [T,H]` += it, then the norm with `weight [H]`; in e4m3 with `scales [T,1]`."""

    residual: Tensor
    weight: Tensor
    eps: float
    scales: Tensor | None = None


def arguments_of(inboxes: Inboxes, x: Tensor, out: Tensor, norm: Norm | None) -> AllReduceArguments:
    """What the kernel reads and writes: `x` and `out` are `[T,H]`."""
    pointers = (ctypes.c_void_p * MOST_RANKS)(*inboxes.addresses)
    after = (None, None, None) if norm is None else (norm.residual, norm.weight, norm.scales)
    tensors = (cuda.address_of(tensor) for tensor in (x, out, *after, inboxes.state))
    rows, hidden = x.shape
    wide = norm is not None and norm.weight.dtype is torch.float32
    vectors = hidden * x.element_size() // VECTOR_BYTES
    eps = 0.0 if norm is None else norm.eps
    return AllReduceArguments(
        pointers, *tensors, inboxes.capacity, eps, inboxes.ranks, inboxes.rank, rows, vectors, wide
    )


def launch_all_reduce(inboxes: Inboxes, shots: int, x: Tensor, out: Tensor, norm: Norm | None = None) -> None:
    """Queue the kernel: the sum of `x`, or what follows it, goes to `out`."""
    if norm is not None and not norm.residual.is_contiguous():
        raise ValueError("all_reduce: the residual stream must be contiguous")
    after = "" if norm is None else "_norm" if norm.scales is None else "_norm_e4m3"
    arguments = arguments_of(inboxes, x, out, norm)
    device = x.device
    threads = threads_for(arguments.vectors)
    chosen = cuda.kernel(STEM, ARCH, NAMES[shots, after], SHARED_BYTES, threads, device.index or 0)
    cuda.launch(chosen, min(x.shape[0], MOST_CTAS), [arguments], device, pdl=pdl_on(device))


def load(device: torch.device) -> None:
    """Load every kernel of the cubin, so that none is loaded under load. Raises CudaError."""
    for name in NAMES.values():
        cuda.kernel(STEM, ARCH, name, SHARED_BYTES, MOST_THREADS, device.index or 0)
