import pytest
import torch

from stoker_kernels import dispatch, gemm_table, gemm_wide
from stoker_kernels.activation import silu_and_mul
from stoker_kernels.gemm import linear
from stoker_kernels.gemm_gated import linear_silu_mul
from stoker_kernels.gemm_small import PAIR_BYTES, SHARED_LIMIT, Tile
from stoker_kernels.gemm_wide import WideTile
from stoker_kernels.linear_weight import LinearWeight
from stoker_kernels.quant import quantize_weight


def operands(m: int, f: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m + f + k)
    return torch.randn(m, k, generator=generator), torch.randn(2 * f, k, generator=generator) * k**-0.5


def definition(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize("m", [0, 1, 5, 64])
def test_equals_the_definition(m: int) -> None:
    x, weight = operands(m, 48, 96)
    got = linear_silu_mul(x, LinearWeight(weight))
    assert got.shape == (m, 48)
    assert torch.allclose(got.double(), definition(x, weight), atol=1e-5)


def test_what_does_not_fit_is_named() -> None:
    x, weight = operands(2, 8, 16)
    with pytest.raises(ValueError, match="fp8_channel"):
        linear_silu_mul(x, quantize_weight(weight, "fp8_channel"))
    with pytest.raises(ValueError, match=r"\(15, 16\)"):
        linear_silu_mul(x, LinearWeight(weight[:15]))
    with pytest.raises(ValueError, match=r"\(2, 8\)"):
        linear_silu_mul(x[:, :8], LinearWeight(weight))


@pytest.mark.parametrize("shape", list(gemm_table.GATED))
@pytest.mark.parametrize("m", [1, 8, 9, 32, 64])
def test_tiles_fit(shape: tuple[int, int], m: int) -> None:
    tile = gemm_table.gated_tile(*shape, m)
    if tile is None:
        assert m > 32, "two kernels are faster for many tokens alone"
        return
    assert isinstance(tile, Tile)
    assert tile.gated
    assert tile.tokens >= m
    assert tile.shared_bytes <= (PAIR_BYTES if tile.ctas_per_sm == 2 else SHARED_LIMIT)


def test_a_weight_that_was_not_measured_gets_wide_tiles_that_keep_the_sms_busy() -> None:
    llama_8b = (28672, 4096)
    assert gemm_table.gated_tile(*llama_8b, 512) is None  # 100 or 112 tiles of rows on 132 SMs, in whole rounds
    assert gemm_table.gated_tile(*llama_8b, 1024) == WideTile(256, True, True)
    assert gemm_table.gated_tile(11264, 2048, 128) is None
    assert gemm_table.busy_share(WideTile(288, True, True), 37888, 256) > 0.99


@pytest.mark.parametrize("rows", [256, 288])
def test_a_wide_tile_fills_shared_memory(rows: int) -> None:
    tile = WideTile(rows, gated=True)
    assert tile.stages == 4
    assert SHARED_LIMIT - tile.stage_bytes < tile.shared_bytes <= SHARED_LIMIT


def test_two_kernels_serve_elsewhere_and_equal_their_ops() -> None:
    x, weight = operands(5, 48, 96)
    dense = LinearWeight(weight)
    assert dispatch.implementations("linear_silu_mul") == ("fused", "split", "reference")
    assert torch.equal(linear_silu_mul(x, dense), silu_and_mul(linear(x, dense)))
    assert dispatch.require(x.device, x.dtype, ("linear_silu_mul",)) == {"linear_silu_mul": "split"}


def test_the_fused_kernel_says_what_it_needs() -> None:
    x, weight = operands(1, 8, 64)
    dispatch.pin("linear_silu_mul", "fused")
    try:
        with pytest.raises(dispatch.KernelUnavailable, match="needs sm_90"):
            linear_silu_mul(x, LinearWeight(weight))
    finally:
        dispatch.unpin("linear_silu_mul")


@pytest.mark.gpu
@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("rows", [256, 288])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(65, 1200, 192), (129, 37888, 3584), (300, 1040, 1152), (2200, 6144, 1024)])
def test_the_wide_kernels_equal_the_definition(m: int, n: int, k: int, gated: bool, rows: int, by_tokens: bool) -> None:
    x, weight = (t.cuda().bfloat16() for t in operands(m, n // 2, k))
    expected = definition(x, weight) if gated else x.double() @ weight.double().T
    out = torch.full(expected.shape, float("nan"), device="cuda", dtype=torch.bfloat16)
    gemm_wide.launch(WideTile(rows, gated, by_tokens), x, weight, out, pdl=False)
    allowed = expected.abs() * 2.0**-7 + 4e-3 * expected.abs().mean()
    assert ((out.double() - expected).abs() <= allowed).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("f", "k"), [(18944, 3584), (3072, 1024), (520, 1152)])
@pytest.mark.parametrize("m", [1, 8, 16, 33, 64, 65, 128, 300])
def test_the_fused_kernels_equal_the_definition(f: int, k: int, m: int) -> None:
    x, weight = (t.cuda().bfloat16() for t in operands(m, f, k))
    expected = definition(x, weight)
    dispatch.pin("linear_silu_mul", "fused")
    try:
        got = linear_silu_mul(x, LinearWeight(weight))
    finally:
        dispatch.unpin("linear_silu_mul")
    # Two kernels round gate and up first.
    rounding = 2.0**-6 if gemm_table.gated_tile(2 * f, k, m) is None else 2.0**-7
    allowed = expected.abs() * rounding + 4e-3 * expected.abs().mean()
    assert ((got.double() - expected).abs() <= allowed).all()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [65, 128, 300])
def test_linear_by_wide_tiles_equals_the_definition(m: int) -> None:
    x, weight = (t.cuda().bfloat16() for t in operands(m, 18944, 512))
    expected = x.double() @ weight.double().T
    dispatch.pin("linear", "wide")
    try:
        got = linear(x, LinearWeight(weight))
    finally:
        dispatch.unpin("linear")
    allowed = expected.abs() * 2.0**-7 + 4e-3 * expected.abs().mean()
    assert ((got.double() - expected).abs() <= allowed).all()
