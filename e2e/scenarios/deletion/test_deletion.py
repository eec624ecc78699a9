"""Scenario 8: however a service is deleted, nothing is left and nothing is wedged, also when the operator is gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.cluster.backend import Given
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, eventually

KINDS = (
    "pods,jobs,deployments,replicasets,services,serviceaccounts,persistentvolumeclaims,poddisruptionbudgets,"
    "networkpolicies,controllerrevisions,horizontalpodautoscalers"
)


@pytest.fixture
def serving(place: Kube) -> Kube:
    """A namespace in which a service serves."""
    place.apply(stoker.service("model"))
    stoker.wait_ready(place, "model")
    return place


@pytest.fixture
def no_operator(installed: Kube) -> Iterator[None]:
    """The operator's pods are gone for the length of a test."""
    installed.kubectl("scale", "deployment/stoker", "--replicas=0")
    eventually("the operator's pods are gone", lambda: not installed.items("pods"), 60)
    yield
    installed.kubectl("scale", "deployment/stoker", "--replicas=2")
    installed.kubectl("rollout", "status", "deployment/stoker", "--timeout=120s")


def left(kube: Kube) -> list[str]:
    """What of ours is in the namespace."""
    ours = [item for item in kube.items(KINDS) if item["metadata"]["name"] != "default"]
    return [f"{item['kind']}/{item['metadata']['name']}" for item in ours]


def owners(kube: Kube) -> list[dict[str, str]]:
    """Whom the namespace's one volume belongs to."""
    (claim,) = kube.items("persistentvolumeclaims")
    found: list[dict[str, str]] = claim["metadata"].get("ownerReferences", [])
    return found


def wait_gone(kube: Kube) -> None:
    eventually("nothing is left", lambda: not left(kube) or None, 120)


@pytest.mark.parametrize("cascade", ["background", "foreground"])
def test_delete_leaves_nothing(serving: Kube, cascade: str) -> None:
    serving.kubectl("delete", "infsvc/model", f"--cascade={cascade}", "--timeout=120s")
    wait_gone(serving)


def test_delete_leaves_what_retain_keeps(serving: Kube, hub: stoker.Hub) -> None:
    """The volume alone; a service made anew from the same source downloads nothing."""
    serving.merge("infsvc", "model", {"spec": {"cache": {"retain": "1h"}}})
    eventually("the volume has no owner", lambda: not owners(serving), 60)
    serving.kubectl("delete", "infsvc/model", "--timeout=120s")
    (claim,) = serving.items("persistentvolumeclaims")
    name = f"PersistentVolumeClaim/{claim['metadata']['name']}"
    eventually("the volume alone is left", lambda: left(serving) == [name], 120)
    start = len(hub.log())
    serving.apply(stoker.service("model"))
    stoker.wait_ready(serving, "model")
    assert not hub.downloads(start), "the retained volume was filled again"


def test_orphans_keep_serving_and_are_not_taken_over(serving: Kube) -> None:
    address = stoker.url(serving, "model")
    pods = {pod["metadata"]["uid"] for pod in stoker.engine_pods(serving, "model")}
    serving.kubectl("delete", "infsvc/model", "--cascade=orphan", "--timeout=60s")
    stoker.ask(address, "model")
    assert {pod["metadata"]["uid"] for pod in stoker.engine_pods(serving, "model")} == pods
    selector = ["-l", "app.kubernetes.io/managed-by=stoker"]
    serving.kubectl("delete", KINDS, *selector, "--timeout=120s")
    wait_gone(serving)


def test_a_namespace_goes_with_all_that_is_in_it(serving: Kube) -> None:
    serving.kubectl("delete", "namespace", serving.namespace, "--timeout=150s")
    assert serving.find("namespace", serving.namespace) is None


def test_the_operator_is_gone_first(serving: Kube, no_operator: None) -> None:
    stoker.ask(stoker.url(serving, "model"), "model")
    serving.kubectl("delete", "infsvc/model", "--timeout=120s")
    wait_gone(serving)


def test_the_release_is_uninstalled_first(serving: Kube, installed: Kube, given: Given, hub: stoker.Hub) -> None:
    """What NOTES.txt promises: services go on, and may be deleted, with their namespace, with no operator there."""
    installed.helm("uninstall", "stoker", "--wait", "--timeout=120s")
    try:
        stoker.ask(stoker.url(serving, "model"), "model")
        serving.kubectl("delete", "infsvc/model", "--timeout=120s")
        wait_gone(serving)
        serving.kubectl("delete", "namespace", serving.namespace, "--timeout=120s")
    finally:
        stoker.install(installed, given.images, hub.endpoint)
