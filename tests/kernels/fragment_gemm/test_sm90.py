"""The Hopper kernels of weights in fragments, launched by their own host code and run on the CPU by `emulator/`: every
form of numbers, the kernels that stream through shared memory and those of warps by themselves.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tests.kernels.emulator.fragments import FragmentMachine, compile_fragments
from tests.kernels.fragment_gemm.weights import FragmentWeight, random_weight, stored_values

from stoker_kernels.fp4_gemm import dequantize_fp4
from stoker_kernels.fragment_gemm import NUMBERS, Numbers, Tile, dequantize, multiply, multiply_invariant, sm90
from stoker_kernels.fragment_gemm.tiles import INT4, INT8, NVFP4
from stoker_kernels.integer_gemm import dequantize_integers
from stoker_kernels.quant import Fp4Weight, pair_rows

CASES = [(numbers, tile) for numbers in NUMBERS for tile in numbers.tiles]


def named(value: object) -> str | None:
    """What a parameter is called."""
    if isinstance(value, Numbers):
        return f"{value.form}-{value.name}"
    return value.kernel_name if isinstance(value, Tile) else None


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FragmentMachine]:
    stems = dict.fromkeys(numbers.stem for numbers in NUMBERS)
    return {stem: FragmentMachine(compile_fragments(stem, tmp_path_factory.mktemp(stem))) for stem in stems}


@pytest.fixture
def machine(
    machines: dict[str, FragmentMachine], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> FragmentMachine:
    """The device with the kernels of the test's numbers."""
    found = machines[request.getfixturevalue("numbers").stem]
    found.sms = 2
    found.install(monkeypatch)
    return found


def group_of(numbers: Numbers, k: int, draw: random.Random) -> int:
    """A size of groups that the kernels of `numbers` take: smaller than a block of columns or not."""
    return draw.choice([16, 32]) if numbers.name == "small" else min(k, draw.choice([64, 128, 256, k]))


def values(weight: FragmentWeight, dtype: torch.dtype) -> torch.Tensor:
    """Gate before up."""
    return dequantize_fp4(weight, dtype) if isinstance(weight, Fp4Weight) else dequantize_integers(weight, dtype)


def as_multiplied(numbers: Numbers, tile: Tile) -> torch.dtype:
    """What codes are rounded to: warps by themselves scale sums of four bits that lie in one group, and a factor of a
    row is always multiplied with its sums.
    """
    sums = numbers == INT4 and not tile.groups
    return torch.float64 if sums or numbers.name == "nvfp4" else torch.bfloat16


def product(machine: FragmentMachine, numbers: Numbers, tile: Tile, split: int, draw: random.Random, *,
            n: int = 0, m: int = 0, k: int = 0) -> None:  # fmt: skip
    """Runs a tile on random operands; checks every value and that nothing around the result is written."""
    m = m or (draw.randrange(1, tile.tokens + 1))
    k, n = k or 64 * draw.randrange(split, 16), n or 64 * draw.randrange(1, 2 * tile.rows // 64 + 2)
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    machine.seed = draw.randrange(1 << 30)
    weight = random_weight(numbers, n, k, group_of(numbers, k, draw), draw.random() < 0.5, generator)
    x_space = torch.randn(m, k + 8, generator=generator).bfloat16()
    bias = torch.randn(n, generator=generator).bfloat16() if draw.random() < 0.5 else None
    x, out_space = x_space[:, :k], torch.full((m + 3, n + 24), float("nan"), dtype=torch.bfloat16)
    want = x.double() @ stored_values(weight, as_multiplied(numbers, tile)).double().T
    want += 0.0 if bias is None else bias.double()
    out = out_space[1 : m + 1, 8 : n + 8]
    machine.x, machine.out = x_space, out_space
    multiply(x, weight, bias, out, tile, split)
    torch.testing.assert_close(out.double(), want, rtol=2.0**-8, atol=1e-3)
    out.fill_(float("nan"))
    assert out_space.isnan().all()


@pytest.mark.matrix("numbers", take=2)
@pytest.mark.parametrize(("numbers", "tile"), CASES, ids=named)
def test_tiles_match(machine: FragmentMachine, numbers: Numbers, tile: Tile) -> None:
    """Fewer tokens and rows than a tile has, and more rows; the CTAs of a cluster sum their columns."""
    draw = random.Random(f"{numbers.name} {tile.kernel_name}")
    for split in (1, draw.randrange(2, 6)):
        product(machine, numbers, tile, split, draw)


@pytest.mark.parametrize("numbers", NUMBERS, ids=named)
def test_ctas_take_tiles_in_turn(machine: FragmentMachine, numbers: Numbers) -> None:
    """More stages than one tile has blocks, and fewer; more tiles of tokens and of rows than CTAs."""
    draw, tile = random.Random(numbers.name), numbers.tiles[-1]
    for k in (128, 64 * 9):
        product(machine, numbers, tile, 1, draw, m=2 * tile.tokens + 1, n=2 * tile.rows + 64, k=k)


def check_pairs(
    machine: FragmentMachine, numbers: Numbers, tile: Tile, split: int, draw: random.Random
) -> None:
    """Gate and up in turn, random operands: the product by halves, and with its activation; nothing else is written."""
    m = draw.randrange(1, 2 * tile.tokens + 2) if tile.groups else draw.randrange(1, 9)
    k = 64 * draw.randrange(split, 14)
    n = 64 * draw.randrange(1, 2 * tile.rows // 64 + 2)
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    machine.seed = draw.randrange(1 << 30)
    stored = random_weight(numbers, n, k, group_of(numbers, k, draw), draw.random() < 0.5, generator)
    weight = replace(stored, layout="pairs")
    x_space = torch.randn(m, k + 8, generator=generator).bfloat16()
    x = x_space[:, :k]
    both = x.double() @ stored_values(weight, as_multiplied(numbers, tile)).double().T
    gate, up = both[:, 0::2], both[:, 1::2]
    bias = torch.randn(n, generator=generator).bfloat16() if draw.random() < 0.5 else None
    halves = torch.cat([gate, up], dim=1) + (0.0 if bias is None else bias.double())
    gated = gate * up / (1.0 + torch.exp(-gate))
    for want, given, fused in ((halves, bias, False), (gated, None, True)):
        columns = want.shape[1]
        out_space = torch.full((m + 3, columns + 24), float("nan"), dtype=torch.bfloat16)
        out = out_space[1 : m + 1, 8 : columns + 8]
        machine.x, machine.out = x_space, out_space
        multiply(x, weight, given, out, tile, split, gated=fused)
        torch.testing.assert_close(out.double(), want, rtol=2.0**-8, atol=1e-3)
        out.fill_(float("nan"))
        assert out_space.isnan().all()


@pytest.mark.matrix("numbers", take=2)
@pytest.mark.parametrize(("numbers", "tile"), CASES, ids=named)
def test_gate_and_up_in_turn_are_halves_or_activated(machine: FragmentMachine, numbers: Numbers, tile: Tile) -> None:
    draw = random.Random(f"in turn {numbers.name} {tile.kernel_name}")
    check_pairs(machine, numbers, tile, draw.randrange(1, 6), draw)


@pytest.mark.parametrize("numbers", NUMBERS, ids=named)
def test_weights_are_dequantized_gate_before_up(machine: FragmentMachine, numbers: Numbers) -> None:
    draw = random.Random(numbers.name)
    for _ in range(6):
        n, k = 64 * draw.randrange(1, 6), 64 * draw.randrange(1, 6)
        generator = torch.Generator().manual_seed(n + k)
        plain = random_weight(numbers, n, k, group_of(numbers, k, draw), draw.random() < 0.5, generator)
        weight = replace(plain, layout="pairs")
        out = torch.full((n, k), float("nan"), dtype=torch.bfloat16)
        machine.x = machine.out = None
        dequantize(weight, out)
        stored = stored_values(weight, torch.bfloat16)
        least = 2.0**-100 if numbers.name == "mxfp4" else 0.0  # of scales that are exact
        for found, expected in (
            (out, torch.cat([stored[0::2], stored[1::2]])), (pair_rows(out), stored),
            (out, values(weight, torch.bfloat16)),
        ):  # fmt: skip
            torch.testing.assert_close(found, expected, rtol=0.0, atol=least)
        dequantize(plain, again := torch.empty_like(out))
        torch.testing.assert_close(again, stored, rtol=0.0, atol=least)


@pytest.mark.parametrize("numbers", [INT4, INT8, NVFP4], ids=named)
def test_a_row_has_the_same_bits_by_every_kernel_of_one_cut(
    machine: FragmentMachine, numbers: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3, 40 and 129 tokens take three kernels; columns are shared, since SMs are many."""
    sm90._choice.cache_clear()
    machine.sms = 66
    taken: set[tuple[object, ...]] = set()

    def recorded(*args: object) -> None:
        taken.add(args[4:])
        multiply(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(sm90, "multiply", recorded)
    generator = torch.Generator().manual_seed(5)
    weight = random_weight(numbers, 192, 64 * 11, 64, True, generator)
    x = torch.randn(129, 64 * 11, generator=generator).bfloat16()
    whole = torch.full((129, 192), float("nan"), dtype=torch.bfloat16)
    multiply_invariant(x, weight, None, whole)
    for count in (3, 40):
        part = torch.full((count, 192), float("nan"), dtype=torch.bfloat16)
        multiply_invariant(x[20 : 20 + count].clone(), weight, None, part)
        assert torch.equal(part, whole[20 : 20 + count])
    sm90._choice.cache_clear()
    assert len({tile for tile, _ in taken}) == 3
    splits = {split for _, split in taken}
    assert len(splits) == 1
    assert splits.pop() > 1  # type: ignore[operator]
