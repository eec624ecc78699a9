"""Scenario 4: GPUs, as many as the node's status says (the engine itself runs on the CPU).

The scheduler counts them like real ones: that is all a rollout depends on.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.scenarios import golden, stoker
from e2e.scenarios.gpus.conftest import GPU, give
from e2e.scenarios.kube import Kube, eventually
from e2e.scenarios.streams import streaming


def held(kube: Kube) -> int:
    """GPUs that pods hold, terminating ones too."""
    pods = [pod for pod in kube.items("pods") if pod["spec"].get("nodeName") and pod["status"]["phase"] != "Succeeded"]
    return sum(
        int(container["resources"].get("limits", {}).get(GPU, 0))
        for pod in pods
        for container in pod["spec"]["containers"]
    )


def test_a_pod_that_does_not_fit_names_the_resource(place: Kube, gpus: int) -> None:
    # While there is none, no pod runs, and what is compared stays as it is for as long as it is read.
    give(place, 0)
    place.apply(stoker.service("model", replicas=gpus + 1, resources={"gpus": 1}))
    condition = stoker.wait_reason(place, "model", "Unschedulable")
    assert GPU in condition["message"], condition["message"]
    golden.check(Path(__file__).parent / "golden" / "unschedulable.txt", golden.situation(place, "model"))
    give(place, gpus)
    eventually("pods hold what GPUs there are", lambda: held(place) == gpus, 120)
    stoker.wait_reason(place, "model", "Unschedulable")
    place.kubectl("scale", "infsvc/model", f"--replicas={gpus}")
    stoker.wait_ready(place, "model")
    eventually("only what serves holds GPUs", lambda: held(place) == gpus, 60)


@pytest.mark.ci
def test_a_rollout_without_a_spare_gpu_goes_in_place(place: Kube, gpus: int) -> None:
    place.apply(stoker.service("model", replicas=gpus, resources={"gpus": 1}))
    stoker.wait_ready(place, "model")
    terminating = []

    def rolled_out() -> bool:
        assert held(place) <= gpus, "more GPUs are held than there are"
        terminating.append(place.get("infsvc", "model")["status"].get("terminatingReplicas", 0))
        ready = stoker.conditions(place, "model")["Ready"]
        generation = place.get("infsvc", "model")["metadata"]["generation"]
        return bool(ready["status"] == "True" and ready["observedGeneration"] == generation)

    with streaming(stoker.url(place, "model"), "model", clients=8) as streams:
        streams.wait_running(8)
        place.merge("infsvc", "model", {"spec": {"runtime": {"args": ["--log-level", "warning"]}}})
        eventually("the rollout is done", rolled_out, 300)
    strategy = place.get("deployment", "model")["spec"]["strategy"]["rollingUpdate"]
    assert strategy["maxSurge"] == 0
    assert max(terminating) >= 1, "no status counted a terminating pod"


def test_a_revision_that_never_becomes_ready_is_rolled_back(place: Kube, gpus: int) -> None:
    place.apply(stoker.service("model", replicas=gpus, resources={"gpus": 1}, rollout={"progressDeadline": "40s"}))
    stoker.wait_ready(place, "model")
    good = place.get("infsvc", "model")["status"]["revisions"]["current"]
    with streaming(stoker.url(place, "model"), "model", clients=4) as streams:
        streams.wait_running(4)
        place.merge("infsvc", "model", {"spec": {"runtime": {"args": ["--tokenizer", "/no/such/tokenizer"]}}})
        condition = stoker.wait_reason(place, "model", "RolledBack", 300)
        streams.wait_more(4)
    assert "/no/such/tokenizer" in condition["message"], condition["message"]
    eventually("all pods are of the good revision", lambda: _all_of(place, good, gpus), 180)
    status = place.get("infsvc", "model")["status"]
    assert status["revisions"]["current"] == good
    assert stoker.conditions(place, "model")["Servable"]["status"] == "True"

    place.merge("infsvc", "model", {"spec": {"runtime": {"args": []}}})
    stoker.wait_ready(place, "model")


def _all_of(kube: Kube, revision: str, count: int) -> bool:
    pods = stoker.engine_pods(kube, "model")
    hashes = [pod["metadata"]["labels"]["pod-template-hash"] for pod in pods]
    ready = [bool(item.get("ready")) for pod in pods for item in pod["status"].get("containerStatuses", ())]
    return bool(hashes == [revision] * count and all(ready))
