"""The kernels of csrc/sm90_packed_experts.cuh, run on the CPU by `emulator/`, against the reference, which decodes by
itself.

Shapes are drawn: rows whose last columns are steps of several sizes, experts that several tokens share, tokens without
experts, groups of integers of every size.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace

import pytest
import torch
from tests.kernels.moe.oracle import random_experts
from tests.kernels.moe.packed_machine import Machine, compiled_kernels
from tests.kernels.moe.test_sm90_few import CPU, drawn_rows, plan_of, routes_of

from stoker_kernels.launch import cuda
from stoker_kernels.moe import ExpertWeights, Routes, quantize_experts, reference
from stoker_kernels.moe.hopper import operands, sm90_packed


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled_kernels(tmp_path_factory.mktemp("emulator"))


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "sm_of", lambda _: 90)
    monkeypatch.setattr(cuda, "missing_cubin", lambda *_: None)


def drawn_weights(kind: str, experts: int, ffn: int, hidden: int, seed: int, *, bias: bool) -> ExpertWeights:
    dense = random_experts(experts, ffn, hidden, torch.bfloat16, CPU, bias=bias, seed=seed)
    group = random.Random(seed).choice([0, 32, 64, 128, 256, 512]) if kind == "int4" else 0
    return quantize_experts(dense, kind, group)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", sm90_packed.KINDS)
@pytest.mark.parametrize("case", range(10))
def test_experts_give_the_weighted_sum(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, kind: str, case: int
) -> None:
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    draw = random.Random(seed)
    tokens, top_k = (1, draw.randint(1, 4)) if case < 4 else (draw.randint(1, 8), draw.randint(1, 3))
    experts, sms = draw.randint(top_k, 7), draw.randint(1, 5)
    ffn, hidden = 32 * draw.randint(1, 12), 32 * draw.randint(1, 20)
    weights = drawn_weights(kind, experts, ffn, hidden, seed, bias=case % 2 == 0)
    Machine(library, monkeypatch, sms, seed)
    x, shared, gate, out = drawn_rows(tokens, hidden, seed, with_shared=case % 3 > 0, with_gate=case % 3 == 2)
    routes = routes_of(tokens, top_k, experts, seed, draw.choice([0.0, 0.25]))
    assert sm90_packed.refusal(x, routes, weights, shared) is None
    way = draw.choice(["clamped", "silu"])
    sm90_packed.experts(x, routes, weights, out, activation=way, limit=0.8, shared=shared, shared_gate=gate)
    expected = reference.experts(
        x, routes, weights, activation=way, limit=0.8, shared=shared, shared_gate=gate,  # type: ignore[arg-type]
    )  # fmt: skip
    assert float((out.float() - expected.float()).norm()) <= 8e-3 * float(expected.float().norm())


def test_a_token_s_bits_do_not_depend_on_the_others(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on the speeds of what runs beside it."""
    weights = drawn_weights("mxfp4", 6, 96, 352, 4, bias=True)
    x = torch.randn(5, 352, generator=torch.Generator().manual_seed(5)).bfloat16()
    routes = routes_of(5, 3, 6, 6, 0.0)
    outs = []
    for seed, order in enumerate([[0, 1, 2, 3, 4], [3, 1, 4, 0, 2]]):
        Machine(library, monkeypatch, 3, seed)
        ids = routes.ids[order]
        moved = Routes(ids, routes.weights[order].contiguous(), plan_of(ids, 6, random.Random(seed)))
        out = torch.empty_like(x)
        sm90_packed.experts(x[order].contiguous(), moved, weights, out)
        outs.append(out[torch.tensor(order).argsort()])
    assert torch.equal(outs[0], outs[1])


def test_what_cannot_be_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = drawn_weights("mxfp4", 4, 96, 160, 3, bias=False)
    x, routes = torch.randn(3, 160).bfloat16(), routes_of(3, 2, 4, 0, 0.0)
    assert sm90_packed.refusal(x, routes, weights, None) is None
    assert "plan" in str(sm90_packed.refusal(x, replace(routes, plan=None), weights, None))
    assert "bfloat16" in str(sm90_packed.refusal(x.half(), routes, weights, None))
    assert "9 tokens" in str(sm90_packed.refusal(torch.randn(9, 160).bfloat16(), routes, weights, None))
    odd = quantize_experts(random_experts(4, 192, 384, torch.bfloat16, CPU), "int4", 96)
    assert "96" in str(sm90_packed.refusal(torch.randn(3, 384).bfloat16(), routes, odd, None))
    monkeypatch.setattr(operands, "HOPPER_SHARED", 6_000)
    assert "shared memory" in str(sm90_packed.refusal(x, routes, weights, None))


def test_wide_rows_of_few_jobs(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer jobs than CTAs, and more boxes of columns than warps: a CTA's warps share one job at the most."""
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    weights = drawn_weights("nvfp4", 2, 32, 32 * random.Random(seed).randint(130, 150), seed, bias=True)
    Machine(library, monkeypatch, 3, seed)
    x = torch.randn(1, weights.hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    routes, out = routes_of(1, 1, 2, seed, 0.0), torch.empty_like(x)
    sm90_packed.experts(x, routes, weights, out)
    expected = reference.experts(x, routes, weights)
    assert float((out.float() - expected.float()).norm()) <= 8e-3 * float(expected.float().norm())


@pytest.mark.parametrize(
    ("jobs", "columns", "parts"), [(1, 2880, 8), (4, 2880, 2), (3, 480, 2), (8, 768, 1), (0, 96, 1), (0, 7040, 8)]
)
def test_every_warp_has_a_part(jobs: int, columns: int, parts: int) -> None:
    assert sm90_packed.parts_of(jobs, columns) == parts
