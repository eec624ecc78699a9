"""A device that runs the kernels of csrc/sm90_grouped_experts.cuh on the CPU, by `emulator/`."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.emulator.build import compile_emulated, tensor_map
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.moe import ExpertKind, Plan, Routes
from stoker_kernels.moe.hopper import operands, sm90_grouped

KINDS: tuple[ExpertKind, ...] = ("dense", "fp8_channel", "fp8_block")

SOURCES = (
    *("sm90_grouped_experts.cuh", "grouped_arguments.cuh", "grouped_epilogue.cuh", "grouped_tiles.cuh"),
    *("silu.cuh", "sm90_chunk.cuh", "store_eights.cuh"),
)


class Before(ctypes.Structure):
    """Before of emulator/grouped_experts.cpp."""

    _fields_ = [("x", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("x_bytes", "out_bytes", "order_bytes"))]


def compiled_kernels(folder: Path) -> ctypes.CDLL:
    """The library of the kernels."""
    compiled = compile_emulated(SOURCES, "grouped_experts.cpp", folder)
    assert compiled.arguments_size() == ctypes.sizeof(sm90_grouped.GroupedArguments)
    return compiled


class Machine:
    """A device of `sms` SMs, whose warps, CTAs and copies run at speeds by `seed`, for tokens with `pairs` choices."""

    def __init__(
        self, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, sms: int, seed: int, tokens: int, pairs: int
    ) -> None:
        self.library, self.seed, self.tokens, self.pairs = library, seed, tokens, pairs
        monkeypatch.setattr(cuda, "_encoded", tensor_map)
        monkeypatch.setattr(cuda, "kernel", self.kernel)
        monkeypatch.setattr(cuda, "launch", self.launch)
        monkeypatch.setattr(sm90_grouped, "sm_count", lambda _: sms)
        sm90_grouped._weight_map.cache_clear()  # by address

    def kernel(self, stem: str, arch: str, name: str, shared_bytes: int, threads: int, device: int) -> cuda.Kernel:
        assert shared_bytes <= operands.HOPPER_SHARED
        which = next(i for i, kind in enumerate(KINDS) if kind in name)
        return cuda.Kernel(name, (which, int("gate_up" in name)), shared_bytes, threads)

    def launch(self, kernel: cuda.Kernel, grid: int, arguments: list[Any], device: Any, *, pdl: bool) -> None:
        given, (_, gated) = arguments[2], kernel.handle
        rows = self.tokens if gated else self.pairs
        x_bytes = (rows - 1) * given.ld_x + given.x_bytes
        before = Before(given.x, x_bytes, self.pairs * given.n * 2, self.pairs * 4)
        given_all = (ctypes.byref(each) for each in (*arguments, before))
        self.library.grouped_experts(*kernel.handle, grid, self.seed, *given_all)


def plan_of(ids: Tensor, experts: int, spare: random.Random) -> Plan:
    """The order of pairs by expert and tiles of up to a random number of tokens, with empty ones between them."""
    flat, most = ids.flatten().tolist(), spare.choice([3, 16, 50, 128])
    pairs = sorted((expert, pair) for pair, expert in enumerate(flat) if expert >= 0)
    tiles: list[list[int]] = []
    for place, (expert, _) in enumerate(pairs):
        if tiles and tiles[-1][0] == expert and place - tiles[-1][1] < most and tiles[-1][2] == place:
            tiles[-1][2] = place + 1
            continue
        tiles += [[spare.randrange(experts), place, place]] * spare.randrange(3)
        tiles.append([expert, place, place + 1])
    tiles += [[0, 0, 0]] * (1 + spare.randrange(40))
    order = torch.full((ids.numel(),), 2**20, dtype=torch.int32)
    order[: len(pairs)] = torch.tensor([pair for _, pair in pairs], dtype=torch.int32)
    return Plan(order, torch.tensor(tiles, dtype=torch.int32), most, experts)


def routes_of(tokens: int, top_k: int, experts: int, seed: int, idle: float, spread: str) -> Routes:
    """Choices among any experts, some, or with one that all tokens choose; each is left out with chance `idle`."""
    drawn = random.Random(seed)
    among = range(experts) if spread != "some" else drawn.sample(range(experts), top_k + 1)
    always = drawn.choice(among)
    ids = []
    for _ in range(tokens):
        chosen = drawn.sample(among, top_k)
        if spread == "one" and always not in chosen:
            chosen[drawn.randrange(top_k)] = always
        ids.append([-1 if drawn.random() < idle else each for each in chosen])
    weights = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(seed)) + 0.1
    made = torch.tensor(ids, dtype=torch.int32)
    return Routes(made, weights, plan_of(made, experts, drawn))
