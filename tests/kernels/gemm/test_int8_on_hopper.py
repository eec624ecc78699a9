"""Products of 8-bit integers on a Hopper GPU: every family of tiles, and the ops, bit for bit as the reference."""

from __future__ import annotations

import random

import pytest
import torch

from stoker_kernels.bench import int8
from stoker_kernels.gemm import int8_tiles, linear
from stoker_kernels.int8_gemm import int8_linear
from stoker_kernels.launch import dispatch
from stoker_kernels.launch.pdl import enable_pdl
from stoker_kernels.quant import Int8Weight, Quantized, quantize_int8

pytestmark = pytest.mark.gpu


@pytest.fixture
def hopper(device: torch.device) -> torch.device:
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs sm_90")
    dispatch.ops()
    return device


def expected(x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """By the reference, on the CPU, of integers that are x's by definition."""
    read = Quantized(*(each.cpu() for each in quantize_int8(x)))
    host = Int8Weight(weight.data.cpu(), weight.scale.cpu())
    return int8_linear(read, host, bias=None if bias is None else bias.cpu()).to(x.device)


def test_random_products_by_random_tiles(hopper: torch.device) -> None:
    seed = random.randrange(1 << 30)
    torch.manual_seed(seed)
    enable_pdl(True)
    try:
        assert int8.check(hopper, 24, random.Random(seed)) == [], f"seed {seed}"
    finally:
        enable_pdl(False)


@pytest.mark.parametrize("m", [1, 8, 17, 33, 64, 65, 128, 200, 256, 257, 1000, 3000])
def test_the_op_on_floats(m: int, hopper: torch.device) -> None:
    """x is quantized as the definition says; a row does not depend on others; in a graph as outside of one."""
    n, k = 8 * random.randint(40, 500), 128 * random.randint(4, 30)
    weight, bias = int8.random_weight(n, k, hopper), torch.randn(n, device=hopper).bfloat16()
    x = (torch.randn(m, k, device=hopper) * torch.logspace(-3, 3, m, device=hopper).unsqueeze(1)).bfloat16()
    found = linear(x, weight, bias=bias)
    assert dispatch.chosen()["int8_product"] == "own"
    assert torch.equal(found, expected(x, weight, bias))
    row = random.randrange(m)
    assert torch.equal(linear(x[row : row + 1], weight, bias=bias)[0], found[row])
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(found)
    with torch.cuda.graph(graph):
        linear(x, weight, bias=bias, out=out)
    graph.replay()
    assert torch.equal(out, found)


def test_shapes_that_no_tile_takes(hopper: torch.device) -> None:
    n, k = 8 * random.randint(3, 90) + 4, 128 * random.randint(2, 9) + 32
    weight, x = int8.random_weight(n, k, hopper), torch.randn(19, k, device=hopper).bfloat16()
    found = int8_tiles.linear(x, weight, bias=None, out=None)
    torch.testing.assert_close(found, int8_linear(x, weight), rtol=0, atol=0)
    torch.testing.assert_close(found, expected(x, weight, None), rtol=2.0**-7, atol=1e-4)
