"""What of the planes' kernels is compiled ahead of time: each format with each tile, for both 16-bit types.

Invariants: a launch's constants follow from format, dtype and number of tokens alone, so no shape needs a compiler.
Does not know: what a format means.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from stoker_kernels.block_gemm.plane_launch import (
    ROW_WARPS,
    ROWS_AT_ONCE,
    TILES,
    PlaneTile,
    constants,
    elements,
    fitted,
)
from stoker_kernels.block_gemm.triton_planes import plane_linear_kernel, plane_rows_kernel
from stoker_kernels.launch.aot_registry import BF16, FP16, I32, I32_DIVISIBLE, SMS, register_aot
from stoker_kernels.quant import PLANE_KINDS

POINTERS = {torch.int16: "*i16", torch.uint8: "*u8"}
COMPACT = "Q4_K"  # the format that stands for all in a quick test


def types(name: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Types of what a piece of a format is passed as, and what is passed as None."""
    kind, (low, high) = PLANE_KINDS[name], elements(name)
    signature = {"low": POINTERS[low], "high": POINTERS[high], "scale": "*i64", "factor": "*i32"}
    signature |= {"n": I32, "k": I32_DIVISIBLE, "low_stride": I32_DIVISIBLE, "high_stride": I32_DIVISIBLE}
    absent = {**({} if kind.high else {"high": None}), **({} if kind.bytes_ else {"factor": None})}
    return {part: type_ for part, type_ in signature.items() if part not in absent}, absent


def _rings(tile: PlaneTile, min_sm: int) -> list[tuple[int, int, int]]:
    """(least SM, most SM, stages) of a tile, where some chips hold a shorter ring one for each SM."""
    each = [(sm, sm, fitted(tile, sm).stages) for sm in SMS if sm >= min_sm]
    return each if len({stages for *_, stages in each}) > 1 else [(min_sm, max(SMS), tile.stages)]


def _register() -> None:
    for (dtype, min_sm), name in itertools.product(((BF16, 80), (FP16, 75)), PLANE_KINDS):
        signature, absent = types(name)
        first = dtype == BF16 and name == COMPACT
        rows = absent | constants(name) | {"ROWS": ROWS_AT_ONCE, "WIDEN": False}
        written = signature | {"out": f"*{dtype}", "count": I32, "first": I32}
        # All rows, a part after the other; or those of a step's tokens.
        for ids in (None, "*i32"):
            register_aot(
                plane_rows_kernel, written | ({"ids": ids} if ids else {}), [rows | ({} if ids else {"ids": None})],
                options={"num_warps": ROW_WARPS}, min_sm=min_sm, compact=first and ids is None,
            )  # fmt: skip
        floats = dict.fromkeys(("x", "bias", "out"), f"*{dtype}") | {"partial": "*fp32", "arrivals": "*i32"}
        sizes = {"m": I32, "x_stride": I32_DIVISIBLE, "out_stride": I32, "biased": I32, "splits": I32}
        for tile in TILES:
            shape = {"ROWS": tile.rows, "TOKENS": tile.tokens, "MANY": tile.many, "WIDEN": False}
            for least, most, stages in _rings(tile, min_sm):
                register_aot(
                    plane_linear_kernel, signature | floats | sizes, [absent | constants(name) | shape],
                    options={"num_warps": tile.warps, "num_stages": stages}, min_sm=least, max_sm=most,
                    compact=first and tile is TILES[0],
                )  # fmt: skip


_register()
