"""`linear` in plain PyTorch: the oracle of the tests, and the CPU backend.

Invariants: products accumulate in fp32 (fp64 where asked for); quantized operands are dequantized by their
definition and never requantized; the result is rounded once, to `out`'s dtype. `sum_error` bounds what a kernel's sums
may be off by before that rounding.
Does not know: devices, tiles, tables.
"""

from __future__ import annotations

import torch

from stoker_kernels.quant import BLOCK, FP8, LinearWeight, Quantized, dequantize, quantize_fp8

# Parts of |x| · |w|, a row of each as a vector: no sum of their products exceeds it, and most stay below its 1/√K.
# wgmma adds 32 products of e4m3 at a time to a sum of which it keeps 13 bits behind the leading one. At K = 18,944 that
# is cut 592 times, by 2^-14 of itself: all to one side, 2^-11.9 of |x| · |w|. Of bf16 it keeps about all of fp32.
SUM_ERROR = {FP8: 2.0**-11, torch.bfloat16: 2.0**-16}
# Values of a weight that are widened to fp32 together: 256 MiB.
WIDENED_AT_ONCE = 1 << 26
SILU_SLOPE = 1.1  # the most that silu's derivative reaches


def dequantize_activations(x: Quantized) -> torch.Tensor:
    """Values of quantized activations [T, K] in fp32."""
    return x.data.float() * x.scale


def linear(
    x: torch.Tensor | Quantized,
    weight: LinearWeight,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x · weightᵀ + bias, [T, N]. Quantized x gives bfloat16 unless `out` says otherwise.

    A float x against an FP8 weight is quantized per token first, as on the GPU.
    """
    if isinstance(x, torch.Tensor) and weight.kind == "dense":
        y = torch.nn.functional.linear(x, weight.data, bias)
        return y if out is None else out.copy_(y)
    dtype = x.dtype if isinstance(x, torch.Tensor) else torch.bfloat16
    quantized = quantize_fp8(x) if isinstance(x, torch.Tensor) else x
    y = _product(dequantize_activations(quantized), weight)
    if bias is not None:
        y += bias.float()
    return y.to(dtype) if out is None else out.copy_(y)


def _product(values: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """values · weightᵀ in fp32; of a weight as large as an output head, some rows are widened at a time."""
    rows = WIDENED_AT_ONCE // weight.in_features // BLOCK * BLOCK
    if weight.kind != "fp8_channel" or weight.scale is None or weight.out_features <= rows:
        return values @ dequantize(weight).float().T
    pieces = zip(weight.data.split(rows), weight.scale.split(rows), strict=True)
    return torch.cat([values @ dequantize(LinearWeight(*piece, "fp8_channel")).T for piece in pieces], dim=1)


def linear_silu_mul(x: torch.Tensor | Quantized, weight: LinearWeight) -> torch.Tensor | Quantized:
    """silu(x · gateᵀ) · (x · upᵀ), [T, F], of a weight [2F, K], gate first.

    A dense one: gate and up are rounded to x's dtype. FP8: their product is rounded to bfloat16, then quantized.
    """
    if isinstance(x, torch.Tensor):
        return _silu_and_mul(linear(x, weight))
    both = dequantize_activations(x) @ dequantize(weight).float().T
    return quantize_fp8(_silu_and_mul(both).to(torch.bfloat16))


def _silu_and_mul(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(both.dtype)


def linear_fp64(
    x: torch.Tensor | Quantized, weight: LinearWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The same product in fp64, unrounded: what benchmarks and tests measure errors against."""
    values = dequantize_activations(x) if isinstance(x, Quantized) else x
    y = values.double() @ dequantize(weight).double().T
    return y if bias is None else y + bias.double()


def sum_error(x: torch.Tensor | Quantized, weight: LinearWeight) -> torch.Tensor:
    """[T, N]: how far a kernel's sums may be from `linear_fp64`."""
    values = dequantize_activations(x) if isinstance(x, Quantized) else x
    lengths: torch.Tensor = values.double().norm(dim=1, keepdim=True) * dequantize(weight).double().norm(dim=1)
    return lengths * SUM_ERROR[weight.data.dtype]


def silu_mul_fp64(both: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) · up of `linear_fp64`'s [T, 2F], and how far it may be off where gate and up are off by `error`."""
    (gate, up), (gate_error, up_error) = both.chunk(2, dim=1), error.chunk(2, dim=1)
    silu = gate * torch.sigmoid(gate)
    return silu * up, SILU_SLOPE * gate_error * (up.abs() + up_error) + silu.abs() * up_error
