"""The kernels of csrc/sm90_unpacked_experts.cuh, run on the CPU by `emulator/`, against the layouts' own reading.

Sizes stand in no table: rows that end with steps of every size, and experts in parts of which the last is smaller.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest
import torch
from tests.kernels.emulator.build import compile_emulated
from tests.kernels.moe.oracle import random_experts

from stoker_kernels.launch import cuda
from stoker_kernels.moe import ExpertKind, ExpertWeights, choose, quantize_experts, reference
from stoker_kernels.moe.hopper import sm90_packed, sm90_unpacked

SOURCES = ("sm90_unpacked_experts.cuh", "packed_codes.cuh", "four_bits.cuh", "few_arguments.cuh")
KINDS = list(sm90_packed.KINDS)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiled = compile_emulated(SOURCES, "unpacked_experts.cpp", tmp_path_factory.mktemp("emulator"))
    assert compiled.arguments_size() == ctypes.sizeof(sm90_unpacked.UnpackArguments)
    return compiled


@pytest.fixture
def launches(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each may begin before the one before it is done."""
    found: list[bool] = []

    def kernel(stem: str, arch: str, name: str, shared_bytes: int, threads: int, device: int) -> cuda.Kernel:
        which = next(at for at, kind in enumerate(KINDS) if name.endswith(kind))
        return cuda.Kernel(name, which, shared_bytes, threads)

    def launch(kernel: cuda.Kernel, grid: int, arguments: list[Any], device: Any, *, pdl: bool) -> None:
        found.append(pdl)
        library.unpacked_experts(kernel.handle, grid, random.randrange(1000), ctypes.byref(arguments[0]))

    monkeypatch.setattr(cuda, "kernel", kernel)
    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(sm90_unpacked, "sm_count", lambda _: 1)
    return found


def experts_of(kind: ExpertKind, experts: int, ffn: int, hidden: int, group: int, *, gated: bool) -> ExpertWeights:
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    dense = random_experts(experts, ffn, hidden, torch.bfloat16, torch.device("cpu"), seed=seed, gated=gated)
    return quantize_experts(dense, kind, group)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("experts", "ffn", "hidden", "group", "gated"),
    [(5, 96, 224, 32, True), (3, 480, 160, 0, True), (4, 32, 736, 64, False), (2, 288, 2080, 32, True)],
)
@pytest.mark.parametrize("at_once", [1, 2, 9])
def test_every_number_is_the_layout_s(
    kind: ExpertKind, experts: int, ffn: int, hidden: int, group: int, gated: bool, at_once: int, launches: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    weights = experts_of(kind, experts, ffn, hidden, group, gated=gated)
    assert sm90_unpacked.group_refusal(weights) is None
    for of_gate in (True, False):
        rows, columns = weights.gate_up.shape[1] if of_gate else hidden, hidden if of_gate else ffn
        monkeypatch.setattr(sm90_unpacked, "SCRATCH_BYTES", at_once * 2 * rows * columns + 7)
        seen = []
        for first, found in sm90_unpacked.unpacked(weights, gated=of_gate):
            assert len(found) <= at_once
            for at, matrix in enumerate(found):
                # Of integers each step is rounded, of NVFP4 the product with the factor, MXFP4 is exact.
                steps = torch.bfloat16 if kind == "int4" else torch.float32
                exact = reference.matrices(weights, first + at, steps)[0 if of_gate else 1].float()
                assert torch.equal(matrix.float(), exact if kind == "mxfp4" else exact.bfloat16().float())
                seen.append(first + at)
        assert seen == list(range(experts))
    assert not any(launches)


def test_what_is_not_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "missing_cubin", lambda *_: None)
    weights = experts_of("int4", 2, 96, 192, 96, gated=True)
    assert "groups of 96" in str(sm90_unpacked.refusal(weights))
    assert sm90_unpacked.refusal(experts_of("int4", 2, 96, 192, 64, gated=True)) is None
    assert "32" in str(sm90_unpacked.refusal(experts_of("nvfp4", 2, 48, 96, 0, gated=True)))


def test_room_is_that_of_as_many_experts_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_unpacked, "SCRATCH_BYTES", 1000)
    sizes = (7, 4, 10)  # gate and up take 160 bytes, down 80
    assert sm90_unpacked.scratch_bytes(*sizes, gated=True) == 6 * 160
    assert sm90_unpacked.scratch_bytes(*sizes, gated=False) == 7 * 80
    assert sm90_unpacked.scratch_bytes(2, 400, 100, gated=True) == 2 * 800 * 100  # one, however large
    for kind, least in choose.MANY_TOKENS.items():
        packed = kind in KINDS
        assert choose.scratch_bytes(kind, sizes, least, gated=True) == (6 * 160 if packed else 0)  # type: ignore[arg-type]
        assert choose.scratch_bytes(kind, sizes, least - 0.5, gated=True) == 0  # type: ignore[arg-type]
