"""Mixtures of experts in Triton against plain loops: any choice, any number of tokens, any distribution of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.kernels.moe.oracle import chosen, mixed, mxfp4_numbers, nvfp4_experts, nvfp4_numbers, random_experts
from tests.kernels.moe.routings import ROUTINGS, draw
from torch import Tensor

from stoker_kernels.launch.dispatch import interpreting, pin, unpin
from stoker_kernels.moe import (
    ExpertActivation,
    ExpertKind,
    ExpertWeights,
    Routes,
    Routing,
    mixture,
    pack_mxfp4,
    pack_nvfp4,
    quantize_experts,
    quantize_mxfp4,
    reference,
    triton_experts,
    triton_keep,
    triton_route,
)
from stoker_kernels.moe.tiles import in_one_program

# exp of −∞ and of large logits is meant; the interpreter's numpy says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1.2e-2}


def check_plan(found: Routes, experts: int) -> None:
    """The order lists each expert's pairs by token, and the tiles cover them once."""
    assert found.plan is not None
    flat = found.ids.flatten().tolist()
    expected = sorted((expert, pair) for pair, expert in enumerate(flat) if expert >= 0)
    order = found.plan.order.tolist()
    assert order[: len(expected)] == [pair for _, pair in expected]
    covered = []
    for expert, begin, end in found.plan.tiles.tolist():
        assert end - begin <= found.plan.tokens
        covered += [(expert, order[place]) for place in range(begin, end)]
    assert sorted(covered) == expected
    assert all(expert < experts for expert, _ in covered)


@pytest.mark.matrix("case")
@pytest.mark.parametrize("tokens", [11, 37])
@pytest.mark.parametrize("case", range(len(ROUTINGS)))
def test_choices_and_their_order(case: int, tokens: int, device: torch.device) -> None:
    routing, count, with_bias = ROUTINGS[case]
    logits, bias = draw(100 * case + tokens, tokens, count, with_bias)
    slots = torch.arange(tokens)
    slots[tokens // 2 :: 4] = -1
    counts = torch.full((count,), 99, dtype=torch.int32, device=device)
    on_device = None if bias is None else bias.to(device)
    found = triton_route.route(logits.to(device), routing, bias=on_device, slot_mapping=slots.to(device), counts=counts)
    for token, (row, ids, weights) in enumerate(
        zip(logits.tolist(), found.ids.tolist(), found.weights.tolist(), strict=True)
    ):
        expected = chosen(row, routing, None if bias is None else bias.tolist())
        assert ids == ([-1] * routing.top_k if slots[token] < 0 else [expert for expert, _ in expected])
        if slots[token] >= 0:
            assert weights == pytest.approx([weight for _, weight in expected], rel=1e-4)
    check_plan(found, count)
    assert counts.tolist() == [int((found.ids == expert).sum()) for expert in range(count)]


@pytest.mark.parametrize("tokens", [3, 700])
def test_equal_logits_choose_the_first_experts(tokens: int, device: torch.device) -> None:
    """One expert gets every token, so that it has many tiles and others have none."""
    found = triton_route.route(torch.zeros(tokens, 9, device=device), Routing(2))
    assert found.ids.tolist() == [[0, 1]] * tokens
    check_plan(found, 9)


def test_more_pairs_than_a_block_of_the_sort(device: torch.device) -> None:
    logits = torch.randn(1400, 5, generator=torch.Generator().manual_seed(3)).to(device)
    found = triton_route.route(logits, Routing(3))
    assert torch.equal(found.ids, reference.route(logits, Routing(3)).ids)
    check_plan(found, 5)


def test_logits_that_are_no_numbers_choose_experts_that_exist(device: torch.device) -> None:
    found = triton_route.route(torch.full((4, 6), float("nan"), device=device), Routing(3))
    assert int(found.ids.max()) < 8  # what is read for them stays within reach; the result is no number either way


def distributed(tokens: int, top_k: int, experts: int, how: str) -> torch.Tensor:
    """Logits [tokens, experts] that send tokens everywhere, all to the same experts, or leave half of them out."""
    shuffled = random.Random(tokens * experts)
    logits = torch.tensor([[shuffled.gauss(0, 1) for _ in range(experts)] for _ in range(tokens)])
    if how == "same":
        logits += torch.linspace(0, 20 * experts, experts)
    if how == "half":
        logits[:, ::2] -= 50.0
    assert top_k <= experts // 2
    return logits


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "how", "dtype"),
    [
        (1, 2, 6, "any", torch.bfloat16),
        (1, 3, 11, "any", torch.float16),
        (7, 2, 9, "half", torch.bfloat16),
        (16, 3, 8, "same", torch.float32),
        (40, 2, 6, "any", torch.bfloat16),
        (45, 2, 5, "half", torch.float16),
        (90, 1, 3, "same", torch.float32),
        (150, 1, 2, "same", torch.bfloat16),
    ],
)
def test_experts_give_the_weighted_sum(
    tokens: int, top_k: int, experts: int, how: str, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ffn, hidden = 24 + 8 * (tokens % 5), 40 + 8 * (tokens % 3)
    clamped = tokens % 2 == 0
    weights = random_experts(experts, ffn, hidden, dtype, device, bias=clamped, seed=tokens)
    x = torch.randn(tokens, hidden, generator=generator).to(device, dtype)
    beside = torch.randn(tokens, hidden, generator=generator).to(device, dtype) if top_k > 1 else None
    gate = torch.randn(tokens, 1, generator=generator).to(device, dtype) if top_k > 2 else None
    logits = distributed(tokens, top_k, experts, how).to(device)
    slots = torch.arange(tokens, device=device)
    slots[1::7] = -1
    found = triton_route.route(logits, Routing(top_k, renormalize=True), slot_mapping=slots)
    assert in_one_program(tokens, top_k) == (tokens <= 16)
    kind: ExpertActivation = "clamped" if clamped else "silu"
    out = torch.full_like(x, float("nan"))
    got = triton_experts.experts(
        x, found, weights, activation=kind, limit=0.8, shared=beside, shared_gate=gate, out=out
    )
    assert got is out
    expected = mixed(x, found.ids, found.weights, weights, kind, 0.8, beside, gate)
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=scale * TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["fp8_channel", "fp8_block"])
@pytest.mark.parametrize(("tokens", "experts"), [(5, 4), (50, 3)])
def test_quantized_experts_equal_the_reference(tokens: int, experts: int, kind: str, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("products in FP8 need SM 8.9")
    dense = random_experts(experts, 144, 176, torch.float32, device, seed=tokens)
    weights = quantize_experts(dense, kind)  # type: ignore[arg-type]
    x = torch.randn(tokens, 176, generator=torch.Generator().manual_seed(1)).to(device)
    found = triton_route.route(distributed(tokens, 1, experts, "any").to(device), Routing(1))
    expected = reference.experts(x, found, weights)
    got = triton_experts.experts(x, found, weights)
    # A value on the edge between two e4m3 numbers may fall either way.
    assert ((got - expected).norm() / expected.norm()).item() < 0.01


@pytest.mark.parametrize(
    ("tokens", "ffn", "hidden", "biased", "dtype"),
    [
        # Widths of a step and a short one, of short ones alone, and of one block.
        (3, 64, 288, True, torch.bfloat16),
        (37, 32, 224, False, torch.float32),
        (70, 32, 96, True, torch.float16),
    ],
)
def test_experts_in_four_bits_are_those_of_their_numbers(
    tokens: int, ffn: int, hidden: int, biased: bool, dtype: torch.dtype, device: torch.device
) -> None:
    dense = random_experts(4, ffn, hidden, torch.float32, device, bias=biased, seed=tokens)
    weights = quantize_experts(dense, "mxfp4")
    up, down = (
        torch.stack([mxfp4_numbers(*quantize_mxfp4(each)) for each in matrices]).float()
        for matrices in (dense.gate_up, dense.down)
    )
    wide = ExpertWeights(up, down, gate_up_bias=dense.gate_up_bias, down_bias=dense.down_bias)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens)).to(device, dtype)
    slots = torch.arange(tokens, device=device)
    slots[1::7] = -1
    logits = distributed(tokens, 2, 4, "any").to(device)
    found = triton_route.route(logits, Routing(2, renormalize=True), slot_mapping=slots)
    got = triton_experts.experts(x, found, weights, activation="clamped", limit=0.8)
    expected = mixed(x, found.ids, found.weights, wide, "clamped", 0.8)
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=scale * TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("tokens", "ffn", "hidden", "activation", "dtype"),
    [
        # Widths of a step and all short ones, of one block, and of no gate.
        (3, 16, 240, "clamped", torch.bfloat16),
        (19, 16, 80, "silu", torch.float16),
        (17, 80, 144, "relu2", torch.float32),
    ],
)
def test_experts_in_nvfp4_are_those_of_their_numbers(
    tokens: int, ffn: int, hidden: int, activation: ExpertActivation, dtype: torch.dtype, device: torch.device
) -> None:
    gated = activation != "relu2"
    dense = random_experts(4, ffn, hidden, torch.float32, device, bias=gated, seed=tokens, gated=gated)
    dense.gate_up[1] *= 3e-4  # an expert with another factor
    weights, wide = quantize_experts(dense, "nvfp4"), nvfp4_experts(dense)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens)).to(device, dtype)
    slots = torch.arange(tokens, device=device)
    slots[1::7] = -1
    logits = distributed(tokens, 2, 4, "any").to(device)
    found = triton_route.route(logits, Routing(2, renormalize=True), slot_mapping=slots)
    got = triton_experts.experts(x, found, weights, activation=activation, limit=0.8)
    expected = mixed(x, found.ids, found.weights, wide, activation, 0.8)
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=scale * TOLERANCE[dtype])


@pytest.mark.parametrize(("kind", "ffn", "hidden"), [("dense", 37, 83), ("fp8_channel", 48, 80), ("fp8_block", 64, 80)])
def test_experts_without_a_gate(kind: ExpertKind, ffn: int, hidden: int, device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = quantize_experts(random_experts(5, ffn, hidden, dtype, device, gated=False), kind)
    assert not weights.gated
    x = torch.randn(21, hidden, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    found = triton_route.route(torch.randn(21, 5, device=device), Routing(3, scoring="sigmoid", scale=2.5))
    got = triton_experts.experts(x, found, weights, activation="relu2").float()
    expected = reference.experts(x, found, weights, activation="relu2").float()
    if kind == "dense":
        exact = mixed(x, found.ids, found.weights, weights, "relu2", 0.0)
        torch.testing.assert_close(expected.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    # A value on the edge between two e4m3 numbers may fall either way.
    assert ((got - expected).norm() / expected.norm()).item() < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "activation"), [(1, "silu"), (16, "relu2"), (17, "silu"), (130, "relu2"), (2000, "silu")]
)
def test_experts_in_nvfp4_match_at_real_sizes(tokens: int, activation: ExpertActivation, device: torch.device) -> None:
    """The shapes of Qwen3-30B-A3B and of Nemotron-3-Nano-30B-A3B; twice for equal bits."""
    ffn, hidden = (768, 2048) if activation == "silu" else (1856, 2688)
    dense = random_experts(32, ffn, hidden, torch.bfloat16, device, gated=activation == "silu")
    weights = quantize_experts(dense, "nvfp4")
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    found = triton_route.route(torch.randn(tokens, 32, device=device).bfloat16(), Routing(6, renormalize=True))
    got, again = (triton_experts.experts(x, found, weights, activation=activation) for _ in range(2))
    assert torch.equal(got, again)
    expected = reference.experts(x.float(), found, weights, activation=activation)
    assert ((got.float() - expected).norm() / expected.norm()).item() < 8e-3


@pytest.mark.gpu
def test_codes_of_nvfp4_are_exact_under_every_scale(device: torch.device) -> None:
    bits = torch.tensor([each for each in range(256) if each & 127 != 127], dtype=torch.uint8, device=device)
    blocks = torch.randint(0, 256, (1024, 64), dtype=torch.uint8, device=device)
    scales = bits[torch.arange(1024 * 8, device=device) % len(bits)].view(1024, 8)
    data, moved = (each[None] for each in pack_nvfp4(blocks, scales))
    rows = torch.ones(1, 1024, device=device)
    down = quantize_experts(random_experts(1, 1024, 128, torch.bfloat16, device, gated=False), "nvfp4")
    weights = ExpertWeights(
        data, down.down, "nvfp4", moved, down.down_scale, gate_up_factor=rows, down_factor=down.down_factor
    )
    x = torch.eye(128, device=device).bfloat16()
    found = triton_route.route(torch.zeros(128, 1, device=device), Routing(1))
    got = triton_experts._gate_up(x, found.plan, weights, 1, "relu2", 0.0, None)
    numbers = nvfp4_numbers(blocks, scales).clamp(min=0)
    assert torch.equal(got.double(), (numbers.float() ** 2).bfloat16().double().t())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 64, 130, 256, 1000, 4096])
def test_experts_in_four_bits_match_at_real_sizes(tokens: int, device: torch.device) -> None:
    """The shape of gpt-oss-20b, with its bias; scales from 2^-14 on; twice for equal bits."""
    dense = random_experts(32, 2880, 2880, torch.bfloat16, device, bias=True)
    weights = quantize_experts(dense, "mxfp4")
    x = torch.randn(tokens, 2880, device=device).bfloat16()
    found = triton_route.route(torch.randn(tokens, 32, device=device).bfloat16(), Routing(4, renormalize=True))
    got, again = (triton_experts.experts(x, found, weights, activation="clamped", limit=7.0) for _ in range(2))
    assert torch.equal(got, again)
    expected = reference.experts(x.float(), found, weights, activation="clamped", limit=7.0)
    assert ((got.float() - expected).norm() / expected.norm()).item() < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize("power", [-60, -8, 0, 33])
def test_codes_are_exact_under_any_scale(power: int, device: torch.device) -> None:
    """As bits of bf16 the codes of 0 and ½ are subnormal; scales go from small to the largest that is taken."""
    blocks = torch.randint(0, 256, (128, 64), dtype=torch.uint8, device=device)
    scales = torch.full((128, 4), power + 127, dtype=torch.uint8, device=device)
    data, moved = (each[None] for each in pack_mxfp4(blocks, scales))
    weights = ExpertWeights(torch.cat([data, data], 1), data, "mxfp4", torch.cat([moved, moved], 2), moved)
    x = torch.eye(128, device=device).bfloat16() * 2.0**-power
    found = triton_route.route(torch.zeros(128, 1, device=device), Routing(1))
    got = triton_experts.pair_rows(x, found, weights).double() / 2.0**power
    numbers = mxfp4_numbers(blocks, scales) / 2.0**power
    inner = (numbers * torch.sigmoid(numbers) * numbers).bfloat16().double()
    expected = inner.t() @ numbers.t()
    assert ((got - expected).norm() / expected.norm()).item() < 4e-3


def test_a_token_s_bits_do_not_depend_on_the_others(device: torch.device) -> None:
    weights = random_experts(5, 32, 48, torch.float32, device)
    x = torch.randn(21, 48, generator=torch.Generator().manual_seed(5)).to(device)
    logits = torch.randn(21, 5, generator=torch.Generator().manual_seed(6)).to(device)
    first = triton_experts.experts(x, triton_route.route(logits, Routing(2)), weights)
    order = torch.randperm(21, generator=torch.Generator().manual_seed(7))
    again = triton_experts.experts(x[order], triton_route.route(logits[order], Routing(2)), weights)
    assert torch.equal(first[order], again)


def test_experts_without_a_plan_are_refused(device: torch.device) -> None:
    weights = random_experts(4, 16, 16, torch.float32, device)
    found = reference.route(torch.randn(2, 4, device=device), Routing(1))
    with pytest.raises(ValueError, match="plan"):
        triton_experts.experts(torch.randn(2, 16, device=device), found, weights)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "fp8_channel", "fp8_block"])
@pytest.mark.parametrize("tokens", [1, 4, 16, 17, 64, 200, 256, 1000, 4096])
def test_experts_match_at_real_sizes(tokens: int, kind: str, device: torch.device) -> None:
    """The shape of Qwen3-30B-A3B with fewer experts, so that the reference takes seconds."""
    dense = random_experts(32, 768, 2048, torch.bfloat16, device)
    weights = quantize_experts(dense, kind)  # type: ignore[arg-type]
    assert isinstance(weights, ExpertWeights)
    x = torch.randn(tokens, 2048, device=device).bfloat16()
    logits = torch.randn(tokens, 32, device=device).bfloat16()
    found = triton_route.route(logits, Routing(8, renormalize=True))
    check_plan(found, 32)
    got, again = (triton_experts.experts(x, found, weights) for _ in range(2))
    assert torch.equal(got, again)
    expected = reference.experts(x.float(), found, ExpertWeights(
        weights.gate_up.float() if kind == "dense" else weights.gate_up,
        weights.down.float() if kind == "dense" else weights.down, weights.kind,
        weights.gate_up_scale, weights.down_scale,
    ))  # fmt: skip
    bound = 8e-3 if kind == "dense" else 2e-2
    assert ((got.float() - expected).norm() / expected.norm()).item() < bound


def test_the_interpreter_is_told_apart(device: torch.device) -> None:
    assert interpreting() == (device.type == "cpu")


@pytest.mark.parametrize("tokens", [9, 60])
def test_the_experts_of_all_ranks_add_up(tokens: int, device: torch.device) -> None:
    """Seven experts over three ranks: what each keeps is the sum that its own give, and nobody's is lost."""
    weights = random_experts(7, 24, 40, torch.float32, device, seed=tokens)
    x = torch.randn(tokens, 40, generator=torch.Generator().manual_seed(tokens)).to(device)
    slots = torch.arange(tokens, device=device)
    slots[::5] = -1
    logits = distributed(tokens, 3, 7, "any").to(device)
    found = triton_route.route(logits, Routing(3), slot_mapping=slots)
    total = torch.zeros_like(x)
    for first, count in ((0, 3), (3, 2), (5, 2)):
        kept = triton_keep.keep_experts(found, first, count)
        assert torch.equal(kept.ids, reference.keep_experts(found, first, count).ids)
        check_plan_of_kept(kept, found, first, count)
        part = ExpertWeights(weights.gate_up[first : first + count], weights.down[first : first + count])
        total += triton_experts.experts(x, kept, part)
    expected = triton_experts.experts(x, found, weights)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)


def check_plan_of_kept(kept: Routes, found: Routes, first: int, count: int) -> None:
    """The tiles are those of the experts that are kept, in their places; the others are empty."""
    assert kept.plan is not None
    assert found.plan is not None
    for mine, whole in zip(kept.plan.tiles.tolist(), found.plan.tiles.tolist(), strict=True):
        here = first <= whole[0] < first + count
        assert mine == ([whole[0] - first, *whole[1:]] if here else [0, 0, 0])


@pytest.fixture
def pins() -> Iterator[None]:
    yield
    for name in ("route", "experts"):
        unpin(name)


@pytest.mark.usefixtures("pins")
@pytest.mark.parametrize("way", ["own", "triton", "reference"])
def test_what_is_shared_is_asked_for_once_and_late(
    way: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(8)
    x, logits = (torch.randn(7, wide, device=device).bfloat16() for wide in (80, 9))
    weights = random_experts(9, 48, 80, torch.bfloat16, device, seed=8)
    pin("route", "triton")
    pin("experts", way)
    shared, order = torch.randn_like(x), []
    products = triton_experts.pair_rows

    def noted(*operands: Any, **more: Any) -> Tensor:
        order.append("products")
        return products(*operands, **more)

    def late() -> Tensor:
        order.append("shared")
        return shared

    monkeypatch.setattr(triton_experts, "pair_rows", noted)
    routing = Routing(3)
    expected = mixture(x, logits, routing, weights, shared=shared)
    order.clear()
    assert torch.equal(mixture(x, logits, routing, weights, shared=late), expected)
    assert order == {"own": ["products", "shared"], "triton": ["shared", "products"], "reference": ["shared"]}[way]
    with pytest.raises(ValueError, match="shared is"):
        mixture(x, logits, routing, weights, shared=lambda: shared[:, 1:])
