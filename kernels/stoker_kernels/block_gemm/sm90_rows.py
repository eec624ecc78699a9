"""Rows of GGUF's planes in bf16 on Hopper, for products of many tokens: host side of csrc/sm90_block_rows.cu.

Invariants: a weight is what its format defines, rounded once, bit for bit as `reference` has it. A launch never
synchronises, takes no memory, and can be captured after one of its format.
Does not know: what is multiplied with the rows, nor how many are decoded at a time (`plane_choose`).
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import sm_of
from stoker_kernels.launch.pdl import pdl_on
from stoker_kernels.quant import PLANE_KINDS, PlaneRows, steps_and_tails

STEM, ARCH, THREADS = "sm90_block_rows", "sm_90a", 256
# Steps of a row that a CTA decodes one after the other, each asked for while the one before is decoded.
PART_STEPS = 4


class RowsArguments(ctypes.Structure):
    """RowsArguments of csrc/block_rows.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "low", "high", "scale", "factor")),
        *((name, ctypes.c_int) for name in ("n", "first", "count", "columns", "parts", "part_steps")),
    ]


def device_refusal(dtype: torch.dtype, sm: int) -> str | None:
    """None where the kernels run, else why not."""
    if not chip_of(sm).wgmma or dtype != torch.bfloat16:
        return "needs sm_90 and bfloat16"
    return cuda.missing_cubin(STEM, ARCH)


def piece_refusal(piece: PlaneRows) -> str | None:
    """None where the kernels read a piece's planes, else why not."""
    planes = (piece.low, piece.high, piece.scale, piece.factor)
    misplaced = any(cuda.address_of(tensor) % 16 for tensor in planes)
    return "planes have to start on multiples of 16 bytes" if misplaced else None


def refusal(piece: PlaneRows, out: Tensor) -> str | None:
    """None where the kernels decode into `out`, else why not."""
    if not out.is_contiguous() or out.data_ptr() % 16:
        return "the result has to be contiguous and start on a multiple of 16 bytes"
    return piece_refusal(piece) or device_refusal(out.dtype, sm_of(out.device))


def rows_of_cta(name: str) -> int:
    """Rows that a CTA decodes: a lane has 16 bytes of a row's lower plane."""
    return THREADS // (2 * PLANE_KINDS[name].low)


def decode(piece: PlaneRows, out: Tensor, *, first: int = 0, part_steps: int = 0) -> None:
    """out [R, K] = rows `first` to first + R of a piece, on the current stream, where `refusal` accepts them.

    `part_steps` in place of PART_STEPS where it is given. Raises CubinMissing.
    """
    steps, tails = steps_and_tails(piece.columns)
    each = part_steps or PART_STEPS
    parts = -(-(steps + (tails > 0)) // each)
    arguments = RowsArguments(
        out.data_ptr(), piece.low.data_ptr(), cuda.address_of(piece.high), piece.scale.data_ptr(),
        cuda.address_of(piece.factor), piece.rows, first, len(out), piece.columns, parts, each,
    )  # fmt: skip
    device = out.device
    chosen = cuda.kernel(STEM, ARCH, f"{STEM}_{piece.format.lower()}", 0, THREADS, device.index or 0)
    ctas = -(-len(out) // rows_of_cta(piece.format)) * parts
    cuda.launch(chosen, ctas, [arguments], device, pdl=pdl_on(device))
