"""Packed blocks: the same values bit for bit, products in bf16 and fp32 against them, and what is not packed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from tests.kernels.block_gemm.test_blocks import by_definition, random_rows, same_bits

from stoker_kernels.block_gemm import block_linear, block_rows, cpu_packed, pack, plain_rows
from stoker_kernels.block_gemm.reference import block_linear as by_reference
from stoker_kernels.launch import cc, compiled
from stoker_kernels.quant import BlockRows, BlockWeight
from stoker_runtime.bench.reference.weights import values_of

REFUSED, NO_BF16 = cpu_packed.refusal(), cpu_packed.bf16_refusal()
needs_compiler = pytest.mark.skipif(REFUSED is not None, reason=f"packed blocks: {REFUSED}")
needs_bf16 = pytest.mark.skipif(NO_BF16 is not None, reason=f"packed blocks in bf16: {NO_BF16}")
TYPES = [pytest.param(torch.bfloat16, marks=needs_bf16), torch.float32]
LEVELS = [None, *(name for name, needs in cc.LEVELS.items() if cc.processor_flags().issuperset(needs))]


@pytest.fixture(params=["tiles", "vectors"])
def unit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What computes in bf16: AMX where there is one, or AVX-512."""
    if request.param == "tiles" and (refused := cpu_packed.tiles_refusal()) is not None:
        pytest.skip(f"AMX: {refused}")
    if request.param == "vectors":
        monkeypatch.setattr(cpu_packed, "tiles_refusal", lambda: "not asked for")


@pytest.fixture
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The processor as one of a lower level, without bf16, or as it is."""
    if request.param is not None:
        for function in (cc.library, cpu_packed.bf16_refusal):
            function.cache_clear()
        monkeypatch.setattr(cc, "level", lambda: request.param)
        monkeypatch.setattr(cc, "processor_flags", lambda: frozenset(cc.LEVELS[request.param]))
    yield
    for function in (cc.library, cpu_packed.bf16_refusal):
        function.cache_clear()


any_level = pytest.mark.parametrize("level", LEVELS, indirect=True)


def weights(columns: int) -> tuple[BlockWeight, torch.Tensor]:
    """Pieces of several formats, and their values."""
    names = random.sample(cpu_packed.PACKED, 3)
    data = [random_rows(name, 16 * random.randint(1, 5), columns) for name in names]
    values = torch.cat([by_definition(each, name) for each, name in zip(data, names, strict=True)])
    return BlockWeight(tuple(BlockRows(*each) for each in zip(names, data, strict=True)), columns), values


@needs_compiler
@pytest.mark.parametrize("name", cpu_packed.PACKED)
def test_values_are_the_definition_and_the_bytes_come_back(name: str) -> None:
    columns = 32 * random.randint(1, 19)
    data = random_rows(name, 48, columns)
    expected, file = by_definition(data, name), data.clone()
    packed = pack(BlockWeight((BlockRows(name, data),), columns))
    (piece,) = packed.pieces
    assert packed.packed
    assert piece.data.data_ptr() == data.data_ptr(), "in its own memory"
    assert torch.equal(plain_rows(piece), file)
    assert torch.equal(values_of(packed), expected)
    assert same_bits(cpu_packed.rows(piece, None, 48, columns, torch.float32), expected)
    ids = torch.tensor([47, 0, 15, 16, 16], dtype=torch.int32)
    assert same_bits(block_rows(ids, packed, torch.float32), expected[ids.long()])
    assert pack(packed) is packed


@needs_bf16
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 83, 160])
def test_products(tokens: int, unit: None) -> None:
    columns = 32 * random.randint(1, 19)
    plain, values = weights(columns)
    packed = pack(plain)
    x = torch.randn(tokens, columns).bfloat16()
    bias = torch.randn(packed.out_features).bfloat16() if tokens % 2 else None
    size = x.double().abs() @ values.double().abs().t() + 1
    expected = x.double() @ values.double().t() + (0.0 if bias is None else bias.double())
    exact = torch.empty(tokens, packed.out_features)
    assert block_linear(x, packed, bias=bias, out=exact) is exact
    assert bool(((exact.double() - expected).abs() <= 1e-6 * size).all())
    assert torch.equal(block_linear(x, packed, bias=bias), exact.bfloat16())
    if not tokens:
        return
    # Other types of x read the same values, and so does the oracle.
    for floats in (x.float(), x.half()):
        ours, theirs = (way(floats, packed, bias=None, out=None) for way in (block_linear, by_reference))
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=2e-3, atol=float(2e-4 * size.max()))


@needs_compiler
@any_level
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 7, 8, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_in_fp32(level: None, tokens: int, dtype: torch.dtype) -> None:
    columns = 32 * random.randint(1, 19)
    plain, values = weights(columns)
    packed = pack(plain)
    x = torch.randn(tokens, columns).to(dtype)
    bias = torch.randn(packed.out_features).to(dtype) if tokens % 2 else None
    size = x.double().abs() @ values.double().abs().t() + 1
    expected = x.double() @ values.double().t() + (0.0 if bias is None else bias.double())
    exact = torch.empty(tokens, packed.out_features)
    assert block_linear(x, packed, bias=bias, out=exact) is exact
    # A code's product is rounded with its sum: some units of the last place of the sum of magnitudes.
    assert bool(((exact.double() - expected).abs() <= 2e-6 * size).all())
    assert torch.equal(block_linear(x, packed, bias=bias), exact.to(dtype))


@needs_compiler
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_is_the_same_beside_any_others_on_any_threads(dtype: torch.dtype, unit: None) -> None:
    columns, rows = 544, 16 * 67
    data = random_rows("Q4_1", rows, columns)
    packed = pack(BlockWeight((BlockRows("Q4_1", data), BlockRows("Q8_0", random_rows("Q8_0", 32, columns))), columns))
    x = torch.randn(random.randint(17, 90), columns).to(dtype)
    threads = torch.get_num_threads()
    assert len(x) * columns * rows >= compiled.THREAD_WORK
    try:
        found = []
        for count in (1, 3, 2):
            torch.set_num_threads(count)
            found.append(block_linear(x, packed))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    for row in range(len(x)):
        assert torch.equal(block_linear(x[row : row + 1], packed), found[0][row : row + 1])


def test_what_is_not_packed() -> None:
    for name, rows in (("Q6_K", 16), ("Q4_0", 24), ("Q5_0", 32)):
        weight = BlockWeight((BlockRows("Q4_1", random_rows("Q4_1", 16, 512)),
                              BlockRows(name, random_rows(name, rows, 512))), 512)  # fmt: skip
        assert pack(weight) is weight
        assert not weight.packed
