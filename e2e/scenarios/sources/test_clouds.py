"""Scenario: weights of Google's and Azure's stores and of ModelScope, from a wrong key to an answer, by stand-ins that
check signatures as these do. No key is in an object, an event or a log.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import pytest
from e2e.cluster import images
from e2e.cluster.backend import Given
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, eventually
from e2e.scenarios.sources import clouds

FETCH = "app.kubernetes.io/component=fetch"
KINDS = ("infsvc", "events", "jobs", "pods", "deployments", "replicasets", "configmaps", "persistentvolumeclaims")
# `kubectl apply` to what the status says of a wrong key: a pod's start, and one refused request.
SAID_SECONDS = 90


@pytest.fixture(scope="module")
def keys() -> clouds.Keys:
    return clouds.Keys()


@pytest.fixture(scope="module")
def host(kube: Kube, given: Given, installed: Kube, keys: clouds.Keys) -> Iterator[str]:
    """Where the stand-ins are, for pods."""
    with (
        stoker.namespace(kube, "stoker-clouds") as place,
        clouds.running(place, given.images.hub, keys) as found,
    ):
        yield found


@pytest.mark.parametrize("scheme", ["gs", "az", "modelscope"])
def test_weights_of_a_cloud_with_keys_of_a_secret(place: Kube, host: str, keys: clouds.Keys, scheme: str) -> None:
    others = clouds.Keys(azure=(keys.azure[0], clouds.Keys().azure[1]))
    wrong, hidden = others.secret(scheme)
    right, more = keys.secret(scheme)
    _apply_secret(place, wrong)
    source = clouds.uri_and_endpoint(scheme, keys, host)
    place.apply(stoker.service("stored", model={**source, "secretRef": {"name": "keys"}}))
    ready = stoker.wait_reason(place, "stored", clouds.REFUSED[scheme], SAID_SECONDS)
    assert clouds.PREFIX in ready["message"]
    _nowhere(place, [*hidden, *more])
    _apply_secret(place, right)
    # What the message advises, so as not to wait for the next try.
    place.kubectl("delete", "jobs", "-l", FETCH, "--wait=false")
    stoker.wait_ready(place, "stored")
    status = place.get("infsvc", "stored")["status"]
    assert status["model"]["bytes"] == images.model_file().stat().st_size
    assert stoker.ask(stoker.url(place, "stored"), "stored", tokens=4)["usage"]["completion_tokens"] == 4
    _nowhere(place, [*hidden, *more])
    (pod,) = stoker.engine_pods(place, "stored")
    assert '"keys"' not in json.dumps(pod["spec"]), "the engine's pods get none"


def _apply_secret(place: Kube, data: dict[str, str]) -> None:
    place.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": data})


def _nowhere(place: Kube, hidden: list[str]) -> None:
    """None of these is in an object but the Secret itself, in an event or in what a pod has said."""
    logs = eventually("a prefetch has said something", lambda: _logs(place), 30)
    told = json.dumps([place.items(kind) for kind in KINDS]) + logs
    found = [key for key in hidden if key in told or base64.b64encode(key.encode()).decode() in told]
    assert not found, "keys stand in no object, event or log"


def _logs(place: Kube) -> str:
    """All that the pods of prefetches have said, and of engines."""
    said = place.kubectl("logs", "-l", FETCH, "--all-containers", "--tail=-1")
    engines = stoker.engine_pods(place, "stored")
    names = [pod["metadata"]["name"] for pod in engines if pod["status"]["phase"] == "Running"]
    return said and said + "".join(place.kubectl("logs", name, "--all-containers", "--tail=-1") for name in names)
