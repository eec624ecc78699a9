"""The choice that csrc/few_choice.cuh makes inside the kernels of experts, run on the CPU by `emulator/`.

Which experts: against the reference, equal in every case, ties included. What they weigh and give: against plain loops
in fp64. Numbers of experts fill no lane's share; what lies between rows of logits is no number.
"""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from tests.kernels.moe.few_machine import Machine, compiled_kernels
from tests.kernels.moe.oracle import chosen, mixed, random_experts
from tests.kernels.moe.routings import ROUTINGS
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.moe import ExpertWeights, Routing, quantize_experts, reference
from stoker_kernels.moe.hopper import operands, sm90_few

CPU = torch.device("cpu")
KINDS_OF_LOGITS = ["any", "coarse", "zeros", "saturated", "equal", "half of them", "two numbers"]
FFN, HIDDEN = 16, 24
# Beside those of the table: more experts than a lane's share, up to all that a warp has.
WAYS = [
    *((routing, experts, bias) for routing, experts, bias in ROUTINGS if routing.scoring != "sparsemixer"),
    (Routing(8, renormalize=True), 128, False),
    (Routing(6), 255, False),
    (Routing(8, "sigmoid", renormalize=True, groups=8, top_groups=4, group_score="top2", scale=2.5), 256, True),
    (Routing(5, groups=9, top_groups=3, group_score="top2"), 99, False),
    (Routing(3, groups=32, top_groups=4), 64, True),
    (Routing(7, "sigmoid", scale=0.7), 33, True),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled_kernels(tmp_path_factory.mktemp("emulator"))


def drawn(way: str, tokens: int, experts: int, generator: torch.Generator) -> Tensor:
    """Logits of bf16, their rows some numbers apart with NaNs between."""
    room = torch.full((tokens, experts + 11), float("nan")).bfloat16()
    logits = room[:, :experts]
    noise = torch.randn(tokens, experts, generator=generator)
    if way == "any":
        logits.copy_(noise * 3)
    elif way == "coarse":  # many ties
        logits.copy_(noise.round())
    elif way == "zeros":  # of both signs, the best there are
        logits.copy_(torch.where(noise.abs() < 0.6, noise * 0.0, -noise.abs().round() - 1))
    elif way == "saturated":  # a sigmoid of one or zero, a softmax that underflows
        logits.copy_(noise * 60)
    else:
        logits.fill_(-0.5 if way == "equal" else float("-inf"))
        if way == "half of them":
            logits[:, experts // 2 :] = noise[:, experts // 2 :]
        elif way == "two numbers":
            logits[:, [experts // 3, experts * 2 // 3]] = noise[:, :2].bfloat16()
    return logits


def run(
    logits: Tensor, routing: Routing, weights: ExpertWeights, x: Tensor, bias: Tensor | None, slots: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What comes out, and the tokens of each expert."""
    counts = torch.full((logits.shape[1],), -7, dtype=torch.int32)
    out = torch.full(x.shape, float("nan")).bfloat16()
    sm90_few.mixture(x, logits, routing, weights, out, bias=bias, slot_mapping=slots, counts=counts)
    return out, counts


@pytest.mark.parametrize("way", KINDS_OF_LOGITS)
@pytest.mark.parametrize(("routing", "experts", "with_bias"), WAYS)
def test_experts_are_those_of_the_reference(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, routing: Routing, experts: int, with_bias: bool, way: str
) -> None:
    """And what comes out is what these give, weighed as it says."""
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    generator, tokens = torch.Generator().manual_seed(seed), random.Random(seed).randrange(1, 1 + 32 // routing.top_k)
    tokens = min(tokens, 4)
    Machine(library, monkeypatch, 2, seed)
    logits = drawn(way, tokens, experts, generator)
    # Eighths: the sum with a score of zero or one is exact, so that ties stay ties.
    bias = torch.randint(-8, 8, (experts,), generator=generator) / 8 if with_bias else None
    expected = reference.route(logits, routing, bias=bias)
    weights = random_experts(experts, FFN, HIDDEN, torch.bfloat16, CPU, seed=seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    out, counts = run(logits, routing, weights, x, bias, None)
    assert counts.tolist() == torch.bincount(expected.ids.flatten(), minlength=experts).tolist()
    result = mixed(x, expected.ids, expected.weights.double(), weights, "silu", 0.0)
    torch.testing.assert_close(out.double(), result, rtol=1.2e-2, atol=1.2e-2 * float(result.abs().max()))


@pytest.mark.parametrize("kind", ["dense", "fp8_channel", "fp8_block"])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "sms"), [(1, 5, 37, 3), (2, 7, 12, 4), (5, 6, 9, 2), (8, 4, 130, 5)]
)
def test_tokens_share_experts(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, kind: str, tokens: int, top_k: int, experts: int, sms: int
) -> None:
    """Weights and experts by loops in fp64; some tokens are padding."""
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    Machine(library, monkeypatch, sms, seed)
    generator, picked = torch.Generator().manual_seed(seed), random.Random(seed)
    routing = Routing(top_k, picked.choice(["softmax", "sigmoid"]), renormalize=picked.random() < 0.5, scale=1.3)
    rows = [picked.sample(range(-2 * experts, 2 * experts), experts) for _ in range(tokens)]
    # Steps that bf16 holds and that no rounding of a sigmoid makes equal.
    logits = torch.tensor(rows).div(32 if experts < 64 else 64).bfloat16()
    slots = torch.tensor([-1 if token % 3 == 1 else token for token in range(tokens)])
    ffn, hidden = 16 * picked.randrange(2, 9), 16 * picked.randrange(5, 30)
    dense = random_experts(experts, ffn, hidden, torch.bfloat16, CPU, seed=seed)
    weights = quantize_experts(dense, kind)  # type: ignore[arg-type]
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    out, counts = run(logits, routing, weights, x, None, slots)
    pairs = [chosen(row.tolist(), routing, None) for row in logits.double()]
    ids = torch.tensor([[expert if slots[token] >= 0 else -1 for expert, _ in of] for token, of in enumerate(pairs)])
    shares = torch.tensor([[weight for _, weight in of] for of in pairs], dtype=torch.float64)
    assert counts.tolist() == torch.bincount(ids[ids >= 0], minlength=experts).tolist()
    if kind == "dense":
        expected = mixed(x, ids, shares, dense, "silu", 0.0)
        torch.testing.assert_close(out.double(), expected, rtol=1.2e-2, atol=1.2e-2 * float(expected.abs().max()))
        return
    routes = reference.route(logits, routing, slot_mapping=slots)
    assert routes.ids.tolist() == ids.tolist()
    expected = reference.experts(x, routes, weights).double()
    # A value on the edge between two e4m3 numbers may fall either way.
    assert ((out.double() - expected).norm() / expected.norm()).item() < 0.01


def test_a_step_of_padding_chooses_nothing(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(library, monkeypatch, 3, 1)
    weights = random_experts(20, FFN, HIDDEN, torch.bfloat16, CPU)
    logits, x = torch.randn(2, 20).bfloat16(), torch.randn(2, HIDDEN).bfloat16()
    out, counts = run(logits, Routing(3), weights, x, None, torch.tensor([-1, -1]))
    assert not out.any()
    assert not counts.any()


def test_what_it_does_not_choose_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "sm_of", lambda _: 90)
    monkeypatch.setattr(cuda, "missing_cubin", lambda *_: None)
    weights = random_experts(6, 16, 16, torch.bfloat16, CPU)
    x = torch.randn(3, 16).bfloat16()

    def reason(routing: Routing, experts: int = 6, dtype: torch.dtype = torch.bfloat16, tokens: int = 3) -> str | None:
        return sm90_few.mixture_refusal(x, torch.randn(tokens, experts).to(dtype), routing, weights, None)

    assert reason(Routing(2)) is None
    assert reason(Routing(10, "sigmoid"), 256) is None
    assert "257 experts" in str(reason(Routing(2), 257))
    assert "33 choices" in str(reason(Routing(11), 40))
    assert "33 groups" in str(reason(Routing(2, groups=33), 66))
    assert "softmax or sigmoid" in str(reason(Routing(2, "sparsemixer")))
    assert "bfloat16" in str(reason(Routing(2), dtype=torch.float32))
    logits = torch.randn(3, 6).bfloat16()
    for beside in ({"bias": torch.rand(6).half()}, {"slot_mapping": torch.arange(3).int()},
                   {"counts": torch.empty(12, dtype=torch.int32)[::2]}):  # fmt: skip
        assert "contiguous" in str(sm90_few.mixture_refusal(x, logits, Routing(2), weights, None, **beside))
