"""Products with weights in fragments on Hopper: host side of csrc/.

Up to 8 tokens each warp streams the weight's fragments by itself; for more warpgroups multiply what others stream
through shared memory, tile after tile of tokens. `dequantize` writes the weight in 16 bits instead, which costs 2.5
bytes a number once for all tokens (`takes_tokens`).

Invariants: a launch never synchronises and can be captured after one launch of its kind; sums are added in a fixed
order, so equal calls give equal bits.
Does not know: which layer it serves, nor how the weight came to be in fragments.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from stoker_kernels.fragment_gemm.order import COLUMNS, GROUP, ROWS, CodeForm
from stoker_kernels.fragment_gemm.tiles import (
    INT4,
    INT4_SMALL,
    INT8,
    INT8_SMALL,
    MXFP4,
    NVFP4,
    Numbers,
    Tile,
    choice_for,
)
from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import sm_count, sm_of
from stoker_kernels.launch.pdl import pdl_on
from stoker_kernels.quant import Fp4Weight, IntegerWeight

ARCH = "sm_90a"
STEMS: dict[CodeForm, str] = {"int4": INT4.stem, "int8": INT8.stem, "fp4": MXFP4.stem}
WHOLE_ROW = 30  # a group_shift beyond every column
PLAIN, PAIRED, GATED = range(3)  # FragmentRows of csrc/fragments.cuh
# From so many tokens on a weight in fragments is dequantized first (`bench.fragments --dense`, int4, H200, µs of 1,024,
# 2,048 and 4,096 tokens: 4608 × 3584 as it is 56, 117, 258, dequantized 54, 97, 191). Gate and up would have
# their activation apart then: 443, 892, 1,847 with it, and 470, 910, 1,782 with 27, 54, 108 for the activation.
DENSE_FROM, GATED_DENSE_FROM = 1536, 5632
PORTION = 1024  # tokens of a launch of `multiply_invariant`

FragmentWeight = IntegerWeight | Fp4Weight


class FragmentArguments(ctypes.Structure):
    """FragmentArguments of csrc/fragments.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "x", "bias", "codes", "scale", "zero", "factor")),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "ld_x", "ld_out", "group_shift", "split", "rows")),
    ]


def takes_tokens(m: int, *, gated: bool = False) -> bool:
    """Whether a weight in fragments is multiplied as it is by `m` tokens, or dequantized first."""
    return m < (GATED_DENSE_FROM if gated else DENSE_FROM)


def kernels_refusal(dtype: torch.dtype, sm: int, form: CodeForm = "int4") -> str | None:
    """None where our Hopper kernels of codes of `form` run, else why not."""
    if not chip_of(sm).wgmma or dtype != torch.bfloat16:
        return "needs sm_90 and bfloat16"
    return cuda.missing_cubin(STEMS[form], ARCH)


def fragments_refusal(dtype: torch.dtype, device: torch.device, form: CodeForm) -> str | None:
    """None where weights of `dtype` products on `device` should be laid out in fragments, else why not."""
    return kernels_refusal(dtype, sm_of(device), form) if device.type == "cuda" else "needs CUDA"


def numbers_of(weight: FragmentWeight) -> Numbers:
    """The form of a weight's numbers."""
    if isinstance(weight, Fp4Weight):
        return MXFP4 if weight.kind == "mxfp4" else NVFP4
    small = weight.group < min(COLUMNS, weight.in_features)
    if weight.bits == 8:
        return INT8_SMALL if small else INT8
    return INT4_SMALL if small else INT4


def choice(tokens: int, weight: FragmentWeight, device: torch.device, split: int = 0) -> tuple[Tile, int]:
    """`choice_for` on this device. Raises CubinMissing."""
    numbers = numbers_of(weight)
    most = numbers.tiles[-1].tokens
    if tokens > most:
        tokens = -(-tokens // most) * most  # whole tiles: the same choice, which is made once
    return _choice(numbers, tokens, weight.out_features, weight.in_features, device, split)


@functools.cache
def _choice(numbers: Numbers, tokens: int, n: int, k: int, device: torch.device, split: int) -> tuple[Tile, int]:
    def residents(tile: Tile, parts: int) -> int:
        if parts == 1:
            return sm_count(device) * tile.ctas
        return cuda.resident_clusters(_kernel(numbers, tile, device), parts, numbers.shared_bytes(tile))

    return choice_for(numbers, tokens, n, k, residents, split)


def refusal(x: Tensor, weight: FragmentWeight, bias: Tensor | None, out: Tensor) -> str | None:
    """None where the kernels take these operands, else why not."""
    if weight.layout == "rows":
        return "the weight is not in fragments"
    scales = weight.scale.dtype if isinstance(weight, IntegerWeight) else torch.bfloat16
    if {x.dtype, out.dtype, scales, bias.dtype if bias is not None else x.dtype} != {torch.bfloat16}:
        return f"takes bfloat16 throughout, not {x.dtype}, {scales}, {out.dtype}"
    if x.stride(1) != 1 or out.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        return "rows of x have to be contiguous and start on multiples of 16 bytes"
    starts = (out, weight.data, weight.scale, _zero(weight), _factor(weight))
    if out.stride(0) % 8 or any(cuda.address_of(tensor) % 16 for tensor in starts):
        return "rows of the result, codes, scales, zero points and factors have to start on multiples of 16 bytes"
    return None


def multiply(
    x: Tensor, weight: FragmentWeight, bias: Tensor | None, out: Tensor, tile: Tile | None = None, split: int = 1,
    *, gated: bool = False,
) -> None:  # fmt: skip
    """out = x · Wᵀ + bias on the current stream, for operands that `refusal` accepts. Raises CubinMissing.

    `gated`: out [M, N / 2] = silu(x · gateᵀ) · (x · upᵀ), of a weight in pairs and without bias. `tile` and `split`
    (1 to 8) are chosen where no tile is given.
    """
    assert not gated or (weight.layout == "pairs" and bias is None), "gated products are of pairs, without bias"
    m, n = x.shape[0], weight.out_features
    if tile is None:
        tile, split = choice(m, weight, x.device)
    arguments: list[Any] = [_arguments(weight, out, x=x, bias=bias, split=split, gated=gated)]
    if tile.groups:
        arguments.insert(0, cuda.tensor_map(x, tile.tokens))
    ctas = -(-n // tile.rows) * -(-m // tile.tokens) * split
    if tile.groups and split == 1:
        ctas = min(ctas, sm_count(x.device) * tile.ctas)
    chosen = _kernel(numbers_of(weight), tile, x.device)
    cuda.launch(chosen, ctas, arguments, x.device, pdl=pdl_on(x.device), cluster=split)


def multiply_invariant(x: Tensor, weight: FragmentWeight, bias: Tensor | None, out: Tensor) -> None:
    """`multiply` of any number of tokens, where a row's bits do not depend on the others: by kernels that bring tokens
    to shared memory, also where there are few, whose CTAs share the columns as the weight alone says. More than PORTION
    tokens are so many launches.
    """
    least = min(tile.tokens for tile in numbers_of(weight).tiles if tile.groups)
    _, split = choice(least, weight, x.device)
    for first in range(0, len(x), PORTION):
        part = slice(first, min(first + PORTION, len(x)))
        tile, _ = choice(max(least, part.stop - part.start), weight, x.device, split)
        multiply(x[part], weight, bias, out[part], tile, split)


def dequantize(weight: FragmentWeight, out: Tensor) -> None:
    """out [N, K] = the weight in bf16, gate before up, columns in the weight's own order. Raises CubinMissing."""
    numbers = numbers_of(weight)
    name = f"{numbers.stem}_dequantize_{numbers.name}"
    chosen = cuda.kernel(numbers.stem, ARCH, name, 0, 256, out.device.index or 0)
    blocks = (weight.out_features // ROWS) * (weight.in_features // COLUMNS)
    cuda.launch(chosen, -(-blocks // 8), [_arguments(weight, out)], out.device, pdl=pdl_on(out.device))


def dense(weight: FragmentWeight) -> Tensor:
    """The weight [N, K] in bf16, gate before up, columns in its own order. Raises CubinMissing."""
    out = torch.empty((weight.out_features, weight.in_features), dtype=torch.bfloat16, device=weight.data.device)
    dequantize(weight, out)
    return out


def silu_mul_pairs(x: Tensor, weight: FragmentWeight) -> Tensor | None:
    """silu(x · gateᵀ) · (x · upᵀ) [M, N / 2] of a weight in pairs by one kernel; None: for so many tokens the weight is
    better dequantized, and multiplied as a dense one. Columns of x are in the order of the weight's.

    Raises ValueError where a weight in pairs meets operands that its kernels do not take.
    """
    if not takes_tokens(len(x), gated=True):
        return None
    out = torch.empty((len(x), weight.out_features // 2), dtype=x.dtype, device=x.device)
    reason = refusal(x, weight, None, out)
    if reason is not None:
        raise ValueError(f"{weight.kind} silu_mul of a weight in pairs: {reason}")
    if len(x):
        multiply(x, weight, None, out, gated=True)
    return out


def _kernel(numbers: Numbers, tile: Tile, device: torch.device) -> cuda.Kernel:
    shared = numbers.shared_bytes(tile)
    return cuda.kernel(numbers.stem, ARCH, numbers.kernel_name(tile), shared, tile.threads, device.index or 0)


def _zero(weight: FragmentWeight) -> Tensor | None:
    return weight.zero if isinstance(weight, IntegerWeight) else None


def _factor(weight: FragmentWeight) -> Tensor | None:
    return weight.factor if isinstance(weight, Fp4Weight) else None


def _arguments(
    weight: FragmentWeight, out: Tensor, *, x: Tensor | None = None, bias: Tensor | None = None, split: int = 1,
    gated: bool = False,
) -> FragmentArguments:  # fmt: skip
    rows = (GATED if gated else PAIRED) if weight.layout == "pairs" else PLAIN
    group = weight.group if isinstance(weight, IntegerWeight) else weight.block
    shift = WHOLE_ROW if group >= weight.in_features else (group // GROUP).bit_length() - 1
    return FragmentArguments(
        out.data_ptr(), cuda.address_of(x), cuda.address_of(bias), weight.data.data_ptr(), weight.scale.data_ptr(),
        cuda.address_of(_zero(weight)), cuda.address_of(_factor(weight)), 0 if x is None else x.shape[0],
        weight.out_features, weight.in_features, 0 if x is None else x.stride(0), out.stride(0), shift, split, rows,
    )  # fmt: skip
