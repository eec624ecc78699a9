"""oneDNN's products against the reference: any shape, pages and slots in any order."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.rounding import close

from stoker_kernels.gemm.cpu import onednn
from stoker_kernels.gemm.reference import linear, linear_fp64, sum_error
from stoker_kernels.launch.dispatch import Target
from stoker_kernels.quant import LinearWeight

BF16 = torch.bfloat16


@pytest.mark.skipif(
    onednn.supports(Target("cpu", 0, BF16)) is not None, reason="this processor does not multiply bf16"
)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 37, 91), (3, 200, 64), (130, 77, 333)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_weight_gives_the_same_product(rows: int, n: int, k: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, data = (torch.randn(shape, k, generator=generator).to(BF16) for shape in (rows, n))
    bias = torch.randn(n, generator=generator).to(BF16) if biased else None
    weight = onednn.pack(LinearWeight(data))
    assert weight.packed is not None
    got, exact = onednn.linear(x, weight, bias=bias), linear_fp64(x, weight, bias)
    allowed = sum_error(x, weight) + exact.abs() * 2.0**-8
    assert ((got.double() - exact).abs() <= allowed).all()
    for row in range(rows):
        alone = onednn.linear(x[row : row + 1], weight, bias=bias)
        close(alone[0], got[row])
    wide = x.float(), LinearWeight(data.float())
    assert torch.equal(onednn.linear(*wide), linear(*wide))
