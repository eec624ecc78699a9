import pytest
import torch

from stoker_kernels.activation import silu_and_mul, silu_and_mul_quant
from stoker_kernels.gemm import linear, linear_silu_mul, table, tiles, wide
from stoker_kernels.gemm.bench import complaint
from stoker_kernels.gemm.reference import dequantize_activations, linear_fp64, silu_mul_fp64, sum_error
from stoker_kernels.gemm.small import PAIR_BYTES, Operands, Tile
from stoker_kernels.gemm.wide import WideTile
from stoker_kernels.launch import dispatch
from stoker_kernels.launch.chip import HOPPER_SHARED
from stoker_kernels.quant import LinearWeight, Quantized, quantize_fp8, quantize_weight


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


def quantized(m: int, f: int, k: int) -> tuple[Quantized, LinearWeight]:
    x, weight = operands(m, f, k)
    return quantize_fp8(x), quantize_weight(weight, "fp8_channel")


def assert_quantized(got: torch.Tensor | Quantized, expected: torch.Tensor, error: torch.Tensor) -> None:
    """`got` is `expected`, known to `error` and rounded to bf16, in e4m3 with a scale a token."""
    assert isinstance(got, Quantized)
    error = error + (expected.abs() + error) * 2.0**-7
    least = got.scale.double() * 2.0**-10  # half of e4m3's smallest number
    allowed = error + (expected.abs() + error) / 16 + least
    assert ((dequantize_activations(got).double() - expected).abs() <= allowed).all()
    largest = (expected.abs() + error).amax(dim=1, keepdim=True)
    assert (got.scale.double() * 448 <= largest * 1.001).all()
    assert (got.scale.double() * 448 >= (largest - 2 * error.amax(dim=1, keepdim=True)) * 0.999).all()


@pytest.mark.parametrize("implementation", ["split", "reference"])
def test_quantized_in_quantized_out(implementation: str) -> None:
    x, weight = quantized(5, 48, 96)
    dispatch.pin("linear_silu_mul", implementation)
    try:
        got = linear_silu_mul(x, weight)
    finally:
        dispatch.unpin("linear_silu_mul")
    expected, _ = silu_mul_fp64(linear_fp64(x, weight), torch.zeros(5, 96))
    assert_quantized(got, expected, 2.0**-7 * expected.abs())


def test_what_does_not_fit_is_named() -> None:
    x, weight = operands(2, 8, 16)
    with pytest.raises(ValueError, match="fp8_channel"):
        linear_silu_mul(x, quantize_weight(weight, "fp8_channel"))
    with pytest.raises(ValueError, match=r"an FP8 .* not dense"):
        linear_silu_mul(quantize_fp8(x), LinearWeight(weight))
    with pytest.raises(ValueError, match=r"\(15, 16\)"):
        linear_silu_mul(x, LinearWeight(weight[:15]))
    with pytest.raises(ValueError, match=r"\(2, 8\)"):
        linear_silu_mul(x[:, :8], LinearWeight(weight))


@pytest.mark.parametrize("shape", list(table.GATED))
@pytest.mark.parametrize("m", [1, 8, 9, 32, 64])
def test_tiles_fit(shape: tuple[int, int], m: int) -> None:
    tile = table.gated_tile(False, *shape, m)
    if tile is None:
        assert m > 32, "two kernels are faster for many tokens alone"
        return
    assert tile.gated
    assert tile.tokens >= m
    assert tile.shared_bytes <= (PAIR_BYTES if isinstance(tile, Tile) and tile.ctas_per_sm == 2 else HOPPER_SHARED)


def test_a_wide_tile_serves_few_tokens_where_it_has_work_for_all_sms() -> None:
    assert table.gated_tile(False, 34816, 5120, 33) == WideTile(272, True, False, tokens=64)  # 128 of 132
    assert table.gated_tile(False, 29312, 3328, 64) == WideTile(224, True, False, tokens=64)  # 131
    # Adapters add to a tile that streams: they have one beside it.
    assert isinstance(table.streaming_gated_tile(34816, 5120, 64), Tile)
    assert table.streaming_gated_tile(34816, 5120, 32) == table.gated_tile(False, 34816, 5120, 32)
    assert table.streaming_gated_tile(34816, 5120, 65) is None
    assert isinstance(table.gated_tile(False, 34816, 5120, 32), Tile)
    assert isinstance(table.gated_tile(False, 30720, 5120, 64), Tile)  # 120 of 256 rows, 107 of 288


@pytest.mark.parametrize("fp8", [False, True])
def test_a_weight_that_was_not_measured_gets_wide_tiles_that_keep_the_sms_busy(fp8: bool) -> None:
    # 28,800 rows are 132 of 218: one round of 224 has 129 tiles, of 256 has 113.
    assert table.gated_tile(fp8, 28800, 4352, 100) == WideTile(224, True, False)
    assert table.gated_tile(fp8, 28800, 4352, 256) == WideTile(224, True, True)  # as many tiles, in pairs by tokens
    assert table.gated_tile(fp8, 16640, 3200, 128) == WideTile(128, True, False)
    if not fp8:
        # 34,816 rows are 128 of 272, one round; 150 tokens are one block of 192, in two rounds of 144 rows.
        assert table.gated_tile(fp8, 34816, 5120, 90) == WideTile(272, True, False)
        assert table.gated_tile(fp8, 34816, 5120, 150) == WideTile(144, True, False, tokens=192)
    # 45 tiles of 256 rows on 132 SMs, 90 of 128: few, but two kernels would be slower.
    assert table.gated_tile(fp8, 11520, 2048, 128) == WideTile(128, True, False)
    assert table.gated_tile(fp8, 5760, 2048, 128) is None


def test_pairs_by_tokens_leave_more_idle_where_the_last_block_is_small() -> None:
    assert table.busy_share(WideTile(288, True, True), 37888, 256) > 0.99
    # Of 300 tokens pairs by rows leave a part of the last block idle, pairs by tokens nearly a block.
    assert table.busy_share(WideTile(288, True, False), 37888, 300) > 0.99
    assert table.busy_share(WideTile(288, True, True), 37888, 300) < 0.76


@pytest.mark.parametrize(
    ("n", "m", "rows"),
    [
        (4608, 200, None),  # 36 tiles of 128 rows × 2 blocks of tokens
        (4608, 512, 160),  # 29 × 4 of 132
        (3584, 1000, 224),  # 16 × 8: as many as 128 SMs
        (28800, 90, 224),
        (2048, 128, None),
        (70144, 128, None),  # the tall ones were not measured with few tokens
    ],
)
def test_plain_e4m3_tiles_go_where_they_keep_the_sms_busy(n: int, m: int, rows: int | None) -> None:
    tile = table.best_tile(True, n, 3584, m)
    assert (tile.rows if isinstance(tile, WideTile) else None) == rows


@pytest.mark.parametrize(
    ("n", "m", "rows"), [(28800, 65, 224), (20480, 128, 160), (28800, 64, None), (28800, 129, None)]
)
def test_plain_bf16_tiles_serve_one_block_of_tokens(n: int, m: int, rows: int | None) -> None:
    tile = table.best_tile(False, n, 4352, m)
    assert (tile.rows if isinstance(tile, WideTile) else None) == rows


def test_no_fp8_tile_serves_few_tokens_or_blocks_of_scales() -> None:
    assert {table.gated_tile(True, 37888, 3584, m) for m in (1, 16, 64)} == {None}
    x, weight = operands(70, 128, 128)
    given, blocks = quantize_fp8(x), quantize_weight(weight, "fp8_block")
    o = Operands(given.data, blocks.data, torch.empty(70, 128).bfloat16(), None, blocks.scale, given.scale)
    assert "a scale for each row" in str(tiles.refusal(WideTile(288, gated=True), o))


@pytest.mark.parametrize(("rows", "stages"), [(128, 7), (160, 6), (192, 5), (256, 4), (288, 4)])
def test_a_wide_tile_fills_shared_memory(rows: int, stages: int) -> None:
    assert WideTile(rows, True, tokens=64).stages >= stages >= WideTile(rows, True, tokens=192).stages
    tile = WideTile(rows, gated=True)
    assert tile.stages == stages
    assert HOPPER_SHARED - tile.stage_bytes < tile.shared_bytes <= HOPPER_SHARED


def test_two_kernels_serve_elsewhere_and_equal_their_ops() -> None:
    x, weight = operands(5, 48, 96)
    dense = LinearWeight(weight)
    assert dispatch.implementations("linear_silu_mul") == ("fused", "split", "reference")
    assert torch.equal(linear_silu_mul(x, dense), silu_and_mul(linear(x, dense)))
    given, fp8 = quantized(5, 48, 96)
    got, want = linear_silu_mul(given, fp8), silu_and_mul_quant(linear(given, fp8))
    assert torch.equal(got.scale, want.scale)
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
    assert dispatch.require(x.device, x.dtype, ("linear_silu_mul",)) == {"linear_silu_mul": "split"}


def test_the_fused_kernel_says_what_it_needs() -> None:
    x, weight = operands(1, 8, 64)
    dispatch.pin("linear_silu_mul", "fused")
    try:
        with pytest.raises(dispatch.KernelUnavailable, match="needs sm_90"):
            linear_silu_mul(x, LinearWeight(weight))
    finally:
        dispatch.unpin("linear_silu_mul")


def on_gpu(m: int, n: int, k: int, fp8: bool) -> tuple[torch.Tensor | Quantized, LinearWeight]:
    x, weight = (t.cuda().bfloat16() for t in operands(m, n // 2, k))
    return quantize_fp8(x) if fp8 else x, quantize_weight(weight, "fp8_channel" if fp8 else "dense")


@pytest.mark.gpu
@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "e4m3"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(27, 1200, 384), (65, 1200, 384), (129, 37888, 3584), (300, 1040, 1152), (2200, 6144, 1024)]
)
def test_the_wide_kernels_equal_the_definition(
    m: int, n: int, k: int, fp8: bool, gated: bool, by_tokens: bool
) -> None:
    x, weight = on_gpu(m, n, k, fp8)
    bias = torch.randn(n, device="cuda").bfloat16() if fp8 and not gated else None
    expected, error = linear_fp64(x, weight, bias), sum_error(x, weight)
    if gated:
        expected, error = silu_mul_fp64(expected, error)
    data, scale = (x.data, x.scale) if isinstance(x, Quantized) else (x, None)
    every = wide.wide_tiles(gated, fp8, 8192)
    for tile in (tile for tile in every if tile.by_tokens == by_tokens):
        out = torch.full(expected.shape, float("nan"), device="cuda", dtype=torch.bfloat16)
        o = Operands(data, weight.data, out, bias, weight.scale, scale)
        assert wide.refusal(tile, o) is None
        wide.launch(tile, o, pdl=False)
        assert complaint(out, expected, error) is None, tile


@pytest.mark.gpu
@pytest.mark.parametrize(("f", "k"), [(18944, 3584), (3072, 1024), (520, 1152)])
@pytest.mark.parametrize("m", [1, 8, 16, 33, 64, 65, 128, 300])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "e4m3"])
def test_the_fused_kernels_equal_the_definition(f: int, k: int, m: int, fp8: bool) -> None:
    x, weight = on_gpu(m, 2 * f, k, fp8)
    both, error = linear_fp64(x, weight), sum_error(x, weight)
    if table.gated_tile(fp8, 2 * f, k, m) is None:
        error += both.abs() * 2.0**-8  # two kernels round gate and up first
    expected, error = silu_mul_fp64(both, error)
    dispatch.pin("linear_silu_mul", "fused")
    try:
        got = linear_silu_mul(x, weight)
    finally:
        dispatch.unpin("linear_silu_mul")
    if fp8:
        assert_quantized(got, expected, error)
    else:
        assert complaint(got, expected, error) is None


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "e4m3"])
@pytest.mark.parametrize(("m", "n"), [(65, 37888), (300, 37888), (1024, 37888), (1024, 3584)])
def test_linear_by_wide_tiles_equals_the_definition(m: int, n: int, fp8: bool) -> None:
    x, weight = on_gpu(m, n, 512, fp8)
    dispatch.pin("linear", "table")
    try:
        got = linear(x, weight)
    finally:
        dispatch.unpin("linear")
    # cuBLAS's products of e4m3 are rounded before they are scaled.
    expected = linear_fp64(x, weight)
    assert complaint(got, expected, sum_error(x, weight) + (expected.abs() * 2.0**-8 if fp8 else 0)) is None
