"""FP8 products in Triton: the scales after an unscaled cuBLAS product, and the product with 128×128 block scales.

Invariants: scales and bias are applied in fp32. The block product multiplies e4m3 by e4m3 and scales each 128 of K on
their way into an fp32 sum; it is correct on every shape and tuned for none.
Knows nothing of which weights take which path (`choose.py`).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import itertools

import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32, I32_DIVISIBLE, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.quant import Quantized

_COLUMNS, _SCALE_WARPS = 2048, 8
_ROWS_A_BLOCK = 128  # weight rows of a tile: one scale block


@kernel
def _scale_kernel(
    y, out, x_scale, w_scale, bias, columns, out_stride,
    W_STEP: tl.constexpr, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    # Weights' scales and biases are no one's output, so they may be requested before the wait.
    scale = tl.load(w_scale + column * W_STEP, mask=inside, other=0.0)
    shift = tl.zeros((BLOCK,), tl.float32)
    if bias is not None:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(y + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    value = value * (tl.load(x_scale + row) * scale) + shift
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


@kernel
def _block_scaled_kernel(
    x, x_scale, w, w_scale, bias, out, m, n, k, x_stride, out_stride, scale_stride,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    # Swapped: the weight is the left side, so that few tokens still make a full tile of the tensor cores.
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    block = tl.program_id(0)
    row = block * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, k, K):
        inner = start + tl.arange(0, K)
        a = tl.load(
            w + row[:, None].to(tl.int64) * k + inner[None, :],
            mask=(row[:, None] < n) & (inner[None, :] < k), other=0.0,
        )  # fmt: skip
        b = tl.load(
            x + token[None, :].to(tl.int64) * x_stride + inner[:, None],
            mask=(token[None, :] < m) & (inner[:, None] < k), other=0.0,
        )  # fmt: skip
        if WIDEN:  # Triton's interpreter multiplies fp32 only
            a, b = a.to(tl.float32), b.to(tl.float32)
        sums += tl.dot(a, b) * tl.load(w_scale + block * scale_stride + start // K)
    y = sums * tl.load(x_scale + token, mask=token < m, other=0.0)[None, :]
    if bias is not None:
        y += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    target = out + token[None, :].to(tl.int64) * out_stride + row[:, None]
    tl.store(target, y.to(out.dtype.element_ty), mask=(token[None, :] < m) & (row[:, None] < n))


def scale(y: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = y · x_scale · w_scaleᵀ + bias; may be in place.

    y: [T, N] contiguous; x_scale: [T, 1], w_scale: [N, 1] or [1, 1], fp32; bias: [N] or None; out: [T, N].
    """
    rows, columns = y.shape
    _scale_kernel[(rows, triton.cdiv(columns, _COLUMNS))](
        y, out, x_scale, w_scale, bias, columns, out.stride(0), W_STEP=1 if w_scale.numel() > 1 else 0,
        BLOCK=_COLUMNS, num_warps=_SCALE_WARPS, **launch_options(y.device),
    )  # fmt: skip


def block_scaled(
    x: Quantized, weight: Tensor, w_scale: Tensor, bias: Tensor | None, out: Tensor, *, widen: bool = False
) -> None:
    """out = x · (weight · w_scale)ᵀ + bias for one scale per 128×128 block.

    x: [T, K]; weight: [N, K] e4m3, rows contiguous; w_scale: [⌈N/128⌉, ⌈K/128⌉] fp32; out: [T, N].
    `widen` multiplies in fp32, as the interpreter has to.
    """
    (m, k), n = x.data.shape, weight.shape[0]
    tokens = min(128, max(16, triton.next_power_of_2(m)))
    _block_scaled_kernel[(triton.cdiv(n, _ROWS_A_BLOCK), triton.cdiv(m, tokens))](
        x.data, x.scale, weight, w_scale, bias, out, m, n, k, x.data.stride(0), out.stride(0), w_scale.stride(0),
        TOKENS=tokens, ROWS=_ROWS_A_BLOCK, K=128, WIDEN=widen, num_warps=4 if tokens < 128 else 8, num_stages=4,
        **launch_options(weight.device),
    )  # fmt: skip


def _register() -> None:
    for dtype, biased in itertools.product((BF16, FP16, FP32), (False, True)):
        signature = {"out": f"*{dtype}"} | ({"bias": f"*{dtype}"} if biased else {})
        constants: dict[str, object] = {} if biased else {"bias": None}
        register_aot(
            _scale_kernel,
            signature | {"y": f"*{BF16}", "x_scale": f"*{FP32}", "w_scale": f"*{FP32}",
                         "columns": I32_DIVISIBLE, "out_stride": I32_DIVISIBLE},
            [constants | {"W_STEP": step, "BLOCK": _COLUMNS} for step in (0, 1)],
            options={"num_warps": _SCALE_WARPS},
            min_sm=89,
        )
        for tokens in (16, 32, 64, 128):
            register_aot(
                _block_scaled_kernel,
                signature | {"x": "*fp8e4nv", "x_scale": f"*{FP32}", "w": "*fp8e4nv", "w_scale": f"*{FP32}",
                             "m": I32, "n": I32_DIVISIBLE, "k": I32_DIVISIBLE,
                             "x_stride": I32_DIVISIBLE, "out_stride": I32_DIVISIBLE, "scale_stride": I32},
                [constants | {"TOKENS": tokens, "ROWS": _ROWS_A_BLOCK, "K": 128, "WIDEN": False}],
                options={"num_warps": 4 if tokens < 128 else 8, "num_stages": 4},
                min_sm=89,
                compact=tokens == 16 and dtype == BF16 and not biased,
            )


_register()
