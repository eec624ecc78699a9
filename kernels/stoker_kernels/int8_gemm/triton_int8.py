"""Products in integers of eight bits in Triton, for every GPU and shape: activations that a kernel of `quant` has
quantized are multiplied on the tensor cores' integer path.

Invariants: integers and sums are those of the definition in `quant`; scales and bias are applied in fp32. Tuned for no
shape. Knows nothing of which layer it serves.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32, I32_DIVISIBLE, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.quant import Int8Weight, Quantized, quantize_int8_rows

TOKEN_TILES = (16, 64)
_ROWS, _COLUMNS, _WARPS = 64, 128, 4  # of a tile: weight rows, columns a step


@kernel
def int8_linear_kernel(
    x, scales, data, scale, bias, out, m, n, k, out_stride,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    # The weight is the left side, so that few tokens still make a full tile of the tensor cores.
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    sums = tl.zeros((ROWS, TOKENS), tl.int32)
    for start in range(0, k, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        a = tl.load(
            data + row[:, None].to(tl.int64) * k + column[None, :],
            mask=(row[:, None] < n) & (column[None, :] < k), other=0,
        )  # fmt: skip
        b = tl.load(
            x + token[None, :].to(tl.int64) * k + column[:, None],
            mask=(token[None, :] < m) & (column[:, None] < k), other=0,
        )  # fmt: skip
        sums += tl.dot(a, b, out_dtype=tl.int32)
    left = tl.load(scale + row, mask=row < n, other=0.0)
    right = tl.load(scales + token, mask=token < m, other=0.0)
    y = sums.to(tl.float32) * right[None, :] * left[:, None]
    if bias is not None:
        y += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    target = out + token[None, :].to(tl.int64) * out_stride + row[:, None]
    tl.store(target, y.to(out.dtype.element_ty), mask=(token[None, :] < m) & (row[:, None] < n))


def int8_linear(x: Tensor | Quantized, weight: Int8Weight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias."""
    rows, dtype = (x.data, torch.bfloat16) if isinstance(x, Quantized) else (x, x.dtype)
    (m, k), n = rows.shape, weight.out_features
    y = torch.empty((m, n), dtype=dtype, device=rows.device) if out is None else out
    if m == 0:
        return y
    data, scales = (x.data, x.scale) if isinstance(x, Quantized) else quantize_int8_rows(x)
    tokens = TOKEN_TILES[0] if m <= TOKEN_TILES[0] else TOKEN_TILES[1]
    int8_linear_kernel[(triton.cdiv(n, _ROWS), triton.cdiv(m, tokens))](
        data, scales, weight.data, weight.scale, bias, y, m, n, k, y.stride(0),
        TOKENS=tokens, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=_WARPS, num_stages=3, **launch_options(rows.device),
    )  # fmt: skip
    return y


def _register() -> None:
    for dtype in (BF16, FP16):
        types = {"x": "*i8", "scales": f"*{FP32}", "data": "*i8", "scale": f"*{FP32}", "out": f"*{dtype}"}
        types |= {"m": I32, "n": I32, "k": I32_DIVISIBLE, "out_stride": I32_DIVISIBLE}
        for bias in ({"bias": None}, {}):
            for tokens in TOKEN_TILES:
                register_aot(
                    int8_linear_kernel, types | ({} if bias else {"bias": f"*{dtype}"}),
                    [bias | {"TOKENS": tokens, "ROWS": _ROWS, "COLUMNS": _COLUMNS}],
                    options={"num_warps": _WARPS, "num_stages": 3}, min_sm=80,
                    compact=dtype == BF16 and tokens == 16 and bool(bias),
                )  # fmt: skip


_register()
