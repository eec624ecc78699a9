"""Products with weights in NVFP4 and MXFP4 in Triton, for every GPU and shape: fused for few tokens, and
dequantization.

Invariants: `(e2m1 · block scale) · factor` in fp32, rounded once to the dtype of x, as the reference does it; codes and
scales are decoded by integer arithmetic, so that no GPU needs types of 4 or 8 bits. Tuned for no shape.
Knows nothing of which products take which path (`choose`).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32, I32_DIVISIBLE, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.quant import FP4_BLOCKS, Fp4Weight

TOKEN_TILES = (16, 64)
_ROWS, _BYTES, _WARPS = 64, 64, 4  # of a tile: weight rows, bytes of codes a step
_DEQUANTIZED_BYTES = 512


@triton.jit
def _power_of_two(exponent):
    """2^exponent of int32, -126 to 127, as fp32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scale_of(bits, BLOCK: tl.constexpr):
    """The bits of a scale → fp32: e4m3 of blocks of 16, e8m0 of blocks of 32."""
    bits = bits.to(tl.int32)
    if BLOCK == 16:
        exponent = (bits >> 3) & 15
        mantissa = (bits & 7) + tl.where(exponent > 0, 8, 0)
        size = mantissa.to(tl.float32) * _power_of_two(tl.maximum(exponent, 1) - 10)
        return tl.where(bits >= 128, -size, size)
    # 2^-127 has no exponent of its own in fp32.
    return tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)


@triton.jit
def _weights(codes, scale, factor, row, column, n, k, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Codes [ROWS, COLUMNS] of `column`s → weights in DTYPE; 0 outside."""
    inside = (row[:, None] < n) & (column[None, :] < k)
    bits = tl.load(scale + (column // BLOCK)[None, :] * n + row[:, None], mask=inside, other=0)
    codes = codes.to(tl.int32)
    size = codes & 7
    # Twice e2m1: 0 1 2 3 4 6 8 12.
    doubled = tl.where(size < 4, size, (2 + (size & 1)) << ((size >> 1) - 1 & 3))
    value = tl.where(codes >= 8, -doubled, doubled).to(tl.float32) * 0.5 * _scale_of(bits, BLOCK)
    if factor is not None:
        value *= tl.load(factor + row, mask=row < n, other=0.0)[:, None]
    return tl.where(inside, value, 0.0).to(DTYPE)


@kernel
def fp4_linear_kernel(
    x, data, scale, factor, bias, out, m, n, k, x_stride, out_stride,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr, WIDEN: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    # As in integer_gemm: the weight is the left side, and the halves of the bytes are two products.
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row_bytes = k // 2
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, row_bytes, BYTES):
        byte = start + tl.arange(0, BYTES)
        packed = tl.load(
            data + row[:, None].to(tl.int64) * row_bytes + byte[None, :],
            mask=(row[:, None] < n) & (byte[None, :] < row_bytes), other=0,
        )  # fmt: skip
        for part in tl.static_range(2):
            column = byte * 2 + part
            codes = (packed >> (4 * part)) & 15
            a = _weights(codes, scale, factor, row, column, n, k, BLOCK, x.dtype.element_ty)
            b = tl.load(
                x + token[None, :].to(tl.int64) * x_stride + column[:, None],
                mask=(token[None, :] < m) & (column[:, None] < k), other=0.0,
            )  # fmt: skip
            if WIDEN:  # Triton's interpreter multiplies fp32 only
                a, b = a.to(tl.float32), b.to(tl.float32)
            sums += tl.dot(a, b)
    if bias is not None:
        sums += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    target = out + token[None, :].to(tl.int64) * out_stride + row[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(token[None, :] < m) & (row[:, None] < n))


@kernel
def fp4_dequantize_kernel(
    data, scale, factor, out, n, k, BLOCK: tl.constexpr, BYTES: tl.constexpr, LAUNCH_PDL: tl.constexpr
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0) + tl.arange(0, 1)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    row_bytes = k // 2
    packed = tl.load(
        data + row[:, None].to(tl.int64) * row_bytes + byte[None, :], mask=byte[None, :] < row_bytes, other=0
    )
    for part in tl.static_range(2):
        column = byte * 2 + part
        codes = (packed >> (4 * part)) & 15
        value = _weights(codes, scale, factor, row, column, n, k, BLOCK, out.dtype.element_ty)
        tl.store(out + row[:, None].to(tl.int64) * k + column[None, :], value, mask=column[None, :] < k)


def multiply(x: Tensor, weight: Fp4Weight, bias: Tensor | None, out: Tensor, *, widen: bool = False) -> None:
    """out = x · Wᵀ + bias. `widen` multiplies in fp32."""
    (m, k), n = x.shape, weight.out_features
    tokens = TOKEN_TILES[0] if m <= TOKEN_TILES[0] else TOKEN_TILES[1]
    fp4_linear_kernel[(triton.cdiv(n, _ROWS), triton.cdiv(m, tokens))](
        x, weight.data, weight.scale, weight.factor, bias, out, m, n, k, x.stride(0), out.stride(0),
        BLOCK=weight.block, TOKENS=tokens, ROWS=_ROWS, BYTES=_BYTES, WIDEN=widen, num_warps=_WARPS, num_stages=3,
        **launch_options(x.device),
    )  # fmt: skip


def dequantize(weight: Fp4Weight, out: Tensor) -> None:
    """out [N, K], contiguous = the weight."""
    n, k = out.shape
    fp4_dequantize_kernel[(n, triton.cdiv(weight.data.shape[1], _DEQUANTIZED_BYTES))](
        weight.data, weight.scale, weight.factor, out, n, k, BLOCK=weight.block, BYTES=_DEQUANTIZED_BYTES,
        num_warps=_WARPS, **launch_options(out.device),
    )  # fmt: skip


def _register() -> None:
    for dtype, min_sm in ((BF16, 80), (FP16, 75)):
        for kind, block in FP4_BLOCKS.items():
            factor = {"factor": None} if kind == "mxfp4" else {}
            types = {"data": "*u8", "scale": "*u8", "out": f"*{dtype}", "n": I32, "k": I32_DIVISIBLE}
            types |= {} if factor else {"factor": f"*{FP32}"}
            register_aot(
                fp4_dequantize_kernel, types, [factor | {"BLOCK": block, "BYTES": _DEQUANTIZED_BYTES}],
                options={"num_warps": _WARPS}, min_sm=min_sm, compact=False,
            )  # fmt: skip
            for bias in ({"bias": None}, {}):
                signature = types | ({} if bias else {"bias": f"*{dtype}"}) | {
                    "x": f"*{dtype}", "m": I32, "x_stride": I32_DIVISIBLE, "out_stride": I32_DIVISIBLE,
                }  # fmt: skip
                for tokens in TOKEN_TILES:
                    tile = {"BLOCK": block, "TOKENS": tokens, "ROWS": _ROWS, "BYTES": _BYTES, "WIDEN": False}
                    register_aot(
                        fp4_linear_kernel, signature, [factor | bias | tile],
                        options={"num_warps": _WARPS, "num_stages": 3}, min_sm=min_sm,
                        compact=dtype == BF16 and kind == "nvfp4" and tokens == 16 and bool(bias),
                    )  # fmt: skip


_register()
