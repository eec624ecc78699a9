"""Scenario: weights of an object store and of a registry, each a real one, from `kubectl apply` to an answer."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from e2e.cluster import images
from e2e.cluster.backend import Given
from e2e.registry.push import push
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, eventually
from e2e.scenarios.sources import servers

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUCKET = "weights"
PREFIX = "team/smollm2"
REPOSITORY = "team/smollm2"
FOLLOWED = "team/followed"
# `kubectl apply` to what the status says of a wrong key: a pod's start, and one refused request.
SAID_SECONDS = 90


@pytest.fixture(scope="module")
def keys() -> tuple[str, str]:
    return f"AK{secrets.token_hex(8)}", secrets.token_hex(20)


@pytest.fixture(scope="module")
def sources(kube: Kube, given: Given, installed: Kube, keys: tuple[str, str]) -> Iterator[dict[str, str]]:
    """The endpoints of the store and of the registry for pods, and where this machine reaches the registry; both hold
    SmolLM2.
    """
    if given.node is None:
        pytest.skip("needs the node of this machine, into which the servers' images are imported")
    files = {f"{PREFIX}/{MODEL}": images.model_file()}
    with stoker.namespace(kube, "stoker-sources") as place, ExitStack() as stack:
        access, secret = keys
        # The folder of a bucket is the bucket.
        store = [
            "versitygw",
            f"--access={access}",
            f"--secret={secret}",
            "--port=:7070",
            "posix",
            "--sidecar=/meta",
            "/data",
        ]
        at = stack.enter_context(
            servers.server(place, given.node, "s3", store, 7070, ("/tmp", "/meta", "/data", f"/data/{BUCKET}"))
        )
        registry = ["crane", "registry", "serve", "--address=:5000", "--disk=/tmp"]
        there = stack.enter_context(servers.server(place, given.node, "registry", registry, 5000, ("/tmp",)))
        servers.fill_bucket(at, keys, BUCKET, files)
        push(there, REPOSITORY, "v1", {MODEL: images.model_file().read_bytes()})
        inside = {name: f"http://{name}.{place.namespace}.svc.cluster.local" for name in ("s3", "registry")}
        yield {"s3": f"{inside['s3']}:7070", "registry": f"{inside['registry']}:5000", "registry here": there}


def secret(name: str, keys: tuple[str, str]) -> dict[str, object]:
    data = {"AWS_ACCESS_KEY_ID": keys[0], "AWS_SECRET_ACCESS_KEY": keys[1], "AWS_REGION": "us-east-1"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}


FETCH = "app.kubernetes.io/component=fetch"


def fetch_logs(place: Kube) -> str:
    """All that the pods of prefetches have said."""
    return place.kubectl("logs", "-l", FETCH, "--all-containers", "--tail=-1")


def test_weights_of_an_object_store_with_keys_of_a_secret(
    place: Kube, sources: dict[str, str], keys: tuple[str, str]
) -> None:
    wrong = f"{keys[1][:-4]}beef"
    place.apply(secret("keys", (keys[0], wrong)))
    model = {"uri": f"s3://{BUCKET}/{PREFIX}", "endpoint": sources["s3"], "secretRef": {"name": "keys"}}
    place.apply(stoker.service("stored", model=model))
    ready = stoker.wait_reason(place, "stored", "TokenRejected", SAID_SECONDS)
    assert BUCKET in ready["message"]
    logs = eventually("the prefetch has said something", lambda: fetch_logs(place), 30)
    told = json.dumps([place.get("infsvc", "stored"), place.items("events"), place.items("pods"), logs])
    for key in (wrong, keys[1], base64.b64encode(wrong.encode()).decode()):
        assert key not in told, "keys stand in no status, event, pod or log"
    place.apply(secret("keys", keys))
    # What the message advises, so as not to wait for the next try.
    place.kubectl("delete", "jobs", "-l", FETCH, "--wait=false")
    stoker.wait_ready(place, "stored")
    logs = eventually("the prefetch has said something", lambda: fetch_logs(place), 30)
    assert keys[1] not in logs, "nor where they are right"
    status = place.get("infsvc", "stored")["status"]
    assert status["model"]["bytes"] == images.model_file().stat().st_size
    assert stoker.ask(stoker.url(place, "stored"), "stored", tokens=4)["usage"]["completion_tokens"] == 4
    (pod,) = stoker.engine_pods(place, "stored")
    assert '"keys"' not in json.dumps(pod["spec"]), "the engine's pods get none"


def test_an_artifact_of_a_registry(place: Kube, sources: dict[str, str]) -> None:
    registry = sources["registry"]
    uri = f"oci://{registry.removeprefix('http://')}/{REPOSITORY}:v1"
    place.apply(stoker.service("packed", model={"uri": uri, "endpoint": registry}))
    stoker.wait_ready(place, "packed")
    status = place.get("infsvc", "packed")["status"]
    assert status["model"]["resolvedRevision"].startswith("sha256:")
    assert stoker.ask(stoker.url(place, "packed"), "packed", tokens=4)["usage"]["completion_tokens"] == 4

    def missing() -> bool:
        return "does not exist" in stoker.conditions(place, "none")["Ready"]["message"]

    place.apply(stoker.service("none", model={"uri": f"{uri}-none", "endpoint": registry}))
    stoker.wait_reason(place, "none", "ModelNotFound", SAID_SECONDS)
    assert eventually("the tag is named", missing, 10)


@pytest.fixture
def looked_up_each_minute(installed: Kube) -> Iterator[None]:
    """What is followed, as often as the chart allows; as seldom as ever again for the others."""

    stoker.upgrade(installed, "follow.intervalSeconds=60")
    yield
    stoker.upgrade(installed, "follow.intervalSeconds=600")


@pytest.mark.usefixtures("looked_up_each_minute")
def test_a_tag_that_moves_is_a_rollout_of_what_it_stands_for_by_now(place: Kube, sources: dict[str, str]) -> None:
    """Nobody changes the object; it answers all the while."""
    registry, content = sources["registry"], images.model_file().read_bytes()
    first = push(sources["registry here"], FOLLOWED, "main", {MODEL: content})
    uri = f"oci://{registry.removeprefix('http://')}/{FOLLOWED}:main"
    files = {"allow": ["*.gguf"], "ignore": []}
    model = {"uri": uri, "endpoint": registry, "updatePolicy": "Follow", "files": files}
    place.apply(stoker.service("followed", model=model))
    stoker.wait_ready(place, "followed")
    assert place.get("infsvc", "followed")["status"]["model"]["resolvedRevision"] == first
    (before,) = stoker.engine_pods(place, "followed")
    second = push(sources["registry here"], FOLLOWED, "main", {"another-name.gguf": content})
    base = stoker.url(place, "followed")

    def served() -> bool:
        assert stoker.ask(base, "followed")["usage"]["completion_tokens"] == 1
        found = place.get("infsvc", "followed")
        ready = stoker.conditions(place, "followed")["Ready"]["status"] == "True"
        return ready and bool(found["status"]["model"]["resolvedRevision"] == second)

    eventually("the new manifest is served", served, 300)
    names = [pod["metadata"]["name"] for pod in stoker.engine_pods(place, "followed")]
    assert before["metadata"]["name"] not in names
    assert place.get("infsvc", "followed")["metadata"]["generation"] == 1
    assert "NewCommit" in {event["reason"] for event in place.items("events")}
