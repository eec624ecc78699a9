"""A replica that spans nodes: two pods of a CPU model, a stage of the layers each, are one service. The cluster has one
node; that the pods share it is all that differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, eventually

NAME = "pair"
SET = f"{NAME}-nodes"
# A worker's own process leads the ranks of its pod, and ends once one of them does.
KILL_RANKS = """
import os, signal
for pid in map(int, filter(str.isdigit, os.listdir('/proc'))):
    if pid not in (1, os.getpid()):
        os.kill(pid, signal.SIGKILL)
"""


def pods(kube: Kube) -> dict[str, dict[str, Any]]:
    """The group's pods by name, those that go aside."""
    found = kube.items("pods", f"leaderworkerset.sigs.k8s.io/name={SET}")
    return {pod["metadata"]["name"]: pod for pod in found if "deletionTimestamp" not in pod["metadata"]}


def test_two_pods_are_one_service(place: Kube, hub: stoker.Hub, install_groups: Callable[[], None]) -> None:
    spanning = {"resources": {"nodes": 2}, "parallelism": {"pipeline": 2}, "drain": {"timeout": "20s"}}
    place.apply(stoker.service(NAME, **spanning))
    said = stoker.wait_reason(place, NAME, "LeaderWorkerSetMissing")["message"]
    assert "https://lws.sigs.k8s.io" in said

    install_groups()
    stoker.wait_ready(place, NAME, 600)
    first = pods(place)
    assert set(first) == {f"{SET}-0", f"{SET}-0-1"}
    assert place.find("deployment", NAME) is None
    answer = stoker.ask(stoker.url(place, NAME), NAME, prompt="The capital of France is", tokens=6)
    text = answer["choices"][0]["text"]
    assert "Paris" in text
    status = place.get("infsvc", NAME)["status"]
    assert (status["replicas"], status["readyReplicas"]) == (1, 1), "one replica, of two pods"
    endpoints = place.items("endpointslices", f"kubernetes.io/service-name={NAME}")
    addresses = {address for each in endpoints for end in each["endpoints"] for address in end["addresses"]}
    assert addresses == {first[f"{SET}-0"]["status"]["podIP"]}, "nobody is led to a worker"
    secret = place.get("secret", SET)["data"]["secret"]
    for pod in first:
        assert secret not in place.kubectl("logs", pod, "-c", "engine")

    place.run_in(f"{SET}-0-1", KILL_RANKS)
    said = stoker.wait_reason(place, NAME, "GroupRestarting")["message"]
    assert f"{SET}-0-1" in said
    stoker.wait_ready(place, NAME, 600)
    uids = {pod["metadata"]["uid"] for pod in pods(place).values()}
    assert len(uids) == 2
    assert not uids & {pod["metadata"]["uid"] for pod in first.values()}, "all of the group is new"
    again = stoker.ask(stoker.url(place, NAME), NAME, prompt="The capital of France is", tokens=6)
    assert again["choices"][0]["text"] == text

    place.kubectl("delete", "infsvc", NAME, "--timeout=120s")
    left = ("leaderworkersets", "statefulsets", "controllerrevisions", "secrets", "services", "pods")
    eventually("nothing of it is left", lambda: not any(place.items(kind) for kind in left), 180)
