"""Integer weights: packing, the order of fragments against the definition of mma.sync, the reference, Triton's
kernels.
"""

from __future__ import annotations

import random

import pytest
import torch

from stoker_kernels.integer_gemm import dequantize_integers, from_fragments, integer_linear, sm90_int4, to_fragments
from stoker_kernels.quant import IntegerWeight, integer_scale_shape, pack_rows, unpack_rows


def random_weight(
    n: int, k: int, bits: int, group: int, *, zeros: bool = True, order: bool = False
) -> tuple[IntegerWeight, torch.Tensor]:
    """A weight in rows and its value in fp64, by the definition."""
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8)
    shape = integer_scale_shape(n, k, group)
    scale = torch.rand(shape) * 0.02 + 0.001
    zero = torch.randint(0, 1 << bits, shape, dtype=torch.uint8) if zeros else None
    value = torch.empty(n, k, dtype=torch.float64)
    for column in range(k):
        shift = 1 << (bits - 1) if zero is None else zero[column // group].double()
        value[:, column] = (codes[:, column].double() - shift) * scale[column // group].double()
    permutation = torch.randperm(k).to(torch.int32) if order else None
    return IntegerWeight(pack_rows(codes, bits), scale, zero, bits, group, permutation), value


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_packed_and_unpacked(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, 38), dtype=torch.uint8)
    data = pack_rows(codes, bits)
    assert data.shape == (5, 38 * bits // 8)
    assert torch.equal(unpack_rows(data, bits), codes)
    if bits == 4:
        assert int(data[3, 7]) == int(codes[3, 14]) + 16 * int(codes[3, 15])


def test_a_word_of_a_fragment_holds_what_a_lane_multiplies() -> None:
    """PTX's m16n8k16: register a_i of lane 4q + c, half e, is row q + 8·(i % 2), slot 2c+e + 8·(i/2)."""
    n, k = 192, 320
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    words = to_fragments(codes).view(torch.int32).view(n // 64, k // 64, 4, 32, 4)
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
    assert torch.equal(from_fragments(to_fragments(codes)), codes)


@pytest.mark.parametrize(("n", "k"), [(63, 64), (64, 96)])
def test_blocks_that_are_not_full_are_refused(n: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"not {n} × {k}"):
        to_fragments(torch.zeros(n, k, dtype=torch.uint8))


@pytest.mark.parametrize(("bits", "group", "zeros", "order"), [
    (4, 32, True, False), (4, 96, False, True), (8, 16, True, True), (8, 10_000, False, False), (4, 5, True, False),
])  # fmt: skip
def test_the_reference_follows_the_definition(bits: int, group: int, zeros: bool, order: bool) -> None:
    weight, value = random_weight(24, 160, bits, group, zeros=zeros, order=order)
    torch.testing.assert_close(dequantize_integers(weight, torch.float32).double(), value, rtol=1e-6, atol=0.0)
    x, bias = torch.randn(7, 160), torch.randn(24)
    placed = x if weight.order is None else x[:, weight.order.long()]
    expected = placed.double() @ value.t() + bias.double()
    torch.testing.assert_close(integer_linear(x, weight, bias=bias).double(), expected, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_named() -> None:
    good, _ = random_weight(8, 64, 4, 32)
    with pytest.raises(ValueError, match=r"scales are floats \(4, 8\)"):
        IntegerWeight(good.data, good.scale, None, 4, 16)
    with pytest.raises(ValueError, match="4 or 8 bits"):
        IntegerWeight(good.data, good.scale, None, 3, 32)
    with pytest.raises(ValueError, match="zero points are uint8"):
        IntegerWeight(good.data, good.scale, torch.zeros(2, 8), 4, 32)
    with pytest.raises(ValueError, match=r"x is \(2, 63\)"):
        integer_linear(torch.zeros(2, 63), good)


@pytest.mark.parametrize("sms", [1, 78, 132])
def test_a_choice_takes_its_tokens_and_leaves_no_cta_without_columns(sms: int) -> None:
    generator = random.Random(sms)
    for n, k in ((64, 64), (4608, 3584), (192, 18944), (152064, 8192)):
        for tokens in (1, 1024, *(generator.randrange(2, 1024) for _ in range(12))):
            tile, split = sm90_int4.choice_for(tokens, n, k, lambda tile, split: sms * tile.ctas // split)
            assert tile.tokens >= min(tokens, 128)
            assert 1 <= split <= sm90_int4.MAX_SPLIT
            assert -(-k // (64 * tile.blocks_at_once)) >= split


def test_a_weight_of_one_wave_is_not_split_and_a_narrow_one_is() -> None:
    """132 SMs: 130 tiles of 320 rows fill most of them; 14 tiles of 256 rows leave most idle."""
    tile, split = sm90_int4.choice_for(100, 130 * 320, 4096, h200)
    assert (tile.rows, split) == (320, 1)
    assert sm90_int4.choice_for(100, 14 * 256, 16384, h200)[1] > 3


def test_clusters_that_would_not_fit_at_once_are_not_chosen() -> None:
    for tokens in (90, 128, 250):
        for n, k in ((3584, 18944), (4608, 3584), (5120, 17408)):
            tile, split = sm90_int4.choice_for(tokens, n, k, h200)
            assert -(-n // tile.rows) * -(-tokens // tile.tokens) <= h200(tile, split)


def test_with_a_given_cut_the_kernel_alone_is_chosen() -> None:
    """As batch invariance wants it: every number of tokens takes the same cut, by a kernel that holds them."""
    for n, k in ((3584, 18944), (4608, 3584), (70 * 64, 1152)):
        for split in (1, 3, 7):
            for tokens in (16, 47, 90, 1024):
                tile, found = sm90_int4.choice_for(tokens, n, k, h200, split)
                assert found == split
                assert tile.groups
                assert tile.tokens >= min(tokens, 128)


def h200(tile: sm90_int4.Int4Tile, split: int) -> int:
    """How many clusters of 1 to 8 CTAs an H200 was found to hold, one of them on an SM."""
    return (132, 66, 39, 30, 22, 17, 15, 15)[split - 1] * tile.ctas
