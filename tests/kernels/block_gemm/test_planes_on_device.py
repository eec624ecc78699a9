"""GGUF's blocks in planes, in Triton: values bit for bit as the gguf package's, and products."""

from __future__ import annotations

import random

import pytest
import torch
from tests.kernels.block_gemm.test_blocks import by_definition, columns_of, random_rows
from tests.kernels.block_gemm.test_planes import in_planes, mild_rows

from stoker_kernels.block_gemm import (
    block_linear,
    block_rows,
    decode_rows,
    decoded,
    plane_launch,
    sm90_few,
    sm90_rows,
    sm90_wide,
)
from stoker_kernels.launch import dispatch
from stoker_kernels.launch.dispatch import interpreting
from stoker_kernels.launch.pdl import enable_pdl
from stoker_kernels.quant import PLANE_KINDS, BlockWeight, LinearWeight

FLOATS = [torch.float16, torch.bfloat16]
# The interpreter takes seconds a format: those that most files have, and others in turn.
USUAL = ("Q4_K", "Q6_K", "Q8_0")
NAMES = (*USUAL, *random.sample(sorted({*PLANE_KINDS} - {*USUAL}), 2)) if interpreting() else tuple(PLANE_KINDS)
LOSES = {torch.float16: 1e-3, torch.bfloat16: 4e-3}


def cut_off(dtype: torch.dtype) -> bool:
    """The interpreter cuts bf16 off where a GPU rounds it."""
    return interpreting() and dtype == torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_values_are_the_definition_rounded_once(name: str, device: torch.device) -> None:
    columns, rows, dtype = columns_of(name), random.randint(17, 40), random.choice(FLOATS)
    data = random_rows(name, rows, columns)
    expected = by_definition(data, name).to(dtype)
    piece = in_planes(name, data, columns, device)
    out = torch.full((rows, columns), float("nan"), dtype=dtype, device=device)
    plane_launch.rows(piece, out, widen=interpreting())
    torch.testing.assert_close(out.cpu(), expected, rtol=2.0**-7 if cut_off(dtype) else 0.0, atol=0.0)
    ids = torch.tensor([rows - 1, 0, 5, 5], dtype=torch.int32, device=device)
    chosen = torch.empty((4, columns), dtype=dtype, device=device)
    plane_launch.rows(piece, chosen, ids=ids, widen=interpreting())
    assert torch.equal(chosen, out[ids.long()])


@pytest.mark.parametrize("name", NAMES)
def test_products_of_few_and_of_many_tokens(name: str, device: torch.device) -> None:
    columns, rows, dtype = columns_of(name), random.randint(33, 60), random.choice(FLOATS)
    data = mild_rows(name, rows, columns)
    values = by_definition(data, name).double().to(device)
    piece = in_planes(name, data, columns, device)
    for tokens in (random.choice([1, 5, 11, 30]), 65):
        bias = random.choice([None, torch.randn(rows, device=device).to(dtype)])
        x = torch.randn(tokens, columns, device=device).to(dtype)
        wide = torch.full((tokens, rows + 24), float("nan"), dtype=dtype, device=device)
        plane_launch.linear(x, piece, bias, wide[:, 16:-8], splits=random.randint(1, 2), widen=interpreting())
        expected = x.double() @ values.t() + (0.0 if bias is None else bias.double())
        found = (wide[:, 16:-8].double() - expected).norm() / expected.norm()
        assert found < LOSES[dtype] * (3 if cut_off(dtype) else 1)
        assert bool(wide[:, :16].isnan().all())
        assert bool(wide[:, -8:].isnan().all())


def test_splits_are_added_in_their_order(device: torch.device) -> None:
    data = mild_rows("Q4_K", 32, 1024)
    piece = in_planes("Q4_K", data, 1024, device)
    x = torch.randn(5, 1024, device=device).half()
    found = []
    for splits in (4, 4, 1):
        out = torch.empty((5, 32), dtype=torch.float16, device=device)
        plane_launch.linear(x, piece, None, out, splits=splits, widen=interpreting())
        found.append(out)
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2], rtol=2e-2, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLANE_KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_number_of_tokens_by_the_op(name: str, dtype: torch.dtype, device: torch.device) -> None:
    columns, rows = 2048 + columns_of(name), (1000, 24)
    data = [mild_rows(name, count, columns) for count in rows]
    weight = BlockWeight(tuple(in_planes(name, each, columns, device) for each in data), columns)
    values = torch.cat([by_definition(each, name) for each in data]).double().to(device)
    for tokens in (1, 7, 16, 31, 64, 65, 128, 200, 256, 257, 1000):
        x, bias = torch.randn(tokens, columns, device=device).to(dtype), torch.randn(1024, device=device).to(dtype)
        got = block_linear(x, weight, bias=bias)
        expected = x.double() @ values.t() + bias.double()
        assert (got.double() - expected).norm() < LOSES[dtype] * expected.norm()
        assert torch.equal(got, block_linear(x, weight, bias=bias))
    table = BlockWeight(weight.pieces[:1], columns)
    ids = torch.randint(0, 1000, (300,), dtype=torch.int32, device=device)
    assert torch.equal(block_rows(ids, table, dtype), values[ids.long()].float().to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("name", sm90_few.FORMATS)
def test_few_tokens_in_cuda(name: str, device: torch.device) -> None:
    """Shapes that the kernels take: more and fewer tiles than SMs, one pass of steps and several."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs sm_90")
    for rows, steps in ((16 * random.randint(1, 40), random.randint(1, 8)), (16 * random.randint(140, 400), 17)):
        columns = 256 * steps
        data = mild_rows(name, rows, columns)
        piece = in_planes(name, data, columns, device)
        values = by_definition(data, name).double().to(device)
        for tokens in (1, random.randint(2, 8), random.randint(9, 16), random.randint(17, 32)):
            x = torch.randn(tokens, columns, device=device).bfloat16()
            bias = torch.randn(rows, device=device).bfloat16()
            wide = torch.full((tokens, rows + 24), float("nan"), dtype=torch.bfloat16, device=device)
            out = wide[:, 16:-8]
            assert sm90_few.refusal(x, piece, bias, out) is None
            expected = x.double() @ values.t() + bias.double()
            for split in (0, 3, 8):
                out.fill_(float("nan"))
                sm90_few.linear(x, piece, bias, out, split=split)
                torch.testing.assert_close(out.double(), expected, rtol=2.0**-8, atol=1e-3)
            again = block_linear(x, BlockWeight((piece,), columns), bias=bias)
            assert torch.equal(again, block_linear(x, BlockWeight((piece,), columns), bias=bias))
            assert bool(wide[:, :16].isnan().all())
            assert bool(wide[:, -8:].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLANE_KINDS)
def test_rows_decoded_in_cuda(name: str, device: torch.device) -> None:
    """Every bit, in parts of every length; and products with them, dependent launches among them."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs sm_90")
    columns, rows = columns_of(name) + 256 * random.randint(0, 14), random.randint(130, 3000)
    data = random_rows(name, rows, columns)
    piece, expected = in_planes(name, data, columns, device), by_definition(data, name).bfloat16()
    for part_steps in (0, 1, 3):
        first = random.randrange(rows)
        out = torch.full((rows - first + 1, columns), float("nan"), dtype=torch.bfloat16, device=device)
        sm90_rows.decode(piece, out[:-1], first=first, part_steps=part_steps)
        assert torch.equal(out[:-1].cpu().view(torch.int16), expected[first:].view(torch.int16))
        assert bool(out[-1].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("name", sm90_wide.FORMATS)
@pytest.mark.parametrize("pairs", [False, True])
def test_many_tokens_decoded_within_the_product(
    name: str, pairs: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and tokens that fill no tile, by every tile and some splits, launched dependently; gate and up."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs sm_90")
    monkeypatch.setattr(sm90_wide, "SHARES_X", pairs)
    rows, columns = 8 * random.randint(60, 700), 256 * random.randint(1, 17)
    data = mild_rows(name, rows, columns)
    piece = in_planes(name, data, columns, device)
    values = by_definition(data, name).bfloat16().double().to(device)
    spans = sm90_wide.gated_spans((piece,))
    assert spans is not None
    enable_pdl(True)
    try:
        for tokens in (random.randint(65, 128), random.randint(129, 300), random.randint(500, 1024)):
            x = torch.randn(tokens, columns, device=device).bfloat16()
            bias = torch.randn(rows, device=device).bfloat16()
            wide = torch.full((tokens, rows + 24), float("nan"), dtype=torch.bfloat16, device=device)
            out = wide[:, 16:-8]
            assert sm90_wide.refusal(x, (piece,), bias, out) is None
            product = x.double() @ values.t()
            gate, up = product.chunk(2, dim=1)
            for tile in (None, *sm90_wide.TILES):
                split = random.choice([sm90_wide.RANGES, 1, random.randint(2, 8)])
                out.fill_(float("nan"))
                sm90_wide.linear(x, piece, bias, out, tile=tile, split=split)
                torch.testing.assert_close(out.double(), product + bias.double(), rtol=2.0**-8, atol=1e-3)
                gated = torch.full((tokens, rows // 2), float("nan"), dtype=torch.bfloat16, device=device)
                sm90_wide.silu_mul(x, *spans, gated, tile=tile, split=split)
                want = torch.nn.functional.silu(gate) * up
                torch.testing.assert_close(gated.double(), want, rtol=2.0**-7, atol=2e-3)
            again = block_linear(x, BlockWeight((piece,), columns), bias=bias)
            assert torch.equal(again, block_linear(x, BlockWeight((piece,), columns), bias=bias))
            assert bool(wide[:, :16].isnan().all())
            assert bool(wide[:, -8:].isnan().all())
    finally:
        enable_pdl(False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_both_ways_multiply_the_same_weights(name: str, device: torch.device) -> None:
    """Tokens of one column each bring out weights: those that rows are decoded to, bit for bit."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs sm_90")
    rows, columns = 8 * random.randint(30, 300), 512
    weight = BlockWeight((in_planes(name, random_rows(name, rows, columns), columns, device),), columns)
    decoded_rows = torch.empty((rows, columns), dtype=torch.bfloat16, device=device)
    decode_rows(weight, decoded_rows, first=0)
    x = torch.eye(columns, device=device).bfloat16()
    for tile in sm90_wide.TILES:
        out = torch.empty((columns, rows), dtype=torch.bfloat16, device=device)
        sm90_wide.linear(x, weight.planes[0], None, out, tile=tile, split=random.randint(0, 4))
        assert torch.equal(out, decoded_rows.t())


@pytest.mark.gpu
def test_no_product_overtakes_the_rows_it_reads(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of dependent launches on one scratch: each product sees its own weight."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs sm_90")
    dispatch.ops()
    weights = []
    for name, rows in (("Q4_K", 4096), ("Q6_K", 6144), ("Q8_0", 4096)):
        weights.append(BlockWeight((in_planes(name, mild_rows(name, rows, 4096), 4096, device),), 4096))
    dense = []
    for weight in weights:
        dense.append(torch.empty((weight.out_features, 4096), dtype=torch.bfloat16, device=device))
        decode_rows(weight, dense[-1], first=0)
    x = torch.randn(random.randint(65, 256), 4096, device=device).bfloat16()
    multiply = dispatch.select("linear", device, torch.bfloat16)
    monkeypatch.setattr(decoded, "SCRATCH_BYTES", 4096 * 4096 * 2 // random.choice([1, 2, 4]))
    enable_pdl(True)
    try:
        for _ in range(30):
            for weight, values in zip(weights, dense, strict=True):
                out = torch.empty((len(x), weight.out_features), dtype=torch.bfloat16, device=device)
                decoded.linear(x, weight, None, out)
                want = multiply(x, LinearWeight(values), bias=None, out=None)
                # Another number of rows may take another tile, which sums in another order.
                torch.testing.assert_close(out, want, rtol=2.0**-7, atol=1e-2)
    finally:
        enable_pdl(False)
