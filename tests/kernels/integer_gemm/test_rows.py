"""Batch-invariant products with integer weights on a CPU: the same bits for a row alone and in any number."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stoker_kernels.fragment_gemm import to_fragments
from stoker_kernels.integer_gemm import reference, rows
from stoker_kernels.launch import cpu_dot
from stoker_kernels.quant import IntegerWeight, integer_scale_shape, pack_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k", "bits", "group"), [(96, 160, 4, 32), (70, 83, 8, 83), (64, 128, 4, 16)])
def test_a_row_has_the_same_bits_in_every_batch(
    n: int, k: int, bits: int, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_dot, "THREAD_BYTES", 0)
    generator = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=generator)
    shape = integer_scale_shape(n, k, group)
    scale = (torch.rand(shape, generator=generator) + 0.2) * 2.0 ** (2 - bits)
    zero = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator)
    order = torch.randperm(k, generator=generator).to(torch.int32)
    weight = IntegerWeight(pack_rows(codes, bits), scale.to(dtype), zero, bits, group, order)
    x, bias = torch.randn(39, k, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)
    whole = rows.integer_linear(x, weight, bias=bias, out=None)
    want = reference.integer_linear(x, weight, bias=bias, out=None)
    assert (whole.double() - want.double()).norm() < (1e-5 if dtype is torch.float32 else 5e-3) * want.double().norm()
    if n % 64 == 0 and k % 64 == 0:
        same = replace(weight, data=to_fragments(codes, weight.kind), layout="fragments")
        assert torch.equal(rows.integer_linear(x, same, bias=bias, out=None), whole)
    for first, last in ((0, 1), (38, 39), (3, 20), (1, 37)):
        out = torch.empty((last - first, n), dtype=dtype)
        assert rows.integer_linear(x[first:last], weight, bias=bias, out=out) is out
        assert torch.equal(out, whole[first:last])
