"""Products of many tokens with decoded rows: which come here, part for part, and that none overtakes its weight.

The kernels run in `emulator/`; the dense product is the CPU's own.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.kernels.block_gemm.test_blocks import by_definition
from tests.kernels.block_gemm.test_planes import in_planes, mild_rows
from tests.kernels.emulator.blocks import BlockMachine

from stoker_kernels.block_gemm import decode_rows, decoded, plane_choose, plane_launch, sm90_few, sm90_rows, sm90_wide
from stoker_kernels.launch import cuda, dispatch, pdl
from stoker_kernels.quant import PLANE_KINDS, BlockWeight, LinearWeight
from stoker_runtime.models.block_parts import PLANE_SCRATCH, PLANE_SUMS


@pytest.fixture
def machine(machine: BlockMachine, monkeypatch: pytest.MonkeyPatch) -> BlockMachine:
    """A Hopper GPU to those who ask."""
    for module in (sm90_few, sm90_rows):
        monkeypatch.setattr(module, "sm_of", lambda _: 90)
    monkeypatch.setattr(cuda, "missing_cubin", lambda *_: None)
    monkeypatch.setattr(decoded, "sm_of", lambda _: 90)
    return machine


def random_weight(columns: int) -> tuple[BlockWeight, torch.Tensor]:
    """Of pieces in several formats, and its values rounded to bf16."""
    kinds = [(name, random.randint(1, 200)) for name in random.sample(sorted(PLANE_KINDS), random.randint(1, 3))]
    data = [mild_rows(name, rows, columns) for name, rows in kinds]
    pieces = tuple(in_planes(name, each, columns) for (name, _), each in zip(kinds, data, strict=True))
    values = [by_definition(each, name).bfloat16() for (name, _), each in zip(kinds, data, strict=True)]
    return BlockWeight(pieces, columns), torch.cat(values)


def test_rows_of_several_pieces_are_decoded_together(machine: BlockMachine) -> None:
    for _ in range(4):
        weight, values = random_weight(256 * random.randint(1, 3))
        first = random.randrange(weight.out_features)
        out = torch.empty((random.randint(1, weight.out_features - first), weight.in_features), dtype=torch.bfloat16)
        decode_rows(weight, out, first=first)
        assert torch.equal(out, values[first : first + len(out)])


def test_many_tokens_are_multiplied_with_decoded_rows(
    machine: BlockMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part for part, each launched plainly, into columns of a wider result."""
    parts: list[int] = []
    dense = dispatch.select("linear", torch.device("cpu"), torch.bfloat16)

    def recorded(x: torch.Tensor, weight: LinearWeight, **options: Any) -> torch.Tensor:
        assert not pdl._enabled
        parts.append(weight.out_features)
        found: torch.Tensor = dense(x, weight, **options)
        return found

    monkeypatch.setattr(decoded, "select", lambda *_: recorded)
    monkeypatch.setattr(decoded, "SCRATCH_BYTES", 256 * 1024)
    pdl.enable_pdl(True)
    try:
        for tokens in (decoded.DECODED_FROM, random.randint(66, 300)):
            weight, values = random_weight(256 * random.randint(2, 3))
            n = weight.out_features
            x = torch.randn(tokens, weight.in_features).bfloat16()
            bias = random.choice([None, torch.randn(n).bfloat16()])
            wide = torch.full((tokens, n + 24), float("nan"), dtype=torch.bfloat16)
            parts.clear()
            found = plane_choose.plane_linear(x, weight, bias=bias, out=wide[:, 8 : n + 8])
            want = x.double() @ values.double().t() + (0.0 if bias is None else bias.double())
            torch.testing.assert_close(found.double(), want, rtol=2.0**-7, atol=2e-3)
            assert sum(parts) == n
            assert len(parts) == -(-n // decoded.part_rows(n, weight.in_features))
            wide[:, 8 : n + 8] = float("nan")
            assert wide.isnan().all()
        assert pdl._enabled
    finally:
        pdl.enable_pdl(False)


def test_fewer_tokens_and_other_types_go_where_they_went(
    machine: BlockMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens by the kernels for them, or Triton's; more with planes where their kernels take a weight, or from 65
    on, and prompts, with decoded rows; fp16 by Triton's for any number, rows and cuBLAS beyond.
    """
    went: list[str] = []
    monkeypatch.setattr(sm90_wide, "sm_of", lambda _: 90)
    monkeypatch.setattr(sm90_wide, "linear", lambda *_: went.append("wide"))
    monkeypatch.setattr(decoded, "linear", lambda *_: went.append("decoded"))
    monkeypatch.setattr(sm90_few, "linear", lambda *_: went.append("few"))
    monkeypatch.setattr(plane_launch, "linear", lambda *_: went.append("triton"))
    monkeypatch.setattr(plane_choose, "by_rows", lambda *_: went.append("rows"))
    few, some = random.randint(1, plane_choose.WIDE_FROM - 1), random.randint(plane_choose.WIDE_FROM, 64)
    many, prompt = random.randint(65, plane_choose.WIDE_TO), random.randint(plane_choose.WIDE_TO + 1, 3000)
    for name, rows, columns, dtype, tokens, way in (
        (random.choice(sm90_few.FORMATS), 32, 512, torch.bfloat16, few, "few"),
        (random.choice(sorted({*PLANE_KINDS} - {*sm90_few.FORMATS})), 32, 512, torch.bfloat16, few, "triton"),
        ("Q8_0", 16 * random.randint(1, 9), 512 + 32 * random.randint(1, 7), torch.bfloat16, some, "triton"),
        (random.choice(sm90_wide.FORMATS), 4 * random.randint(1, 20), 512, torch.bfloat16, some, "wide"),
        (random.choice(sm90_wide.FORMATS), 4 * random.randint(1, 20), 512, torch.bfloat16, many, "wide"),
        (random.choice(list(PLANE_KINDS)), 32, 512, torch.bfloat16, prompt, "decoded"),
        (random.choice(list(PLANE_KINDS)), 4 * random.randint(1, 20) + 1, 512, torch.bfloat16, many, "decoded"),
        ("Q8_0", 32, 512 + 32 * random.randint(1, 7), torch.bfloat16, many, "decoded"),
        ("Q4_K", 32, 512, torch.float16, random.randint(1, 256), "triton"),
        ("Q4_K", 32, 512, torch.float16, random.randint(257, 999), "rows"),
    ):
        weight = BlockWeight((in_planes(name, mild_rows(name, rows, columns), columns),), columns)
        plane_choose.plane_linear(torch.zeros(tokens, columns, dtype=dtype), weight, bias=None, out=None)
        assert went.pop() == way
        assert not went


@pytest.mark.parametrize(("sm", "missing", "reason"), [(80, None, "needs sm_90"), (90, "not built", "not built")])
def test_what_cannot_decode_says_so(
    sm: int, missing: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoded, "sm_of", lambda _: sm)
    monkeypatch.setattr(cuda, "missing_cubin", lambda *_: missing)
    weight = BlockWeight((in_planes("Q6_K", mild_rows("Q6_K", 8, 256), 256),), 256)
    x = torch.zeros(100, 256, dtype=torch.bfloat16)
    assert reason in str(decoded.refusal(x, weight))
    assert not decoded.decodes(x, weight)


def test_parts_are_equal_whole_tiles_within_the_scratch() -> None:
    assert decoded.part_rows(28672, 4096) == 14336  # gate and up of 8B
    assert decoded.part_rows(14336, 4096, spans=2) == 7168
    assert decoded.part_rows(4096, 14336) == 4096
    for _ in range(300):
        rows, columns, spans = random.randint(1, 200_000), 32 * random.randint(1, 900), random.choice([1, 2])
        each = decoded.part_rows(rows, columns, spans)
        assert each == rows or each % decoded.TILE_ROWS == 0
        assert spans * each * columns * 2 <= decoded.SCRATCH_BYTES or each == decoded.TILE_ROWS
        parts = -(-rows // each)
        assert parts == 1 or each - (rows - (parts - 1) * each) < parts * decoded.TILE_ROWS


def test_the_engine_counts_on_what_is_taken() -> None:
    assert decoded.SCRATCH_BYTES == PLANE_SCRATCH
    assert plane_choose.SCRATCH_BYTES == PLANE_SUMS
