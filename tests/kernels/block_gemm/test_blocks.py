"""Weights in GGUF's blocks: values bit for bit against the gguf package, products and rows against those values."""

from __future__ import annotations

import random
from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch

from stoker_kernels.block_gemm import block_linear, block_rows, cpu, decode_blocks
from stoker_kernels.launch import cc, dispatch
from stoker_kernels.quant import BLOCK_FORMATS, BlockRows, BlockWeight, block_row_bytes

COMPILED = cc.refusal("cpu_blocks")
# Bytes of a block that hold its fp16 scales: random ones would be infinities now and then.
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)} | dict.fromkeys(("Q4_K", "Q5_K", "Q4_1", "Q5_1"), (0, 2))
needs_compiler = pytest.mark.skipif(COMPILED is not None, reason=f"compiled blocks: {COMPILED}")


def random_rows(name: str, rows: int, columns: int) -> torch.Tensor:
    """Random bits in every code and scale; the fp16 scales random numbers of either sign, some subnormal or zero."""
    width, size = BLOCK_FORMATS[name]
    draw = np.random.default_rng()
    blocks = draw.integers(0, 256, (rows * columns // width, size), dtype=np.uint8)
    for at in SCALES.get(name, (0,)):
        scales = (draw.standard_normal(len(blocks)) * 10.0 ** draw.integers(-7, 1, len(blocks))).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(blocks.reshape(rows, -1))


def by_definition(data: torch.Tensor, name: str) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[name]))


def same_bits(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(ours.view(torch.int32), expected.view(torch.int32))


def columns_of(name: str) -> int:
    """A width that fills no whole tile where blocks are small."""
    return 256 * random.randint(1, 3) + (32 * random.randint(1, 7) if BLOCK_FORMATS[name][0] == 32 else 0)


@pytest.fixture
def reference() -> Iterator[None]:
    for op in ("block_linear", "block_rows"):
        dispatch.pin(op, "reference")
    yield
    for op in ("block_linear", "block_rows"):
        dispatch.unpin(op)


def test_sizes_are_the_packages() -> None:
    for name, sizes in BLOCK_FORMATS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == sizes


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_the_reference_is_the_definition(name: str) -> None:
    data = random_rows(name, 7, columns_of(name))
    assert same_bits(decode_blocks(data, name), by_definition(data, name))


@needs_compiler
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_compiled_values_are_the_definition(name: str) -> None:
    columns = columns_of(name)
    data = random_rows(name, 9, columns)
    expected = by_definition(data, name)
    assert same_bits(cpu.unpack(BlockRows(name, data), columns, torch.float32), expected)
    assert torch.equal(cpu.unpack(BlockRows(name, data), columns, torch.bfloat16), expected.bfloat16())
    ids = torch.tensor([8, 0, 3, 3], dtype=torch.int32)
    table = BlockWeight((BlockRows(name, data),), columns)
    assert same_bits(block_rows(ids, table, torch.float32), expected[ids.long()])


@needs_compiler
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 7, 16, 21, cpu.UNPACKED_TOKENS, cpu.UNPACKED_TOKENS + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_are_those_of_the_values(tokens: int, dtype: torch.dtype) -> None:
    names = random.sample(sorted(BLOCK_FORMATS), 3)
    columns, rows = 512, [random.randint(1, 13) for _ in names]
    data = [random_rows(name, count, columns) for name, count in zip(names, rows, strict=True)]
    weight = BlockWeight(tuple(BlockRows(name, each) for name, each in zip(names, data, strict=True)), columns)
    values = torch.cat([by_definition(each, name) for each, name in zip(data, names, strict=True)])
    values = values.double()
    x, bias = torch.randn(tokens, columns).to(dtype), torch.randn(sum(rows)).to(dtype)
    # A row of the largest values decides what its sums may lose.
    size = (x.double().abs() @ values.abs().t()) + 1e-9
    expected = x.double() @ values.t() + bias.double()
    loses = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    ours = block_linear(x, weight, bias=bias)
    assert ours.dtype == dtype
    finite = torch.isfinite(ours.double())
    assert finite.all() or dtype == torch.float16
    assert bool((((ours.double() - expected).abs() <= loses * (size + 1)) | ~finite).all())
    if dtype != torch.float16:
        out = torch.empty_like(ours)
        assert block_linear(x, weight, bias=bias, out=out) is out
        assert torch.equal(out, ours)


@needs_compiler
def test_many_threads_and_one_give_the_same_bits() -> None:
    data = random_rows("Q5_K", 911, 1024)
    assert data.numel() >= cpu.THREAD_BYTES
    weight, x = BlockWeight((BlockRows("Q5_K", data),), 1024), torch.randn(5, 1024)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            found.append(block_linear(x, weight))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    # A row of the result depends on its own row of x alone.
    assert torch.equal(block_linear(x[3:4], weight), found[0][3:4])


def test_the_reference_multiplies_and_looks_up(reference: None) -> None:
    data = random_rows("Q6_K", 5, 256)
    weight, x = BlockWeight((BlockRows("Q6_K", data),), 256), torch.randn(2, 256)
    torch.testing.assert_close(block_linear(x, weight), x @ by_definition(data, "Q6_K").t())
    assert torch.equal(block_rows(torch.tensor([4]), weight, torch.float32), by_definition(data, "Q6_K")[4:])


def test_what_does_not_fit_is_named() -> None:
    data = random_rows("Q4_0", 3, 64)
    with pytest.raises(ValueError, match="no block format"):
        block_row_bytes("Q4_2", 64)
    with pytest.raises(ValueError, match="no whole blocks of 256"):
        block_row_bytes("Q4_K", 288)
    with pytest.raises(ValueError, match="uint8 \\[N, 54\\]"):
        BlockWeight((BlockRows("Q4_0", data),), 96)
    weight = BlockWeight((BlockRows("Q4_0", data), BlockRows("Q4_0", data)), 64)
    with pytest.raises(ValueError, match="2 pieces"):
        block_rows(torch.tensor([0]), weight, torch.float32)
    with pytest.raises(ValueError, match=r"\(6, 64\)"):
        block_linear(torch.randn(1, 96), weight)


@needs_compiler
def test_ids_beyond_the_table_are_refused() -> None:
    table = BlockWeight((BlockRows("Q4_0", random_rows("Q4_0", 3, 64)),), 64)
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=r"\[0, 3\)"):
            block_rows(torch.tensor([0, wrong]), table, torch.float32)
