"""Scenario 6, what people do to a service: mistakes that they correct, changes that find no node, patches to what is
the operator's, a volume and a Secret deleted, and rot that leaves no trace.

What needs a service that serves has one among its tests, in the order in which they stand; each leaves it ready.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster.backend import Given
from e2e.scenarios import golden, stoker
from e2e.scenarios.faults.record import Fault, Record
from e2e.scenarios.faults.test_operator_killed import settled, uids
from e2e.scenarios.faults.test_pod_faults import answers
from e2e.scenarios.faults.test_source_faults import seen
from e2e.scenarios.faults.vandal import ROT, run_with_volume
from e2e.scenarios.kube import Kube, eventually
from e2e.scenarios.streams import streaming

GOLDEN = Path(__file__).parent / "golden"
# Much more than it takes, and far less than a Job's back-off or a rollout's deadline.
SOON = 90


@dataclass(frozen=True)
class Mistake:
    """What is wrong in a spec, and what corrects it; both are merged. `reason` and `says`: what Ready tells of it."""

    wrong: dict[str, Any]
    right: dict[str, Any]
    reason: str
    says: str


FETCH_MISTAKES = {
    "image": Mistake(
        {"runtime": {"image": "stoker/no-such-image:1"}},
        {"runtime": {"image": None}},
        "ImagePullFailed", "stoker/no-such-image:1",
    ),
    "selector": Mistake(
        {"placement": {"nodeSelector": {"no": "node"}}},
        {"placement": {"nodeSelector": None}},
        "Unschedulable", "placement.nodeSelector",
    ),
    "secret": Mistake(
        {"model": {"secretRef": {"name": "hub-tokenn"}}},
        {"model": {"secretRef": None}},
        "ReferenceMissing", "hub-tokenn",
    ),
}  # fmt: skip


def test_what_a_prefetch_hangs_on_is_corrected(place: Kube, record: Record) -> None:
    """Each correction brings the next mistake: what the message names is always what is wrong now."""
    mistakes = list(FETCH_MISTAKES.items())
    place.apply(stoker.service("model", **mistakes[0][1].wrong))
    for (name, mistake), (_, following) in zip(mistakes, [*mistakes[1:], ("", None)], strict=True):
        condition = stoker.wait_reason(place, "model", mistake.reason, SOON)
        assert mistake.says in condition["message"]
        golden.check(GOLDEN / f"fetch-{name}.txt", golden.situation(place, "model"))
        watch = stoker.Stopwatch()
        place.merge("infsvc", "model", {"spec": stoker.merged(mistake.right, following.wrong if following else {})})
    stoker.wait_ready(place, "model", SOON)
    record.add(Fault("a prefetch hangs on the spec", seen(condition), watch.seconds, "after the spec was corrected"))


def test_the_charts_hub_is_corrected(place: Kube, installed: Kube, hub: stoker.Hub, record: Record) -> None:
    """A Job that waits for its next try is not waited for."""

    def upgrade(endpoint: str) -> None:
        stoker.upgrade(installed, f"hub.endpoint={endpoint}", 120)

    try:
        upgrade("http://no-such-hub.stoker-hub.svc.cluster.local:8090")
        place.apply(stoker.service("model"))
        condition = stoker.wait_reason(place, "model", "HubUnreachable")
        golden.check(GOLDEN / "hub-misnamed.txt", golden.situation(place, "model"))
    finally:
        watch = stoker.Stopwatch()
        upgrade(hub.endpoint)
    stoker.wait_ready(place, "model", SOON)
    record.add(Fault("the chart names a hub that is none", seen(condition), watch.seconds, "after `helm upgrade`"))


@pytest.fixture(scope="module")
def served(kube: Kube, installed: Kube) -> Iterator[Kube]:
    """A namespace with a service that serves."""
    with stoker.namespace(kube, "spec-faults") as made:
        made.apply(stoker.service("model", cache={"verify": "Scheduled"}))
        stoker.wait_ready(made, "model")
        yield made


PLACELESS = {
    "change without a node": Mistake(
        {"placement": {"nodeSelector": {"no": "node"}}},
        {"placement": {"nodeSelector": None}},
        "Unschedulable", "no node matches",
    ),
    "change without the memory": Mistake(
        {"resources": {"memory": "900Gi"}},
        {"resources": {"memory": "1500Mi"}},
        "Unschedulable", "no node has enough memory free",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACELESS)
def test_a_change_that_finds_no_node_ends_nobody(served: Kube, record: Record, name: str) -> None:
    mistake, before = PLACELESS[name], uids(served)
    served.kubectl("delete", "events", "--all")
    with streaming(stoker.url(served, "model"), "model", clients=2) as streams:
        streams.wait_running(1)
        served.merge("infsvc", "model", {"spec": mistake.wrong})
        condition = stoker.wait_reason(served, "model", mistake.reason)
        assert mistake.says in condition["message"]
        golden.check(GOLDEN / f"{name.replace(' ', '-')}.txt", golden.situation(served, "model"))
        assert stoker.conditions(served, "model")["Servable"]["status"] == "True"
        streams.wait_more(6)
        strategy = served.get("deployment", "model")["spec"]["strategy"]["rollingUpdate"]
        assert strategy == {"maxSurge": 1, "maxUnavailable": 0}
        watch = stoker.Stopwatch()
        served.merge("infsvc", "model", {"spec": mistake.right})
        stoker.wait_ready(served, "model", SOON)
        streams.wait_more(2)
    assert uids(served) == before, "the pod that served was taken away"
    record.add(Fault(name, seen(condition), watch.seconds, "after the spec was corrected"))


_ENV = {"containers": [{"name": "engine", "env": [{"name": "HF_HUB_OFFLINE", "value": "0"}]}]}
ADDED: dict[str, dict[str, Any]] = {
    "service": {"selector": {"nobody": "none"}},
    "networkpolicy": {"podSelector": {"matchLabels": {"only": "this"}}},
    "pdb": {"selector": {"matchLabels": {"only": "this"}}},
    "deployment": {"template": {"spec": _ENV}},
}


def test_what_another_writer_adds_is_taken_out(served: Kube, record: Record) -> None:
    theirs = strangers_policy(served)
    before, watch = uids(served), stoker.Stopwatch()
    for kind, spec in ADDED.items():
        ours = served.get(kind, "model")["spec"]
        served.kubectl("patch", kind, "model", "--type=strategic", "-p", json.dumps({"spec": spec}))
        eventually(f"the {kind} is as it was", partial(specified, served, kind, ours), 60)
        eventually("it answers", partial(answers, served), 60)
    eventually("only the pod that served is left", lambda: settled(served) and uids(served) == before, 120)
    stoker.wait_ready(served, "model")
    told = {item["message"] for item in served.items("events") if item["involvedObject"]["kind"] == "InferenceService"}
    for path in ("spec.selector", "spec.template.spec.containers[name=engine].env"):
        assert any(f"another writer added to {path}; restored" in text for text in told), told
    assert served.get("networkpolicy", "theirs")["metadata"]["uid"] == theirs, "a stranger's policy was deleted"
    text = "an event names each path to which another writer added; a policy of a stranger's with our labels stays"
    record.add(Fault("a selector and a variable patched in", text, watch.seconds))


def specified(kube: Kube, kind: str, spec: dict[str, Any]) -> bool:
    return bool(kube.get(kind, "model")["spec"] == spec)


def strangers_policy(kube: Kube) -> str:
    """A NetworkPolicy of somebody else's, with the labels of ours; its uid."""
    ours = kube.get("networkpolicy", "model")
    head = {"name": "theirs", "labels": ours["metadata"]["labels"]}
    kube.apply({"apiVersion": ours["apiVersion"], "kind": ours["kind"], "metadata": head, "spec": ours["spec"]})
    return str(kube.get("networkpolicy", "theirs")["metadata"]["uid"])


def test_rot_that_leaves_no_trace_is_found(served: Kube, hub: stoker.Hub, given: Given, record: Record) -> None:
    before = uids(served)
    run_with_volume(served, given.images.runtime, ROT)
    start = len(hub.log())
    hub.faults(bytes_per_second=8_000_000)
    watch = stoker.Stopwatch()
    try:
        published_long_ago(served)
        condition = eventually("it is being mended", lambda: mending(served), 180, every=0.2)
        golden.check(GOLDEN / "rot.txt", golden.situation(served, "model"))
    finally:
        hub.faults()
    assert stoker.conditions(served, "model")["Ready"]["status"] == "True"
    stoker.ask(stoker.url(served, "model"), "model")
    eventually("every file is right again", lambda: condition_is(served, "CacheVerified", "True"), 120)
    assert condition_is(served, "Degraded", "False")
    assert uids(served) == before
    assert len({entry["path"] for entry in hub.downloads(start)}) == 1, "not the one broken file was fetched again"
    record.add(Fault("rot that leaves size and times alone", seen(condition), watch.seconds))


def published_long_ago(kube: Kube) -> None:
    """As if the first verification had been due for hours: the model was published two days ago."""
    found = kube.get("infsvc", "model")["status"]["conditions"]
    at = next(number for number, item in enumerate(found) if item["type"] == "ModelCached")
    patch = [{"op": "replace", "path": f"/status/conditions/{at}/lastTransitionTime", "value": "2026-01-01T00:00:00Z"}]
    kube.kubectl("patch", "infsvc", "model", "--subresource=status", "--type=json", "-p", json.dumps(patch))


def condition_is(kube: Kube, kind: str, status: str) -> bool:
    return bool(stoker.conditions(kube, "model").get(kind, {}).get("status") == status)


def mending(kube: Kube) -> dict[str, Any] | None:
    """CacheVerified, while what was found is fetched again."""
    verified = stoker.conditions(kube, "model").get("CacheVerified", {})
    return verified if re.search("download, .* s to go", verified.get("message", "")) else None


def test_a_deleted_volume_goes_and_comes_back(served: Kube, record: Record) -> None:
    (old,) = served.items("persistentvolumeclaims")
    name = old["metadata"]["name"]
    served.kubectl("delete", "pvc", name, "--wait=false")
    condition = stoker.wait_reason(served, "model", "VolumeTerminating")
    golden.check(GOLDEN / "volume-deleted.txt", golden.situation(served, "model"))
    stoker.ask(stoker.url(served, "model"), "model")
    watch, reasons = stoker.Stopwatch(), set()

    def serves_from_another() -> bool:
        ready = stoker.conditions(served, "model")["Ready"]
        reasons.add(ready["reason"])
        volumes = {item["metadata"]["uid"] for item in served.items("persistentvolumeclaims")}
        return ready["status"] == "True" and old["metadata"]["uid"] not in volumes

    served.kubectl("delete", "pods", "-l=app.kubernetes.io/component=engine", "--timeout=60s")
    eventually("it serves from another volume", serves_from_another, SOON)
    assert not reasons & {"CacheCorrupt", "CrashLoop"}, "a volume that is new was called a broken one"
    record.add(Fault("the cache volume deleted", seen(condition), watch.seconds, "after the pod was deleted"))


def test_keys_that_are_gone_are_told(served: Kube, record: Record) -> None:
    keys(served, "sk-of-a-scenario\n")
    served.merge("infsvc", "model", {"spec": {"endpoint": {"auth": {"apiKeysSecretRef": {"name": "chat-keys"}}}}})
    stoker.wait_ready(served, "model")
    keys(served, "")
    warned(served, "The keys that were valid stay valid", "keys-emptied.txt")
    keys(served, "sk-of-a-scenario\n")
    eventually("nobody warns any more", lambda: condition_is(served, "Degraded", "False"), 180)
    served.kubectl("delete", "secret", "chat-keys")
    watch = stoker.Stopwatch()
    condition = warned(served, "cannot read Secret chat-keys any more", "keys-deleted.txt")
    assert condition_is(served, "Ready", "True")
    record.add(Fault("the Secret of the keys deleted", seen(condition), watch.seconds, "until it is said"))


def keys(kube: Kube, text: str) -> None:
    kube.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "chat-keys"}, "stringData": {"keys": text}})


def warned(kube: Kube, words: str, file: str) -> dict[str, Any]:
    """Degraded, once it says so."""

    def look() -> dict[str, Any] | None:
        degraded = stoker.conditions(kube, "model")["Degraded"]
        return degraded if words in degraded["message"] else None

    condition = eventually(f"Degraded says {words!r}", look, 300)
    golden.check(GOLDEN / file, golden.situation(kube, "model"))
    return condition
