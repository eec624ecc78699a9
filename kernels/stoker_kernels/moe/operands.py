"""What the Triton products of experts are given: activations as a kind of weights reads them, words, tiles and steps.

Invariants: views and choices by shapes alone; only activations are made anew, in FP8 or INT8.
Knows nothing of kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import sm_count, sm_of
from stoker_kernels.moe.layouts.int4 import columns_of, places_together
from stoker_kernels.moe.layouts.int8 import step_columns
from stoker_kernels.moe.tiles import RowTile, packed_row_tile, row_tile
from stoker_kernels.moe.types import ExpertKind, ExpertWeights
from stoker_kernels.quant import BLOCK, quantize_fp8, quantize_int8_rows


def read_by_products(x: Tensor, weights: ExpertWeights) -> tuple[Tensor, Tensor | None]:
    """What a product reads: x, or x in FP8 or INT8 with a scale a row."""
    if weights.takes_int8:
        return quantize_int8_rows(x)
    if not weights.takes_quantized:
        return x, None
    quantized = quantize_fp8(x)
    return quantized.data, quantized.scale


def in_words(data: Tensor, scale: Tensor | None, dtype: torch.dtype, kind: ExpertKind) -> tuple[Tensor, Tensor | None]:
    """What kernels read: of four bits eight codes as one number, and as one the scales of eight, or a scale and its
    zero point, of eight bits beside a code a byte. Raises ValueError for scales beside zero points of another type than
    x's.
    """
    if scale is None or data.dtype != torch.uint8:
        return data, scale
    if scale.dtype == torch.uint8:
        return data.view(torch.int32), scale.view(torch.int64)
    if scale.dtype != dtype:
        raise ValueError(f"scales of experts in integers are {scale.dtype}, but x is {dtype}")
    settings = scale.view(torch.int32 if dtype.itemsize == 2 else torch.int64)
    return data if kind == "int8" else data.view(torch.int32), settings


def groups_of_steps(weights: ExpertWeights, columns: int) -> tuple[int | None, int]:
    """Of integers the columns of a group, and how many code places of a step share one; else none."""
    if not weights.in_integers:
        return None, 1
    together = places_together(weights.group, columns) if weights.kind == "int4" else 1
    return columns_of(weights.group, columns), together


def tile_of_rows(
    weights: ExpertWeights, tokens: int, tiles: int, rows: int, device: torch.device, *, gated: bool
) -> RowTile:
    if weights.in_four_bits:
        return packed_row_tile(weights.kind, tokens, tiles, rows, sm_count(device), gated=gated)
    as_fp8 = weights.takes_quantized and chip_of(sm_of(device)).wgmma
    in_bytes = weights.kind == "int8"
    return row_tile(tokens, tiles, rows, sm_count(device), gated=gated, as_fp8=as_fp8, in_bytes=in_bytes)


def step_of(weights: ExpertWeights, width: int, columns: int) -> int:
    """Columns a step of rows `width` wide: of weights with blocks exactly one block, of integers in bytes no more than
    a group's, else the bytes of `columns` in 16 bits, or fewer.
    """
    if weights.in_four_bits:
        return columns
    if weights.kind == "int8":
        return min(columns, step_columns(weights.group, width))
    if weights.kind == "fp8_block":
        return BLOCK
    return min(BLOCK, columns * 2 // weights.down.element_size())
