"""y += B·s, and the activation of gate and up within it, by mma.sync: host side of csrc/sm90_bf16_lora_expand.cu.

For any number of tokens in bf16 on SM 9.0; what the kernels do not take goes to Triton's.
Invariants: a token's bits depend on its own row and its adapter alone; nothing is allocated. Knows nothing of how s was
summed.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.launch.dispatch import Target
from stoker_kernels.launch.pdl import pdl_on
from stoker_kernels.lora.cluster_shrink import bf16_supports
from stoker_kernels.lora.types import TILE, LoraPlan, LoraTarget

STEM, ARCH = "sm90_bf16_lora_expand", "sm_90a"
MOST_PIECES = 4  # of ExpandArguments
_TILES, _COLUMNS, _WARPS = 4, 32, 4  # of a CTA; of a warp; of a CTA
_EIGHT = 8  # elements that a lane reads and writes at once


class ExpandArguments(ctypes.Structure):
    """ExpandArguments of the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("y", "out", "b", "shrunk", "order", "of_tile", "ranks", "of_token")),
        ("slot_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("rank_stride", "y_stride", "out_stride", "m", "tiles", "pieces")),
        *((name, ctypes.c_int) for name in ("max_rank", "parts", "planned", "chunks")),
        ("rows", ctypes.c_int * MOST_PIECES),
    ]


def refusal(y: Tensor, target: LoraTarget, scratch: Tensor) -> str | None:
    """None where the kernels take these, else why not."""
    if target.b.dtype != torch.bfloat16 or y.dtype != torch.bfloat16:
        return f"takes bf16, not {y.dtype} and {target.b.dtype}"
    strides = (y.stride(0), *target.b.stride()[:2], *target.rows)
    if y.stride(1) != 1 or any(value % _EIGHT for value in strides) or y.data_ptr() % 16 or target.b.data_ptr() % 16:
        return "rows and pieces have to be multiples of 16 bytes, and to start on them"
    if target.a.shape[1] % 2 or scratch.data_ptr() % 8:
        return "takes ranks two by two"
    return None


def expand_lora(y: Tensor, target: LoraTarget, plan: LoraPlan, scratch: Tensor, parts: int, planned: bool) -> None:
    """`expand_lora` of the op."""
    if refusal(y, target, scratch) is not None:
        from stoker_kernels.lora import triton_lora

        triton_lora.expand_lora(y, target, plan, scratch, parts, planned)
        return
    _launch("plain", y, y, target, plan, scratch, parts, planned)


def expand_silu_mul(
    y: Tensor, target: LoraTarget, plan: LoraPlan, scratch: Tensor, out: Tensor, parts: int, planned: bool
) -> None:
    """`expand_silu_mul` of the op, into `out`."""
    if refusal(y, target, scratch) is not None or out.stride(0) % _EIGHT or out.data_ptr() % 16:
        from stoker_kernels.lora import triton_lora

        triton_lora.expand_silu_mul(y, target, plan, scratch, out, parts, planned)
        return
    _launch("gated", y, out, target, plan, scratch, parts, planned)


def supports(target: Target) -> str | None:
    """Where these run."""
    return bf16_supports(STEM, target)


def _launch(
    mode: str, y: Tensor, out: Tensor, target: LoraTarget, plan: LoraPlan, scratch: Tensor, parts: int, planned: bool
) -> None:
    _, max_rank, pieces, _ = target.a.shape
    slot_stride, rank_stride, _ = target.b.stride()
    gated, tokens, tiles = mode == "gated", y.shape[0], plan.adapters.shape[0]
    blocks = sum(-(-rows // _COLUMNS) for rows in (target.rows[:1] if gated else target.rows))
    chunks, walked = -(-blocks // _WARPS), tiles + (-(-tokens // TILE) if gated else 0)
    arguments = ExpandArguments(
        y.data_ptr(), out.data_ptr(), target.b.data_ptr(), scratch.data_ptr(), plan.order.data_ptr(),
        plan.adapters.data_ptr(), target.ranks.data_ptr(), plan.tokens.data_ptr(), slot_stride, rank_stride,
        y.stride(0), out.stride(0), tokens, tiles, pieces, max_rank, parts, int(planned), chunks,
        (ctypes.c_int * MOST_PIECES)(*target.rows),
    )  # fmt: skip
    kernel = cuda.kernel(STEM, ARCH, f"{STEM}_{mode}", 0, 32 * _WARPS, y.device.index or 0)
    cuda.launch(kernel, chunks * -(-walked // _TILES), [arguments], y.device, pdl=pdl_on(y.device))
