"""What the ops of all weights in fragments have in common: few tokens by our kernels, many by a dense weight.

Invariants: an operand that the kernels do not take is an error, never another way.
Does not know: how a weight of another layout is multiplied, nor how its numbers were made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.fragment_gemm.sm90 import FragmentWeight, multiply, refusal, takes_tokens
from stoker_kernels.launch.rehearsal import rehearsing


def multiplied(x: Tensor, weight: FragmentWeight, bias: Tensor | None, out: Tensor, op: str) -> bool:
    """Whether out = x · Wᵀ + bias was computed; False: for so many tokens the weight is better dequantized.

    Raises ValueError, which names `op`, where a weight in fragments meets operands that its kernels do not take.
    """
    reason = refusal(x, weight, bias, out)
    if reason is not None:
        raise ValueError(f"{op} of a weight in fragments: {reason}")
    if not takes_tokens(len(x)):
        return False
    multiply(x, weight, bias, out)
    return True


def by_dense(x: Tensor, dense: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """out = x · denseᵀ + bias by cuBLAS, which a rehearsal leaves out."""
    if rehearsing():
        return out
    if bias is None:
        return torch.mm(x, dense.t(), out=out)
    return torch.addmm(bias, x, dense.t(), out=out)
