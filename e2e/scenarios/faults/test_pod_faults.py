"""Scenario 6, what runs: image, node, engine process, the API server and what etcd leases, the leader's Lease."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from e2e.cluster.backend import Given
from e2e.cluster.layout import ETCD_PORT
from e2e.scenarios import golden, stoker
from e2e.scenarios.faults.record import Fault, Record
from e2e.scenarios.faults.test_operator_killed import settled, uids
from e2e.scenarios.faults.test_source_faults import seen
from e2e.scenarios.kube import Kube, eventually

GOLDEN = Path(__file__).parent / "golden"
# The engine's own process is a child of the API's; both are in the container's process namespace.
SIGNAL = """
import os, signal
for name in filter(str.isdigit, os.listdir('/proc')):
    try:
        words = open(f'/proc/{{name}}/cmdline').read().split(chr(0))
    except OSError:
        continue
    if 'stoker_runtime.engine' in words:
        os.kill(int(name), signal.{signal})
        print(name)
"""


@pytest.fixture
def serving(place: Kube) -> Kube:
    """A namespace in which a service serves."""
    place.apply(stoker.service("model"))
    stoker.wait_ready(place, "model")
    return place


@pytest.fixture(scope="module")
def served(kube: Kube, installed: Kube) -> Iterator[Kube]:
    """A namespace in which a service serves, for all tests that leave its pod as it was."""
    with stoker.namespace(kube, "pod-faults") as made:
        made.apply(stoker.service("model"))
        stoker.wait_ready(made, "model")
        yield made


@pytest.fixture
def steady(served: Kube) -> Iterator[Kube]:
    """The same, with one pod again at the end."""
    yield served
    served.kubectl("scale", "infsvc/model", "--replicas=1")
    eventually("one pod is left", lambda: settled(served) and len(uids(served)) == 1, 120)
    stoker.wait_ready(served, "model")


def answers(kube: Kube) -> bool:
    """Whether the service answers a completion now."""
    try:
        stoker.ask(stoker.url(kube, "model"), "model", seconds=10)
    except (URLError, OSError):
        return False
    return True


def signal_engine(kube: Kube, name: str) -> None:
    (pod,) = stoker.engine_pods(kube, "model")
    assert kube.run_in(pod["metadata"]["name"], SIGNAL.format(signal=name)).strip(), "no engine process was found"


def restarts(kube: Kube) -> int:
    (pod,) = stoker.engine_pods(kube, "model")
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


@pytest.mark.parametrize(
    ("name", "number", "first"),
    # A server whose engine process is dead says so for a moment, then ends: whether it is seen before that is chance.
    [
        pytest.param("engine process killed", "SIGKILL", "PodRestarting", marks=pytest.mark.ci),
        ("engine hung", "SIGSTOP", "PodNotReady"),
    ],
)
def test_engine(serving: Kube, record: Record, name: str, number: str, first: str) -> None:
    watch = stoker.Stopwatch()
    signal_engine(serving, number)
    stoker.wait_reason(serving, "model", first, 240)
    assert stoker.conditions(serving, "model")["Servable"]["status"] == "False"
    eventually("the container was restarted", lambda: restarts(serving), 240)
    condition = stoker.wait_reason(serving, "model", "PodRestarting")
    golden.check(GOLDEN / f"{name.replace(' ', '-')}.txt", golden.situation(serving, "model"))
    stoker.wait_ready(serving, "model")
    assert answers(serving)
    told = [item["reason"] for item in serving.items("events") if item["involvedObject"]["kind"] == "InferenceService"]
    assert told.count("RollingOut") == 1, "a restart was called a rollout"
    record.add(Fault(f"{name} ({number})", seen(condition), watch.seconds))


def test_image_missing(steady: Kube, record: Record) -> None:
    steady.merge("infsvc", "model", {"spec": {"runtime": {"image": "stoker/no-such-image:1"}}})
    condition = stoker.wait_reason(steady, "model", "ImagePullFailed")
    golden.check(GOLDEN / "image-missing.txt", golden.situation(steady, "model"))
    assert stoker.conditions(steady, "model")["Servable"]["status"] == "True"
    assert answers(steady), "the revision before does not answer"
    watch = stoker.Stopwatch()
    steady.merge("infsvc", "model", {"spec": {"runtime": {"image": None}}})
    stoker.wait_ready(steady, "model")
    record.add(Fault("image missing", seen(condition), watch.seconds, "after the image was corrected"))


def test_node_cordoned(place: Kube, only_node: str, record: Record) -> None:
    place.kubectl("cordon", only_node)
    try:
        place.apply(stoker.service("model"))
        condition = stoker.wait_reason(place, "model", "Unschedulable")
        golden.check(GOLDEN / "node-cordoned.txt", golden.situation(place, "model"))
    finally:
        place.kubectl("uncordon", only_node)
    watch = stoker.Stopwatch()
    stoker.wait_ready(place, "model")
    record.add(Fault("node cordoned", seen(condition), watch.seconds, "by itself once a node takes pods"))


def test_api_server_restarted(steady: Kube, given: Given, record: Record) -> None:
    if given.node is None:
        pytest.skip("only the API server of a node of plain processes can be restarted")
    address = stoker.url(steady, "model")
    given.node.processes.stop("kube-apiserver")
    try:
        stoker.ask(address, "model")
    finally:
        given.node.processes.restart("kube-apiserver")
    watch = stoker.Stopwatch()
    eventually("the API server answers", lambda: steady.kubectl("get", "--raw", "/readyz"), 120)
    assert stoker.conditions(steady, "model")["Ready"]["status"] == "True"
    steady.kubectl("scale", "infsvc/model", "--replicas=2")
    stoker.wait_ready(steady, "model")
    assert not restarts_of_all(steady)
    text = "the service answers throughout; a change made right after is carried out"
    record.add(Fault("API server restarted", text, watch.seconds))


def test_etcds_leases_lost(steady: Kube, given: Given, record: Record) -> None:
    """What etcd keeps for a time alone is gone at once: events, the API server's own registration, with them all
    Leases, of the node and of the leader.
    """
    if given.node is None:
        pytest.skip("only the etcd of a node of plain processes can be told to forget")
    pods = {pod["metadata"]["uid"] for pod in stoker.engine_pods(steady, "model")}
    revoked = [etcd("/v3/lease/revoke", {"ID": lease["ID"]}) for lease in etcd("/v3/lease/leases").get("leases", ())]
    assert revoked, "etcd had no lease"
    assert not steady.items("events"), "events outlived their lease"
    watch = stoker.Stopwatch()
    for lease in json.loads(steady.kubectl("get", "leases", "--all-namespaces", "-o", "json"))["items"]:
        steady.within(lease["metadata"]["namespace"]).kubectl("delete", "lease", lease["metadata"]["name"])
    assert answers(steady)
    steady.kubectl("scale", "infsvc/model", "--replicas=2")
    stoker.wait_ready(steady, "model")
    assert pods < {pod["metadata"]["uid"] for pod in stoker.engine_pods(steady, "model")}
    assert not restarts_of_all(steady)
    text = "the service answers throughout; a change made right after is carried out; earlier events are gone"
    record.add(Fault("etcd's leases lost", text, watch.seconds))
    # The API server goes on with the lease that it has for events, for up to a minute, and etcd takes none of them.
    eventually("events are kept again", partial(keeps_events, steady), 120)


def keeps_events(kube: Kube) -> bool:
    """Whether an event can be written. Raises CommandFailed."""
    about = {"kind": "Service", "namespace": kube.namespace, "name": "model"}
    head = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "probe"}}
    kube.apply(head | {"involvedObject": about, "type": "Normal", "reason": "Probe", "message": "Events are kept."})
    return True


def test_lease_lost(steady: Kube, installed: Kube, record: Record) -> None:
    watch = stoker.Stopwatch()
    installed.kubectl("delete", "lease", "stoker")
    steady.kubectl("scale", "infsvc/model", "--replicas=2")
    stoker.wait_ready(steady, "model")
    assert installed.get("lease", "stoker")["spec"]["holderIdentity"]
    text = "the service answers throughout; a replica takes a new Lease and carries out what was asked meanwhile"
    record.add(Fault("the leader's Lease lost", text, watch.seconds))


def test_engine_dead_under_a_kubelet_that_is_gone(steady: Kube, given: Given, record: Record) -> None:
    """Nobody but the pod itself could tell: for the API server it stays ready for a minute."""
    if given.node is None:
        pytest.skip("only the kubelet of a node of plain processes can be stopped")
    (pod,) = stoker.engine_pods(steady, "model")
    watch = stoker.Stopwatch()
    given.node.processes.stop("kubelet")
    try:
        kill_processes(pod["metadata"]["uid"])
        condition = stoker.wait_reason(steady, "model", "PodNotReady", 45)
        assert "is said to be ready and does not answer" in condition["message"]
        golden.check(GOLDEN / "kubelet-gone.txt", golden.situation(steady, "model"))
    finally:
        given.node.processes.restart("kubelet")
    stoker.wait_ready(steady, "model")
    assert answers(steady)
    record.add(Fault("kubelet gone, then the engine dead", seen(condition), watch.seconds, "once the kubelet is back"))


def kill_processes(pod: str) -> None:
    """End what runs in a pod of this machine, but for what holds its network."""
    ended = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if pod in (process / "cgroup").read_text() and b"/pause" not in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
                ended += 1
        except (FileNotFoundError, ProcessLookupError):
            continue
    assert ended, f"no process of pod {pod} was found"


def restarts_of_all(kube: Kube) -> int:
    pods = stoker.engine_pods(kube, "model")
    return sum(int(item["restartCount"]) for pod in pods for item in pod["status"].get("containerStatuses", ()))


def etcd(path: str, body: dict[str, str] | None = None) -> dict[str, Any]:
    """One call of the node's etcd, as JSON."""
    request = Request(f"http://127.0.0.1:{ETCD_PORT}{path}", json.dumps(body or {}).encode())
    with urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found
