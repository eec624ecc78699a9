"""Products with what adapters add: `adapted_linear`, y = x·Wᵀ + B·(A·x), and `adapted_silu_mul` of gate and up.

Implementations, for `--kernel adapted_linear=NAME`: `fused` (SM 9.0, bf16, up to 64 tokens; the default there: A·x is
one launch, and the kernel that multiplies with W reads B behind it, as further columns) and `split` (shrink, the
product, expand, on every device and for every weight), which `fused` leaves other calls to.
Invariants: a token without an adapter gets what `linear` gives it; nothing synchronises with the host.
Does not know: which layer it serves.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from stoker_kernels.gemm import small, table
from stoker_kernels.gemm.op import linear
from stoker_kernels.gemm.small import Operands, Tile
from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import Target, register, select
from stoker_kernels.launch.pdl import pdl_on
from stoker_kernels.lora import (
    LoraStep,
    LoraTarget,
    expand_lora,
    expand_silu_mul,
    row_ranks,
    shrink_lora,
    shrink_refusal,
    shrink_rows,
    words_of,
)
from stoker_kernels.quant import AnyWeight, LinearWeight, Quantized

MOST_TOKENS = 64
MOST_PAIRS, FEW_PAIRS = 32, 16
"""Adapters of a step × sixteens of their ranks, and tiles of a plan: one a lane of the warp that lists them. Beyond one
block of 8 tokens only few: `split` is faster from 24 pairs on (H200)."""
MOST_SLOTS = 255  # a token's is a byte
MOST_PIECES = 3  # of AdapterArguments
_RANKS = 16  # of a box of B
_NO_ROW = 2**31 - 1


def _fused_supports(target: Target) -> str | None:
    if target.device != "cuda" or not chip_of(target.sm).wgmma:
        return "needs sm_90"
    if target.dtype != torch.bfloat16:
        return "takes bfloat16"
    stems = ("lora_shrink", *(f"gemm_{kind}_adapted" for kind in ("cluster", "gated", "multicast")))
    missing = (cuda.missing_cubin(f"sm90_bf16_{stem}", "sm_90a") for stem in stems)
    return next((reason for reason in missing if reason is not None), None)


def _split_supports(target: Target) -> str | None:
    return None  # what `linear` and the ops of adapters lack they say themselves


for _op in ("adapted_linear", "adapted_silu_mul"):
    register(_op, "fused", f"stoker_kernels.gemm.adapted:fused_{_op.removeprefix('adapted_')}", _fused_supports)
    register(_op, "split", f"stoker_kernels.gemm.adapted:split_{_op.removeprefix('adapted_')}", _split_supports)


class AdapterArguments(ctypes.Structure):
    """AdapterArguments of csrc/gemm_adapters.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("shrunk", "of_token", "of_tile", "ranks", "turn", "words")),
        *((name, ctypes.c_int) for name in ("row_ranks", "pieces", "tiles")),
        ("ends", ctypes.c_int * 2),
        ("planned", ctypes.c_int),
    ]


def adapted_linear(
    x: Tensor | Quantized,
    weight: AnyWeight,
    target: LoraTarget,
    step: LoraStep,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`linear` of the same operands, plus what the adapters of `step`'s tokens change in it: `target` is the linear's.

    Raises ValueError for shapes that do not fit, KernelUnavailable where nothing takes the dtypes.
    """
    if isinstance(x, Quantized):
        return split_linear(x, weight, target, step, bias=bias, out=out)
    y: Tensor = select("adapted_linear", x.device, x.dtype)(x, weight, target, step, bias=bias, out=out)
    return y


def adapted_silu_mul(x: Tensor, weight: AnyWeight, target: LoraTarget, step: LoraStep) -> Tensor:
    """silu(gate) · up `[T, F]` of `adapted_linear`'s result `[T, 2F]`; `target` has gate and up as its pieces."""
    y: Tensor = select("adapted_silu_mul", x.device, x.dtype)(x, weight, target, step)
    return y


def split_linear(
    x: Tensor | Quantized, weight: AnyWeight, target: LoraTarget, step: LoraStep, *, bias: Tensor | None,
    out: Tensor | None,
) -> Tensor:  # fmt: skip
    """Shrink, the product, expand: a GPU brings the weight in while the first one ends."""
    parts = shrink_lora(x, target, step.plan, step.scratch, planned=step.planned)
    y = linear(x, weight, bias=bias, out=out)
    expand_lora(y, target, step.plan, step.scratch, parts=parts, planned=step.planned)
    return y


def split_silu_mul(x: Tensor, weight: AnyWeight, target: LoraTarget, step: LoraStep) -> Tensor:
    """Shrink, the product, expand with the activation."""
    parts = shrink_lora(x, target, step.plan, step.scratch, planned=step.planned)
    return expand_silu_mul(linear(x, weight), target, step.plan, step.scratch, parts=parts, planned=step.planned)


def fused_linear(
    x: Tensor, weight: AnyWeight, target: LoraTarget, step: LoraStep, *, bias: Tensor | None, out: Tensor | None
) -> Tensor:
    """Two launches where a tile of our own for few tokens takes the operands, else `split_linear`."""
    n, k = weight.out_features, x.shape[1]
    if isinstance(weight, LinearWeight) and weight.kind == "dense" and 0 < len(x) <= MOST_TOKENS:
        y = torch.empty((len(x), n), dtype=x.dtype, device=x.device) if out is None else out
        if _taken(table.best_tile(False, n, k, len(x)), Operands(x, weight.data, y, bias), target, step):
            return y
    return split_linear(x, weight, target, step, bias=bias, out=out)


def fused_silu_mul(x: Tensor, weight: AnyWeight, target: LoraTarget, step: LoraStep) -> Tensor:
    """Two launches where a gated tile for few tokens takes the operands, else `split_silu_mul`."""
    n, k = weight.out_features, x.shape[1]
    if isinstance(weight, LinearWeight) and weight.kind == "dense" and 0 < len(x) <= MOST_TOKENS:
        out = torch.empty((len(x), n // 2), dtype=x.dtype, device=x.device)
        if _taken(table.streaming_gated_tile(n, k, len(x)), Operands(x, weight.data, out), target, step):
            return out
    return split_silu_mul(x, weight, target, step)


def refusal(tile: Tile, o: Operands, target: LoraTarget, step: LoraStep) -> str | None:
    """None where the two launches, the second one with this tile, take these adapters, else why not."""
    slots, max_rank, *_ = target.a.shape
    blocks, tiles = row_ranks(max_rank) // _RANKS, len(step.plan.adapters)
    most = MOST_PAIRS if tile.tokens == 8 else FEW_PAIRS
    if min(len(o.x), slots) * blocks > most or tiles > MOST_PAIRS or slots > MOST_SLOTS:
        return f"a step has up to {min(len(o.x), slots)} adapters of {max_rank} ranks in {tiles} tiles, too many"
    if len(target.rows) > MOST_PIECES:
        return f"takes up to {MOST_PIECES} pieces"
    if tile.family == "multicast" and tile.tokens > MOST_TOKENS:
        return f"takes up to {MOST_TOKENS} tokens"
    if any(rows % 8 for rows in target.rows) or sum(target.rows) != len(o.weight):
        return f"pieces of {target.rows} rows are not multiples of 8, or not the weight's"
    strides = target.b.stride()
    if target.b.dtype != torch.bfloat16 or strides[2] != 1 or strides[0] % 8 or strides[1] % 8:
        return "takes B in bf16, whose rows start on multiples of 16 bytes"
    if target.b.data_ptr() % 16:
        return "B has to start on a multiple of 16 bytes"
    if with_adapters(tile, target) is None:
        return f"A·x of {tile.tokens} tokens leaves no room in shared memory"
    return shrink_refusal(o.x, target)


def with_adapters(tile: Tile, target: LoraTarget) -> Tile | None:
    """The tile that adds what these adapters do; None where shared memory has no room for it."""
    _, max_rank, pieces, _ = target.a.shape
    return small.with_shrunk(tile, tile.tokens * pieces * row_ranks(max_rank) * 2)


def _taken(tile: object, o: Operands, target: LoraTarget, step: LoraStep) -> bool:
    """Run a tile for few tokens with the adapters if it takes them; whether it did."""
    if not isinstance(tile, Tile) or small.refusal(tile, o) is not None or refusal(tile, o, target, step) is not None:
        return False
    run(tile, o, target, step)
    return True


def run(tile: Tile, o: Operands, target: LoraTarget, step: LoraStep) -> None:
    """Both launches, for operands that `small.refusal` and `refusal` accept. Raises CubinMissing."""
    _, max_rank, pieces, _ = target.a.shape
    adding = with_adapters(tile, target)
    assert adding is not None, "`refusal` says where there is no room"
    shrunk = shrink_rows(o.x, target, step)
    ends = [sum(target.rows[:count]) if count < pieces else _NO_ROW for count in (1, 2)]
    arguments = AdapterArguments(
        shrunk.data_ptr(), step.plan.tokens.data_ptr(), step.plan.adapters.data_ptr(), target.ranks.data_ptr(),
        step.plan.turn.data_ptr(), cuda.address_of(words_of(target, step)),
        row_ranks(max_rank), pieces, len(step.plan.adapters), (ctypes.c_int * 2)(*ends), int(step.planned),
    )  # fmt: skip
    halves = 2 if tile.gated else 1
    b_map = cuda.tensor_map_4d(target.b.unflatten(2, (halves, -1)), (1, _RANKS, halves))
    small.launch(small.fitted(adding, o.weight), o, pdl=pdl_on(o.x.device), adapters=(b_map, arguments))
