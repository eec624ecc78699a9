"""Quantization to FP8 (e4m3): activations per token, weights per channel, per tensor or per 128×128 block.

Invariants: a quantized value is `data * scale`; scales are fp32 and positive, chosen so that the largest
magnitude of the token, channel, tensor or block lands on 448, e4m3's largest. scale = max(amax · fp32(1/448), 1e-12)
and data = e4m3(clamp(value · fp32(1/scale))): single fp32 operations with one rounding each, so that every device and
every kernel gives the same bits. (A division by the number 448 would not: CUDA multiplies by its reciprocal.)
Does not know: which layers are quantized, nor how a product is computed.
"""

from __future__ import annotations

import torch

from stoker_kernels.launch.dispatch import reference_supports, register, select, triton_supports
from stoker_kernels.quant.linear_weight import BLOCK, FP8, FP8_MAX, LinearWeight, WeightKind
from stoker_kernels.quant.types import MIN_SCALE, Quantized

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

register(
    "quantize_fp8",
    "triton",
    "stoker_kernels.quant.triton_quant:quantize_fp8",
    triton_supports(*_FLOATS),
    invariant=True,
)
register("quantize_fp8", "reference", "stoker_kernels.quant.reference:quantize_fp8", reference_supports, invariant=True)


def to_fp8(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`values / scale` as e4m3, saturating at ±448 (torch's own conversion gives NaN above 464)."""
    return (values.float() * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    """The fp32 scale that maps `amax` to 448; not below 1e-12, so that zeros divide by something."""
    return (amax.float() * (1.0 / FP8_MAX)).clamp_min(MIN_SCALE)


def quantize_fp8(x: torch.Tensor) -> Quantized:
    """Quantize activations [T, K] with one scale per token: data [T, K] e4m3, scale [T, 1] fp32."""
    y: Quantized = select("quantize_fp8", x.device, x.dtype)(x)
    return y


def quantize_int8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantize_int8`, [T, K] on a GPU, by one Triton kernel: data [T, K] int8, scale [T, 1] fp32."""
    from stoker_kernels.quant import triton_int8

    return triton_int8.quantize_rows(x)


def quantize_weight(weight: torch.Tensor, kind: WeightKind) -> LinearWeight:
    """Quantize a [N, K] float weight; `dense` wraps it as it is. Raises ValueError for an unknown kind."""
    if kind == "dense":
        return LinearWeight(weight)
    if kind == "fp8_channel":
        scale = scale_of(weight.abs().amax(dim=1, keepdim=True))
    elif kind == "fp8_tensor":
        scale = scale_of(weight.abs().amax().reshape(1, 1))
    elif kind == "fp8_block":
        scale = scale_of(_block_amax(weight))
    else:
        raise ValueError(f"unknown weight kind {kind!r}")
    return LinearWeight(to_fp8(weight, spread_scale(scale, kind, weight.shape)), scale, kind)


def dequantize(weight: LinearWeight) -> torch.Tensor:
    """The weight's values [N, K]: a dense weight's own tensor, else `data * scale` in fp32."""
    if weight.scale is None:
        return weight.data
    return weight.data.float() * spread_scale(weight.scale, weight.kind, weight.data.shape)


def spread_scale(scale: torch.Tensor, kind: WeightKind, shape: torch.Size) -> torch.Tensor:
    """`scale` in a shape that broadcasts against a weight of `shape` [N, K]."""
    if kind != "fp8_block":
        return scale
    rows = scale.repeat_interleave(BLOCK, dim=0)[: shape[0]]
    return rows.repeat_interleave(BLOCK, dim=1)[:, : shape[1]]


def _block_amax(weight: torch.Tensor) -> torch.Tensor:
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight.abs(), (0, -k % BLOCK, 0, -n % BLOCK))
    return padded.reshape(-(-n // BLOCK), BLOCK, -(-k // BLOCK), BLOCK).amax(dim=(1, 3))
