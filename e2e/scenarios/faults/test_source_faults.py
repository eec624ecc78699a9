"""Scenario 6, the model's source and its volume: token, revision, hub, space, an interrupted fetch, a flipped bit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.cluster.backend import Given
from e2e.cluster.layout import LIMITED_STORAGE_CLASS
from e2e.scenarios import golden, stoker
from e2e.scenarios.faults.record import Fault, Record
from e2e.scenarios.faults.vandal import FLIP, run_with_volume
from e2e.scenarios.kube import Kube, eventually

GOLDEN = Path(__file__).parent / "golden"


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
    golden.check(GOLDEN / "token-wrong.txt", golden.situation(place, "model"))
    text = json.dumps(place.get("infsvc", "model")) + place.kubectl("get", "events")
    assert "wrong-token-of-a-user" not in text
    watch = stoker.Stopwatch()
    secret(place, "right")
    stoker.wait_ready(place, "model")
    record.add(Fault("token wrong", seen(condition), watch.seconds, "after the Secret was corrected"))


def test_revision_missing(place: Kube, record: Record) -> None:
    place.apply(stoker.service("model", model={"revision": "no-such-branch"}))
    condition = stoker.wait_reason(place, "model", "RevisionNotFound")
    golden.check(GOLDEN / "revision-missing.txt", golden.situation(place, "model"))
    watch = stoker.Stopwatch()
    place.merge("infsvc", "model", {"spec": {"model": {"revision": "main"}}})
    stoker.wait_ready(place, "model")
    record.add(Fault("revision missing", seen(condition), watch.seconds, "after the revision was corrected"))


def test_hub_down(place: Kube, hub: stoker.Hub, record: Record) -> None:
    hub.kube.kubectl("scale", f"deployment/{hub.name}", "--replicas=0", "--timeout=60s")
    try:
        place.apply(stoker.service("model"))
        condition = stoker.wait_reason(place, "model", "HubUnreachable")
        golden.check(GOLDEN / "hub-down.txt", golden.situation(place, "model"))
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
    golden.check(GOLDEN / "volume-full.txt", golden.situation(place, "model"))
    watch = stoker.Stopwatch()
    # The way out that the message names: this class cannot grow volumes, and the pods of the fetch name this one.
    place.merge("infsvc", "model", {"spec": {"cache": {"pvc": {"size": "200Mi"}}}})
    (full,) = place.items("persistentvolumeclaims")
    assert f"kubectl delete pvc {full['metadata']['name']}" in condition["message"]
    place.kubectl("delete", "pvc", full["metadata"]["name"], "--timeout=60s")
    stoker.wait_ready(place, "model")
    (made,) = place.items("persistentvolumeclaims")
    assert made["spec"]["resources"]["requests"]["storage"] == "200Mi"
    record.add(
        Fault("volume full", seen(condition), watch.seconds, "after a larger size was asked for and it was deleted")
    )


def test_prefetch_killed_half_way(place: Kube, hub: stoker.Hub, record: Record) -> None:
    start = len(hub.log())
    hub.faults(bytes_per_second=4_000_000)
    place.apply(stoker.service("model"))
    done, _ = eventually("a third is there", lambda: _fetched(place, 30_000_000), 60)
    watch = stoker.Stopwatch()
    place.kubectl("delete", "pods", "-l", "app.kubernetes.io/component=fetch", "--force", "--grace-period=0")
    _, reason = eventually("a new pod fetches", lambda: _fetched(place, done + 1), 60)
    assert reason == "Fetching"
    hub.faults()
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
    run_with_volume(place, given.images.runtime, FLIP)
    start = len(hub.log())
    watch = stoker.Stopwatch()
    place.kubectl("delete", "pods", "-l", "app.kubernetes.io/component=engine", "--wait=false")
    hub.faults(bytes_per_second=8_000_000)
    # What is there is hashed first, and that may take a moment, too.
    condition = eventually("it is being repaired", lambda: _names(place, "download, .* s to go"), 120, every=0.2)
    golden.check(GOLDEN / "byte-flipped.txt", golden.situation(place, "model"))
    hub.faults()
    stoker.wait_ready(place, "model")
    told = {item["reason"] for item in place.items("events") if item["involvedObject"]["kind"] == "InferenceService"}
    assert not told & {"CrashLoop", "RolloutFailed"}, "a broken file was called something else"
    assert len({entry["path"] for entry in hub.downloads(start)}) == 1, "not the one broken file was fetched again"
    record.add(Fault("a byte of the cache flipped (the hub slowed to 8 MB/s)", seen(condition), watch.seconds))


def _names(kube: Kube, pattern: str) -> dict[str, str] | None:
    """Ready, once its message has this."""
    ready = stoker.conditions(kube, "model").get("Ready", {})
    return ready if re.search(pattern, ready.get("message", "")) else None


def _fetched(kube: Kube, least: int) -> tuple[int, str] | None:
    """(bytes, the reason of Ready) of one status, once it tells of `least` bytes."""
    status = kube.get("infsvc", "model").get("status", {})
    done = int(status.get("cache", {}).get("bytesDone", 0))
    reasons = {condition["type"]: condition["reason"] for condition in status.get("conditions", ())}
    return (done, reasons["Ready"]) if done >= least else None
