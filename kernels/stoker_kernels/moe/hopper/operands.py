"""What the Hopper kernels of experts have in common: the operands that they read.

Must never know: for how many tokens, and how experts are chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.chip import HOPPER_SHARED, chip_of
from stoker_kernels.launch.dispatch import sm_of
from stoker_kernels.moe.types import ExpertKind, ExpertWeights

KINDS: tuple[ExpertKind, ...] = ("dense", "fp8_channel", "fp8_block")


def operands_refusal(
    x: Tensor, weights: ExpertWeights, shared: Tensor | None, kinds: tuple[ExpertKind, ...] = KINDS
) -> str | None:
    """None where rows of x and experts of `kinds` are as these kernels read them, else why not."""
    if weights.kind not in kinds or not chip_of(sm_of(x.device)).wgmma:
        return f"takes experts of {', '.join(kinds)}, on sm_90, not {weights.kind}"
    if not weights.gated:
        return "takes experts with a gate"
    floats = {x.dtype, *(each.dtype for each in (weights.gate_up_bias, weights.down_bias, shared) if each is not None)}
    if floats != {torch.bfloat16} or (weights.kind == "dense" and weights.down.dtype != torch.bfloat16):
        return f"takes bfloat16 throughout, not {sorted(map(str, floats | {weights.down.dtype}))}"
    matrices = (weights.gate_up, weights.down)
    if weights.ffn % 8 or any(each.shape[2] * each.element_size() % 16 for each in matrices):
        return f"rows of {weights.ffn} and {weights.hidden} numbers do not start on multiples of 16 bytes"
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        return "rows have to be contiguous and start on multiples of 16 bytes, unlike rows of x"
    return None


def few_refusal(
    x: Tensor, weights: ExpertWeights, shared: Tensor | None, most: int, kinds: tuple[ExpertKind, ...] = KINDS
) -> str | None:
    """The same of kernels for up to `most` tokens, which add what is shared."""
    reason = operands_refusal(x, weights, shared, kinds)
    if reason is not None:
        return reason
    if not 0 < x.shape[0] <= most:
        return f"{x.shape[0]} tokens are not 1 to {most}"
    if shared is not None and shared.stride(1) != 1:
        return "rows of what is shared have to be contiguous"
    return None


def room_refusal(room: int, tokens: int, top_k: int, ffn: int) -> str | None:
    """None where a CTA may have so many bytes of shared memory, else why not."""
    if room <= HOPPER_SHARED:
        return None
    return f"{tokens} tokens of {top_k} experts of width {ffn} need {room} bytes of shared memory"
