"""Weights of few bits, sixteen rows side by side on a CPU: the same codes, products against the values they stand for
in bf16 and fp32, and what stays row by row.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from stoker_kernels.fp4_gemm import dequantize_fp4, fp4_linear
from stoker_kernels.integer_gemm import dequantize_integers, integer_linear
from stoker_kernels.lane_gemm import from_lanes, lanes_refusal, pack_lanes, product, to_lanes
from stoker_kernels.launch import cc, compiled
from stoker_kernels.quant import FP4_BLOCKS, Fp4Kind, Fp4Weight, IntegerWeight, integer_scale_shape, pack_rows
from stoker_runtime.bench.reference.weights import values_of

REFUSED, NO_BF16 = cc.refusal("cpu_lanes_floats"), product.bf16_refusal()
pytestmark = pytest.mark.skipif(REFUSED is not None, reason=f"{REFUSED}")
TYPES = [
    pytest.param(torch.bfloat16, marks=pytest.mark.skipif(NO_BF16 is not None, reason=f"{NO_BF16}")),
    torch.float32,
]
LEVELS = [None, *(name for name, needs in cc.LEVELS.items() if cc.processor_flags().issuperset(needs))]
KINDS = ["int4", "int8", "nvfp4", "mxfp4"]
Weight = IntegerWeight | Fp4Weight


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The processor as it is, or as one of a level, without bf16."""
    for function in (cc.library, product.bf16_refusal):
        function.cache_clear()
    if request.param is not None:
        monkeypatch.setattr(cc, "level", lambda: request.param)
        monkeypatch.setattr(cc, "processor_flags", lambda: frozenset(cc.LEVELS[request.param]))
    yield
    for function in (cc.library, product.bf16_refusal):
        function.cache_clear()


def random_weight(kind: str, n: int, k: int) -> Weight:
    """Any group, zero points or none, an order or none, scales of any type."""
    if kind.startswith("int"):
        bits, group = int(kind[3:]), random.choice([32, 64, 96, 128, k, 5 * k])
        shape = integer_scale_shape(n, k, group)
        dtype = random.choice([torch.bfloat16, torch.float16, torch.float32])
        return IntegerWeight(
            pack_rows(torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8), bits),
            ((torch.rand(shape) - 0.3) * 10.0 ** random.randint(-6, 1)).to(dtype),
            random.choice([None, torch.randint(0, 1 << bits, shape, dtype=torch.uint8)]),
            bits,
            group,
            random.choice([None, torch.randperm(k).int()]),
        )
    (one,) = (each for each in FP4_BLOCKS if each == kind)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    if one == "mxfp4":
        # Powers of two, the least of all among them.
        scale = torch.randint(*random.choice([(0, 4), (120, 134)]), (k // 32, n), dtype=torch.uint8)
        return Fp4Weight(codes, scale, None, one)
    scale = torch.randint(0, 256, (k // 16, n), dtype=torch.uint8)
    scale[scale & 0x7F == 0x7F] = 0x31
    return Fp4Weight(codes, scale, torch.rand(n) + 0.1, one)


def packed(weight: Weight) -> Weight:
    """Packed, of a copy."""
    copy = type(weight)(**{**vars(weight), "data": weight.data.clone()})
    made: Weight = pack_lanes(copy)
    assert made.layout == "lanes"
    assert made.data.data_ptr() == copy.data.data_ptr(), "in its own memory"
    return made


def product_of(x: torch.Tensor, weight: Weight, **options: torch.Tensor | None) -> torch.Tensor:
    """By the op."""
    if isinstance(weight, Fp4Weight):
        return fp4_linear(x, weight, **options)
    return integer_linear(x, weight, **options)


def values(weight: Weight) -> torch.Tensor:
    """In fp64, by columns of x."""
    if isinstance(weight, Fp4Weight):
        return dequantize_fp4(weight, torch.float32).double()
    shown = IntegerWeight(**{**vars(weight), "scale": weight.scale.float()})
    found = dequantize_integers(shown, torch.float64)
    return found if weight.order is None else torch.empty_like(found).index_copy_(1, weight.order.long(), found)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_come_back_from_as_many_bytes(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (16 * random.randint(1, 7), 32 * random.randint(1, 9)), dtype=torch.uint8)
    lanes = to_lanes(codes, bits)
    assert lanes.numel() * 8 == codes.numel() * bits
    assert torch.equal(from_lanes(lanes, bits), codes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_weight_has_the_values_it_had(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "PACKED_AT_ONCE", random.randint(1, 1 << 14))
    weight = random_weight(kind, 16 * random.randint(1, 9), 96 * random.randint(1, 5))
    made = packed(weight)
    assert torch.equal(values(made), values(weight))
    assert torch.equal(values_of(made), values_of(weight))
    assert pack_lanes(made) is made


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind: str, tokens: int, level: None) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        n, k = 16 * random.randint(1, 9), 32 * random.randint(1, 19)
        weight = random_weight(kind, n, k)
        x = torch.randn(tokens, k).to(dtype)
        bias = random.choice([None, torch.randn(n).to(dtype)])
        w = values(weight)
        # With zero points a sum is that of codes less the middle, and of x.
        size = x.double().abs() @ w.abs().t() + 1
        if isinstance(weight, IntegerWeight) and weight.zero is not None:
            size *= 1 << weight.bits
        expected = x.double() @ w.t() + (0.0 if bias is None else bias.double())
        exact = torch.empty(tokens, n)
        made = packed(weight)
        assert product_of(x, made, bias=bias, out=exact) is exact
        assert bool(((exact.double() - expected).abs() <= 2e-6 * size).all())
        assert torch.equal(product_of(x, made, bias=bias), exact.to(dtype))
        given = torch.empty(tokens, n, dtype=dtype)
        assert product_of(x, made, bias=bias, out=given) is given
        assert torch.equal(given, exact.to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_beside_any_others_on_any_threads(kind: str, dtype: torch.dtype) -> None:
    n, k, tokens = 16 * 37, 480, random.randint(9, 21)
    made = packed(random_weight(kind, n, k))
    x = torch.randn(tokens, k).to(dtype)
    threads = torch.get_num_threads()
    assert tokens * n * k >= compiled.THREAD_WORK
    try:
        found = []
        for count in (1, 3, 2):
            torch.set_num_threads(count)
            found.append(product_of(x, made))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    for row in range(tokens):
        assert torch.equal(product_of(x[row : row + 1], made), found[0][row : row + 1])


def test_what_is_no_number_stays_none() -> None:
    scale = torch.full((2, 16), 255, dtype=torch.uint8)
    for kind in FP4_BLOCKS:
        factor = torch.ones(16) if kind == "nvfp4" else None
        bits = scale if kind == "mxfp4" else scale.repeat(2, 1)
        made = packed(Fp4Weight(torch.randint(0, 256, (16, 32), dtype=torch.uint8), bits, factor, kind))
        for x in (torch.randn(2, 64), torch.randn(2, 64).bfloat16()):
            assert bool(product_of(x, made).isnan().all())


@pytest.mark.parametrize(
    ("n", "k", "group", "words"),
    [(24, 64, 64, "rows fill no 16s"), (32, 80, 80, "columns no 32s"), (48, 96, 48, "groups of 48 columns")],
)
def test_what_stays_row_by_row_gives_the_reference_s(n: int, k: int, group: int, words: str) -> None:
    shape = integer_scale_shape(n, k, group)
    weight = IntegerWeight(torch.randint(0, 256, (n, k // 2), dtype=torch.uint8), torch.rand(shape), None, 4, group)
    assert words in str(lanes_refusal(weight))
    assert pack_lanes(weight) is weight
    x = torch.randn(3, k)
    torch.testing.assert_close(integer_linear(x, weight), x @ dequantize_integers(weight, torch.float32).t())


def test_kinds_are_all_there_are() -> None:
    kinds: list[Fp4Kind] = list(FP4_BLOCKS)
    assert {"int4", "int8", *kinds} == set(KINDS)
