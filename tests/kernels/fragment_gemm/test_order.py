"""The order of fragments against the definition of mma.sync."""

from __future__ import annotations

import random

import pytest
import torch

from stoker_kernels.fragment_gemm import CodeForm, from_fragments, store_half, to_fragments
from stoker_kernels.quant import E2M1, pair_rows


def test_a_word_of_a_fragment_holds_what_a_lane_multiplies() -> None:
    """PTX's m16n8k16: register a_i of lane 4q + c, half e, is row q + 8·(i % 2), slot 2c+e + 8·(i/2)."""
    n, k = 192, 320
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    words = to_fragments(codes, "int4").view(torch.int32).view(n // 64, k // 64, 4, 32, 4)
    generator = random.Random(7)
    for _ in range(400):
        block, chunk, tile, lane, step = (generator.randrange(each) for each in words.shape)
        q, c = divmod(lane, 4)
        word = int(words[block, chunk, tile, lane, step]) & 0xFFFFFFFF
        for register in range(4):
            pair = word >> (4 * register) & 0x000F000F
            for e in range(2):
                row = 64 * block + 8 * q + 2 * tile + register % 2
                column = 64 * chunk + 16 * step + 2 * c + e + 8 * (register // 2)
                assert pair >> (16 * e) & 15 == int(codes[row, column])


def test_eight_bits_have_two_words_a_step() -> None:
    """Byte h + 2e of the word of slots 2c + e + 8p is row q + 8h."""
    n, k = 128, 192
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    data = to_fragments(codes, "int8").view(n // 64, k // 64, 2, 4, 32, 2, 2, 4)
    generator = random.Random(8)
    for _ in range(400):
        block, chunk, piece, tile, lane, step, p, byte = (generator.randrange(each) for each in data.shape)
        q, c = divmod(lane, 4)
        row = 64 * block + 8 * q + 2 * tile + byte % 2
        column = 64 * chunk + 32 * piece + 16 * step + 8 * p + 2 * c + byte // 2
        assert data[block, chunk, piece, tile, lane, step, p, byte] == codes[row, column]


def test_floats_lie_where_bf16_has_its_bits() -> None:
    """As of integers, but a code's field is bits of the half word: a bf16 of 2^-126 times its value once moved up."""
    n, k = 64, 128
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    halves = to_fragments(codes, "fp4").view(torch.int16).view(k // 64, 4, 32, 4, 2)
    generator = random.Random(9)
    for _ in range(400):
        chunk, tile, lane, step, e = (generator.randrange(each) for each in halves.shape)
        q, c = divmod(lane, 4)
        half = int(halves[chunk, tile, lane, step, e]) & 0xFFFF
        for field in range(4):
            bits = half << 3 * field & 0x81C0
            if field == 3:
                bits = (half << 1 & 0x8000) | (half >> 3 & 0x0180) | (half >> 7 & 0x0040)
            number = torch.tensor([bits - (bits >> 15 << 16)], dtype=torch.int16).view(torch.bfloat16).double()
            code = int(codes[8 * q + 2 * tile + field % 2, 64 * chunk + 16 * step + 2 * c + e + 8 * (field // 2)])
            assert number * 2.0**126 == (-1 if code > 7 else 1) * E2M1[code % 8]


@pytest.mark.parametrize("form", ["int4", "int8", "fp4"])
def test_codes_come_back_and_halves_are_apart(form: CodeForm) -> None:
    """Gate and up, stored in lots over what was there, are the rows of a whole in turn."""
    draw, k = random.Random(form), 64 * 3
    f = 32 * draw.randrange(2, 8)
    codes = torch.randint(0, 256 if form == "int8" else 16, (2 * f, k), dtype=torch.uint8)
    assert torch.equal(from_fragments(to_fragments(codes, form), form), codes)
    data = torch.randint(0, 256, (2 * f, k if form == "int8" else k // 2), dtype=torch.uint8)
    lots = [(half, first) for half in (0, 1) for first in range(0, f, 32)]
    for half, first in draw.sample(lots, len(lots)):
        store_half(data, half, first, codes[half * f + first : half * f + first + 32], form)
    assert torch.equal(from_fragments(data, form), pair_rows(codes))


@pytest.mark.parametrize(("n", "k"), [(63, 64), (64, 96)])
def test_blocks_that_are_not_full_are_refused(n: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"not {n} × {k}"):
        to_fragments(torch.zeros(n, k, dtype=torch.uint8), "int8")
