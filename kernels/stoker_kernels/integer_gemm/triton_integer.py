"""Products with integer weights in Triton, for every GPU, shape and width: fused for few tokens, and dequantization.

Invariants: `(code - zero) · scale` in the dtype of x, as the reference rounds it; correct on every shape and tuned for
none. Reads the layout "rows". Knows nothing of which products take which path (`choose`).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP16, I32, I32_DIVISIBLE, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.quant import IntegerWeight

TOKEN_TILES = (16, 64)
_ROWS, _BYTES, _WARPS = 64, 64, 4  # of a tile: weight rows, bytes of codes a step


@triton.jit
def _weights(codes, scale, zero, row, column, n, k, group, middle, DTYPE: tl.constexpr):
    """Codes [ROWS, COLUMNS] of `column`s → weights in DTYPE; 0 outside."""
    inside = (row[:, None] < n) & (column[None, :] < k)
    place = (column // group)[None, :] * n + row[:, None]
    factor = tl.load(scale + place, mask=inside, other=0.0).to(tl.float32)
    steps = codes.to(tl.int32)
    if zero is None:
        steps -= middle
    else:
        steps -= tl.load(zero + place, mask=inside, other=0).to(tl.int32)
    return (steps.to(tl.float32) * factor).to(DTYPE)  # one rounding: the product is exact in fp32


@kernel
def integer_linear_kernel(
    x, data, scale, zero, bias, out, m, n, k, group, x_stride, out_stride,
    BITS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr, WIDEN: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    # Swapped: the weight is the left side, so that few tokens still make a full tile of the tensor cores. The halves of
    # the bytes are two products, of the even and the odd columns, so that nothing is interleaved in registers.
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    PER_BYTE: tl.constexpr = 8 // BITS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row_bytes = k // PER_BYTE
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, row_bytes, BYTES):
        byte = start + tl.arange(0, BYTES)
        packed = tl.load(
            data + row[:, None].to(tl.int64) * row_bytes + byte[None, :],
            mask=(row[:, None] < n) & (byte[None, :] < row_bytes), other=0,
        )  # fmt: skip
        for part in tl.static_range(PER_BYTE):
            column = byte * PER_BYTE + part
            codes = (packed >> (BITS * part)) & ((1 << BITS) - 1) if BITS < 8 else packed
            a = _weights(codes, scale, zero, row, column, n, k, group, 1 << (BITS - 1), x.dtype.element_ty)
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
def integer_dequantize_kernel(
    data, scale, zero, out, n, k, group, BITS: tl.constexpr, BYTES: tl.constexpr, LAUNCH_PDL: tl.constexpr
):
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    PER_BYTE: tl.constexpr = 8 // BITS
    row = tl.program_id(0) + tl.arange(0, 1)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    row_bytes = k // PER_BYTE
    packed = tl.load(
        data + row[:, None].to(tl.int64) * row_bytes + byte[None, :], mask=byte[None, :] < row_bytes, other=0
    )
    for part in tl.static_range(PER_BYTE):
        column = byte * PER_BYTE + part
        codes = (packed >> (BITS * part)) & ((1 << BITS) - 1) if BITS < 8 else packed
        value = _weights(codes, scale, zero, row, column, n, k, group, 1 << (BITS - 1), out.dtype.element_ty)
        tl.store(out + row[:, None].to(tl.int64) * k + column[None, :], value, mask=column[None, :] < k)


def multiply(
    x: Tensor, weight: IntegerWeight, bias: Tensor | None, out: Tensor, *, widen: bool = False, tokens: int = 0
) -> None:
    """out = x · Wᵀ + bias; `weight` in rows with scales of x's dtype. `widen` multiplies in fp32.

    `tokens` (one of TOKEN_TILES) share a tile; 0: by their number.
    """
    (m, k), n = x.shape, weight.out_features
    tokens = tokens or (TOKEN_TILES[0] if m <= TOKEN_TILES[0] else TOKEN_TILES[1])
    integer_linear_kernel[(triton.cdiv(n, _ROWS), triton.cdiv(m, tokens))](
        x, weight.data, weight.scale, weight.zero, bias, out, m, n, k, weight.group, x.stride(0), out.stride(0),
        BITS=weight.bits, TOKENS=tokens, ROWS=_ROWS, BYTES=_BYTES, WIDEN=widen, num_warps=_WARPS, num_stages=3,
        **launch_options(x.device),
    )  # fmt: skip


def dequantize(weight: IntegerWeight, out: Tensor) -> None:
    """out [N, K], contiguous, of the scales' dtype = the weight in rows, columns in its own order."""
    n, k = out.shape
    integer_dequantize_kernel[(n, triton.cdiv(weight.data.shape[1], 512))](
        weight.data, weight.scale, weight.zero, out, n, k, weight.group, BITS=weight.bits, BYTES=512,
        num_warps=_WARPS, **launch_options(out.device),
    )  # fmt: skip


def _register() -> None:
    for dtype, min_sm in ((BF16, 80), (FP16, 75)):
        for zero in ({"zero": None}, {}):
            types = {"data": "*u8", "scale": f"*{dtype}", "out": f"*{dtype}", "k": I32_DIVISIBLE, "group": I32}
            types |= {} if zero else {"zero": "*u8"}
            for bits in (4, 8):
                register_aot(
                    integer_dequantize_kernel, types | {"n": I32},
                    [zero | {"BITS": bits, "BYTES": 512}], options={"num_warps": _WARPS}, min_sm=min_sm,
                    compact=bits == 4 and not zero,
                )  # fmt: skip
                for bias in ({"bias": None}, {}):
                    signature = types | ({} if bias else {"bias": f"*{dtype}"}) | {
                        "x": f"*{dtype}", "m": I32, "n": I32, "x_stride": I32_DIVISIBLE, "out_stride": I32_DIVISIBLE,
                    }  # fmt: skip
                    for tokens in TOKEN_TILES:
                        tile = {"TOKENS": tokens, "ROWS": _ROWS, "BYTES": _BYTES, "WIDEN": False}
                        register_aot(
                            integer_linear_kernel, signature, [zero | bias | {"BITS": bits} | tile],
                            options={"num_warps": _WARPS, "num_stages": 3}, min_sm=min_sm,
                            compact=bits == 4 and tokens == 16 and not zero and bool(bias),
                        )  # fmt: skip


_register()
