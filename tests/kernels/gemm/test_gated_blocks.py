"""silu(gate) · up of weights in GGUF's blocks: part for part on decoded rows, or by two kernels.

Decoding is the reference's here, and tiles multiply in PyTorch: what is looked at is which rows meet which columns.
"""

from __future__ import annotations

import random

import pytest
import torch

from stoker_kernels.activation import silu_and_mul
from stoker_kernels.block_gemm import decode_piece, encode_blocks, store_planes
from stoker_kernels.gemm import gated_blocks, linear, linear_silu_mul, table, tiles
from stoker_kernels.gemm.small import Operands
from stoker_kernels.gemm.wide import WideTile
from stoker_kernels.launch import dispatch
from stoker_kernels.quant import BlockWeight, place_planes, plane_sizes


def random_weight(rows: list[int], columns: int) -> BlockWeight:
    """Pieces of so many rows, in two formats in turn."""
    pieces = []
    for index, count in enumerate(rows):
        name = ("Q8_0", "Q4_K")[index % 2]
        size = sum(plane_sizes(name, count, columns))
        pieces.append(place_planes(name, count, columns, torch.empty(size, dtype=torch.uint8)))
        store_planes(pieces[-1], 0, encode_blocks(torch.randn(count, columns), name))
    return BlockWeight(tuple(pieces), columns)


def definition(x: torch.Tensor, weight: BlockWeight) -> torch.Tensor:
    values = torch.cat([decode_piece(piece) for piece in weight.planes]).bfloat16().double()
    gate, up = (x.double() @ values.t()).chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each part that a tile multiplies; a device that decodes."""
    rows: list[int] = []

    def decode(weight: BlockWeight, out: torch.Tensor, *, first: int) -> None:
        values = torch.cat([decode_piece(piece) for piece in weight.planes])
        out.copy_(values[first : first + len(out)])

    def launch(tile: object, o: Operands, *, pdl: bool) -> None:
        assert isinstance(tile, WideTile)
        assert tile.gated
        assert not pdl, "a product may not ask for rows that are still decoded"
        gate, up = (o.x.float() @ o.weight.float().t()).chunk(2, dim=1)
        o.out.copy_(torch.nn.functional.silu(gate) * up)
        rows.append(len(o.weight))

    monkeypatch.setattr(gated_blocks, "decodes", lambda x, _: len(x) > 64)
    monkeypatch.setattr(gated_blocks, "decode_rows", decode)
    monkeypatch.setattr(tiles, "launch", launch)
    return rows


def test_gate_and_up_are_decoded_beside_each_other(launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    half, columns = 8 * random.randrange(33, 60, 2), 256 * random.randint(1, 3)
    cut = 8 * random.randint(1, 2 * half // 8 - 1)
    weight, x = random_weight([cut, 2 * half - cut], columns), torch.randn(random.randint(65, 200), columns).bfloat16()
    monkeypatch.setattr(table, "gated_tile", lambda *_: WideTile(128, True))
    for at_once in (half, 128):
        monkeypatch.setattr(gated_blocks, "part_rows", lambda rows, _, spans, each=at_once: each)
        launched.clear()
        got = gated_blocks.own(x, weight)
        torch.testing.assert_close(got.double(), definition(x, weight), rtol=0.02, atol=0.02 * columns**0.5)
        assert launched == [2 * min(at_once, half - first) for first in range(0, half, at_once)]


@pytest.mark.parametrize("why", ["few tokens", "no tile", "operands"])
def test_else_there_are_two_kernels(why: str, launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight([60 if why == "operands" else 64], 256)
    x = torch.randn(random.randint(1, 64) if why == "few tokens" else 70, 256).bfloat16()
    monkeypatch.setattr(table, "gated_tile", lambda *_: None if why == "no tile" else WideTile(128, True))
    assert torch.equal(gated_blocks.own(x, weight), silu_and_mul(linear(x, weight)))
    assert not launched


def test_without_hopper_there_are_two_kernels() -> None:
    weight, x = random_weight([48, 16], 512), torch.randn(67, 512).bfloat16()
    assert torch.equal(linear_silu_mul(x, weight), silu_and_mul(linear(x, weight)))
    assert dispatch.chosen()["block_silu_mul"].startswith("split")
