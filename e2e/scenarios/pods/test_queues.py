"""Kueue admits a service's pods, as far as the quota of its queue goes, and nobody fights over what it writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, eventually
from e2e.scenarios.pods.conftest import Queue
from e2e.scenarios.streams import streaming

QUIET_SECONDS = 15.0
GROUPED = "leaderworkerset.sigs.k8s.io/name"


def held_back(kube: Kube) -> list[str]:
    """The pods that no queue has admitted."""
    pods = stoker.engine_pods(kube, "model")
    return [pod["metadata"]["name"] for pod in pods if pod["spec"].get("schedulingGates")]


def written(kube: Kube) -> tuple[Any, ...]:
    """What is another one once anybody writes the Deployment's spec or labels."""
    found = kube.get("deployment", "model")["metadata"]
    return found["generation"], found["labels"]


def refusal(kube: Kube) -> str:
    """What a condition says of something that was not taken."""
    said = [each["message"] for each in stoker.conditions(kube, "model").values() if "denied" in each["message"]]
    return said[0] if said else ""


def test_a_queue_admits_pods_as_its_quota_allows(place: Kube, hub: stoker.Hub, gpus: int, queue: Queue) -> None:
    queue.make(1)
    place.apply(stoker.service("model", replicas=2, resources={"gpus": 1}, placement={"queueName": queue.name}))
    said = stoker.wait_reason(place, "model", "Unschedulable")["message"]
    assert "placement.queueName" in said, said
    eventually("one pod is admitted", lambda: len(held_back(place)) == 1, 120)
    eventually("it serves", lambda: place.get("infsvc", "model")["status"].get("readyReplicas") == 1, 240)
    (waits,) = held_back(place)
    assert waits in stoker.conditions(place, "model")["Ready"]["message"]

    queue.make(2)
    stoker.wait_ready(place, "model")
    assert not held_back(place)
    before = written(place)
    time.sleep(QUIET_SECONDS)
    assert written(place) == before, "somebody writes what another one takes back"

    # What the queue holds is no reason for a pod more: as many GPUs as there are.
    with streaming(stoker.url(place, "model"), "model", clients=4) as streams:
        streams.wait_running(4)
        place.merge("infsvc", "model", {"spec": {"runtime": {"args": ["--log-level", "warning"]}}})
        stoker.wait_ready(place, "model", 400)
    assert not held_back(place)

    # Another queue would judge pods that serve already: Kueue refuses that, and its words are said.
    place.merge("infsvc", "model", {"spec": {"placement": {"queueName": "other"}}})
    said = eventually("the refusal is said", lambda: refusal(place), 60)
    assert "queue-name" in said, said
    assert place.get("infsvc", "model")["status"]["readyReplicas"] == 2
    place.merge("infsvc", "model", {"spec": {"placement": {"queueName": queue.name}}})
    stoker.wait_ready(place, "model")

    place.kubectl("delete", "infsvc", "model", "--timeout=180s")
    eventually("nothing is left", lambda: not place.items("workloads.kueue.x-k8s.io"), 120)


def test_a_queue_admits_a_group_as_a_whole(
    place: Kube, hub: stoker.Hub, gpus: int, install_groups: Callable[[], None], queue: Queue
) -> None:
    install_groups()
    queue.make(1)
    spanning = {"resources": {"nodes": 2, "gpus": 1}, "parallelism": {"pipeline": 2}, "drain": {"timeout": "20s"}}
    place.apply(stoker.service("model", placement={"queueName": queue.name}, **spanning))
    said = stoker.wait_reason(place, "model", "Unschedulable")["message"]
    assert "placement.queueName" in said, said
    time.sleep(QUIET_SECONDS)
    assert not [pod for pod in place.items("pods", GROUPED) if pod["spec"].get("nodeName")], "half of a group runs"

    queue.make(2)
    stoker.wait_ready(place, "model", 400)
    answer = stoker.ask(stoker.url(place, "model"), "model", prompt="The capital of France is", tokens=6)
    assert "Paris" in answer["choices"][0]["text"]
    found = place.items("leaderworkersets")[0]["metadata"]
    time.sleep(QUIET_SECONDS)
    assert place.items("leaderworkersets")[0]["metadata"]["generation"] == found["generation"]

    place.kubectl("delete", "infsvc", "model", "--timeout=180s")
    eventually("nothing is left", lambda: not place.items("workloads.kueue.x-k8s.io"), 120)
