"""The protocol by which ranks share out rows, on a CPU: ranks are threads, and each has a thread that copies for it,
when it likes. What is queued on a GPU happens at once here, so that only copies and other ranks come late.
"""

from __future__ import annotations

import ctypes
import queue
import random
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker_kernels.all_reduce import reference
from stoker_kernels.all_reduce.memory import PeerMemory
from stoker_kernels.all_reduce.row_shares import CopyLane, Layout, RowShares
from stoker_kernels.all_reduce.rule import LEAST_SHARE
from stoker_kernels.all_reduce.sm90_all_reduce import Norm
from stoker_kernels.norm import add_rms_norm, add_rms_norm_quant
from stoker_kernels.quant import Quantized

HIDDEN, EPS, SECONDS = 16, 1e-6, 60.0
module = sys.modules[RowShares.__module__]


@pytest.fixture(autouse=True)
def nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class LateLane(CopyLane):
    """Copies in their order, each after a pause of its own."""

    def __init__(self, seed: int) -> None:
        self._wanted: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()
        self._rng = random.Random(seed)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """What is queued has happened."""

    def copy(self, to: int, source: int, size: int) -> None:
        self._wanted.put((to, source, size))

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            if self._rng.random() < 0.3:
                time.sleep(self._rng.random() * 2e-3)
            ctypes.memmove(*wanted)

    def end(self) -> None:
        self._wanted.put(None)
        self._thread.join(SECONDS)


def bytes_at(address: int, size: int) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def await_word(address: int, value: int, _: torch.device) -> None:
    word, until = ctypes.c_uint32.from_address(address), time.monotonic() + SECONDS
    while word.value != value:
        assert time.monotonic() < until, f"{value} is never said"
        time.sleep(0)


def sum_of_copied(parts: Sequence[int], rank: int, x: Tensor, out: Tensor, norm: Norm) -> None:
    size = x.nbytes
    # The place of the own part is none: it lies behind the memory.
    total = reference.total([
        x if other == rank else bytes_at(at, size).view(torch.bfloat16).view(x.shape).clone()
        for other, at in enumerate(parts)
    ])
    if norm.scales is None:
        out.copy_(add_rms_norm(total, norm.residual, norm.weight, norm.eps))
    else:
        quantized = add_rms_norm_quant(total, norm.residual, norm.weight, norm.eps)
        out.copy_(quantized.data)
        norm.scales.copy_(quantized.scale)


def one_exchange(end: RowShares, rank: int, seed: int, pieces: int) -> None:
    """As a layer does it, and what it gives and leaves compared with the definition."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ranks = end._layout.ranks
    tokens, quantized = draw.randint(ranks * LEAST_SHARE, end._layout.tokens), draw.random() < 0.5
    shares = end.shares(tokens, torch.bfloat16)
    parts = [torch.randn(tokens, HIDDEN, generator=generator).bfloat16() for _ in range(ranks)]
    stream = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    weight = torch.rand(HIDDEN, generator=generator).bfloat16()
    again = stream.clone()
    expected: Any = reference.total_add_rms_norm_quant if quantized else reference.total_add_rms_norm
    wanted = expected(parts, again, weight, EPS)
    given = []
    for share in end.outgoing(shares):
        for rows in share.pieces(1 if share.owner == rank else pieces):
            given.append(parts[rank][rows].clone())
            end.give(share, given[-1], rows.start - share.start)
    mine = shares[rank]
    end.sum_add_rms_norm(mine, stream[mine.rows], weight, EPS, quantized=quantized)
    for share in end.incoming(shares):
        found = end.rows(share)
        if isinstance(found, Quantized):
            assert torch.equal(found.data.view(torch.uint8), wanted.data[share.rows].view(torch.uint8))
            assert torch.equal(found.scale, wanted.scale[share.rows])
        else:
            assert torch.equal(found, wanted[share.rows])
    # Nobody copies from it any more: other tensors may have this memory by now.
    for each in given:
        each.fill_(torch.nan)
    assert torch.equal(stream[mine.rows], again[mine.rows])


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_exchanges_follow_each_other_without_a_handshake(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    monkeypatch.setattr(module, "launch_await", await_word)
    monkeypatch.setattr(module, "launch_sum_of_copied", sum_of_copied)
    monkeypatch.setattr(module, "NUMBERS", 5)  # so that numbers come again
    layout = Layout(ranks * LEAST_SHARE + 700, HIDDEN, ranks)
    memory = [torch.zeros(layout.size, dtype=torch.uint8) for _ in range(ranks)]
    lanes = [LateLane(seed + rank) for rank in range(ranks)]

    ends: list[RowShares] = []  # late copies read numbers that they hold

    def life(rank: int) -> int:
        peers = PeerMemory(rank, [each.data_ptr() for each in memory], memory[rank].data_ptr())
        end = RowShares(peers, layout, memory[rank], lanes[rank], ranks * LEAST_SHARE)
        ends.append(end)
        draw = random.Random(seed * ranks + rank)
        for step in range(12):
            if draw.random() < 0.3:
                time.sleep(draw.random() * 5e-3)
            one_exchange(end, rank, seed + step, draw.randint(1, 3))
        return end.exchanges

    with ThreadPoolExecutor(ranks) as pool:
        assert set(pool.map(life, range(ranks))) == {13}
    for lane in lanes:
        lane.end()


def test_a_rehearsal_neither_copies_nor_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank alone, whose peers do nothing: nothing is said, and the number stays."""
    monkeypatch.setattr(module, "launch_await", partial(pytest.fail, "it waits"))
    monkeypatch.setattr(module, "launch_sum_of_copied", sum_of_copied)
    layout = Layout(2 * LEAST_SHARE, HIDDEN, 2)
    memory = [torch.zeros(layout.size, dtype=torch.uint8) for _ in range(2)]
    lane = LateLane(1)
    peers = PeerMemory(0, [each.data_ptr() for each in memory], memory[0].data_ptr())
    end = RowShares(peers, layout, memory[0], lane, 1)
    end.quiet = True
    end.try_once()
    lane.end()
    assert end.exchanges == 1
    assert not memory[1].any()


def test_which_steps_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(2 * LEAST_SHARE + 300, HIDDEN, 2)
    held = torch.zeros(layout.size, dtype=torch.uint8)
    lane = LateLane(1)
    end = RowShares(PeerMemory(1, [0, 0], 0), layout, held, lane, 2 * LEAST_SHARE + 9)
    lane.end()
    assert end.shares(layout.tokens + 1, torch.bfloat16) == ()
    assert end.shares(2 * LEAST_SHARE + 8, torch.bfloat16) == ()
    assert end.shares(layout.tokens, torch.float32) == ()
    assert sum(map(len, end.shares(2 * LEAST_SHARE + 9, torch.bfloat16))) == 2 * LEAST_SHARE + 9
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert end.shares(layout.tokens, torch.bfloat16) == ()
