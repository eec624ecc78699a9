"""Scenario: a service's NetworkPolicy, enforced: pods answer on the API's port, and reach nothing and are reached on
nothing else; the service is fetched, becomes ready and answers all the same. Where pods publish KV events, their port
is the picker's alone.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import CalledProcessError
from typing import Any

import pytest
from e2e.cluster import policy
from e2e.cluster.backend import Given
from e2e.scenarios import stoker
from e2e.scenarios.kube import CommandFailed, Kube, eventually

OPEN_PORT = 9321
EVENTS_PORT = 5757
# Beside the engine, in its own pod: a port that nobody asked for.
LISTEN = f"""
import os, socket, sys
if os.fork():
    sys.exit()
os.setsid()
for number in range(3):
    os.dup2(os.open(os.devnull, os.O_RDWR), number)
with socket.create_server(("0.0.0.0", {OPEN_PORT})) as server:
    while True:
        server.accept()[0].close()
"""
REACH = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 4).close(); print('reached')"


@contextmanager
def enforced(kube: Kube) -> Iterator[None]:
    """Every policy of the cluster, from now on, followed as pods come and go."""
    over = threading.Event()
    failed: list[Exception] = []

    def follow() -> None:
        while not over.wait(0.3):
            try:
                kinds = ("networkpolicies", "pods", "namespaces")
                found = [json.loads(kube.kubectl("get", kind, "-A", "-o", "json"))["items"] for kind in kinds]
                policy.enforce(*found)
            except (CommandFailed, OSError, policy.Unsupported, CalledProcessError) as error:
                failed.append(error)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
        assert not failed, failed[0]
    finally:
        over.set()
        follower.join(30)
        policy.lift()


def reaches(kube: Kube, workload: str, container: str, address: str, port: int) -> bool:
    """Whether a container reaches an address."""
    python = "/opt/stoker/bin/python" if container == "engine" else "python"
    try:
        said = kube.kubectl("exec", workload, "-c", container, "--", python, "-c", REACH, address, str(port))
    except CommandFailed as error:
        if not re.search("timed out|TimeoutError|refused", str(error)):
            raise
        return False
    return "reached" in said


def test_one_port_in_and_nothing_out(place: Kube, hub: stoker.Hub, given: Given) -> None:
    if given.node is None:
        pytest.skip("needs a node of this machine, whose firewall is ours")
    with enforced(place):
        place.apply(stoker.service("model"))
        stoker.wait_ready(place, "model")  # it was fetched, and the operator asked a pod for a completion
        (pod,) = stoker.engine_pods(place, "model")
        name, address = pod["metadata"]["name"], pod["status"]["podIP"]
        place.run_in(name, LISTEN)
        (front,) = hub.kube.items("pods", f"app={hub.name}")
        client, hub_address = f"pod/{front['metadata']['name']}", front["status"]["podIP"]

        assert reaches(hub.kube, client, "hub", address, 8000), "clients must reach the API"
        assert not reaches(hub.kube, client, "hub", address, OPEN_PORT), "another port of the pod was reached"
        assert not reaches(place, f"pod/{name}", "engine", hub_address, 8090), "the engine reached another pod"
        stoker.ask(stoker.url(place, "model"), "model")

        place.merge("infsvc", "model", {"spec": {"endpoint": {"networkPolicy": False}}})
        eventually("the policy is gone", lambda: not place.items("networkpolicies"), 60)
        eventually(
            "without it the port is reached", lambda: reaches(hub.kube, client, "hub", address, OPEN_PORT), 30, every=1
        )
        assert reaches(place, f"pod/{name}", "engine", hub_address, 8090)


def client(name: str, image: str) -> dict[str, Any]:
    """A pod that waits to be told to connect somewhere."""
    security = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "client",
        "image": image,
        "command": ["python", "-c", "import time; time.sleep(3600)"],
        "securityContext": security,
    }
    spec = {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


def test_events_are_for_the_picker_alone(place: Kube, hub: stoker.Hub, given: Given) -> None:
    if given.node is None:
        pytest.skip("needs a node of this machine, whose firewall is ours")
    pool = {"endpointPickerRef": {"name": "epp"}, "kvEvents": {"port": EVENTS_PORT, "pickerLabels": {"app": "epp"}}}
    with enforced(place):
        place.apply(client("epp", given.images.hub), client("other", given.images.hub))
        place.apply(stoker.service("model", endpoint={"inferencePool": pool}))
        stoker.wait_ready(place, "model")
        for name in ("epp", "other"):
            place.wait("condition=Ready", f"pod/{name}", 60)
        (pod,) = stoker.engine_pods(place, "model")
        address = pod["status"]["podIP"]
        (front,) = hub.kube.items("pods", f"app={hub.name}")

        def reached(kube: Kube, name: str, container: str, port: int = EVENTS_PORT) -> bool:
            return reaches(kube, f"pod/{name}", container, address, port)

        eventually("the picker reaches the events", lambda: reached(place, "epp", "client"), 30, every=1)
        assert not reached(place, "other", "client"), "another pod of the namespace reads what is cached"
        assert not reached(hub.kube, front["metadata"]["name"], "hub"), "a pod of another namespace reads it"
        assert reached(place, "other", "client", 8000), "clients must reach the API all the same"

        less = {"spec": {"endpoint": {"inferencePool": {"kvEvents": {"pickerLabels": None}}}}}
        place.merge("infsvc", "model", less)
        eventually("then all of its namespace may", lambda: reached(place, "other", "client"), 60, every=1)
        assert not reached(hub.kube, front["metadata"]["name"], "hub"), "a pod of another namespace reads it"
        (after,) = stoker.engine_pods(place, "model")
        assert after["metadata"]["uid"] == pod["metadata"]["uid"], "who may read is no rollout"
