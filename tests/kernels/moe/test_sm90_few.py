"""The kernels of csrc/sm90_few_experts.cuh, run on the CPU by `emulator/`, against plain loops in fp64.

Shapes stand in no table: rows that fill no stage and no share of the CTAs, columns that fill no box, tokens without
experts, experts that several tokens share, tiles of a plan that are empty.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace

import pytest
import torch
from tests.kernels.moe.few_machine import KINDS, Machine, compiled_kernels
from tests.kernels.moe.oracle import mixed, random_experts
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.moe import Plan, Routes, quantize_experts, reference
from stoker_kernels.moe.hopper import operands, sm90_few

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled_kernels(tmp_path_factory.mktemp("emulator"))


def plan_of(ids: Tensor, experts: int, spare: random.Random) -> Plan:
    """The order of pairs by expert and the experts' tiles, with empty ones between them."""
    flat = ids.flatten().tolist()
    pairs = sorted((expert, pair) for pair, expert in enumerate(flat) if expert >= 0)
    tiles: list[list[int]] = []
    for place, (expert, _) in enumerate(pairs):
        if tiles and tiles[-1][0] == expert and tiles[-1][2] > tiles[-1][1]:
            tiles[-1][2] = place + 1
            continue
        tiles += [[0, 0, 0]] * spare.randrange(3)
        tiles.append([expert, place, place + 1])
    tiles += [[0, 0, 0]] * (1 + spare.randrange(40))
    order = torch.full((ids.numel(),), 2**20, dtype=torch.int32)
    order[: len(pairs)] = torch.tensor([pair for _, pair in pairs], dtype=torch.int32)
    return Plan(order, torch.tensor(tiles, dtype=torch.int32), sm90_few.MOST_TOKENS, experts)


def routes_of(tokens: int, top_k: int, experts: int, seed: int, idle: float) -> Routes:
    """Random choices; each pair is left out with probability `idle`."""
    drawn = random.Random(seed)
    ids = [[drawn.choice([-1, *[each] * round(1 / idle - 1)]) if idle else each
            for each in drawn.sample(range(experts), top_k)] for _ in range(tokens)]  # fmt: skip
    weights = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(seed)) + 0.1
    chosen = torch.tensor(ids, dtype=torch.int32)
    return Routes(chosen, weights, plan_of(chosen, experts, drawn))


def drawn_rows(
    tokens: int, hidden: int, seed: int, *, with_shared: bool, with_gate: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """x, whose rows do not follow each other, what is shared and its gate, and room for the result."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden + 8, generator=generator).bfloat16()[:, :hidden]
    shared = torch.randn(tokens, hidden, generator=generator).bfloat16() if with_shared else None
    gate = torch.randn(tokens, 1, generator=generator).bfloat16() if with_gate else None
    return x, shared, gate, torch.full((tokens, hidden), float("nan"), dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "ffn", "hidden", "sms", "idle"),
    [
        (1, 3, 7, 40, 304, 2, 0.0),
        (1, 2, 3, 272, 80, 5, 0.0),
        (4, 2, 3, 144, 208, 3, 0.25),
        (7, 3, 5, 24, 528, 4, 0.2),
        (13, 1, 2, 96, 176, 3, 0.0),
        (8, 2, 2, 56, 432, 1, 0.1),
        (3, 2, 4, 16, 2064, 2, 0.5),
        (2, 3, 8, 1040, 48, 1, 0.0),
    ],
)
def test_experts_give_the_weighted_sum(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, kind: str, whole: bool, tokens: int, top_k: int,
    experts: int, ffn: int, hidden: int, sms: int, idle: float,
) -> None:  # fmt: skip
    if whole and tokens > 8:
        pytest.skip("a product has eight tokens")
    monkeypatch.setattr(sm90_few, "WHOLE_ROWS", range(1, 9) if whole else range(0))
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    unit = 8 if kind == "dense" else 16
    ffn, hidden = -(-ffn // unit) * unit, -(-hidden // unit) * unit
    biased, clamped = kind == "dense" and tokens != 4, tokens % 2 == 0
    weights = random_experts(experts, ffn, hidden, torch.bfloat16, CPU, bias=biased, seed=seed)
    weights = quantize_experts(weights, kind)  # type: ignore[arg-type]
    Machine(library, monkeypatch, sms, seed)
    x, shared, gate, out = drawn_rows(tokens, hidden, seed, with_shared=top_k > 1, with_gate=top_k > 2)
    routes = routes_of(tokens, top_k, experts, seed, idle)
    way = "clamped" if clamped else "silu"
    sm90_few.experts(x, routes, weights, out, activation=way, limit=0.8, shared=shared, shared_gate=gate)
    if kind == "dense":
        expected = mixed(x, routes.ids, routes.weights, weights, way, 0.8, shared, gate)
        torch.testing.assert_close(out.double(), expected, rtol=1.2e-2, atol=1.2e-2 * float(expected.abs().max()))
        return
    expected = reference.experts(
        x,
        routes,
        weights,
        activation=way,
        limit=0.8,
        shared=shared,
        shared_gate=gate,  # type: ignore[arg-type]
    )
    # A value on the edge between two e4m3 numbers may fall either way.
    assert ((out.float() - expected.float()).norm() / expected.float().norm()).item() < 0.01


def test_a_token_s_bits_do_not_depend_on_the_others(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on the speeds of what runs beside it."""
    weights = random_experts(6, 48, 336, torch.bfloat16, CPU, seed=4)
    x = torch.randn(5, 336, generator=torch.Generator().manual_seed(5)).bfloat16()
    routes = routes_of(5, 3, 6, 6, 0.0)
    outs = []
    for seed, order in enumerate([[0, 1, 2, 3, 4], [3, 1, 4, 0, 2]]):
        Machine(library, monkeypatch, 3, seed)
        ids = routes.ids[order]
        moved = Routes(ids, routes.weights[order].contiguous(), plan_of(ids, 6, random.Random(seed)))
        out = torch.empty_like(x)
        sm90_few.experts(x[order].contiguous(), moved, weights, out)
        outs.append(out[torch.tensor(order).argsort()])
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("whole", [False, True])
def test_a_ring_goes_round_many_times(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """One SM does everything."""
    monkeypatch.setattr(sm90_few, "WHOLE_ROWS", range(1, 9) if whole else range(0))
    weights = quantize_experts(random_experts(4, 64, 1040, torch.bfloat16, CPU, seed=1), "fp8_channel")
    Machine(library, monkeypatch, 1, 9)
    x = torch.randn(2, 1040, generator=torch.Generator().manual_seed(2)).bfloat16()
    routes, out = routes_of(2, 3, 4, 3, 0.0), torch.empty(2, 1040, dtype=torch.bfloat16)
    sm90_few.experts(x, routes, weights, out)
    expected = reference.experts(x, routes, weights)
    assert ((out.float() - expected.float()).norm() / expected.float().norm()).item() < 0.01


def test_what_cannot_be_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "sm_of", lambda _: 90)
    monkeypatch.setattr(cuda, "missing_cubin", lambda *_: None)
    weights = random_experts(4, 48, 80, torch.bfloat16, CPU)
    x, routes = torch.randn(3, 80).bfloat16(), routes_of(3, 2, 4, 0, 0.0)
    assert sm90_few.refusal(x, routes, weights, None) is None
    assert "plan" in str(sm90_few.refusal(x, replace(routes, plan=None), weights, None))
    assert "bfloat16" in str(sm90_few.refusal(x.half(), routes, weights, None))
    assert "rows have" in str(sm90_few.refusal(x.t().contiguous().t(), routes, weights, None))
    odd = random_experts(4, 44, 80, torch.bfloat16, CPU)
    assert "44" in str(sm90_few.refusal(x, routes, odd, None))
    monkeypatch.setattr(operands, "HOPPER_SHARED", 60_000)
    assert "shared memory" in str(sm90_few.refusal(x, routes, weights, None))


@pytest.mark.parametrize(("hidden", "sms", "rows"), [(2048, 132, 16), (2880, 132, 12), (304, 2, 16), (90, 5, 10)])
def test_rows_of_down_are_dealt_evenly(hidden: int, sms: int, rows: int) -> None:
    assert sm90_few.down_rows(hidden, sms) == rows
