"""`linear` on CUDA: our kernels, cuBLAS, and the table that chooses between them per call.

Invariants: nothing allocates outside torch's allocator, so every path can be captured after one call outside a
capture; no path dequantizes a weight. FP8 through cuBLAS is an unscaled product in bf16 (e4m3 sums stay below
448² · K, far inside its range), then one kernel for scales and bias.
Does not know: which layer it serves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from stoker_kernels.gemm import tiles
from stoker_kernels.gemm.small import MAX_TOKENS, Operands
from stoker_kernels.gemm.table import best_tile, own_tile
from stoker_kernels.launch.rehearsal import rehearsing
from stoker_kernels.quant import FP8, LinearWeight, Quantized, quantize_fp8

Choose = Callable[[bool, int, int, int], tiles.AnyTile | None]
"""(is e4m3, N, K, M) → tile of our own, or None for cuBLAS."""


def table(
    x: torch.Tensor | Quantized, weight: LinearWeight, *, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """Our kernel where `table.py` has measured it faster, else cuBLAS."""
    return route(x, weight, bias, out, best_tile)


def own(
    x: torch.Tensor | Quantized, weight: LinearWeight, *, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """Our kernel wherever it takes the operands (M ≤ 128, rows on 16 bytes), else cuBLAS."""
    return route(
        x, weight, bias, out, lambda fp8, n, k, m: own_tile(fp8, n, k, m) if m <= MAX_TOKENS else None
    )


def cublas(
    x: torch.Tensor | Quantized, weight: LinearWeight, *, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """cuBLAS for everything but block scales, which it lacks here."""
    return route(x, weight, bias, out, lambda *_: None)


def route(
    x: torch.Tensor | Quantized,
    weight: LinearWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    choose: Choose,
) -> torch.Tensor:
    """`linear` with our kernels where `choose` names a tile that takes the operands; else cuBLAS."""
    dtype = x.dtype if isinstance(x, torch.Tensor) else torch.bfloat16
    given = x
    if weight.kind != "dense" and isinstance(given, torch.Tensor):
        given = quantize_fp8(given)
    data, x_scale = (given.data, given.scale) if isinstance(given, Quantized) else (given, None)
    (m, k), n = data.shape, weight.out_features
    y = torch.empty((m, n), dtype=dtype, device=data.device) if out is None else out
    if m == 0:
        return y
    if weight.kind == "fp8_block":
        return _block_scaled(Quantized(data, _present(x_scale)), weight, bias, y)
    tile = choose(weight.data.dtype == FP8, n, k, m)
    if tile is not None and tiles.taken(tile, Operands(data, weight.data, y, bias, weight.scale, x_scale)):
        return y
    if weight.kind == "dense":
        return _dense(data, weight.data, bias, y)
    return _scaled(data, _present(x_scale), weight, bias, y)


def _dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    if rehearsing():
        return out
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def _scaled(
    x: torch.Tensor, x_scale: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    from stoker_kernels.gemm import triton_fp8_scale

    one = _unit_scale(x.device)
    in_place = out.dtype == torch.bfloat16 and out.is_contiguous()
    raw = out if in_place else torch.empty(out.shape, dtype=torch.bfloat16, device=out.device)
    if not rehearsing():
        torch._scaled_mm(x, weight.data.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True, out=raw)
    triton_fp8_scale.scale(raw, x_scale, _present(weight.scale), bias, out)
    return out


def _block_scaled(
    x: Quantized, weight: LinearWeight, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    from stoker_kernels.gemm import triton_fp8_scale

    triton_fp8_scale.block_scaled(x, weight.data, _present(weight.scale), bias, out)
    return out


@functools.cache
def _unit_scale(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)


def _present(scale: torch.Tensor | None) -> torch.Tensor:
    assert scale is not None, "FP8 operands carry scales"
    return scale
