"""The Hopper kernels of four-bit weights that stream through shared memory, launched by their own host code and run on
the CPU by `emulator/`.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.kernels.emulator.int4 import Int4Machine, compile_int4

from stoker_kernels.integer_gemm import dequantize_integers, fixed, sm90_int4, to_fragments
from stoker_kernels.integer_gemm.sm90_int4 import TILES, Int4Tile
from stoker_kernels.quant import IntegerWeight, integer_scale_shape, pair_rows

WIDE = [tile for tile in TILES if tile.groups]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_int4(Path(tmp_path_factory.mktemp("int4")))


@pytest.fixture
def machine(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Int4Machine:
    machine = Int4Machine(library)
    machine.install(monkeypatch)
    return machine


def random_weight(n: int, k: int, group: int, zeros: bool, generator: torch.Generator) -> IntegerWeight:
    shape = integer_scale_shape(n, k, group)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
    scale = (torch.rand(shape, generator=generator) + 0.5) * (0.2 / k**0.5)
    zero = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator) if zeros else None
    return IntegerWeight(to_fragments(codes), scale.bfloat16(), zero, 4, group, layout="fragments")


def product(machine: Int4Machine, tile: Int4Tile, m: int, n: int, k: int, group: int, split: int, zeros: bool) -> None:
    """Runs a tile on random operands; checks every value and that nothing around the result is written."""
    generator = torch.Generator().manual_seed(m * n + k + group)
    machine.seed = m + split
    weight = random_weight(n, k, group, zeros, generator)
    x_space = torch.randn(m, k + 8, generator=generator).bfloat16()
    bias = torch.randn(n, generator=generator).bfloat16() if m % 2 else None
    x, out_space = x_space[:, :k], torch.full((m + 3, n + 24), float("nan"), dtype=torch.bfloat16)
    want = x.float() @ dequantize_integers(weight, torch.bfloat16).float().T + (0.0 if bias is None else bias.float())
    out = out_space[1 : m + 1, 8 : n + 8]
    machine.x, machine.out = x_space, out_space
    sm90_int4.multiply(x, weight, bias, out, tile, split)
    torch.testing.assert_close(out.float(), want, rtol=2.0**-8, atol=1e-3)
    out.fill_(float("nan"))
    assert out_space.isnan().all()


@pytest.mark.matrix("tile")
@pytest.mark.parametrize("tile", WIDE, ids=lambda tile: tile.kernel_name(False))
@pytest.mark.parametrize(("group", "zeros"), [(32, True), (128, False)])
def test_tiles_match(machine: Int4Machine, tile: Int4Tile, group: int, zeros: bool) -> None:
    """Fewer tokens and rows than a tile has, and more."""
    k = 64 * (5 + group % 3)
    product(machine, tile, max(1, tile.tokens - 5), tile.rows + 64, k, min(group, k), 1, zeros)


@pytest.mark.parametrize("tile", WIDE, ids=lambda tile: tile.kernel_name(False))
@pytest.mark.parametrize("split", [3])
def test_the_ctas_of_a_cluster_sum_their_columns(machine: Int4Machine, tile: Int4Tile, split: int) -> None:
    product(machine, tile, tile.tokens - 1, tile.rows + 64, 64 * 15, 64, split, split % 2 == 0)


@pytest.mark.parametrize(("group", "zeros"), [(16, True), (64, False), (1 << 20, True)])
def test_groups_match(machine: Int4Machine, group: int, zeros: bool) -> None:
    k = 64 * 5
    product(machine, WIDE[2], 11, 640, k, min(group, k), 2, zeros)


@pytest.mark.parametrize("tile", WIDE[-1:], ids=lambda tile: tile.kernel_name(False))
def test_ctas_take_tiles_in_turn(machine: Int4Machine, tile: Int4Tile) -> None:
    """More stages than one tile has blocks, and fewer; more tiles of tokens and of rows than CTAs."""
    for k in (128, 64 * 17):
        product(machine, tile, 2 * tile.tokens + 1, 2 * tile.rows + 64, k, 128, 1, True)


def gate_and_up(n: int, k: int, group: int, zeros: bool, generator: torch.Generator) -> IntegerWeight:
    """A weight of random rows, whose even ones are gate and odd ones up."""
    return replace(random_weight(n, k, group, zeros, generator), layout="pairs")


def exact(x: torch.Tensor, weight: IntegerWeight, dtype: torch.dtype) -> torch.Tensor:
    """x · Wᵀ in fp64 of the stored rows, as they lie, whose values are rounded to `dtype`."""
    return x.double() @ dequantize_integers(replace(weight, layout="fragments"), dtype).double().T


def check_pairs(machine: Int4Machine, tile: Int4Tile, split: int, draw: random.Random) -> None:
    """Gate and up in turn, random operands: the product by halves, and with its activation; nothing else is written."""
    m = draw.randrange(1, 2 * tile.tokens + 2) if tile.groups else draw.randrange(1, 9)
    k = 64 * draw.randrange(split, 14)
    n = 64 * draw.randrange(1, 2 * tile.rows // 64 + 2)
    group = draw.choice([16, 32] if draw.random() < 0.4 else [64, 128, k])
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    machine.seed = draw.randrange(1 << 30)
    weight = gate_and_up(n, k, min(group, k), draw.random() < 0.5, generator)
    x_space = torch.randn(m, k + 8, generator=generator).bfloat16()
    x = x_space[:, :k]
    # A warp by itself scales the sums of blocks that lie in one group, not their codes.
    both = exact(x, weight, torch.bfloat16 if tile.groups or group < 64 else torch.float64)
    gate, up = both[:, 0::2], both[:, 1::2]
    bias = torch.randn(n, generator=generator).bfloat16() if draw.random() < 0.5 else None
    halves = torch.cat([gate, up], dim=1) + (0.0 if bias is None else bias.double())
    gated = gate * up / (1.0 + torch.exp(-gate))
    for want, given, fused in ((halves, bias, False), (gated, None, True)):
        columns = want.shape[1]
        out_space = torch.full((m + 3, columns + 24), float("nan"), dtype=torch.bfloat16)
        out = out_space[1 : m + 1, 8 : columns + 8]
        machine.x, machine.out = x_space, out_space
        sm90_int4.multiply(x, weight, given, out, tile, split, gated=fused)
        torch.testing.assert_close(out.double(), want, rtol=2.0**-8, atol=1e-3)
        out.fill_(float("nan"))
        assert out_space.isnan().all()


@pytest.mark.matrix("tile")
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.kernel_name(False))
@pytest.mark.parametrize("split", [1, 2, 5])
def test_gate_and_up_in_turn_are_halves_or_activated(machine: Int4Machine, tile: Int4Tile, split: int) -> None:
    check_pairs(machine, tile, split, random.Random(tile.tokens * tile.rows + split))


def test_weights_are_dequantized_gate_before_up(machine: Int4Machine) -> None:
    draw = random.Random(11)
    for _ in range(6):
        n, k = 64 * draw.randrange(1, 6), 64 * draw.randrange(1, 6)
        weight = gate_and_up(n, k, draw.choice([16, 64, k]), draw.random() < 0.5, torch.Generator().manual_seed(n + k))
        out = torch.full((n, k), float("nan"), dtype=torch.bfloat16)
        machine.x = machine.out = None
        sm90_int4.dequantize(weight, out)
        stored = dequantize_integers(replace(weight, layout="fragments"), torch.bfloat16)
        assert torch.equal(out, torch.cat([stored[0::2], stored[1::2]]))
        sm90_int4.dequantize(replace(weight, layout="fragments"), plain := torch.empty_like(out))
        assert torch.equal(plain, stored)
        assert torch.equal(pair_rows(out), stored)
        assert torch.equal(out, dequantize_integers(weight, torch.bfloat16))


def test_a_row_has_the_same_bits_by_every_kernel_of_one_cut(
    machine: Int4Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fixed`: 3, 40 and 129 tokens take three kernels; columns are shared, since SMs are many."""
    sm90_int4._choice.cache_clear()
    machine.sms = 66
    taken, multiply = set(), sm90_int4.multiply

    def recorded(*args: object) -> None:
        taken.add(args[4:])
        multiply(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(sm90_int4, "multiply", recorded)
    generator = torch.Generator().manual_seed(5)
    weight = random_weight(192, 64 * 11, 64, True, generator)
    x = torch.randn(129, 64 * 11, generator=generator).bfloat16()
    whole = fixed.integer_linear(x, weight, bias=None, out=None)
    for count in (3, 40):
        part = fixed.integer_linear(x[20 : 20 + count].clone(), weight, bias=None, out=None)
        assert torch.equal(part, whole[20 : 20 + count])
    sm90_int4._choice.cache_clear()
    assert len({tile for tile, _ in taken}) == 3
    splits = {split for _, split in taken}
    assert len(splits) == 1
    assert splits.pop() > 1
