"""csrc/sm90_route.cuh on the CPU by `emulator/`: experts, weights and the order of tokens, against the reference.

Numbers of tokens, choices and experts are drawn; what lies between rows of logits is no number.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest
import torch
from tests.kernels.emulator.build import compile_emulated
from tests.kernels.moe.test_on_device import check_plan
from tests.kernels.moe.test_sm90_few_choice import KINDS_OF_LOGITS, WAYS, drawn

from stoker_kernels.launch import cuda
from stoker_kernels.moe import Routing, choose, reference, triton_route
from stoker_kernels.moe.hopper import sm90_route

SOURCES = ("sm90_route.cuh", "few_arguments.cuh", "few_choice.cuh")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiled = compile_emulated(SOURCES, "route.cpp", tmp_path_factory.mktemp("emulator"))
    assert compiled.arguments_size() == ctypes.sizeof(sm90_route.RouteArguments)
    return compiled


@pytest.fixture
def emulated(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> int:
    """The seed of its warps' speeds."""
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")

    def launch(kernel: cuda.Kernel, grid: int, arguments: list[Any], device: torch.device, *, pdl: bool) -> None:
        assert grid == 1
        library.route(kernel.threads, seed, ctypes.byref(arguments[0]))

    monkeypatch.setattr(
        cuda, "kernel", lambda stem, arch, name, space, threads, device: cuda.Kernel(name, None, space, threads)
    )
    monkeypatch.setattr(cuda, "launch", launch)
    return seed


@pytest.mark.parametrize("way", KINDS_OF_LOGITS)
@pytest.mark.parametrize(("routing", "experts", "with_bias"), WAYS)
def test_it_chooses_and_sorts_as_the_reference(
    emulated: int, routing: Routing, experts: int, with_bias: bool, way: str
) -> None:
    generator, picked = torch.Generator().manual_seed(emulated), random.Random(emulated)
    tokens = picked.choice([1, 2, 7, 19, 33])
    logits = drawn(way, tokens, experts, generator)
    bias = torch.randint(-8, 8, (experts,), generator=generator) / 8 if with_bias else None
    slots = torch.tensor([-1 if picked.random() < 0.2 else token for token in range(tokens)])
    counts = torch.full((experts,), -7, dtype=torch.int32)
    found = sm90_route.route(logits, routing, bias=bias, slot_mapping=slots, counts=counts)
    expected = reference.route(logits, routing, bias=bias, slot_mapping=slots)
    assert torch.equal(found.ids, expected.ids)
    there = expected.ids >= 0
    torch.testing.assert_close(found.weights[there], expected.weights[there], rtol=1e-4, atol=1e-7)
    check_plan(found, experts)
    assert counts.tolist() == [int((found.ids == expert).sum()) for expert in range(experts)]


def test_one_expert_of_many_tokens_has_several_tiles(emulated: int) -> None:
    logits = torch.zeros(sm90_route.MOST_TOKENS, 37).bfloat16()
    found = sm90_route.route(logits, Routing(2))
    assert found.ids.tolist() == [[0, 1]] * sm90_route.MOST_TOKENS
    check_plan(found, 37)


def test_shared_memory_is_enough_for_the_largest() -> None:
    assert sm90_route.shared_bytes(sm90_route.MOST_TOKENS, 32, 256) < 232_448


def test_what_it_does_not_take_goes_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than one CTA chooses for, logits in float32, more experts than a warp has lanes for."""
    taken = []
    monkeypatch.setattr(sm90_route, "sm_of", lambda _: 90)
    monkeypatch.setattr(cuda, "missing_cubin", lambda *_: None)
    monkeypatch.setattr(sm90_route, "route", lambda logits, *_, **__: taken.append(len(logits)))
    monkeypatch.setattr(triton_route, "route", lambda logits, *_, **__: taken.append(-len(logits)))
    for tokens, experts, dtype in ((13, 130, torch.bfloat16), (13, 130, torch.float32), (13, 257, torch.bfloat16)):
        choose.route(torch.zeros(tokens, experts, dtype=dtype), Routing(5))
    choose.route(torch.zeros(choose.ONE_LAUNCH.stop, 130).bfloat16(), Routing(5))
    choose.route(torch.zeros(1, 130).bfloat16(), Routing(5))
    assert taken == [13, -13, -13, -choose.ONE_LAUNCH.stop, -1]
    reason = sm90_route.refusal(torch.zeros(sm90_route.MOST_TOKENS + 1, 130).bfloat16(), Routing(5))
    assert reason is not None
    assert "1 to 128" in reason
    reason = sm90_route.refusal(torch.zeros(3, 9).bfloat16(), Routing(2, "sparsemixer"))
    assert reason is not None
    assert "softmax" in reason
