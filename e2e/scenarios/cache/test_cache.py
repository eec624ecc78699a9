"""Scenario 2: weights are downloaded once: a second replica, a second service and a restart download nothing."""

from __future__ import annotations

import urllib.error
from typing import Any

from e2e.cluster import images
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, eventually


def test_second_replica_and_second_service_download_nothing(place: Kube, hub: stoker.Hub) -> None:
    start = len(hub.log())
    place.apply(stoker.service("first"))
    stoker.wait_ready(place, "first")
    downloads = hub.downloads(start)
    assert downloads, "the first service downloaded nothing"
    assert len({entry["path"] for entry in downloads}) == len(downloads), "a file was downloaded twice"
    status = place.get("infsvc", "first")["status"]

    place.kubectl("scale", "infsvc/first", "--replicas=2")
    stoker.wait_ready(place, "first")
    claims = [pod["spec"]["volumes"][0]["persistentVolumeClaim"] for pod in stoker.engine_pods(place, "first")]
    assert len(claims) == 2
    assert claims[0] == claims[1]
    assert hub.downloads(start) == downloads, "a second replica downloaded"

    place.apply(stoker.service("second", runtime={"contextLength": 256}))
    stoker.wait_ready(place, "second")
    assert place.get("infsvc", "second")["status"]["model"]["digest"] == status["model"]["digest"]
    assert len(place.items("persistentvolumeclaims")) == 1
    assert hub.downloads(start) == downloads, "a second service on the same revision downloaded"

    (pod,) = stoker.engine_pods(place, "second")
    place.kubectl("delete", "pod", pod["metadata"]["name"], "--timeout=120s")
    eventually("another pod serves", lambda: _serves_another(place, pod), 120)
    assert hub.downloads(start) == downloads, "a pod that came anew downloaded"

    # The volume outlives the service that asked for it first.
    place.kubectl("delete", "infsvc/first", "--timeout=120s")
    eventually("the node leads to the new pod", lambda: _answers(place), 10, every=0.2)
    assert len(place.items("persistentvolumeclaims")) == 1


def test_two_services_that_come_at_one_moment_are_one_download(place: Kube, hub: stoker.Hub) -> None:
    """Each has a Job, which run beside each other: one fetches, the other waits for it and finds everything there."""
    start = len(hub.log())
    # Some seconds for the two pods to be there together, on any machine.
    hub.faults(bytes_per_second=4_000_000)
    place.apply(stoker.service("left"), stoker.service("right", runtime={"contextLength": 256}))
    eventually("one of two fetches waits for the other", lambda: _fetches(place) == ["fetches", "waits"], 120)
    hub.faults()
    for name in ("left", "right"):
        stoker.wait_ready(place, name)
    size = images.model_file().stat().st_size
    statuses = {name: place.get("infsvc", name)["status"]["model"] for name in ("left", "right")}
    assert statuses["left"]["digest"] == statuses["right"]["digest"]
    assert {status["bytes"] for status in statuses.values()} == {size}
    assert len(place.items("persistentvolumeclaims")) == 1
    downloads = hub.downloads(start)
    assert len({entry["path"] for entry in downloads}) == len(downloads), "a file was asked for twice"
    assert sum(int(entry["sent"]) for entry in downloads) == size, "the hub served more or less than the model once"
    for name in ("left", "right"):
        assert stoker.ask(stoker.url(place, name), name)["usage"]["completion_tokens"] == 1


def _fetches(kube: Kube) -> list[str]:
    """What each pod of a prefetch does by its log: it waits for another, or it fetches."""
    done = []
    for pod in kube.items("pods", "app.kubernetes.io/component=fetch"):
        if pod["status"]["phase"] == "Running":
            said = kube.kubectl("logs", pod["metadata"]["name"])
            done.append("waits" if "waiting for it" in said else "fetches")
    return sorted(done)


def _serves_another(kube: Kube, gone: dict[str, Any]) -> bool:
    """The service may be Ready for a moment more by what the operator has seen last, so the pods are asked, too."""
    pods = stoker.engine_pods(kube, "second")
    ready = [each["ready"] for pod in pods for each in pod["status"].get("containerStatuses", [{"ready": False}])]
    said = stoker.conditions(kube, "second")["Ready"]["status"] == "True"
    return said and bool(pods) and all(ready) and all(pod["metadata"]["uid"] != gone["metadata"]["uid"] for pod in pods)


def _answers(kube: Kube) -> bool:
    """False for the moment in which the node's rules lag behind the endpoints."""
    try:
        return bool(stoker.ask(stoker.url(kube, "second"), "second"))
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ConnectionRefusedError):
            raise
        return False
