"""Ranks that tell each other what they have, in threads: all of them sum by their own kernels or none does."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import types
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stoker_kernels.all_reduce import NoPeers, memory, peer_sums
from stoker_kernels.all_reduce.memory import PeerMemory
from stoker_kernels.all_reduce.row_shares import Layout, Told
from stoker_kernels.all_reduce.rule import LEAST_SHARE, MOST_RANKS, ONE_SHOT, largest, share_rows, shares_of, shots_for
from stoker_kernels.launch.cuda import CudaError


class Table:
    """Where ranks that are threads put what they say, in rounds."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=30)
        self._said = [""] * ranks

    def exchange(self, rank: int, text: str) -> Sequence[str]:
        self._said[rank] = text
        self._barrier.wait()
        said = list(self._said)
        self._barrier.wait()
        return said


REASONS = [(3, "are for sm_90, and cpu is sm_0"), (MOST_RANKS + 3, "are more than 8")]


@pytest.mark.parametrize(("ranks", "reason"), REASONS)
def test_every_rank_hears_why_there_are_no_peers(ranks: int, reason: str) -> None:
    table = Table(ranks)

    def join(rank: int) -> str:
        with pytest.raises(NoPeers) as raised:
            peer_sums(torch.device("cpu"), rank, ranks, lambda text: table.exchange(rank, text))
        return str(raised.value)

    with ThreadPoolExecutor(ranks) as pool:
        heard = set(pool.map(join, range(ranks)))
    assert len(heard) == 1
    assert reason in heard.pop()


class Driver:
    """Memory of ranks that are threads, as the driver would hand it out; `broken` names a rank whose call fails."""

    def __init__(self, broken: int | None) -> None:
        self.freed_early = False
        self._broken, self._rank, self._mapped = broken, threading.local(), {}
        self._counting = threading.Lock()

    def join(self, rank: int) -> None:
        self._rank.value = rank

    def make(self, size: int, word: int) -> tuple[int, bytes]:
        if self._rank.value == self._broken:
            raise CudaError("cuMemAlloc failed: out of memory")
        self._mapped[self._rank.value + 1] = 0
        return self._rank.value + 1, b"%d" % (self._rank.value + 1)

    @property
    def rank(self) -> int:
        """The thread's."""
        return int(self._rank.value)

    def bus(self, device: torch.device) -> str:
        return f"bus {self.rank}"

    def open(self, address: int) -> int:
        with self._counting:
            self._mapped[address] += 1
        return address

    def map(self, memory: PeerMemory, device: torch.device, offers: list[dict[str, Any]]) -> None:
        for index in range(len(offers)):
            if index != memory.rank:
                memory.addresses[index] = self.open(index + 1)
                memory._opened.append(index + 1)

    def unmap(self, address: int) -> tuple[int]:
        with self._counting:
            self._mapped[address] -= 1
        return (0,)

    def free(self, address: int) -> None:
        if address:
            self.freed_early |= self._mapped.pop(address) > 0

    @property
    def held(self) -> int:
        return len(self._mapped)


class Wires:
    """Which GPUs reach each other, as the driver tells it: all by NVLink, but for one pair that lacks `kind`."""

    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
    CUipcMemHandle = SimpleNamespace
    CUdevice_P2PAttribute = SimpleNamespace(
        CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED="access",
        CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED="atomics",
    )

    def __init__(self, driver: Driver, kind: str, pair: set[int]) -> None:
        self._driver, self._kind, self._pair = driver, kind, pair
        self.cuIpcCloseMemHandle = driver.unmap

    def cuDeviceGetByPCIBusId(self, bus: bytes) -> int:
        return int(bus.removeprefix(b"bus "))

    def cuDeviceGetP2PAttribute(self, kind: str, own: int, other: int) -> int:
        assert own == self._driver.rank
        return kind != self._kind or {own, other} != self._pair

    def cuIpcOpenMemHandle(self, handle: SimpleNamespace, flags: int) -> int:
        return self._driver.open(int(handle.reserved))


def in_threads(
    driver: Driver, ranks: int, monkeypatch: pytest.MonkeyPatch, table: Table, wires: Wires | None = None
) -> list[str]:
    """What each rank came to: peers that were closed again, or why there are none."""
    for name, fake in (("_unfit", lambda *_: None), ("_make", driver.make), ("_bus_of", driver.bus),
                       ("_free", driver.free)):  # fmt: skip
        monkeypatch.setattr(memory, name, fake)
    if wires is None:
        monkeypatch.setattr(memory, "_map", driver.map)
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = wires or SimpleNamespace(cuIpcCloseMemHandle=driver.unmap)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(memory, "checked", lambda _, answer: answer)

    def life(rank: int) -> str:
        driver.join(rank)
        # A device of CUDA by name alone: what would be asked of it is the driver's above.
        device = torch.device("cuda", rank) if wires else torch.device("cpu")

        def exchange(text: str) -> Sequence[str]:
            return table.exchange(rank, text)

        try:
            opened = memory.open_memory(device, rank, ranks, exchange, 64, 0, lambda: None)
        except NoPeers as reason:
            return str(reason)
        opened.close(device, exchange)
        return "closed"

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(life, range(ranks)))


@pytest.mark.parametrize("ranks", [2, 5])
def test_memory_is_freed_once_nobody_has_it_mapped(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(None)
    assert in_threads(driver, ranks, monkeypatch, Table(ranks)) == ["closed"] * ranks
    assert driver.held == 0
    assert not driver.freed_early


def test_a_rank_without_memory_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(broken=1)
    said = in_threads(driver, 3, monkeypatch, Table(3))
    assert said == ["rank 1 cannot take part: cuMemAlloc failed: out of memory"] * 3
    assert driver.held == 0


@pytest.mark.parametrize(
    ("kind", "says"), [("access", "cannot reach each other's memory"), ("atomics", "are joined by PCIe alone")]
)
def test_all_ranks_refuse_where_one_pair_has_no_nvlink(kind: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others had mapped by then is given back."""
    driver = Driver(None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    heard = in_threads(driver, 4, monkeypatch, Table(4), Wires(driver, kind, {1, 3}))
    assert heard == [f"GPU 1 and the one at bus 3 {says}"] * 4
    assert driver.held == 0
    assert not driver.freed_early


def test_ranks_that_all_reach_each_other_have_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    assert in_threads(driver, 3, monkeypatch, Table(3), Wires(driver, "access", {7, 9})) == ["closed"] * 3
    assert driver.held == 0


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_way_goes_by_the_size(ranks: int) -> None:
    row = 5376 * 2
    ways = [shots_for(rows, row, ranks) for rows in range(largest(ranks) // row + 2)]
    assert ways[0] is None
    assert ways[-1] is None
    assert ways[1] == 1
    assert ways[-2] == (1 if ranks == 2 else 2)
    assert ways[ONE_SHOT // row] == 1
    assert ways == [None, *sorted(way for way in ways if way), None]
    assert shots_for(1, 5376 * 2 + 2, ranks) is None


@pytest.mark.parametrize("ranks", [2, 3, 7, 8])
def test_rows_are_shared_out_in_whole_tiles_and_each_once(ranks: int) -> None:
    for tokens in random.sample(range(ranks * LEAST_SHARE, 40_000), 50):
        shares = shares_of(tokens, ranks)
        assert [share.owner for share in shares] == list(range(ranks))
        assert [row for share in shares for row in range(share.start, share.stop)] == list(range(tokens))
        assert all(share.start % 128 == 0 for share in shares)
        assert min(map(len, shares)) > 0
        assert max(map(len, shares)) <= share_rows(tokens, ranks)
        for share in shares:
            pieces = [range(tokens)[piece] for piece in share.pieces(random.randint(1, 3))]
            assert [row for piece in pieces for row in piece] == list(range(share.start, share.stop))


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_what_ranks_copy_to_each_other_lies_apart(ranks: int) -> None:
    """Of every step up to the largest: all rows and their scales, the part of each sender, and the words of each."""
    hidden = random.choice([1032, 3584, 8192])
    layout = Layout(random.randrange(ranks * LEAST_SHARE, 20_000), hidden, ranks)
    part = max(share_rows(tokens, ranks) for tokens in (layout.tokens, ranks * LEAST_SHARE)) * hidden * 2
    places = [(0, layout.tokens * hidden * 2), (layout.scales, layout.tokens * 4)]
    owner = random.randrange(ranks)
    places += [(layout.part(owner, sender), part) for sender in range(ranks) if sender != owner]
    places += [(layout.word(told, sender), 4) for told in Told for sender in range(ranks)]
    places.sort()
    for (begin, size), (following, _) in itertools.pairwise(places):
        assert begin + size <= following
    assert sum(places[-1]) <= layout.size
    assert all(begin % (16 if size > 4 else 4) == 0 for begin, size in places)
    with pytest.raises(ValueError, match="too wide"):
        Layout(4096, 20_000, ranks)
