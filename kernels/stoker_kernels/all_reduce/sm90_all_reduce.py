"""Launches of csrc/sm90_all_reduce: sums over ranks on SM 9.0, with what may follow.

Invariants: where ranks wait for each other within a launch, the number of CTAs depends on the rows alone and is the
same on all ranks, and all of them fit on the GPU at once.
Knows nothing of how memory came to be mapped, nor of who chose the number of shots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_kernels.all_reduce.memory import ARCH, STEM, Inboxes
from stoker_kernels.all_reduce.rule import MOST_RANKS, VECTOR_BYTES, most_ctas
from stoker_kernels.launch import cuda
from stoker_kernels.launch.pdl import pdl_on

MOST_THREADS, WARP = 1024, 32
SHARED_BYTES = MOST_THREADS // WARP * 4  # AllReduceShared
NAMES = {
    (shots, after): f"sm90_all_reduce_{text}{after}"
    for shots, text in ((1, "one"), (2, "two"))
    for after in ("", "_norm", "_norm_e4m3")
}
NAMES_OF_COPIED = {after: f"sm90_all_reduce_copied{after}" for after in ("_norm", "_norm_e4m3")}
AWAIT = "sm90_await_peer"


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
    memory = inboxes.memory
    return _arguments(memory.addresses, memory.rank, x, out, norm, inboxes.state, inboxes.capacity)


def arguments_of_copied(parts: Sequence[int], rank: int, x: Tensor, out: Tensor, norm: Norm) -> AllReduceArguments:
    """The same of a sum whose `parts` of the other ranks, `[T,H]` each, were copied to these addresses."""
    return _arguments(parts, rank, x, out, norm, None, 0)


def _arguments(
    addresses: Sequence[int], rank: int, x: Tensor, out: Tensor, norm: Norm | None, state: Tensor | None, capacity: int
) -> AllReduceArguments:
    pointers = (ctypes.c_void_p * MOST_RANKS)(*addresses)
    after = (None, None, None) if norm is None else (norm.residual, norm.weight, norm.scales)
    tensors = (cuda.address_of(tensor) for tensor in (x, out, *after, state))
    rows, hidden = x.shape
    wide = norm is not None and norm.weight.dtype is torch.float32
    vectors = hidden * x.element_size() // VECTOR_BYTES
    eps = 0.0 if norm is None else norm.eps
    return AllReduceArguments(pointers, *tensors, capacity, eps, len(addresses), rank, rows, vectors, wide)


def launch_all_reduce(inboxes: Inboxes, shots: int, x: Tensor, out: Tensor, norm: Norm | None = None) -> None:
    """Queue the kernel: the sum of `x`, or what follows it, goes to `out`."""
    if norm is not None and not norm.residual.is_contiguous():
        raise ValueError("all_reduce: the residual stream must be contiguous")
    after, arguments = "" if norm is None else _norm_name(norm), arguments_of(inboxes, x, out, norm)
    ctas = min(x.shape[0], most_ctas(threads_for(arguments.vectors)))
    _launch(NAMES[shots, after], ctas, arguments, x.device)


def launch_sum_of_copied(parts: Sequence[int], rank: int, x: Tensor, out: Tensor, norm: Norm) -> None:
    """Queue the sum of `x` with `parts`, as `arguments_of_copied` says, and what follows it, to `out`."""
    arguments = arguments_of_copied(parts, rank, x, out, norm)
    _launch(NAMES_OF_COPIED[_norm_name(norm)], x.shape[0], arguments, x.device)


def launch_await(address: int, value: int, device: torch.device) -> None:
    """Let what is queued from now on begin once a peer has written `value` to the word at `address`."""
    chosen = cuda.kernel(STEM, ARCH, AWAIT, 0, 1, device.index or 0)
    cuda.launch(chosen, 1, [ctypes.c_void_p(address), ctypes.c_uint32(value)], device, pdl=pdl_on(device))


def _norm_name(norm: Norm) -> str:
    return "_norm" if norm.scales is None else "_norm_e4m3"


def _launch(name: str, ctas: int, arguments: AllReduceArguments, device: torch.device) -> None:
    chosen = cuda.kernel(STEM, ARCH, name, SHARED_BYTES, threads_for(arguments.vectors), device.index or 0)
    cuda.launch(chosen, ctas, [arguments], device, pdl=pdl_on(device))


def load(device: torch.device) -> None:
    """Load every kernel of the cubin, so that none is loaded under load. Raises CudaError."""
    for name in (*NAMES.values(), *NAMES_OF_COPIED.values()):
        cuda.kernel(STEM, ARCH, name, SHARED_BYTES, MOST_THREADS, device.index or 0)
    cuda.kernel(STEM, ARCH, AWAIT, 0, 1, device.index or 0)
