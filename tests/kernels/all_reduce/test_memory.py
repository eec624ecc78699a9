"""Ranks that tell each other what they have, in threads: all of them sum by their own kernels or none does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stoker_kernels.all_reduce import NoPeers, peer_sums
from stoker_kernels.all_reduce.rule import LARGEST, MOST_RANKS, ONE_SHOT, shots_for


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


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_way_goes_by_the_size(ranks: int) -> None:
    row = 5376 * 2
    ways = [shots_for(rows, row, ranks) for rows in range(LARGEST // row + 2)]
    assert ways[0] is None
    assert ways[-1] is None
    assert ways[1] == 1
    assert ways[-2] == (1 if ranks == 2 else 2)
    assert ways[ONE_SHOT // row] == 1
    assert ways == [None, *sorted(way for way in ways if way), None]
    assert shots_for(1, 5376 * 2 + 2, ranks) is None
