"""Experts in four bits as bf16, for as many tokens as multiply with them many times: host side of
csrc/sm90_unpacked_experts.

As many experts at a time as SCRATCH_BYTES hold: whoever multiplies with some is done, on the stream, when the next ones
take their place. FP4 is exact but for NVFP4's factor, with which a number is rounded once; integers are rounded as
everywhere.
Invariants: a launch never synchronises and can be captured after one launch of its kind.
Does not know: for how many tokens that pays (`choose`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.launch.dispatch import sm_count
from stoker_kernels.moe.hopper.sm90_packed import group_refusal, group_shift, lines_of
from stoker_kernels.moe.types import ExpertWeights

STEM, ARCH = "sm90_unpacked_experts", "sm_90a"
THREADS = 256
SCRATCH_BYTES = 1 << 30
_CTAS = 8  # that an SM holds


class UnpackArguments(ctypes.Structure):
    """UnpackArguments of csrc/sm90_unpacked_experts.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "weight", "scales", "factor")),
        *((name, ctypes.c_int) for name in ("all_rows", "rows", "columns", "lines", "group_shift")),
    ]


def refusal(weights: ExpertWeights) -> str | None:
    """None where `unpacked` takes these experts in four bits, else why not."""
    return group_refusal(weights) or cuda.missing_cubin(STEM, ARCH)


def experts_at_once(experts: int, rows: int, columns: int) -> int:
    """How many experts of [rows, columns] SCRATCH_BYTES hold, one at least."""
    return max(1, min(experts, SCRATCH_BYTES // (2 * rows * columns)))


def scratch_bytes(experts: int, ffn: int, hidden: int, *, gated: bool) -> int:
    """What the matrices of so many experts take at a time."""
    sizes = (((2 if gated else 1) * ffn, hidden), (hidden, ffn))
    return max(experts_at_once(experts, *size) * 2 * size[0] * size[1] for size in sizes)


def unpacked(weights: ExpertWeights, *, gated: bool) -> Iterator[tuple[int, Tensor]]:
    """Gate and up, or down, of some experts after others: the first of them, and bf16 [experts, rows, columns], the
    room of the next ones once these are asked for. Raises CubinMissing.
    """
    weight, scale, factor = (
        (weights.gate_up, weights.gate_up_scale, weights.gate_up_factor)
        if gated
        else (weights.down, weights.down_scale, weights.down_factor)
    )
    assert scale is not None
    experts, rows, columns = weights.experts, weight.shape[1], 2 * weight.shape[2]
    count = experts_at_once(experts, rows, columns)
    scratch = torch.empty((count, rows, columns), dtype=torch.bfloat16, device=weight.device)
    device = weight.device
    chosen = cuda.kernel(STEM, ARCH, f"{STEM}_{weights.kind}", 0, THREADS, device.index or 0)
    for first in range(0, experts, count):
        some = slice(first, min(first + count, experts))
        arguments = UnpackArguments(
            out=scratch.data_ptr(), weight=weight[some].data_ptr(), scales=scale[some].data_ptr(),
            factor=cuda.address_of(None if factor is None else factor[some]),
            all_rows=(some.stop - first) * rows, rows=rows, columns=columns,
            lines=lines_of(weights.kind, columns, weights.group), group_shift=group_shift(weights, columns),
        )  # fmt: skip
        # Not before those are done that multiply with what is there.
        cuda.launch(chosen, _CTAS * sm_count(device), [arguments], device, pdl=False)
        yield first, scratch[: some.stop - first]
