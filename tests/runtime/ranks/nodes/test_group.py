"""Nodes find each other, tell each other what is to be told, and end together, whatever befalls one of them.

Real processes and sockets, ranks without a model. Seconds are bounds of patience on a crowded machine.
"""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from tests.runtime.ranks.nodes.conftest import Group, NodeProcess, wait_gone
from tests.runtime.ranks.nodes.light_follower import told_to
from tests.runtime.ranks.test_faults import PATIENCE, wait_for

from stoker_runtime.errors import EngineDeadError, EngineError
from stoker_runtime.ranks.ring import SLOT_BYTES
from stoker_runtime.ranks.watch import SILENT_SECONDS, WATCH_SECONDS
from stoker_runtime.ranks.wire import STOP, command

Make = Callable[..., Group]
ALONE = ("unshare", "--net")


def has_networks() -> bool:
    """Whether this process may make networks."""
    if not all(map(shutil.which, ("unshare", "ip"))):
        return False
    return subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(("nodes", "tensors", "stages"), [(2, 1, 2), (3, 2, 3), (2, 4, 1)])
def test_every_rank_of_every_node_is_told_all_of_it_in_order(
    nodes: int, tensors: int, stages: int, group: Make
) -> None:
    made = group(nnodes=nodes, tensor_parallel_size=tensors, pipeline_parallel_size=stages)
    crew = made.complete()
    share = tensors * stages // nodes
    assert [len(node.ranks) for node in made.nodes] == [share] * (nodes - 1)
    assert len(crew.pids) == share - 1
    messages = [random.randbytes(random.choice([1, 60, 3000, SLOT_BYTES, 3 * SLOT_BYTES + 7])) for _ in range(40)]
    for message in messages:
        crew.write(message)
    crew.write(command(STOP))
    assert [node.status() for node in made.nodes] == [0] * (nodes - 1)
    time.sleep(4 * WATCH_SECONDS)
    assert not crew.fault, "ranks that end as they were told are taken for lost"
    crew.close()
    assert all(told_to(rank) == messages for rank in range(1, tensors * stages))


@pytest.mark.parametrize(
    ("victim", "number", "says"),
    [
        ("rank", signal.SIGKILL, r"node 1 \(127\.0\.0\.1\) reports: rank 2 ended with signal 9"),
        ("rank", signal.SIGSTOP, "rank 2 has been stopped for 2 s"),
        ("node", signal.SIGKILL, r"node 1 \(127\.0\.0\.1\) is gone"),
        ("node", signal.SIGSTOP, r"node 1 \(127\.0\.0\.1\) is gone"),
    ],
)
def test_what_befalls_one_node_ends_all(victim: str, number: signal.Signals, says: str, group: Make) -> None:
    made = group(nnodes=3, tensor_parallel_size=2, pipeline_parallel_size=3)
    crew = made.complete()
    struck, other = made.nodes
    ranks = [*struck.ranks, *other.ranks, *crew.pids]
    os.kill(struck.ranks[0] if victim == "rank" else struck.pid, number)
    wait_for(lambda: bool(crew.fault), "the leader does not notice")
    with pytest.raises(EngineDeadError, match=says):
        crew.check()
    assert struck.status() == (1 if victim == "rank" else -signal.SIGKILL)
    assert other.status() == 1
    assert "the leader says: " in other.log
    wait_gone(ranks)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_leader_that_dies_ends_the_other_nodes(when: str, group: Make) -> None:
    made = group(nnodes=3, pipeline_parallel_size=3)
    leader = made.node(0)
    nodes = [made.node(1), *([made.node(2)] if when == "after" else [])]
    if when == "after":
        wait_for(lambda: all(node.ask("/ready").status_code == 200 for node in nodes), "no node is ready")
    else:
        wait_for(lambda: "has joined the leader" in nodes[0].log, "the node does not join")
    wait_for(lambda: all(node.ranks for node in nodes), "no rank was started")
    ranks = [rank for node in nodes for rank in node.ranks]
    os.kill(leader.pid, signal.SIGKILL)
    assert [node.status() for node in nodes] == [1] * len(nodes)
    assert all("the leader is gone" in node.log for node in nodes)
    wait_gone(ranks)


def test_a_node_with_another_secret_is_refused_by_name_and_a_late_one_is_awaited(
    group: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    made = group()
    crew = made.lead()
    other_secret = secrets.token_hex(20)
    wrong = made.node(1, secret=other_secret)
    assert wrong.status() == 2
    assert "The leader refuses this node's secret" in wrong.log
    assert "127.0.0.1: node 1 is refused: it presents another secret" in caplog.text
    right = made.node(1)
    crew.gather()
    crew.ready(on_gpu=False)
    wait_for(lambda: right.ask("/ready").status_code == 200, "the right one is not ready")
    logs = wrong.log + right.log + caplog.text
    assert other_secret not in logs
    assert os.environ["STOKER_NODE_SECRET"] not in logs


@pytest.mark.parametrize(
    "differs",
    [
        {"max_model_len": random.randint(100, 5000)},
        {"seed": random.randint(1, 99), "cpu_threads": 1},
        {"model": "shape:qwen2.5-7b"},
        {"nnodes": 1 + 2, "pipeline_parallel_size": 6},
    ],
    ids=lambda differs: next(iter(differs)),
)
def test_a_node_that_is_to_run_something_else_is_refused_by_name(
    differs: dict[str, object], group: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = group()
    made.lead()
    node = made.node(1, **differs)
    assert node.status() == 2
    name, value = next(iter(differs.items()))
    said = "its model is another one" if name == "model" else f"{value}"
    for log in (node.log, caplog.text):
        assert "node 1 is refused" in log
        assert said in log
    if name != "model":
        assert f"--{name.replace('_', '-')}" in node.log or "--pipeline-parallel-size" in node.log


def test_what_nodes_may_have_as_they_like_is_no_difference(group: Make) -> None:
    made = group(cpu_threads=3)
    crew = made.lead()
    node = made.node(1, cpu_threads=1, master_addr="localhost")
    crew.gather()
    crew.ready(on_gpu=False)
    wait_for(lambda: node.ask("/ready").status_code == 200, "the node is not let in")


def test_a_second_node_of_one_number_waits_and_says_why(group: Make, caplog: pytest.LogCaptureFixture) -> None:
    made = group(nnodes=3, pipeline_parallel_size=3)
    made.lead()
    first = made.node(1)
    wait_for(lambda: "has joined the leader" in first.log, "the first does not join")
    second = made.node(1)
    wait_for(lambda: "has joined already, from 127.0.0.1" in second.log, "the second does not say why it waits")
    assert second.ask("/health").status_code == 200
    assert second.ask("/ready").status_code == 503
    os.kill(second.pid, signal.SIGTERM)
    assert second.status() == 0


def test_nobody_waits_for_ever(group: Make) -> None:
    made = group(nnodes=4, pipeline_parallel_size=4, node_join_seconds=3)
    crew = made.lead()
    node = made.node(2, node_join_seconds=1, master_port=made.config.master_port % 65535 + 1)
    with pytest.raises(EngineError, match="Of 4 nodes nodes 1, 2, 3 did not join within 3 s"):
        crew.gather()
    assert node.status() == 1
    assert "No leader at 127.0.0.1:" in node.log


def test_probes_tell_a_node_that_waits_from_one_that_is_ready_and_a_signal_awaits_the_leader(group: Make) -> None:
    made = group()
    node = made.node(1)
    assert node.ask("/health").status_code == 200
    waiting = node.ask("/ready")
    assert waiting.status_code == 503
    assert "it waits for the leader" in json.loads(waiting.content)["error"]["message"]
    crew = made.lead()
    crew.gather()
    wait_for(lambda: "its ranks load" in node.ask("/ready").text, "the node does not say that it loads")
    crew.ready(on_gpu=False)
    wait_for(lambda: node.ask("/ready").status_code == 200, "the node is not ready")
    elsewhere = node.ask("/v1/models")
    assert elsewhere.status_code == 404
    assert "clients ask node 0, at 127.0.0.1" in elsewhere.text
    os.kill(node.pid, signal.SIGTERM)
    wait_for(lambda: "shutting down" in node.ask("/ready").text, "the node takes no notice")
    message = random.randbytes(50)
    crew.write(message)
    wait_for(lambda: told_to(1) == [message], "the node serves nobody any more")
    crew.write(command(STOP))
    assert node.status() == 0


def test_a_node_whose_leader_does_not_stop_leaves(group: Make) -> None:
    made = group()
    crew = made.lead()
    node: NodeProcess = made.node(1)
    crew.gather()
    wait_for(lambda: bool(node.ranks), "no rank was started")
    os.kill(node.pid, signal.SIGTERM)
    assert node.status() == 0
    wait_for(lambda: "was asked to end" in crew.fault, "the leader is not told")


@pytest.mark.skipif(not has_networks(), reason="needs the right to make a network, and ip of iproute2")
def test_machines_that_lose_each_other_end_both_sides(group: Make) -> None:
    """No connection is closed, and nobody says anything: the kernels find out."""
    group()  # for its environment
    command = [*ALONE, sys.executable, "-m", "tests.runtime.ranks.nodes.unplugged"]
    ended = subprocess.run(command, capture_output=True, check=True, text=True, timeout=4 * PATIENCE)
    noticed, fault, gone, status, log = json.loads(ended.stdout)
    assert "node 1 (127.0.0.1) is gone" in fault
    assert status == 1
    assert "the leader is gone" in log
    print(f"the leader knew after {noticed:.1f} s, the node had ended after {gone:.1f} s")
    assert noticed < SILENT_SECONDS, "it was a beat that was missed"
