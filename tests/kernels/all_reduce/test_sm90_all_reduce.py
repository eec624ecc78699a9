"""The kernels of csrc/sm90_all_reduce.cuh, run on the CPU by `emulator/`: a process a rank, with memory that all have.

Ranks run at their own speed, words of a message arrive one by one, and shapes and kinds of sums follow each other at
random, as in an engine's steps; each rank's results are compared with the definition, and with each other's bits.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
from dataclasses import dataclass

import pytest
import torch
from tests.kernels.emulator.build import compile_emulated
from torch import Tensor

from stoker_kernels.all_reduce import reference, sm90_all_reduce
from stoker_kernels.all_reduce.memory import ABSENT, STATE_WORDS, Inboxes, PeerMemory
from stoker_kernels.all_reduce.rule import SLOTS
from stoker_kernels.all_reduce.sm90_all_reduce import (
    SHARED_BYTES,
    AllReduceArguments,
    Norm,
    arguments_of,
    arguments_of_copied,
)
from stoker_kernels.launch import nvcc
from stoker_kernels.quant import Quantized

SECONDS = 6  # that a rank may take before it counts as hung
CAPACITY = 9 * 512 * 2
EPS = 1e-5


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    sources = tuple(path.name for path in nvcc.headers() if path.stem == "sm90_all_reduce")
    library = compile_emulated(sources, "all_reduce.cpp", tmp_path_factory.mktemp("emulator"))
    assert library.arguments_size() == ctypes.sizeof(AllReduceArguments)
    assert library.state_bytes() == STATE_WORDS * 4
    assert library.shared_bytes() == SHARED_BYTES
    assert ctypes.c_uint(library.absent()).value == ABSENT
    return library


@dataclass
class Step:
    """One sum: what each rank has of it, before and after, in memory that all processes have."""

    shots: int
    after: int  # 0: nothing, 1: norm, 2: norm in e4m3
    ctas: int
    threads: int
    parts: list[Tensor]
    outs: list[Tensor]
    residuals: list[Tensor]
    scales: list[Tensor]
    weight: Tensor
    stream: Tensor
    """The residual stream before."""

    def launch(self, kernels: ctypes.CDLL, rank: int, inboxes: Inboxes, seed: int) -> None:
        scales = self.scales[rank] if self.after == 2 else None
        norm = Norm(self.residuals[rank], self.weight, EPS, scales) if self.after else None
        arguments = arguments_of(inboxes, self.parts[rank], self.outs[rank], norm)
        kernels.all_reduce(self.shots, self.after, self.ctas, self.threads, seed, ctypes.byref(arguments))

    def check(self) -> None:
        stream = self.stream.clone()
        expected: Tensor | Quantized = reference.total(self.before)
        if self.after == 1:
            expected = reference.total_add_rms_norm(self.before, stream, self.weight, EPS)
        elif self.after == 2:
            expected = reference.total_add_rms_norm_quant(self.before, stream, self.weight, EPS)
        for out, residual, scale in zip(self.outs, self.residuals, self.scales, strict=True):
            assert torch.equal(out.view(torch.uint8), self.outs[0].view(torch.uint8))
            assert torch.equal(residual, stream if self.after else self.stream)
            if isinstance(expected, Quantized):
                torch.testing.assert_close(scale, expected.scale, rtol=1e-6, atol=0.0)
                near = expected.data.float()
                torch.testing.assert_close(out.view(torch.float8_e4m3fn).float(), near, rtol=0.13, atol=0.002)
                assert (out.view(torch.float8_e4m3fn).float() == near).float().mean() > 0.99
            elif self.after:
                torch.testing.assert_close(out.float(), expected.float(), rtol=0.008, atol=1e-6)
            else:
                assert torch.equal(out, expected)

    @property
    def before(self) -> list[Tensor]:
        return self._before

    def __post_init__(self) -> None:
        self._before = [part.clone() for part in self.parts]


def shared(x: Tensor) -> Tensor:
    """`x`, in memory that processes forked later have too."""
    x.share_memory_()
    return x


def random_step(ranks: int, rng: random.Random) -> Step:
    """Sums of a shape that fits; some words of which are zeros of both signs."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    after, rows, threads = rng.randrange(3), rng.randint(1, 9), rng.choice([32, 64])
    vectors = rng.randint(1, min(64, 2 * threads))
    shape = (rows, vectors * 8)

    def values() -> Tensor:
        x = torch.randn(shape, generator=generator).bfloat16()
        zeros = torch.rand(shape, generator=generator)
        x.masked_fill_(zeros < 0.1, -0.0).masked_fill_(zeros > 0.9, 0.0)
        return shared(x)

    parts = [values() for _ in range(ranks)]
    for part in parts:
        part[0, :8] = -0.0  # the word that stands for nothing, in every rank's first vector
    stream = values()
    weight = torch.randn(shape[1], generator=generator).to(rng.choice([torch.bfloat16, torch.float32]))
    in_place = after < 2 and rng.random() < 0.5
    kind = torch.uint8 if after == 2 else torch.bfloat16
    outs = parts if in_place else [shared(torch.full(shape, 7, dtype=kind)) for _ in range(ranks)]
    return Step(
        rng.choice([1, 2]), after, rng.randint(1, min(rows, 5)), threads, parts, outs,
        [shared(stream.clone()) for _ in range(ranks)],
        [shared(torch.zeros(rows, 1)) for _ in range(ranks)], weight, stream,
    )  # fmt: skip


def run(kernels: ctypes.CDLL, steps: list[Step], ranks: int, seed: int) -> list[Tensor]:
    """Every rank makes all steps in a process of its own → the inboxes as they were left."""
    words = SLOTS * (ranks + 1) * CAPACITY // 4
    memory = [shared(torch.full((words,), ABSENT - (1 << 32), dtype=torch.int32)) for _ in range(ranks)]
    states = [shared(torch.zeros(STATE_WORDS, dtype=torch.int32)) for _ in range(ranks)]
    processes = []
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            inboxes = Inboxes(PeerMemory(rank, [each.data_ptr() for each in memory]), states[rank], CAPACITY)
            for number, step in enumerate(steps):
                step.launch(kernels, rank, inboxes, seed * 1000 + number)
            os._exit(0)
        processes.append(process)
    ends = [os.waitpid(process, 0)[1] for process in processes]
    assert ends == [0] * ranks
    return memory


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_random_steps(kernels: ctypes.CDLL, ranks: int) -> None:
    """Both kinds of kernel take turns, in place and not, with and without what follows."""
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    rng = random.Random(seed)
    steps = [random_step(ranks, rng) for _ in range(24 if ranks < 8 else 10)]
    memory = run(kernels, steps, ranks, seed % 1000)
    for step in steps:
        step.check()
    # Of each rank two slots of three are clear: the next steps' words cannot be taken for older ones.
    for inbox in memory:
        slots = inbox.view(SLOTS, -1)
        assert sum(bool((slot == ABSENT - (1 << 32)).all()) for slot in slots) >= SLOTS - 1


def test_both_ways_give_the_same_bits(kernels: ctypes.CDLL) -> None:
    """Words far apart in size, whose sum depends on the order."""
    ranks = 5
    generator = torch.Generator().manual_seed(5)
    shape = (7, 136)
    sizes = torch.randint(-9, 9, (ranks, *shape), generator=generator).float().exp2()
    values = (torch.randn(ranks, *shape, generator=generator) * sizes).bfloat16()
    none = torch.zeros(0)
    steps = [
        Step(shots, 0, 3, 32, [shared(part.clone()) for part in values],
             [shared(torch.zeros(shape, dtype=torch.bfloat16)) for _ in values], [none] * ranks, [none] * ranks,
             none, none)
        for shots in (1, 2)
    ]  # fmt: skip
    run(kernels, steps, ranks, 3)
    for step in steps:
        step.check()
    assert torch.equal(steps[0].outs[0], steps[1].outs[4])


@pytest.mark.parametrize("ranks", [2, 5])
def test_the_sum_of_copied_rows_has_the_same_bits(kernels: ctypes.CDLL, ranks: int) -> None:
    """One rank's launch over parts that lie there: what the definition gives, in both forms."""
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for number in range(6):
        step = random_step(ranks, rng)
        step.after = 1 + number % 2
        kind = torch.uint8 if step.after == 2 else torch.bfloat16
        step.outs = [torch.full(step.parts[0].shape, 7, dtype=kind) for _ in range(ranks)]
        for rank in range(ranks):
            scales = step.scales[rank] if step.after == 2 else None
            norm = Norm(step.residuals[rank], step.weight, EPS, scales)
            parts = [0 if other == rank else part.data_ptr() for other, part in enumerate(step.parts)]
            arguments = arguments_of_copied(parts, rank, step.parts[rank], step.outs[rank], norm)
            rows = step.parts[rank].shape[0]
            kernels.sum_copied(step.after, rng.randint(1, rows), step.threads, number, ctypes.byref(arguments))
        step.check()


@pytest.mark.parametrize("dependent", [False, True])
def test_sums_are_links_of_the_chain(dependent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is launched while the kernel before it drains, where that is on."""
    launched: list[bool] = []
    monkeypatch.setattr(sm90_all_reduce, "pdl_on", lambda device: dependent)
    monkeypatch.setattr(sm90_all_reduce.cuda, "kernel", lambda *arguments: None)
    monkeypatch.setattr(sm90_all_reduce.cuda, "launch", lambda *arguments, pdl: launched.append(pdl))
    x, residual, weight = torch.zeros(3, 64).bfloat16(), torch.zeros(3, 64).bfloat16(), torch.ones(64).bfloat16()
    norm = Norm(residual, weight, EPS)
    sm90_all_reduce.launch_sum_of_copied([x.data_ptr()], 0, x, torch.empty_like(x), norm)
    sm90_all_reduce.launch_await(x.data_ptr(), 1, x.device)
    memory = torch.zeros(2, CAPACITY, dtype=torch.uint8)
    peers = PeerMemory(0, [each.data_ptr() for each in memory])
    inboxes = Inboxes(peers, torch.zeros(STATE_WORDS, dtype=torch.int32), CAPACITY)
    for shots in (1, 2):
        for after in (None, norm):
            sm90_all_reduce.launch_all_reduce(inboxes, shots, x, torch.empty_like(x), after)
    assert launched == [dependent] * 6
