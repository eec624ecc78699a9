"""What is chosen on each kind of GPU, with none present: Hopper's own kernels nowhere else, never a type that a chip
lacks; and what Triton is asked for compiles for the chip, fits it, and multiplies on its tensor cores.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable

import pytest
import torch
from tests.kernels.attention.batches import Shape, random_batch
from tests.kernels.image_attention import drawn

from stoker_kernels.attention import choose as attention_choose
from stoker_kernels.attention import sm90_decode
from stoker_kernels.block_gemm import plane_choose
from stoker_kernels.block_gemm.plane_launch import fitted, tile_for
from stoker_kernels.block_gemm.triton_planes import plane_linear_kernel
from stoker_kernels.fp4_gemm import best_layout as best_fp4_layout
from stoker_kernels.fp4_gemm import choose as fp4_choose
from stoker_kernels.image_attention import launch as image_launch
from stoker_kernels.int8_gemm import triton_int8
from stoker_kernels.integer_gemm import best_layout, triton_integer
from stoker_kernels.launch import aot, at_need, cuda, dispatch, pdl
from stoker_kernels.launch.aot_index import Wanted
from stoker_kernels.launch.aot_registry import SMS
from stoker_kernels.launch.chip import SHARED_KIB, chip_of
from stoker_kernels.launch.dispatch import KernelUnavailable, Target
from stoker_kernels.launch.rehearsal import Missing
from stoker_kernels.launch.triton_kernel import PrecompiledKernel
from stoker_kernels.moe.triton_experts import pair_rows
from stoker_kernels.moe.types import ExpertWeights, Plan, Routes
from stoker_kernels.quant import (
    BLOCK_FORMATS,
    FP4_BLOCKS,
    PLANE_KINDS,
    BlockWeight,
    Fp4Kind,
    Fp4Weight,
    Int8Weight,
    IntegerWeight,
    Quantized,
    integer_scale_shape,
    place_planes,
    plane_sizes,
)

BF16, HALF, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
HOPPERS = {("linear", name) for name in ("table", "own", "fixed")} | {
    ("linear_silu_mul", "fused"), ("int8_product", "own"), ("int8_silu_mul", "own"), ("sample", "sm90"),
    ("latent_attention", "sm90"),
}  # fmt: skip
QUANTIZING = {"quantizing_activation", "rms_norm_quant", "add_rms_norm_quant"}
OTHERS = [sm for sm in SHARED_KIB if sm != 90]
GPU = torch.device("cuda", 0)
Launches = list[tuple[PrecompiledKernel, Wanted]]


def wear(sm: int, patch: pytest.MonkeyPatch) -> None:
    """Have every chooser see a GPU of this capability, with every CUDA kernel built."""
    dispatch.ops()
    for name, module in list(sys.modules.items()):
        if name.startswith("stoker_kernels.") and hasattr(module, "sm_of"):
            patch.setattr(module, "sm_of", lambda device: sm)
    patch.setattr(cuda, "missing_cubin", lambda stem, arch: None)
    patch.setattr(dispatch, "_selected", {})


def supported(sm: int) -> set[tuple[str, str]]:
    """(op, implementation) of all that would run on a chip, for any type."""
    dispatch.ops()
    return {
        (op, name)
        for op, known in dispatch._registry.items()
        for name, each in known.items()
        for dtype in (BF16, HALF, FP8, torch.float32, torch.int32, torch.int64)
        if each.supports(Target("cuda", sm, dtype)) is None
    }


def test_the_kernels_of_sm_90_are_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    wear(90, monkeypatch)
    assert supported(90) >= HOPPERS
    assert sm90_decode.available(GPU, BF16, 128, 7)
    for bits in (4, 8):
        assert best_layout(4096, 4096, bits, 128, BF16, GPU) == "fragments"
    assert best_fp4_layout(4096, 4096, "nvfp4", BF16, GPU, gated=True) == "pairs"
    for sm in OTHERS:
        wear(sm, monkeypatch)
        assert not supported(sm) & HOPPERS, sm
        assert not sm90_decode.available(GPU, BF16, 128, 7)
        for bits in (4, 8):
            assert best_layout(4096, 4096, bits, 128, BF16, GPU) == "rows"
        assert best_fp4_layout(4096, 4096, "mxfp4", BF16, GPU) == "rows"


def test_dependent_launch_is_for_chips_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pdl.enable_pdl(True)
    try:
        for sm in SHARED_KIB:
            wear(sm, monkeypatch)
            assert pdl.launch_options(GPU)["LAUNCH_PDL"] == (sm >= 90)
    finally:
        pdl.enable_pdl(False)


@pytest.mark.parametrize(
    ("sm", "op", "dtype", "reason"),
    [
        (75, "linear", BF16, "bfloat16 needs sm_80"),
        (75, "paged_attention", BF16, "bfloat16 needs sm_80"),
        (75, "int8_linear", HALF, "needs sm_80"),
        (75, "latent_attention", HALF, "needs sm_80"),
        (80, "linear", FP8, "float8_e4m3fn needs sm_89"),
        (86, "experts", FP8, "float8_e4m3fn needs sm_89"),
        (70, "rms_norm", HALF, "needs sm_75"),
    ],
)
def test_what_a_chip_lacks_is_refused_by_name(
    sm: int, op: str, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wear(sm, monkeypatch)
    with pytest.raises(KernelUnavailable, match=f"op {op} with {dispatch.dtype_name(dtype)} on sm_{sm} .*{reason}"):
        dispatch.select(op, GPU, dtype)


@pytest.mark.parametrize("sm", [sm for sm in SHARED_KIB if sm >= 80])
def test_every_op_has_a_kernel_from_ampere_on(sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wear(sm, monkeypatch)
    found = {op for op, _ in supported(sm)}
    lacks = set(dispatch.ops()) - found
    # Blocks rest in planes on a GPU.
    assert lacks == {"block_linear", "block_rows"} | (set() if sm >= 89 else QUANTIZING)


def test_a_capability_in_no_table_has_the_least_of_its_generation() -> None:
    assert chip_of(82).shared_bytes == chip_of(86).shared_bytes < chip_of(80).shared_bytes
    assert chip_of(107).shared_bytes == chip_of(100).shared_bytes
    assert chip_of(139).shared_bytes <= chip_of(120).shared_bytes


def attention(pick: random.Random, sm: int) -> None:
    """A step of decode rows and chunks."""
    fp8, heads = pick.random() < 0.5, pick.choice([1, 2, 3])
    query = BF16 if sm >= 80 else HALF
    shape = Shape(
        pick.choice([16, 64]), heads, heads * pick.randint(1, 9), 16 * pick.randint(3, 16), FP8 if fp8 else query, query
    )
    rows = [(1, pick.randint(1, 90)), (1, 7), (pick.randint(2, 40), 70)]
    batch = random_batch(shape, rows, decodes=2, seed=pick.randint(0, 99))
    attention_choose.paged_attention(batch.q, batch.k, batch.v, batch.meta, **batch.options)


def images(pick: random.Random, sm: int) -> None:
    """A step of images, in the tile for a head of any size."""
    fp8, query = pick.random() < 0.5, BF16 if sm >= 80 else HALF
    heads, group, dim = pick.choice([1, 2, 3]), pick.randint(1, 9), 16 * pick.randint(3, 16)
    shape = drawn.Shape(pick.choice([16, 64]), heads, group, dim, FP8 if fp8 else query, query)
    rules = drawn.Rules(pick.choice([0, pick.randint(1, 90)]), pick.choice([0.0, 30.0]))
    drawn.make_step(shape, drawn.draw_chunks(pick), rules).run(image_launch.image_attention)


def integers(pick: random.Random, sm: int) -> None:
    """A product with weights in four or eight bits."""
    n, bits, group = 8 * pick.randint(3, 40), pick.choice([4, 8]), pick.choice([32, 64, 128])
    k, dtype = group * pick.randint(1, 5), BF16 if sm >= 80 else HALF
    codes = torch.zeros(n, k * bits // 8, dtype=torch.uint8)
    zero = torch.zeros(integer_scale_shape(n, k, group), dtype=torch.uint8) if pick.random() < 0.5 else None
    weight = IntegerWeight(codes, torch.ones(integer_scale_shape(n, k, group), dtype=dtype), zero, bits, group)
    x = torch.zeros(pick.randint(1, 64), k, dtype=dtype)
    triton_integer.multiply(x, weight, None, torch.empty(len(x), n, dtype=dtype))


def small_floats(pick: random.Random, sm: int) -> None:
    """A product with weights in floats of four bits."""
    kind: Fp4Kind = pick.choice(["nvfp4", "mxfp4"])
    n, k, block = 8 * pick.randint(3, 40), 32 * pick.randint(1, 30), FP4_BLOCKS[kind]
    dtype = BF16 if sm >= 80 else HALF
    codes, scale = torch.zeros(n, k // 2, dtype=torch.uint8), torch.zeros(k // block, n, dtype=torch.uint8)
    weight = Fp4Weight(codes, scale, torch.ones(n) if kind == "nvfp4" else None, kind)
    bias = pick.choice([None, torch.zeros(n, dtype=dtype)])
    x = torch.zeros(pick.randint(1, fp4_choose.FUSED_TOKENS), k, dtype=dtype)
    fp4_choose.fp4_linear(x, weight, bias=bias, out=None)


def integers_on_both_sides(pick: random.Random, sm: int) -> None:
    """A product of integers of eight bits."""
    n, k, dtype = 8 * pick.randint(3, 40), 16 * pick.randint(2, 60), pick.choice([BF16, HALF])
    weight = Int8Weight(torch.zeros(n, k, dtype=torch.int8), torch.ones(n, 1))
    tokens = pick.randint(1, 99)
    x = Quantized(torch.zeros(tokens, k, dtype=torch.int8), torch.ones(tokens, 1))
    triton_int8.int8_linear(x, weight, bias=None, out=torch.empty(tokens, n, dtype=dtype))


def blocks(pick: random.Random, sm: int) -> None:
    """A product with planes of any of GGUF's formats, in the tile for so many tokens."""
    name, dtype = pick.choice(sorted(PLANE_KINDS)), BF16 if sm >= 80 else HALF
    rows, columns = 8 * pick.randint(3, 40), BLOCK_FORMATS[name][0] * pick.randint(1, 9)
    piece = place_planes(name, rows, columns, torch.zeros(sum(plane_sizes(name, rows, columns)), dtype=torch.uint8))
    x = torch.zeros(pick.randint(1, plane_choose.FUSED_TOKENS), columns, dtype=dtype)
    plane_choose.plane_linear(x, BlockWeight((piece,), columns), bias=None, out=None)


def experts(pick: random.Random, sm: int) -> None:
    """Gate-up and down of a mixture, in the tile for many tokens or for few."""
    hidden, ffn, count, tile = 16 * pick.randint(4, 40), 16 * pick.randint(4, 40), 3, pick.choice([16, 32, 64, 128])
    dtype = BF16 if sm >= 80 else HALF
    weights = ExpertWeights(
        torch.zeros(count, 2 * ffn, hidden, dtype=dtype), torch.zeros(count, hidden, ffn, dtype=dtype)
    )
    tokens, tiles = pick.randint(1, 9), pick.choice([3, 700])
    ids = torch.zeros(tokens, 2, dtype=torch.int32)
    plan = Plan(torch.zeros(tokens * 2, dtype=torch.int32), torch.zeros(tiles, 3, dtype=torch.int32), tile, count)
    pair_rows(torch.zeros(tokens, hidden, dtype=dtype), Routes(ids, torch.ones(tokens, 2), plan), weights)


def launches(op: Callable[[random.Random, int], None], sm: int, seed: int) -> Launches:
    """What the host code of an op would launch on a chip."""
    found: Launches = []

    def run(kernel: PrecompiledKernel, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        found.append((kernel, kernel.wanted(kernel.kinds(args), kwargs)))

    with pytest.MonkeyPatch.context() as patch:
        wear(sm, patch)
        count = random.Random(seed).choice([40, 132])
        for name, module in list(sys.modules.items()):
            if name.startswith("stoker_kernels.") and hasattr(module, "sm_count"):
                patch.setattr(module, "sm_count", lambda device: count)
        patch.setattr(PrecompiledKernel, "run", run)
        op(random.Random(seed), sm)
    return found


@pytest.mark.parametrize(
    ("sm", "op"),
    [
        (75, attention),
        (75, images),
        (80, images),
        (86, images),
        (120, images),
        (80, experts),
        (86, attention),
        (86, experts),
        (89, integers),
        (120, integers),
        (75, integers),
        (75, small_floats),
        (80, small_floats),
        (89, small_floats),
        (80, integers_on_both_sides),
        (86, integers_on_both_sides),
        (75, blocks),
        (86, blocks),
        (89, blocks),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_chosen_compiles_and_fits(sm: int, op: Callable[[random.Random, int], None]) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # what a failure is repeated by
    products = [each for each in launches(op, sm, seed) if not re.search("plan(?!e)", each[0].__name__)]
    assert products
    for kernel, wanted in products[-1:]:
        compiled = aot.compile_variant(at_need.variant_of(Missing(kernel, wanted, sm, "")))
        ptx = compiled.asm["ptx"]
        assert compiled.metadata.shared <= chip_of(sm).shared_bytes
        # Triton multiplies on Turing without its tensor cores.
        assert ("mma.sync" in ptx) == (sm >= 80)
        assert not re.search(r"wgmma|tcgen05|cp\.async\.bulk|tensormap", ptx)
        assert ("griddepcontrol" in ptx) == bool(wanted.constants["LAUNCH_PDL"])


@pytest.mark.parametrize("sm", [80, 86])
def test_the_ring_of_blocks_is_as_long_as_a_chip_holds(sm: int) -> None:
    """Weights of Q8_0 for 33 to 64 tokens: with three stages 100 KiB, of which SM 8.6 has 99."""
    (variant,) = (
        each
        for each in aot.variants(sm)
        if each.spec.kernel is plane_linear_kernel
        and {"TOKENS": 64, "OFFSET": 128}.items() <= each.constants.items()
        and each.spec.signature["x"] == "*bf16"
    )
    assert variant.spec.options["num_stages"] == fitted(tile_for(33), sm).stages
    assert (variant.spec.options["num_stages"] == 3) == chip_of(sm).large_shared
    if not chip_of(sm).large_shared:
        assert aot.compile_variant(variant).metadata.shared <= chip_of(sm).shared_bytes


def test_a_kernel_that_does_not_fit_a_chip_is_named(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel, wanted), *_ = launches(integers, 80, 9)
    monkeypatch.setitem(SHARED_KIB, 80, 4)
    chip_of.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"integer_linear_kernel takes \d+ bytes of shared .* sm_80 has 4096"):
            aot.write_variant(at_need.variant_of(Missing(kernel, wanted, 80, "")), tmp_path)  # type: ignore[arg-type]
    finally:
        chip_of.cache_clear()


def test_chips_that_kernels_are_compiled_for_are_known() -> None:
    assert set(SMS) <= set(SHARED_KIB)
