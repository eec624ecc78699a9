"""The Hopper kernels that decode GGUF's planes, launched by their own host code and run on the CPU.

In `emulator/`: every bit, at random shapes, of what the gguf package decodes, rounded once.
"""

from __future__ import annotations

import random

import pytest
import torch
from tests.kernels.block_gemm.test_blocks import by_definition, columns_of, random_rows
from tests.kernels.block_gemm.test_planes import in_planes
from tests.kernels.emulator.blocks import BlockMachine

from stoker_kernels.block_gemm import sm90_rows
from stoker_kernels.quant import BLOCK_FORMATS, PLANE_KINDS


def bits(values: torch.Tensor) -> torch.Tensor:
    """Of bf16, where 0 and -0 differ."""
    return values.contiguous().view(torch.int16)


def decoded(machine: BlockMachine, name: str, rows: int, columns: int, **options: int) -> None:
    """Some rows of random bits: every one, and nothing around them is written."""
    data = random_rows(name, rows, columns)
    piece, first = in_planes(name, data, columns), random.randrange(rows)
    count = random.randint(1, rows - first)
    space = torch.full((count + 4, columns), float("nan"), dtype=torch.bfloat16)
    machine.out, machine.seed = space, random.randrange(1 << 30)
    sm90_rows.decode(piece, space[2:-2], first=first, **options)
    expected = by_definition(data[first : first + count], name).bfloat16()
    assert torch.equal(bits(space[2:-2]), bits(expected))
    assert bool(space[:2].isnan().all())
    assert bool(space[-2:].isnan().all())


@pytest.mark.parametrize("name", PLANE_KINDS)
def test_every_bit_is_the_definition_rounded_once(machine: BlockMachine, name: str) -> None:
    """Odd numbers of rows and steps, fewer rows than a CTA has and more, steps in parts of every length."""
    for rows in (random.randrange(1, 30, 2), random.randrange(67, 150, 2)):
        decoded(machine, name, rows, columns_of(name))
    decoded(machine, name, random.randint(1, 80), 256 * random.choice([5, 7, 9]), part_steps=random.randint(1, 6))


@pytest.mark.parametrize("name", [name for name, (width, _) in BLOCK_FORMATS.items() if width == 32])
def test_rows_that_fill_no_step(machine: BlockMachine, name: str) -> None:
    """Every number of tails, alone or behind steps that fill a part or leave it room."""
    for blocks in range(1, 8):
        decoded(machine, name, random.randrange(1, 40, 2), 32 * blocks + 256 * random.choice([0, 1, 3, 4]))


def test_one_row_at_every_place(machine: BlockMachine) -> None:
    data = random_rows("Q6_K", 41, 512)
    piece, out = in_planes("Q6_K", data, 512), torch.empty((1, 512), dtype=torch.bfloat16)
    for row in range(41):
        sm90_rows.decode(piece, out, first=row)
        assert torch.equal(bits(out), bits(by_definition(data[row : row + 1], "Q6_K").bfloat16()))


def test_what_is_not_taken_is_named() -> None:
    piece = in_planes("Q5_K", random_rows("Q5_K", 4, 512), 512)
    space = torch.empty((4, 1024), dtype=torch.bfloat16)
    assert "contiguous" in str(sm90_rows.refusal(piece, space[:, :512]))
    assert "multiple of 16 bytes" in str(sm90_rows.refusal(piece, space.view(-1)[1:2049].view(4, 512)))
    assert "needs sm_90 and bfloat16" in str(sm90_rows.refusal(piece, space.half()[:2, :].view(4, 512)))
