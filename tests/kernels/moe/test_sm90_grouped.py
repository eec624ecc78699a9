"""The kernels of csrc/sm90_grouped_experts.cuh, run on the CPU by `emulator/`, against plain loops in fp64.

Shapes stand in no table: rows and columns that fill no tile and no box, experts without tokens, one that has all, tiles
of a plan of any number of tokens, and empty ones among them.
"""

from __future__ import annotations

import ctypes
import random
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.kernels.moe.grouped_machine import KINDS, Machine, compiled_kernels, plan_of, routes_of
from tests.kernels.moe.oracle import mixed, random_experts
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.moe import ExpertKind, ExpertWeights, Routes, choose, quantize_experts, reference, triton_experts
from stoker_kernels.moe.hopper import operands, sm90_grouped, sm90_packed, sm90_unpacked

CPU = torch.device("cpu")
CASES = [
    # tokens, top_k, experts, ffn, hidden, sms, idle, spread
    (150, 2, 3, 136, 80, 2, 0.0, "any"),
    (201, 1, 4, 40, 272, 3, 0.0, "one"),
    (70, 3, 5, 304, 144, 5, 0.25, "any"),
    (33, 2, 9, 24, 592, 1, 0.5, "some"),
    (300, 1, 2, 160, 48, 7, 0.1, "any"),
    (1, 2, 6, 88, 528, 4, 0.0, "any"),
    (262, 2, 2, 264, 112, 1, 0.0, "any"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled_kernels(tmp_path_factory.mktemp("emulator"))


def summed(rows: Tensor, routes: Routes) -> Tensor:
    """The weighted sum of each token's rows, in fp64; those of no expert are anything."""
    each = rows.double().view(*routes.ids.shape, -1)
    chosen = (routes.ids >= 0)[..., None]
    return torch.where(chosen, each * routes.weights.double()[..., None], 0.0).sum(1)


def case_of(kind: ExpertKind, ffn: int, hidden: int, experts: int, *, bias: bool, seed: int) -> ExpertWeights:
    weights = random_experts(experts, ffn, hidden, torch.bfloat16, CPU, bias=bias, seed=seed)
    return quantize_experts(weights, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "top_k", "experts", "ffn", "hidden", "sms", "idle", "spread"), CASES)
def test_pairs_give_the_weighted_sum(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, kind: ExpertKind, tokens: int,
    top_k: int, experts: int, ffn: int, hidden: int, sms: int, idle: float, spread: str,
) -> None:  # fmt: skip
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    unit = 8 if kind == "dense" else 16
    ffn, hidden = -(-ffn // unit) * unit, -(-hidden // unit) * unit
    way = "clamped" if tokens % 2 else "silu"
    weights = case_of(kind, ffn, hidden, experts, bias=tokens % 3 == 0, seed=seed)
    Machine(library, monkeypatch, sms, seed, tokens, tokens * top_k)
    x = torch.randn(tokens, hidden + 8, generator=torch.Generator().manual_seed(seed)).bfloat16()[:, :hidden]
    routes = routes_of(tokens, top_k, experts, seed, idle, spread)
    asked = {"activation": way, "limit": 0.8}
    found = summed(sm90_grouped.pair_rows(x, routes, weights, **asked), routes)  # type: ignore[arg-type]
    if kind == "dense":
        expected = mixed(x, routes.ids, routes.weights, weights, **asked)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected, rtol=1.2e-2, atol=1.2e-2 * float(expected.abs().max()))
        return
    expected = reference.experts(x, routes, weights, **asked).double()  # type: ignore[arg-type]
    # A value on the edge between two e4m3 numbers may fall either way.
    assert ((found - expected).norm() / expected.norm()).item() < 0.01


@pytest.mark.parametrize("kind", sm90_packed.KINDS)
@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_experts_in_four_bits_come_some_at_a_time(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, kind: ExpertKind, at_once: int
) -> None:
    """As bf16 by other kernels; each part's tiles are its own, and its biases."""
    seed, tokens, hidden = random.randrange(1 << 20), 130, 96
    print(f"seed {seed}")
    weights = case_of(kind, 64, hidden, 5, bias=True, seed=seed)
    Machine(library, monkeypatch, 3, seed, tokens, 2 * tokens)

    made: list[weakref.ref[Tensor]] = []

    def unpacked(weights: ExpertWeights, *, gated: bool) -> Iterator[tuple[int, Tensor]]:
        assert not any(each() is not None for each in made), "what gate and up became is still there"
        for first in range(0, 5, at_once):
            some = range(first, min(first + at_once, 5))
            each = [reference.matrices(weights, expert, torch.bfloat16)[0 if gated else 1] for expert in some]
            found = torch.stack(each).bfloat16().contiguous()
            made.append(weakref.ref(found))
            yield first, found

    monkeypatch.setattr(sm90_unpacked, "unpacked", unpacked)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    routes = routes_of(tokens, 2, 5, seed, 0.1, "any")
    found = summed(sm90_grouped.pair_rows(x, routes, weights, activation="clamped", limit=0.8), routes)
    expected = reference.experts(x, routes, weights, activation="clamped", limit=0.8).double()
    assert ((found - expected).norm() / expected.norm()).item() < 8e-3
    assert len(made) == 2 * -(-5 // at_once)


def test_a_token_s_bits_do_not_depend_on_the_others(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on tiles, nor on the speeds of what runs beside it."""
    weights = case_of("dense", 72, 208, 3, bias=False, seed=4)
    x = torch.randn(190, 208, generator=torch.Generator().manual_seed(5)).bfloat16()
    routes = routes_of(190, 2, 3, 6, 0.0, "any")
    outs = []
    for seed in range(2):
        order = torch.randperm(190, generator=torch.Generator().manual_seed(seed))[: 190 - 70 * seed]
        Machine(library, monkeypatch, 3, seed, len(order), 2 * len(order))
        ids = routes.ids[order]
        moved = Routes(ids, routes.weights[order], plan_of(ids, 3, random.Random(seed)))
        rows = sm90_grouped.pair_rows(x[order].contiguous(), moved, weights)
        outs.append(dict(zip(order.tolist(), rows.view(len(order), 2, -1), strict=True)))
    assert all(torch.equal(outs[0][token], rows) for token, rows in outs[1].items())


def test_what_cannot_be_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "sm_of", lambda _: 90)
    monkeypatch.setattr(cuda, "missing_cubin", lambda *_: None)
    weights = case_of("dense", 48, 80, 4, bias=False, seed=0)
    x, routes = torch.randn(30, 80).bfloat16(), routes_of(30, 2, 4, 0, 0.0, "any")
    assert sm90_grouped.refusal(x, routes, weights, None) is None
    assert "plan" in str(sm90_grouped.refusal(x, replace(routes, plan=None), weights, None))
    assert "bfloat16" in str(sm90_grouped.refusal(x.half(), routes, weights, None))
    assert "bfloat16" in str(sm90_grouped.refusal(x, routes, weights, x.float()))
    assert "rows of x" in str(sm90_grouped.refusal(x.t().contiguous().t(), routes, weights, None))
    assert "44" in str(sm90_grouped.refusal(x, routes, case_of("dense", 44, 80, 4, bias=False, seed=0), None))
    wide = torch.randn(30, 96).bfloat16()
    assert "int8" in str(sm90_grouped.refusal(wide, routes, case_of("int8", 64, 96, 4, bias=False, seed=0), None))
    assert sm90_grouped.refusal(wide, routes, case_of("mxfp4", 64, 96, 4, bias=False, seed=0), None) is None
    ungated = random_experts(4, 48, 80, torch.bfloat16, CPU, gated=False)
    assert "gate" in str(sm90_grouped.refusal(x, routes, ungated, None))
    with pytest.raises(ValueError, match="experts=grouped takes experts with a gate"):
        sm90_grouped.experts(x, routes, ungated)
    monkeypatch.setattr(sm90_grouped, "MOST_EXPERTS", 3)
    assert "4 experts" in str(sm90_grouped.refusal(x, routes, weights, None))


@pytest.mark.parametrize(("bound", "taken"), [(9.0, True), (12.0, True), (12.5, False)])
def test_tokens_an_expert_choose_the_kernels(monkeypatch: pytest.MonkeyPatch, bound: float, taken: bool) -> None:
    """Of a rank's experts as of all: 54 tokens that choose 2 of 9 experts are 12 an expert."""
    ran: list[str] = []
    monkeypatch.setattr(sm90_grouped, "pair_rows", lambda *_, **__: ran.append("grouped"))
    monkeypatch.setattr(triton_experts, "sum_pairs", lambda *_, **__: None)
    monkeypatch.setattr(triton_experts, "pair_rows", lambda *_, **__: ran.append("triton"))
    monkeypatch.setattr(sm90_grouped, "refusal", lambda *_: None)
    monkeypatch.setattr(choose, "MANY_TOKENS", {"dense": bound})
    x, routes = torch.randn(54, 80).bfloat16(), routes_of(54, 2, 9, 0, 0.0, "any")
    for experts in (9, 4):
        choose.experts(x, routes, case_of("dense", 48, 80, experts, bias=False, seed=0))
    assert ran == ["grouped" if taken else "triton"] * 2
    monkeypatch.setattr(choose, "sm_count", lambda _: 5)  # 9 experts make as many tiles, 4 do not
    choose.experts(x, routes, case_of("dense", 48, 80, 9, bias=False, seed=0))
    choose.experts(x, routes, case_of("dense", 48, 80, 4, bias=False, seed=0))
    assert ran[2:] == ["grouped" if taken else "triton", "triton"]
    monkeypatch.setattr(sm90_grouped, "refusal", lambda *_: "a reason")
    choose.experts(x, routes, case_of("dense", 48, 80, 9, bias=False, seed=0))
    choose.experts(x, routes, case_of("mxfp4", 64, 96, 9, bias=False, seed=0))
    assert ran[4:] == ["triton"] * 2
