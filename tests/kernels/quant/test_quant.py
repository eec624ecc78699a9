import pytest
import torch

from stoker_kernels.quant import FP8, FP8_MAX, LinearWeight, WeightKind, dequantize, quantize_fp8, quantize_weight

KINDS: list[WeightKind] = ["fp8_channel", "fp8_tensor", "fp8_block"]
# e4m3 has 3 mantissa bits: half a step is 1/16 of the value's power of two; below 2^-6 steps are 2^-9 apart.
RELATIVE_STEP, SUBNORMAL_HALF_STEP = 2.0**-4, 2.0**-10


def random_weight(n: int, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n * 7919 + k)
    return torch.randn(n, k, generator=generator) * torch.logspace(-3, 1, n).unsqueeze(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(128, 256), (200, 130), (1, 128), (257, 64)])
def test_dequantized_weight_is_within_half_a_step(kind: WeightKind, n: int, k: int) -> None:
    weight = random_weight(n, k)
    quantized = quantize_weight(weight, kind)
    assert quantized.scale is not None
    restored = dequantize(quantized)
    coarsest = quantized.scale.max() if kind != "fp8_channel" else quantized.scale
    bound = weight.abs() * RELATIVE_STEP + SUBNORMAL_HALF_STEP * coarsest
    assert (restored - weight).abs().le(bound * 1.0001).all()


def test_largest_magnitude_of_each_channel_lands_on_448() -> None:
    quantized = quantize_weight(random_weight(64, 96), "fp8_channel")
    assert quantized.data.float().abs().amax(dim=1).eq(FP8_MAX).all()


def test_block_scale_covers_its_block_only() -> None:
    weight = torch.zeros(256, 256)
    weight[130, 5] = 448.0
    quantized = quantize_weight(weight, "fp8_block")
    assert quantized.scale is not None
    assert quantized.scale[1, 0] == 1.0
    assert quantized.scale[[0, 0, 1], [0, 1, 1]].max() < 1e-9
    assert torch.equal(dequantize(quantized), weight)


def test_quantize_fp8_scales_each_token_by_itself() -> None:
    x = torch.randn(5, 300) * torch.tensor([[1e-3], [1.0], [30.0], [0.0], [1e4]])
    together = quantize_fp8(x)
    assert together.data.dtype == FP8
    assert together.scale.shape == (5, 1)
    for row in range(5):
        alone = quantize_fp8(x[row : row + 1])
        assert torch.equal(alone.data.view(torch.uint8)[0], together.data.view(torch.uint8)[row])
        assert alone.scale[0] == together.scale[row]
    assert together.data[3].float().eq(0).all()
    assert together.data.float().isfinite().all()


def test_weight_refuses_what_does_not_fit() -> None:
    data = torch.zeros(256, 128).to(FP8)
    with pytest.raises(ValueError, match=r"fp32 \(256, 1\)"):
        LinearWeight(data, torch.ones(128, 1), "fp8_channel")
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        LinearWeight(torch.zeros(4, 4), torch.ones(4, 1), "fp8_channel")
    with pytest.raises(ValueError, match="no scale"):
        LinearWeight(torch.zeros(4, 4), torch.ones(4, 1))
    with pytest.raises(ValueError, match="K contiguous"):
        LinearWeight(torch.zeros(4, 8).t())
