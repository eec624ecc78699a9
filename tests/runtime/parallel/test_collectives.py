"""What NCCL is told before it makes anything, on every rank; and how ranks sum that have no kernels of their own."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from stoker_runtime.parallel import collectives
from stoker_runtime.parallel.collectives import Collectives
from stoker_runtime.parallel.meeting import Meeting
from stoker_runtime.parallel.place import places
from stoker_runtime.parallel.store import open_store

ASKED = "NCCL_NVLS_ENABLE", "NCCL_RUNTIME_CONNECT"


def meet(rank: int, store: str) -> None:
    place = places(2, 1)[rank]
    make, told = dist.init_process_group, []

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        told.append([os.environ[name] for name in ASKED])
        make(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", init_process_group)
        Collectives(place, torch.device("cpu"), open_store(Meeting(store), place)).close()
    assert told == [["0", "0"]]


def test_no_rank_uses_multicast_or_connects_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the environment asks for it."""
    for name in ASKED:
        monkeypatch.setenv(name, "1")
    spawn(meet, (str(tmp_path / "store"),), nprocs=2)


def sum_without_peers(rank: int, store: str) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    collectives.log.addHandler(handler)
    collectives.log.setLevel(logging.INFO)
    place = places(3, 1)[rank]
    ends = Collectives(place, torch.device("cpu"), open_store(Meeting(store), place))
    ends.open_peers()
    assert said == ["ranks: sums go by NCCL alone: the kernels are for sm_90, and cpu is sm_0"]
    sums, ordinary = [], dist.all_reduce

    def all_reduce(x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        sums.append(x.shape)
        ordinary(x, *args, **kwargs)

    x = torch.full((5, 24), 7.0**rank, dtype=torch.bfloat16)
    assert ends.peers_for(x) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        assert torch.equal(ends.sum(x), torch.full_like(x, 57.0))
    assert sums == [(5, 24)]
    ends.close()


def test_ranks_without_peers_say_why_and_sum_another_way(tmp_path: Path) -> None:
    spawn(sum_without_peers, (str(tmp_path / "store"),), nprocs=3)
