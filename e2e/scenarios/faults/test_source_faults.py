"""Scenario 6, the model's source and its volume: token, revision, hub, space, an interrupted fetch, a flipped bit."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from e2e.cluster.backend import Given
from e2e.cluster.layout import LIMITED_STORAGE_CLASS
from e2e.scenarios import stoker
from e2e.scenarios.faults.record import Fault, Record
from e2e.scenarios.kube import Kube, eventually

FLIP = """
import glob
for path in glob.glob('/models/sha256-*/*.gguf'):
    with open(path, 'r+b') as stream:
        stream.seek(1 << 20)
        byte = stream.read(1)
        stream.seek(1 << 20)
        stream.write(bytes([byte[0] ^ 1]))
"""


def seen(condition: dict[str, str]) -> str:
    return f"`{condition['reason']}`: {condition['message']}"


@pytest.fixture
def private_hub(place: Kube, given: Given) -> Iterator[stoker.Hub]:
    """A hub that asks for a token."""
    with stoker.hub(place, given.images, "private-hub", "--token=right") as running:
        yield running


def secret(kube: Kube, token: str) -> None:
    kube.apply(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub-token"}, "stringData": {"token": token}}
    )


@pytest.mark.ci
def test_token_wrong(place: Kube, private_hub: stoker.Hub, record: Record) -> None:
    secret(place, "wrong-token-of-a-user")
    place.apply(stoker.service("model", model={"endpoint": private_hub.endpoint, "secretRef": {"name": "hub-token"}}))
    condition = stoker.wait_reason(place, "model", "TokenRejected")
    text = json.dumps(place.get("infsvc", "model")) + place.kubectl("get", "events")
    assert "wrong-token-of-a-user" not in text
    watch = stoker.Stopwatch()
    secret(place, "right")
    stoker.wait_ready(place, "model")
    record.add(Fault("token wrong", seen(condition), watch.seconds, "after the Secret was corrected"))


def test_revision_missing(place: Kube, record: Record) -> None:
    place.apply(stoker.service("model", model={"revision": "no-such-branch"}))
    condition = stoker.wait_reason(place, "model", "RevisionNotFound")
    assert "no-such-branch" in condition["message"]
    watch = stoker.Stopwatch()
    place.merge("infsvc", "model", {"spec": {"model": {"revision": "main"}}})
    stoker.wait_ready(place, "model")
    record.add(Fault("revision missing", seen(condition), watch.seconds, "after the revision was corrected"))


def test_hub_down(place: Kube, hub: stoker.Hub, record: Record) -> None:
    hub.kube.kubectl("scale", f"deployment/{hub.name}", "--replicas=0", "--timeout=60s")
    try:
        place.apply(stoker.service("model"))
        condition = eventually("the status names the hub", lambda: _names(place, "HubUnreachable"), 180)
    finally:
        hub.kube.kubectl("scale", f"deployment/{hub.name}", "--replicas=1")
        hub.kube.kubectl("rollout", "status", f"deployment/{hub.name}", "--timeout=60s")
    watch = stoker.Stopwatch()
    stoker.wait_ready(place, "model", 400)
    record.add(Fault("hub down", seen(condition), watch.seconds))


def test_volume_full(place: Kube, record: Record) -> None:
    if place.find("storageclass", LIMITED_STORAGE_CLASS) is None:
        pytest.skip(f"the cluster has no StorageClass {LIMITED_STORAGE_CLASS}, whose volumes can be full")
    place.apply(stoker.service("model", cache={"pvc": {"size": "60Mi", "storageClassName": LIMITED_STORAGE_CLASS}}))
    condition = stoker.wait_reason(place, "model", "VolumeFull")
    watch = stoker.Stopwatch()
    place.kubectl("delete", "infsvc/model", "--timeout=120s")
    eventually("the volume is gone", lambda: not place.items("persistentvolumeclaims"), 60)
    place.apply(stoker.service("model", cache={"pvc": {"size": "200Mi", "storageClassName": LIMITED_STORAGE_CLASS}}))
    stoker.wait_ready(place, "model")
    record.add(Fault("volume full", seen(condition), watch.seconds, "made anew with a larger volume"))


def test_prefetch_killed_half_way(place: Kube, hub: stoker.Hub, record: Record) -> None:
    start = len(hub.log())
    hub.faults(bytes_per_second=8_000_000)
    place.apply(stoker.service("model"))
    done = eventually("a third is there", lambda: _bytes_done(place, 30_000_000), 60)
    watch = stoker.Stopwatch()
    place.kubectl("delete", "pods", "-l", "app.kubernetes.io/component=fetch", "--force", "--grace-period=0")
    stoker.wait_ready(place, "model")
    resumed = [entry["range"] for entry in hub.downloads(start) if entry["range"]]
    assert resumed, "it was downloaded from the start"
    offset = int(resumed[-1].removeprefix("bytes=").rstrip("-"))
    assert offset >= done - 10_000_000
    text = f"`Fetching` stays; the next pod went on at byte {offset}"
    record.add(Fault("prefetch killed half-way", text, watch.seconds))


def test_byte_of_the_cache_flipped(place: Kube, hub: stoker.Hub, record: Record, given: Given) -> None:
    place.apply(stoker.service("model", cache={"verify": "Always"}))
    stoker.wait_ready(place, "model")
    _run_with_volume(place, given.images.runtime, FLIP)
    start = len(hub.log())
    watch = stoker.Stopwatch()
    place.kubectl("delete", "pods", "-l", "app.kubernetes.io/component=engine", "--wait=false")
    told = eventually("an event tells of it", lambda: _event(place, "ChecksumMismatch"), 120)
    stoker.wait_ready(place, "model")
    assert len({entry["path"] for entry in hub.downloads(start)}) == 1, "not the one broken file was fetched again"
    record.add(Fault("a byte of the cache flipped", seen(told), watch.seconds))


def _names(kube: Kube, reason: str) -> dict[str, str] | None:
    """Ready, once its reason or the message of a try that failed names this."""
    ready = stoker.conditions(kube, "model").get("Ready", {})
    return ready if reason in f"{ready.get('reason')} {ready.get('message')}" else None


def _event(kube: Kube, word: str) -> dict[str, str] | None:
    """The first event on a service whose message has this word."""
    found = [item for item in kube.items("events") if word in item["message"]]
    return next((item for item in found if item["involvedObject"]["kind"] == "InferenceService"), None)


def _bytes_done(kube: Kube, least: int) -> int | None:
    done = kube.get("infsvc", "model").get("status", {}).get("cache", {}).get("bytesDone", 0)
    return int(done) if done >= least else None


def _run_with_volume(kube: Kube, image: str, script: str) -> None:
    """Run a Python program in a pod that mounts the model's volume for writing."""
    (claim,) = kube.items("persistentvolumeclaims")
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "vandal"},
        "spec": {
            "restartPolicy": "Never",
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "runAsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}],
            "containers": [
                {
                    "name": "vandal",
                    "image": image,
                    "command": ["/opt/stoker/bin/python", "-c", script],
                    "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                    "securityContext": security,
                }
            ],
        },
    }
    kube.apply(pod)
    kube.wait("jsonpath={.status.phase}=Succeeded", "pod/vandal", 60)
    kube.kubectl("delete", "pod/vandal")
