"""GGUF's blocks in planes: exact both ways, no more memory than promised, and the reference's products."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests.kernels.block_gemm.test_blocks import SCALES, by_definition, columns_of, random_rows, same_bits

from stoker_kernels.block_gemm import block_linear, block_rows, decode_piece, plane_launch, store_planes
from stoker_kernels.quant import BLOCK_FORMATS, PLANE_KINDS, BlockWeight, PlaneRows, place_planes, plane_sizes

# About how large a code or the product of a code and a scale is: what makes weights of a few hundredths.
LARGEST = {
    "Q8_0": 128, "Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "IQ4_NL": 128, "IQ4_XS": 4096, "Q2_K": 45, "Q3_K": 128,
    "Q4_K": 900, "Q5_K": 1900, "Q6_K": 4096,
}  # fmt: skip


def mild_rows(name: str, rows: int, columns: int) -> torch.Tensor:
    """Random bits in codes and scales; the fp16 numbers make weights of a few hundredths."""
    width, size = BLOCK_FORMATS[name]
    draw = np.random.default_rng()
    blocks = draw.integers(0, 256, (rows * columns // width, size), dtype=np.uint8)
    for at in SCALES.get(name, (0,)):
        numbers = (0.05 / LARGEST[name] * draw.uniform(0.5, 1.5, len(blocks))).astype(np.float16)
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(blocks.reshape(rows, -1))


def in_planes(name: str, data: torch.Tensor, columns: int, device: torch.device | str = "cpu") -> PlaneRows:
    """Rows in planes, brought there in two parts, in memory that held something else."""
    size = sum(plane_sizes(name, data.shape[0], columns))
    place = place_planes(name, data.shape[0], columns, torch.full((size,), 0x5A, dtype=torch.uint8, device=device))
    cut = random.randint(0, data.shape[0])
    for row, part in ((0, data[:cut]), (cut, data[cut:])):
        store_planes(place, row, part.to(device))
    return place


@pytest.mark.parametrize("name", PLANE_KINDS)
def test_planes_keep_every_value(name: str) -> None:
    for columns in (columns_of(name), 256, *((32, 576) if BLOCK_FORMATS[name][0] == 32 else ())):
        data = random_rows(name, random.randint(1, 9), columns)
        assert same_bits(decode_piece(in_planes(name, data, columns)), by_definition(data, name))


@pytest.mark.parametrize("name", PLANE_KINDS)
def test_planes_take_what_the_file_has_and_a_tenth(name: str) -> None:
    width, size = BLOCK_FORMATS[name]
    for columns in (256, 4096, 14336, *((576, 960, 896) if width == 32 else ())):
        assert sum(plane_sizes(name, 64, columns)) <= 1.1 * 64 * columns // width * size


def test_the_reference_multiplies_and_looks_up_planes() -> None:
    data, more = random_rows("Q6_K", 5, 512), random_rows("Q3_K", 3, 512)
    weight = BlockWeight((in_planes("Q6_K", data, 512), in_planes("Q3_K", more, 512)), 512)
    assert weight.in_planes
    assert weight.out_features == 8
    values = torch.cat([by_definition(data, "Q6_K"), by_definition(more, "Q3_K")])
    x = torch.randn(2, 512)
    torch.testing.assert_close(block_linear(x, weight), x @ values.t())
    table = BlockWeight(weight.pieces[:1], 512)
    assert torch.equal(block_rows(torch.tensor([4, 1]), table, torch.float32), values[[4, 1]])


def test_what_does_not_fit_is_named() -> None:
    piece = in_planes("Q4_K", random_rows("Q4_K", 3, 512), 512)
    with pytest.raises(ValueError, match="Q4_K planes of 512 columns, not of 256"):
        BlockWeight((piece,), 256)
    with pytest.raises(ValueError, match="low of Q6_K planes is contiguous"):
        PlaneRows("Q6_K", 512, piece.low[:, :-1], None, piece.scale, piece.factor)
    with pytest.raises(ValueError, match="factor of Q4_0 planes is contiguous None"):
        PlaneRows("Q4_0", 512, piece.low, None, torch.zeros(12, dtype=torch.int64), piece.factor)


def test_splits_fill_the_gpu_and_are_never_empty() -> None:
    for _ in range(300):
        tokens, rows = random.randint(1, 300), random.choice([16, 48, 1024, 4096, 28672, 128256])
        columns, sms = 32 * random.randint(1, 600), random.choice([24, 132])
        tile = plane_launch.tile_for(tokens)
        splits, steps = plane_launch.splits_for(tile, tokens, rows, columns, sms), columns // 256
        tiles = -(-rows // tile.rows) * -(-tokens // tile.tokens)
        assert 1 <= splits <= 16
        assert splits == 1 or (tiles <= plane_launch.MOST_TILES and -(-steps // splits) * (splits - 1) < steps)
        assert splits == 1 or tiles * (splits - 1) < tile.programs * sms
