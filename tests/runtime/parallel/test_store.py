"""Ranks of several machines have to decide alike, and say by name where they do not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from stoker_runtime.errors import ConfigError
from stoker_runtime.parallel.meeting import Meeting
from stoker_runtime.parallel.place import places
from stoker_runtime.parallel.store import agree, open_store


def test_a_rank_that_decides_otherwise_than_the_leader_ends_by_name(tmp_path: Path) -> None:
    leader, other = places(1, 2, nodes=2)
    meeting = Meeting(str(tmp_path / "store"))
    decided = {"dtype": "bfloat16", "max_num_seqs": str(random.randrange(9, 99)), "max_model_len": "77"}
    agree(open_store(meeting, leader), leader, decided)
    store = open_store(meeting, other)
    agree(store, other, dict(decided))
    changed = {**decided, "max_num_seqs": "7"}
    with pytest.raises(
        ConfigError, match=f"max_num_seqs is 7 on node 1 and {decided['max_num_seqs']} on node 0.*"
    ) as at:
        agree(store, other, changed)
    assert "--max-num-seqs" in at.value.message


@pytest.mark.parametrize(
    ("tensors", "stages", "nodes", "whole"),
    [(2, 3, 3, True), (2, 3, 2, False), (4, 1, 2, False), (2, 4, 2, True), (3, 2, 1, True), (1, 4, 4, True)],
)
def test_ranks_of_a_node_are_neighbours_and_a_stage_is_spread_only_where_it_must(
    tensors: int, stages: int, nodes: int, whole: bool
) -> None:
    ranks = places(tensors, stages, nodes=nodes)
    share = tensors * stages // nodes
    assert [rank.node for rank in ranks] == [node for node in range(nodes) for _ in range(share)]
    assert all(rank.stage_is_on_one_node for rank in ranks) is whole
    assert ranks[0].is_last
    for rank in ranks:
        on_nodes = {other.node for other in ranks if other.stage == rank.stage}
        assert rank.stage_is_on_one_node is (len(on_nodes) == 1)
