from pathlib import Path

import pytest
import torch

from stoker_kernels.gemm import linear
from stoker_kernels.gemm.reference import linear_fp64
from stoker_kernels.launch import dispatch, nvcc
from stoker_kernels.launch.dispatch import KernelUnavailable
from stoker_kernels.quant import FP8, LinearWeight, WeightKind, quantize_fp8, quantize_weight


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    x, weight, bias = (torch.randn(*size, generator=generator) for size in ((m, k), (n, k), (n,)))
    return x, weight * k**-0.5, bias


@pytest.mark.parametrize("m", [1, 3, 64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_dense_equals_the_definition(m: int, with_bias: bool) -> None:
    x, weight, bias = operands(m, 48, 96)
    expected = linear_fp64(x, LinearWeight(weight), bias if with_bias else None)
    got = linear(x, LinearWeight(weight), bias=bias if with_bias else None)
    assert torch.allclose(got.double(), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["fp8_channel", "fp8_tensor", "fp8_block"])
@pytest.mark.parametrize("prequantized", [False, True])
def test_fp8_equals_the_definition(kind: WeightKind, prequantized: bool) -> None:
    x, weight, bias = operands(7, 136, 256)
    quantized_weight, quantized_x = quantize_weight(weight, kind), quantize_fp8(x)
    expected = linear_fp64(quantized_x, quantized_weight, bias)
    got = linear(quantized_x if prequantized else x, quantized_weight, bias=bias)
    assert got.dtype == (torch.bfloat16 if prequantized else torch.float32)
    assert torch.allclose(got.double(), expected, atol=2e-2 if prequantized else 1e-5)
    assert (got.double() - linear_fp64(x, LinearWeight(weight), bias)).abs().max() < 0.3


@pytest.mark.parametrize("kind", ["dense", "fp8_channel"])
def test_out_is_written_and_returned(kind: WeightKind) -> None:
    x, weight, _ = operands(4, 32, 64)
    out = torch.full((4, 32), float("nan"))
    quantized = quantize_weight(weight, kind)
    assert linear(x, quantized, out=out) is out
    assert torch.equal(out, linear(x, quantized))


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(2, 8\).*\(4, 16\)"):
        linear(torch.zeros(2, 8), LinearWeight(torch.zeros(4, 16)))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A CUDA device of SM 9.0 to dispatch for, without its hardware."""
    monkeypatch.setattr("stoker_kernels.launch.dispatch._selected", {})
    monkeypatch.setattr("stoker_kernels.launch.dispatch.sm_of", lambda device: 90)
    return torch.device("cuda", 0)


def test_missing_kernels_are_said_and_a_pin_on_them_refused(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STOKER_AOT_DIR", str(tmp_path))
    dispatch.select("linear", hopper, torch.bfloat16)
    assert "cublas; no table: sm90_bf16_gemm_cluster" in dispatch.chosen()["linear"]
    assert "run python -m stoker_kernels.launch.nvcc" in dispatch.chosen()["linear"]
    dispatch.pin("linear", "own")
    try:
        with pytest.raises(KernelUnavailable, match=r"python -m stoker_kernels\.launch\.nvcc"):
            dispatch.select("linear", hopper, torch.bfloat16)
    finally:
        dispatch.unpin("linear")


def test_built_kernels_are_taken_for_the_dtypes_they_have(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STOKER_AOT_DIR", str(tmp_path))
    for element in ("bf16", "e4m3"):
        for family in ("cluster", "multicast", "spread", "wide"):
            (tmp_path / nvcc.cubin_name(f"sm90_{element}_gemm_{family}", "sm_90a")).touch()
    chosen = dispatch.require(hopper, torch.bfloat16, ("linear",)) | dispatch.require(hopper, FP8, ("linear",))
    assert chosen == {"linear": "table"}
    assert dispatch.require(hopper, torch.float16, ("linear",)) == {"linear": "cublas"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["table", "own", "cublas"])
@pytest.mark.parametrize("kind", ["dense", "fp8_channel", "fp8_tensor", "fp8_block"])
@pytest.mark.parametrize("m", [1, 16, 64, 100, 300])
def test_every_path_on_the_device_equals_the_definition(name: str, kind: WeightKind, m: int) -> None:
    x, weight, bias = (t.cuda().bfloat16() for t in operands(m, 3584, 1536))
    quantized = quantize_weight(weight, kind)
    expected = linear_fp64(x if kind == "dense" else quantize_fp8(x), quantized, bias)
    dispatch.pin("linear", name)
    try:
        got = linear(x, quantized, bias=bias)
    finally:
        dispatch.unpin("linear")
    allowed = expected.abs() * 2.0**-6 + 2e-2 * expected.abs().mean()
    assert got.dtype == torch.bfloat16
    assert ((got.double() - expected).abs() <= allowed).all()
