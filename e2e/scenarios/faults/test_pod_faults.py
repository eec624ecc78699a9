"""Scenario 6, what runs: image, node, engine process, operator at each step, API server, the leader's lease."""

from __future__ import annotations

from collections.abc import Callable
from urllib.error import URLError

import pytest
from e2e.cluster.backend import Given
from e2e.scenarios import stoker
from e2e.scenarios.faults.record import Fault, Record
from e2e.scenarios.faults.test_source_faults import seen
from e2e.scenarios.kube import Kube, eventually

# The engine's own process is a child of the API's; both are in the container's process namespace.
SIGNAL = """
import os, signal
for name in filter(str.isdigit, os.listdir('/proc')):
    try:
        words = open(f'/proc/{{name}}/cmdline').read().split(chr(0))
    except OSError:
        continue
    if 'stoker_runtime.engine.core' in words:
        os.kill(int(name), signal.{signal})
        print(name)
"""


@pytest.fixture
def serving(place: Kube) -> Kube:
    """A namespace in which a service serves."""
    place.apply(stoker.service("model"))
    stoker.wait_ready(place, "model")
    return place


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
    ("name", "number"),
    [pytest.param("engine process killed", "SIGKILL", marks=pytest.mark.ci), ("engine hung", "SIGSTOP")],
)
def test_engine(serving: Kube, record: Record, name: str, number: str) -> None:
    watch = stoker.Stopwatch()
    signal_engine(serving, number)

    def noticed() -> dict[str, str] | None:
        ready = stoker.conditions(serving, "model")["Ready"]
        return ready if ready["status"] == "False" else None

    condition = eventually("Ready says so", noticed, 240, every=0.2)
    eventually("the container was restarted", lambda: restarts(serving), 240)
    stoker.wait_ready(serving, "model")
    assert answers(serving)
    record.add(Fault(f"{name} ({number})", seen(condition), watch.seconds))


def test_image_missing(serving: Kube, record: Record) -> None:
    serving.merge("infsvc", "model", {"spec": {"runtime": {"image": "stoker/no-such-image:1"}}})
    condition = stoker.wait_reason(serving, "model", "ImagePullFailed")
    assert stoker.conditions(serving, "model")["Servable"]["status"] == "True"
    assert answers(serving), "the revision before does not answer"
    watch = stoker.Stopwatch()
    serving.merge("infsvc", "model", {"spec": {"runtime": {"image": None}}})
    stoker.wait_ready(serving, "model")
    record.add(Fault("image missing", seen(condition), watch.seconds, "after the image was corrected"))


def test_node_cordoned(place: Kube, only_node: str, record: Record) -> None:
    place.kubectl("cordon", only_node)
    try:
        place.apply(stoker.service("model"))
        condition = stoker.wait_reason(place, "model", "Unschedulable")
    finally:
        place.kubectl("uncordon", only_node)
    watch = stoker.Stopwatch()
    stoker.wait_ready(place, "model")
    record.add(Fault("node cordoned", seen(condition), watch.seconds, "by itself once a node takes pods"))


def _kind_exists(kind: str) -> Callable[[Kube], bool]:
    return lambda kube: bool(kube.items(kind))


def _reason(name: str) -> Callable[[Kube], bool]:
    return lambda kube: stoker.conditions(kube, "model").get("Ready", {}).get("reason") == name


def _pod_ready(kube: Kube) -> bool:
    conditions = [item for pod in stoker.engine_pods(kube, "model") for item in pod["status"].get("conditions", ())]
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


STEPS: dict[str, Callable[[Kube], bool]] = {
    "the claim is made": _kind_exists("persistentvolumeclaims"),
    "the fetch runs": _kind_exists("jobs"),
    "the Deployment is made": _kind_exists("deployments"),
    "a pod is ready": _pod_ready,
}


IN_CI = pytest.param("the fetch runs", marks=pytest.mark.ci)


@pytest.mark.parametrize("step", [IN_CI if step in IN_CI.values else step for step in STEPS])
def test_operator_killed(place: Kube, installed: Kube, record: Record, step: str) -> None:
    place.apply(stoker.service("model"))
    eventually(step, lambda: STEPS[step](place), 120, every=0.1)
    watch = stoker.Stopwatch()
    leader = installed.get("lease", "stoker")["spec"]["holderIdentity"]
    installed.kubectl("delete", "pod", leader, "--force", "--grace-period=0")
    stoker.wait_ready(place, "model")
    jobs = place.items("jobs")
    assert len(jobs) == 1, f"the new leader fetched again: {[job['metadata']['name'] for job in jobs]}"
    installed.kubectl("rollout", "status", "deployment/stoker", "--timeout=120s")
    record.add(Fault(f"operator killed when {step}", "the other replica leads and goes on", watch.seconds))


def test_api_server_restarted(serving: Kube, given: Given, record: Record) -> None:
    if given.node is None:
        pytest.skip("only the API server of a node of plain processes can be restarted")
    address = stoker.url(serving, "model")
    given.node.processes.stop("kube-apiserver")
    try:
        stoker.ask(address, "model")
    finally:
        given.node.processes.restart("kube-apiserver")
    watch = stoker.Stopwatch()
    eventually("the API server answers", lambda: serving.kubectl("get", "--raw", "/readyz"), 120)
    serving.kubectl("scale", "infsvc/model", "--replicas=2")
    stoker.wait_ready(serving, "model")
    text = "the service answers throughout; a change made right after is carried out"
    record.add(Fault("API server restarted", text, watch.seconds))


def test_lease_lost(serving: Kube, installed: Kube, record: Record) -> None:
    watch = stoker.Stopwatch()
    installed.kubectl("delete", "lease", "stoker")
    serving.kubectl("scale", "infsvc/model", "--replicas=2")
    stoker.wait_ready(serving, "model")
    assert installed.get("lease", "stoker")["spec"]["holderIdentity"]
    record.add(Fault("the leader's Lease lost", "a replica takes a new one", watch.seconds))
