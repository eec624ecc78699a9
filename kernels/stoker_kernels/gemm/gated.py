"""`linear_silu_mul`: silu(x · gateᵀ) · (x · upᵀ) for gate and up stacked in one weight; FP8 in, FP8 out.

Implementations, for `--kernel linear_silu_mul=NAME`: `fused` (SM 9.0, bf16 and e4m3; the default there: one kernel of
our own where `table.GATED` has measured it to be faster, which reads the halves side by side by TMA and never
writes [T, 2F]; it rounds once, where two kernels round gate and up first; e4m3 is then quantized by a kernel of its
own), `split` (`linear`, then `silu_and_mul`, or `silu_and_mul_quant`, on every device) and, where batch invariance is
demanded, `fixed` (SM 9.0, `fixed.py`). Weights in integers are
those of the op `integer_silu_mul`: `own` (SM 9.0, `gated_fragments.py`) and `split`; in floats of four bits likewise of
the op `fp4_silu_mul`; in integers on both sides of the op `int8_silu_mul`: `own` (SM 9.0, `int8_tiles.py`, for many
tokens) and `split`, which alone is batch-invariant; in GGUF's blocks of the op `block_silu_mul`: `own` (SM 9.0,
`gated_blocks.py`, for many tokens) and `split`.
Invariants: the weight is stored as for `linear`, gate rows before up rows, or as its layout says; each row of the
result depends on its own row of x alone; nothing synchronises with the host.
Does not know: which layer it serves; biases, which take `linear` and an activation.
"""

from __future__ import annotations

from typing import overload

import torch

from stoker_kernels.activation import silu_and_mul, silu_and_mul_quant
from stoker_kernels.block_gemm import decoding_refusal
from stoker_kernels.fragment_gemm import kernels_refusal
from stoker_kernels.gemm import fixed, int8_tiles, table, tiles, wide
from stoker_kernels.gemm.op import linear
from stoker_kernels.gemm.small import Operands
from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import Target, reference_supports, register, register_invariant, select
from stoker_kernels.quant import (
    FP8,
    BlockWeight,
    Fp4Weight,
    Int8Weight,
    IntegerWeight,
    LinearWeight,
    Quantized,
    activation_type,
    quantize_fp8,
)


def _fused_supports(target: Target) -> str | None:
    if target.device != "cuda" or not chip_of(target.sm).wgmma:
        return "needs sm_90"
    if target.dtype not in (torch.bfloat16, FP8):
        return "takes bfloat16, float8_e4m3fn"
    missing = cuda.missing_cubin(wide.stem(target.dtype), wide.ARCH)
    return missing if target.dtype == FP8 else cuda.missing_cubin("sm90_bf16_gemm_gated", "sm_90a") or missing


def _split_supports(target: Target) -> str | None:
    return None  # what `linear` and `silu_and_mul` lack they say themselves


def _integers_support(target: Target) -> str | None:
    if target.device != "cuda":
        return "needs CUDA"
    return kernels_refusal(target.dtype, target.sm, "int4") or kernels_refusal(target.dtype, target.sm, "int8")


def _floats_support(target: Target) -> str | None:
    return kernels_refusal(target.dtype, target.sm, "fp4") if target.device == "cuda" else "needs CUDA"


def _blocks_support(target: Target) -> str | None:
    if target.device != "cuda":
        return "needs CUDA"
    return decoding_refusal(target.dtype, target.sm) or _fused_supports(target)


register("linear_silu_mul", "fused", "stoker_kernels.gemm.gated:fused", _fused_supports)
register_invariant("linear_silu_mul", "fixed", "stoker_kernels.gemm.fixed:linear_silu_mul", fixed.supports)
register("linear_silu_mul", "split", "stoker_kernels.gemm.gated:split", _split_supports, invariant=True)
register("linear_silu_mul", "reference", "stoker_kernels.gemm.reference:linear_silu_mul", reference_supports)
register("integer_silu_mul", "own", "stoker_kernels.gemm.gated_fragments:own", _integers_support)
register("integer_silu_mul", "split", "stoker_kernels.gemm.gated:split", _split_supports, invariant=True)
register("int8_silu_mul", "own", "stoker_kernels.gemm.int8_tiles:silu_mul", int8_tiles.supports)
register("int8_silu_mul", "split", "stoker_kernels.gemm.gated:split", _split_supports, invariant=True)
register("fp4_silu_mul", "own", "stoker_kernels.gemm.gated_fragments:own", _floats_support)
register("fp4_silu_mul", "split", "stoker_kernels.gemm.gated:split", _split_supports)
register("block_silu_mul", "own", "stoker_kernels.gemm.gated_blocks:own", _blocks_support)
register("block_silu_mul", "split", "stoker_kernels.gemm.gated:split", _split_supports)

FloatsWeight = LinearWeight | IntegerWeight | Fp4Weight | BlockWeight
"""What a float x is multiplied with."""


@overload
def linear_silu_mul(x: torch.Tensor, weight: FloatsWeight | Int8Weight) -> torch.Tensor: ...
@overload
def linear_silu_mul(x: Quantized, weight: LinearWeight | Int8Weight) -> Quantized: ...
def linear_silu_mul(x: torch.Tensor | Quantized, weight: FloatsWeight | Int8Weight) -> torch.Tensor | Quantized:
    """x [T, K], weight [2F, K] (gate, then up) → silu(x · gateᵀ) · (x · upᵀ) [T, F] of x's dtype.

    A `Quantized` x takes an FP8 weight, or one of integers on both sides, and gives a `Quantized` result; a tensor a
    dense weight, integers, floats of four bits or blocks. Raises ValueError for shapes that do not fit or a weight of
    the other kind.
    """
    data, shape = x.data if isinstance(x, Quantized) else x, (weight.out_features, weight.in_features)
    if (x.data.dtype if isinstance(x, Quantized) else None) != activation_type(weight) or weight.out_features % 2:
        wanted = ("an INT8" if data.dtype == torch.int8 else "an FP8") if isinstance(x, Quantized) else "a dense"
        raise ValueError(f"linear_silu_mul of {data.dtype} takes {wanted} [2F, K] weight, not {weight.kind} {shape}")
    if data.dim() != 2 or data.shape[1] != weight.in_features:
        raise ValueError(f"x is {tuple(data.shape)}, the weight [2F, K] = {shape}")
    if isinstance(weight, Int8Weight):
        gated: Quantized = select("int8_silu_mul", data.device, torch.bfloat16)(x, weight)
        return gated
    if not isinstance(weight, LinearWeight):
        kinds = {BlockWeight: "block_silu_mul", Fp4Weight: "fp4_silu_mul", IntegerWeight: "integer_silu_mul"}
        op = kinds[type(weight)]
        product: torch.Tensor = select(op, data.device, data.dtype)(x, weight)
        return product
    y: torch.Tensor | Quantized = select("linear_silu_mul", data.device, weight.data.dtype)(x, weight)
    return y


def split(x: torch.Tensor | Quantized, weight: FloatsWeight | Int8Weight) -> torch.Tensor | Quantized:
    """`linear`, then `silu_and_mul`, or `silu_and_mul_quant`."""
    both = linear(x, weight)
    return silu_and_mul_quant(both, x.data.dtype) if isinstance(x, Quantized) else silu_and_mul(both)


def fused(x: torch.Tensor | Quantized, weight: LinearWeight) -> torch.Tensor | Quantized:
    """One kernel where `table.gated_tile` names one that takes the operands, else `split`; then quantization."""
    data, scale = (x.data, x.scale) if isinstance(x, Quantized) else (x, None)
    dtype = torch.bfloat16 if isinstance(x, Quantized) else x.dtype
    (n, k), m, fp8 = weight.data.shape, data.shape[0], weight.data.dtype == FP8
    tile = table.gated_tile(fp8, n, k, m) if m else None
    if tile is None:
        return split(x, weight)
    out = torch.empty((m, n // 2), dtype=dtype, device=data.device)
    operands = Operands(data, weight.data, out, None, weight.scale, scale)
    if not tiles.taken(tile, operands):
        del out, operands  # `split` takes its own
        return split(x, weight)
    return quantize_fp8(out) if fp8 else out
