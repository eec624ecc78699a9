"""A·x of each token in final sums, by clusters of CTAs: host side of csrc/sm90_bf16_lora_shrink.cu.

`shrink_rows` gives what the products of `gemm/adapted.py` read: bf16 `[T, P, R']`, R' being the ranks rounded up to 16;
`shrink_lora` what `expand_lora` reads. For bf16 on SM 9.0, and for x in eight bits there.
Invariants: a token's bits depend on its own row of x and its adapter alone; nothing is allocated; where a token has no
adapter, or a slot no rank, nothing is written. Knows nothing of what is done with the sums.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import Target
from stoker_kernels.launch.pdl import pdl_on
from stoker_kernels.lora.types import TILE, LoraPlan, LoraStep, LoraTarget
from stoker_kernels.quant import Quantized

STEM, ARCH = "sm90_bf16_lora_shrink", "sm_90a"
RANKS = 16
"""Ranks that a cluster computes."""
MOST_AHEAD = 48
"""Clusters whose end the product does not wait for. With more it starts later, and its weights slow them down."""
_CTAS, _WARPS, _UNIT = 8, 8, 32
_AHEAD = (2, 4, 10)  # units of A's columns that a warp of each compiled kernel holds
_NAMES = {torch.bfloat16: "a", torch.float8_e4m3fn: "e4m3_a", torch.int8: "s8_a"}  # of kernels, by the type of x
_SUMS = TILE * RANKS * 4
_SHARED_BYTES = _WARPS * TILE * (RANKS + 4) * 4 + _CTAS * _SUMS + 8


class ShrinkArguments(ctypes.Structure):
    """ShrinkArguments of the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "x_scale", "a", "out", "order", "of_tile", "ranks")),
        ("slot_stride", ctypes.c_int64),
        ("turn", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("rank_stride", "piece_stride", "x_stride", "columns", "pieces")),
        *((name, ctypes.c_int) for name in ("row_ranks", "rank_blocks", "by_place", "planned", "clusters")),
    ]


def row_ranks(max_rank: int) -> int:
    """Elements from one piece's sums of a token to the next one's."""
    return -(-max_rank // RANKS) * RANKS


def shrink_refusal(x: Tensor | Quantized, target: LoraTarget) -> str | None:
    """None where the kernels take these, else why not. Only `shrink_lora` has x in eight bits."""
    if isinstance(x, Quantized):
        if x.data.dtype not in _NAMES or x.scale.numel() != len(x.data) or not x.scale.is_contiguous():
            return "takes e4m3 and int8 with a scale a token"
        x = x.data
    elif x.dtype != torch.bfloat16:
        return f"takes bf16, not {x.dtype}"
    if target.a.dtype != torch.bfloat16:
        return f"takes bf16, not {target.a.dtype}"
    if x.stride(1) != 1 or any(value % 8 for value in (x.shape[1], x.stride(0), *target.a.stride()[:3])):
        return "rows have to be contiguous, and to start on multiples of 16 bytes"
    if x.data_ptr() % 16 or target.a.data_ptr() % 16:
        return "rows have to start on multiples of 16 bytes"
    return None


def shrink_rows(x: Tensor, target: LoraTarget, step: LoraStep) -> Tensor:
    """A·x `[T, P, R']` bf16 in `step.scratch`, for operands that `shrink_refusal` accepts. Raises CubinMissing.

    Where `words_of` has any, they say when x and A·x are there, and the launch behind need not wait for this one's end.
    """
    _, max_rank, pieces, _ = target.a.shape
    tokens, ranks = len(x), row_ranks(max_rank)
    out = step.scratch.view(torch.bfloat16)[: tokens * pieces * ranks].view(tokens, pieces, ranks)
    _launch(x, target, step, ranks, by_place=False)
    return out


def words_of(target: LoraTarget, step: LoraStep) -> Tensor | None:
    """The words that the launches of a linear use in this step: none where a GPU may not hold all clusters at once."""
    return target.words if step.planned and _clusters(target, step.plan) <= MOST_AHEAD else None


def _clusters(target: LoraTarget, plan: LoraPlan) -> int:
    """Clusters that shrink."""
    _, max_rank, pieces, _ = target.a.shape
    return plan.adapters.shape[0] * pieces * (row_ranks(max_rank) // RANKS)


def shrink_lora(x: Tensor | Quantized, target: LoraTarget, plan: LoraPlan, scratch: Tensor, planned: bool) -> int:
    """`shrink_lora` of the op: fp32 by place, in one part; what these kernels do not take goes to Triton's."""
    step = LoraStep(plan, scratch, planned)
    if shrink_refusal(x, target) is not None:
        from stoker_kernels.lora import triton_lora

        return int(triton_lora.shrink_lora(x, target, plan, scratch, planned))
    _launch(x, target, step, target.a.shape[1], by_place=True)
    return 1


def supports(target: Target) -> str | None:
    """Where `shrink_lora` of this file runs."""
    return bf16_supports(STEM, target)


def bf16_supports(stem: str, target: Target) -> str | None:
    """Where the kernels of csrc/STEM.cu run, which take bfloat16."""
    if target.device != "cuda" or not chip_of(target.sm).wgmma:
        return "needs sm_90"
    return cuda.missing_cubin(stem, ARCH) if target.dtype == torch.bfloat16 else "takes bfloat16"


def _launch(
    given: Tensor | Quantized, target: LoraTarget, step: LoraStep, ranks_of_row: int, *, by_place: bool
) -> None:
    x, scale = (given.data, given.scale) if isinstance(given, Quantized) else (given, None)
    columns, plan = x.shape[1], step.plan
    _, max_rank, pieces, _ = target.a.shape
    slot_stride, rank_stride, piece_stride, _ = target.a.stride()
    blocks, clusters = row_ranks(max_rank) // RANKS, _clusters(target, plan)
    words = None if by_place else words_of(target, step)
    arguments = ShrinkArguments(
        x.data_ptr(), cuda.address_of(scale), target.a.data_ptr(), step.scratch.data_ptr(), plan.order.data_ptr(),
        plan.adapters.data_ptr(), target.ranks.data_ptr(), slot_stride, plan.turn.data_ptr(), cuda.address_of(words),
        rank_stride, piece_stride, x.stride(0), columns, pieces, ranks_of_row, blocks, int(by_place), int(step.planned),
        clusters,
    )  # fmt: skip
    units = -(-columns // (_UNIT * _WARPS * _CTAS))
    ahead = next((each for each in _AHEAD if units <= each), _AHEAD[-1])
    name = f"{STEM}_{_NAMES[x.dtype]}{ahead}"
    kernel = cuda.kernel(STEM, ARCH, name, _SHARED_BYTES, 32 * _WARPS, x.device.index or 0)
    grid = (clusters + (words is not None)) * _CTAS  # a cluster says that x is there
    cuda.launch(kernel, grid, [arguments], x.device, pdl=pdl_on(x.device), cluster=_CTAS)
