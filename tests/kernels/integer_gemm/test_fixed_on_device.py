"""Batch-invariant products with integer weights on a GPU: the same bits for a row alone and in any number."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.integer_gemm.test_on_device import random_weight

from stoker_kernels.fragment_gemm import to_fragments
from stoker_kernels.integer_gemm import fixed, reference, triton_integer
from stoker_kernels.launch.dispatch import interpreting
from stoker_kernels.quant import IntegerWeight, unpack_rows


def check(weight: IntegerWeight, tokens: int, counts: tuple[int, ...], device: torch.device) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, weight.in_features, generator=generator).bfloat16().to(device)
    bias = torch.randn(weight.out_features, generator=generator).bfloat16().to(device)
    whole = fixed.integer_linear(x, weight, bias=bias, out=None)
    want = x.double() @ reference.dequantize_integers(weight, torch.bfloat16).double().t() + bias.double()
    assert (whole.double() - want).norm() < (1.2e-2 if interpreting() else 4e-3) * want.norm()
    for count in counts:
        for first in {0, (tokens - count) // 3, tokens - count}:
            part = fixed.integer_linear(x[first : first + count].clone(), weight, bias=bias, out=None)
            assert torch.equal(part, whole[first : first + count]), f"{count} rows from {first}"


@pytest.mark.parametrize(("n", "k", "bits", "group"), [(96, 160, 4, 32), (130, 96, 8, 48)])
def test_a_row_has_the_same_bits_in_every_batch(
    n: int, k: int, bits: int, group: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if interpreting():
        multiply = triton_integer.multiply
        monkeypatch.setattr(triton_integer, "multiply", lambda *args, **kwargs: multiply(*args, **kwargs, widen=True))
    weight = random_weight(n, k, bits, group, True, torch.bfloat16, device)
    check(weight, 90, (1, 2, 16, 17, 65), device)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["rows", "fragments"])
@pytest.mark.parametrize("group", [32, 128, 1 << 20])
@pytest.mark.parametrize(("n", "k"), [(4608, 3584), (3584, 18944), (192, 640)])
def test_published_sizes(n: int, k: int, group: int, layout: str, bits: int, device: torch.device) -> None:
    weight = random_weight(n, k, bits, min(group, k), True, torch.bfloat16, device)
    if layout == "fragments":
        data = to_fragments(unpack_rows(weight.data, bits), weight.kind)
        weight = IntegerWeight(data, weight.scale, weight.zero, bits, weight.group, layout="fragments")
    check(weight, 1500, (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 300, 1024, 1100), device)
