"""`linear_silu_mul`: silu(x · gateᵀ) · (x · upᵀ) for gate and up stacked in one weight.

Implementations, for `--kernel linear_silu_mul=NAME`: `fused` (SM 9.0, bf16; the default there: one kernel of our own
where `gemm_table.GATED` has measured it to be faster, which reads the halves side by side by TMA and never writes
[T, 2F]; it rounds once, where two kernels round gate and up first) and `split` (`linear`, then `silu_and_mul`, on
every device).
Invariants: the weight is stored as for `linear`, gate rows before up rows; each row of the result depends on its own
row of x alone; nothing synchronises with the host.
Does not know: which layer it serves; biases and FP8, which take `linear` and an activation.
"""

from __future__ import annotations

import torch

from stoker_kernels import cuda, gemm_small, gemm_table, gemm_wide
from stoker_kernels.activation import silu_and_mul
from stoker_kernels.dispatch import Target, reference_supports, register, select
from stoker_kernels.gemm import linear
from stoker_kernels.gemm_small import Operands, Tile
from stoker_kernels.gemm_wide import WideTile
from stoker_kernels.linear_weight import LinearWeight
from stoker_kernels.pdl import pdl_on


def _fused_supports(target: Target) -> str | None:
    if target.device != "cuda" or target.sm != 90:
        return "needs sm_90"
    if target.dtype != torch.bfloat16:
        return "takes bfloat16"
    return cuda.missing_cubin("sm90_bf16_gemm_gated", "sm_90a") or cuda.missing_cubin(gemm_wide.STEM, gemm_wide.ARCH)


def _split_supports(target: Target) -> str | None:
    return None  # what `linear` and `silu_and_mul` lack they say themselves


register("linear_silu_mul", "fused", "stoker_kernels.gemm_gated:fused", _fused_supports)
register("linear_silu_mul", "split", "stoker_kernels.gemm_gated:split", _split_supports)
register("linear_silu_mul", "reference", "stoker_kernels.reference_gemm:linear_silu_mul", reference_supports)


def linear_silu_mul(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """x [T, K], dense weight [2F, K] (gate, then up) → silu(x · gateᵀ) · (x · upᵀ) [T, F] of x's dtype.

    Raises ValueError for shapes that do not fit or a weight that is not dense.
    """
    if weight.kind != "dense" or weight.out_features % 2:
        raise ValueError(f"linear_silu_mul takes a dense [2F, K] weight, not {weight.kind} {tuple(weight.data.shape)}")
    if x.dim() != 2 or x.shape[1] != weight.in_features:
        raise ValueError(f"x is {tuple(x.shape)}, the weight [2F, K] = {tuple(weight.data.shape)}")
    y: torch.Tensor = select("linear_silu_mul", x.device, weight.data.dtype)(x, weight)
    return y


def split(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """`linear`, then `silu_and_mul`."""
    return silu_and_mul(linear(x, weight))


def fused(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """One kernel where `gemm_table.gated_tile` names one that takes the operands, else `split`."""
    out = torch.empty((x.shape[0], weight.out_features // 2), dtype=x.dtype, device=x.device)
    tile = gemm_table.gated_tile(weight.out_features, weight.in_features, x.shape[0]) if x.shape[0] else None
    if tile is None or refusal(tile, x, weight.data, out) is not None:
        return split(x, weight)
    if isinstance(tile, gemm_small.Tile):
        tile = gemm_small.fitted(tile, weight.data)
    launch(tile, x, weight.data, out, pdl=pdl_on(x.device))
    return out


def refusal(tile: Tile | WideTile, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> str | None:
    """None where the tile takes x [M, K], weight [2F, K] and out [M, F], else why not."""
    if isinstance(tile, WideTile):
        return gemm_wide.refusal(tile, x, weight, out)
    if weight.shape[0] % 16 or weight.dtype != torch.bfloat16:
        return f"takes bf16 and F in multiples of 8, not {weight.dtype}, 2F = {weight.shape[0]}"
    return gemm_small.refusal(Operands(x, weight, out))


def launch(tile: Tile | WideTile, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, pdl: bool) -> None:
    """Run a gated tile for operands that `refusal` accepts."""
    if isinstance(tile, WideTile):
        gemm_wide.launch(tile, x, weight, out, pdl=pdl)
    else:
        gemm_small.launch(tile, Operands(x, weight, out), pdl=pdl)
