"""The Hopper kernels of four-bit weights, launched by their own host code and run on the CPU by `emulator/`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from tests.kernels.emulator.int4 import Machine, compile_int4

from stoker_kernels.integer_gemm import dequantize_integers, fixed, sm90_int4, to_fragments
from stoker_kernels.integer_gemm.sm90_int4 import TILES, Int4Tile
from stoker_kernels.quant import IntegerWeight, integer_scale_shape

WIDE = [tile for tile in TILES if tile.groups]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_int4(Path(tmp_path_factory.mktemp("int4")))


@pytest.fixture
def machine(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(library)
    machine.install(monkeypatch)
    return machine


def random_weight(n: int, k: int, group: int, zeros: bool, generator: torch.Generator) -> IntegerWeight:
    shape = integer_scale_shape(n, k, group)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
    scale = (torch.rand(shape, generator=generator) + 0.5) * (0.2 / k**0.5)
    zero = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator) if zeros else None
    return IntegerWeight(to_fragments(codes), scale.bfloat16(), zero, 4, group, layout="fragments")


def product(machine: Machine, tile: Int4Tile, m: int, n: int, k: int, group: int, split: int, zeros: bool) -> None:
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


@pytest.mark.parametrize("tile", WIDE, ids=lambda tile: tile.kernel_name(False))
@pytest.mark.parametrize(("group", "zeros"), [(32, True), (128, False)])
def test_tiles_match(machine: Machine, tile: Int4Tile, group: int, zeros: bool) -> None:
    """Fewer tokens and rows than a tile has, and more."""
    k = 64 * (5 + group % 3)
    product(machine, tile, max(1, tile.tokens - 5), tile.rows + 64, k, min(group, k), 1, zeros)


@pytest.mark.parametrize("tile", WIDE, ids=lambda tile: tile.kernel_name(False))
@pytest.mark.parametrize("split", [3])
def test_the_ctas_of_a_cluster_sum_their_columns(machine: Machine, tile: Int4Tile, split: int) -> None:
    product(machine, tile, tile.tokens - 1, tile.rows + 64, 64 * 15, 64, split, split % 2 == 0)


@pytest.mark.parametrize(("group", "zeros"), [(16, True), (64, False), (1 << 20, True)])
def test_groups_match(machine: Machine, group: int, zeros: bool) -> None:
    k = 64 * 5
    product(machine, WIDE[2], 11, 640, k, min(group, k), 2, zeros)


@pytest.mark.parametrize("tile", WIDE[-1:], ids=lambda tile: tile.kernel_name(False))
def test_ctas_take_tiles_in_turn(machine: Machine, tile: Int4Tile) -> None:
    """More stages than one tile has blocks, and fewer; more tiles of tokens and of rows than CTAs."""
    for k in (128, 64 * 17):
        product(machine, tile, 2 * tile.tokens + 1, 2 * tile.rows + 64, k, 128, 1, True)


@pytest.mark.parametrize("tile", [tile for tile in TILES if not tile.groups], ids=lambda tile: tile.kernel_name(False))
@pytest.mark.parametrize(("group", "split"), [(16, 1), (128, 3), (320, 2)])
def test_few_tokens_match(machine: Machine, tile: Int4Tile, group: int, split: int) -> None:
    product(machine, tile, tile.tokens - 1, 192, 64 * 20, group, split, group != 16)


def test_a_row_has_the_same_bits_by_every_kernel_of_one_cut(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
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
