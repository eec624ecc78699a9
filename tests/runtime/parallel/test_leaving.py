"""Ranks leave each other: whoever frees what others have mapped waits for them, also when the file by which they met
is long gone.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import spawn

from stoker_kernels.all_reduce import Exchange
from stoker_runtime.parallel.collectives import Collectives
from stoker_runtime.parallel.meeting import Meeting
from stoker_runtime.parallel.place import places
from stoker_runtime.parallel.store import open_store

RANKS = 3


class Mapped:
    """What `PeerSums` is to its ranks when they leave."""

    def __init__(self) -> None:
        self.met: Sequence[str] = ()

    def close(self, exchange: Exchange) -> None:
        self.met = exchange("unmapped")


def leave(rank: int, folder: str) -> None:
    place = places(RANKS, 1, whole_experts=False)[rank]
    collectives = Collectives(place, torch.device("cpu"), open_store(Meeting(f"{folder}/store"), place))
    collectives.least(rank)
    if rank == 0:
        shutil.rmtree(folder)
    collectives.least(rank)
    mapped = Mapped()
    collectives._peers = mapped  # type: ignore[assignment]
    collectives.close()
    assert len(mapped.met) == RANKS


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are processes of one Linux machine")
def test_ranks_leave_when_the_file_by_which_they_met_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "met"
    folder.mkdir()
    spawn(leave, (str(folder),), nprocs=RANKS)
    assert not folder.exists()
