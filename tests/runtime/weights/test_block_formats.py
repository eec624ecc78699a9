"""block_formats.py: what it counts without torch is what the kernels lay out."""

from __future__ import annotations

import random

import pytest

from stoker_kernels.block_gemm import packs
from stoker_kernels.quant import BLOCK_FORMATS, plane_sizes
from stoker_runtime.weights.block_formats import BLOCK_COLUMNS, PACKED, PACKED_ROWS, plane_bytes


def test_the_formats_are_those_that_are_multiplied() -> None:
    assert {name: width for name, (width, _) in BLOCK_FORMATS.items()} == BLOCK_COLUMNS
    for rows in random.sample(range(1, 400), 40):
        assert {name for name in BLOCK_FORMATS if packs(name, rows)} == (set() if rows % PACKED_ROWS else set(PACKED))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_rows_in_planes_take_what_the_kernels_give_them(name: str) -> None:
    for _ in range(20):
        columns, rows = BLOCK_COLUMNS[name] * random.randrange(1, 70), random.randrange(1, 200)
        # Each of four planes is filled up to 16 bytes.
        assert 0 <= sum(plane_sizes(name, rows, columns)) - rows * plane_bytes(name, columns) < 4 * 16
