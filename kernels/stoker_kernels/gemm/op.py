"""`linear`: y = x · Wᵀ + bias for dense and FP8 weights; of integers on both sides the op `int8_product`.

Implementations on CUDA, for `--kernel linear=NAME`: `table` (ours where it was measured faster, else cuBLAS; the
default on SM 9.0), `cublas`, and `own` (ours wherever M ≤ 128). The choice per call is by (N, K, M), the choice of
implementation by the weight's dtype. Without compiled kernels `table` gives way to `cublas`, and
`dispatch.chosen()` says so with the command that builds them; `own`, pinned, raises KernelUnavailable.
Of `int8_product`: `own` (SM 9.0, the same tiles for integers) and `split` (`int8_linear`).
On a CPU that multiplies bf16: `onednn`. Where batch invariance is demanded: `fixed` on SM 9.0, `dot` on a CPU.
Invariants: each row of the result depends on its own row of x alone; `out` may be given and is then
returned; nothing synchronises with the host, so every path can be captured in a CUDA graph.
Does not know: which layer it serves, nor how weights reached the device.
"""

from __future__ import annotations

import torch

from stoker_kernels.block_gemm import block_linear
from stoker_kernels.fp4_gemm import fp4_linear
from stoker_kernels.gemm import fixed, int8_tiles
from stoker_kernels.gemm.cpu import dot, onednn
from stoker_kernels.gemm.small import stem_of
from stoker_kernels.int8_gemm import checked_rows
from stoker_kernels.integer_gemm import integer_linear
from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import (
    Target,
    dtype_name,
    reference_supports,
    register,
    register_invariant,
    select,
    type_refusal,
)
from stoker_kernels.quant import (
    FP8,
    AnyWeight,
    BlockWeight,
    Fp4Weight,
    Int8Weight,
    LinearWeight,
    Quantized,
    WeightKind,
)

__all__ = ["LinearWeight", "Quantized", "WeightKind", "linear"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _own_supports(target: Target) -> str | None:
    if target.device != "cuda" or not chip_of(target.sm).wgmma:
        return "needs sm_90"
    if target.dtype not in (torch.bfloat16, FP8):
        return "takes bfloat16, float8_e4m3fn"
    stems = (stem_of(target.dtype, kind) for kind in ("cluster", "multicast", "spread", "wide"))
    missing = (cuda.missing_cubin(stem, "sm_90a") for stem in stems)
    return next((reason for reason in missing if reason is not None), None)


def _cublas_supports(target: Target) -> str | None:
    if target.device != "cuda":
        return "needs CUDA"
    if target.dtype not in (*_FLOATS, FP8):
        return f"does not take {dtype_name(target.dtype)}"
    return type_refusal(target)


def _split_supports(target: Target) -> str | None:
    return None  # what `int8_linear` lacks it says itself


register("linear", "table", "stoker_kernels.gemm.choose:table", _own_supports)
register("linear", "cublas", "stoker_kernels.gemm.choose:cublas", _cublas_supports)
register("linear", "own", "stoker_kernels.gemm.choose:own", _own_supports)
register("linear", "onednn", "stoker_kernels.gemm.cpu.onednn:linear", onednn.supports)
register("linear", "reference", "stoker_kernels.gemm.reference:linear", reference_supports)
register_invariant("linear", "fixed", "stoker_kernels.gemm.fixed:linear", fixed.supports)
register_invariant("linear", "dot", "stoker_kernels.gemm.cpu.dot:linear", dot.supports)
register("int8_product", "own", "stoker_kernels.gemm.int8_tiles:linear", int8_tiles.supports, invariant=True)
register("int8_product", "split", "stoker_kernels.gemm.int8_tiles:split", _split_supports)


def linear(
    x: torch.Tensor | Quantized,
    weight: AnyWeight,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x · weightᵀ + bias.

    x:    [T, K] of the weight's dtype, or `Quantized([T, K] e4m3, [T, 1] fp32)` for FP8 weights.
          A float x against an FP8 weight is quantized per token first.
    bias: [N] or None. out: [T, N] or None (allocated; x's dtype, bfloat16 for a quantized x).
    Weights in integers, floats of four bits or blocks take a float x: `integer_linear`, `fp4_linear`, `block_linear`;
    those in integers on both sides a float one or `Quantized([T, K] int8, [T, 1] fp32)`. Raises ValueError for shapes
    that do not fit, KernelUnavailable where nothing takes the weight's dtype.
    """
    if isinstance(weight, Int8Weight):
        rows = checked_rows(x, weight)
        held = rows.dtype if isinstance(x, torch.Tensor) else torch.bfloat16 if out is None else out.dtype
        product: torch.Tensor = select("int8_product", rows.device, held)(x, weight, bias=bias, out=out)
        return product
    if not isinstance(weight, LinearWeight):
        if isinstance(x, Quantized):
            raise ValueError(f"x is quantized, but {weight.kind} weights take floats")
        if isinstance(weight, BlockWeight):
            return block_linear(x, weight, bias=bias, out=out)
        if isinstance(weight, Fp4Weight):
            return fp4_linear(x, weight, bias=bias, out=out)
        return integer_linear(x, weight, bias=bias, out=out)
    data = x.data if isinstance(x, Quantized) else x
    if data.dtype == torch.int8:
        raise ValueError(f"x is quantized to integers, but the weight is {weight.kind}")
    if data.dim() != 2 or data.shape[1] != weight.in_features:
        raise ValueError(f"x is {tuple(data.shape)}, the weight [N, K] = {tuple(weight.data.shape)}")
    y: torch.Tensor = select("linear", data.device, weight.data.dtype)(x, weight, bias=bias, out=out)
    return y
