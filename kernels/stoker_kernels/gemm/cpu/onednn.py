"""`linear` by oneDNN's bf16 kernels, over a weight in the order in which they read it: the CPU's own implementation.

A weight that was packed at the start (`pack`) is read at memory speed: 1.6 to 1.9 times as fast at one to eight rows as
a row-major one. It stands beside the plain weight, which the embedding, the checks and other types of input read.
Invariants: products accumulate in fp32 and are rounded once; each row of the result depends on its own row of x alone.
Does not know: which layer it serves.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from stoker_kernels.gemm.reference import linear as plain_linear
from stoker_kernels.launch.dispatch import Target
from stoker_kernels.quant import AnyWeight, LinearWeight, Quantized

# Any number of rows runs at about the same speed over a weight that was packed for these.
PACKED_FOR_ROWS = 16


def supports(target: Target) -> str | None:
    """bf16 on a processor that multiplies it."""
    if target.device != "cpu":
        return "needs a CPU"
    if target.dtype is not torch.bfloat16:
        return "takes bfloat16"
    return None if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "needs a processor with bf16 (AVX-512)"


def pack(weight: AnyWeight) -> AnyWeight:
    """The same weight with its packed form beside it; as it is where `supports` says no."""
    if not isinstance(weight, LinearWeight) or weight.kind != "dense":
        return weight
    data = weight.data
    if supports(Target(data.device.type, 0, data.dtype)) is not None:
        return weight
    return replace(weight, packed=torch.ops.mkldnn._reorder_linear_weight(data, PACKED_FOR_ROWS))


def linear(
    x: torch.Tensor | Quantized,
    weight: LinearWeight,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x · weightᵀ + bias, [T, N]; shapes as of `gemm.linear`."""
    if weight.packed is None or isinstance(x, Quantized) or x.dtype is not torch.bfloat16:
        return plain_linear(x, weight, bias=bias, out=out)
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.packed, bias, "none", [], "")
    return y if out is None else out.copy_(y)
