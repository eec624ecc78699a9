"""Numbers rounded to GGUF's blocks: Q8_0 as the gguf package does it, Q4_K by what its decoder gives back."""

from __future__ import annotations

import gguf
import pytest
import torch

from stoker_kernels.block_gemm import encode_blocks

Kind = gguf.GGMLQuantizationType


def matrix(columns: int) -> torch.Tensor:
    """Rows of many sizes and shapes: zeros, constants, one sign alone, and one number that is far from all others."""
    found = torch.randn(12, columns) * torch.logspace(-4, 2, 12).unsqueeze(1)
    found[1] = 0
    found[2, : columns // 2] = 0.37
    found[3], found[4] = found[3].abs(), -found[4].abs()
    found[5, 7] = 80 * found[5].abs().max()
    return found


def test_eight_bits_are_the_packages_own() -> None:
    numbers = matrix(544)
    assert torch.equal(encode_blocks(numbers, "Q8_0"), torch.from_numpy(gguf.quantize(numbers.numpy(), Kind.Q8_0)))


def test_four_bits_lose_less_than_those_with_more_bytes() -> None:
    numbers = matrix(768)
    blocks = encode_blocks(numbers.bfloat16(), "Q4_K")
    found = torch.from_numpy(gguf.dequantize(blocks.numpy(), Kind.Q4_K))
    beside = torch.from_numpy(gguf.dequantize(gguf.quantize(numbers.numpy(), Kind.Q4_1), Kind.Q4_1))
    lost, theirs = ((each - numbers).norm(dim=1) for each in (found, beside))
    assert bool((lost <= 1.05 * theirs + 3e-3 * numbers.norm(dim=1)).all())
    assert torch.equal(found[1], numbers[1])
    # Half a step of sixteen, of what the group spans, and what six bits lose of scale and minimum.
    groups, errors = numbers.view(12, -1, 32), (found - numbers).view(12, -1, 32).abs().amax(2)
    span = (groups.amax(2) - groups.amin(2).clamp(max=0)).view(12, -1, 8).amax(2, keepdim=True)
    assert bool((errors.view(12, -1, 8) <= span / 11 + 1e-9).all())


def test_what_is_not_made_is_named() -> None:
    with pytest.raises(ValueError, match="Q6_K is not made of numbers here; Q8_0, Q4_K are"):
        encode_blocks(torch.randn(1, 256), "Q6_K")
    with pytest.raises(ValueError, match="fill no whole blocks of 256"):
        encode_blocks(torch.randn(1, 288), "Q4_K")
