"""Scenario 16: a canary by the weights of an HTTPRoute, which a real implementation of the Gateway API carries out:
Traefik, built from its Go module, as a process of this machine.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e.cluster.apiserver import end, free_ports, spawn
from e2e.cluster.backend import Given
from e2e.cluster.binaries import BuildError, Say, ensure
from e2e.cluster.crds import definitions
from e2e.scenarios import stoker
from e2e.scenarios.canary.traffic import Way, answered, canary_pods, lives, stand
from e2e.scenarios.kube import Kube, eventually
from e2e.scenarios.person import plugin_of

GATEWAY = "gateway.networking.k8s.io/v1"
HOST = "model.example.com"
WEIGHT, REQUESTS = 25, 80
CLIENTS = 4


@pytest.fixture(scope="module")
def traefik() -> str:
    """Where it is."""
    try:
        return str(ensure(["traefik"])["traefik"])
    except BuildError as error:
        pytest.skip(f"no implementation of the Gateway API can be had: {error}")


@pytest.fixture(scope="module")
def kinds(installed: Kube, traefik: str) -> Iterator[None]:
    """The Gateway API's standard kinds; the operator finds out that they are there within a minute."""
    files = [str(file) for file in definitions("gateway-standard")]
    for file in files:
        installed.kubectl("apply", "--server-side", "-f", file)
    for file in files:
        installed.kubectl("wait", "--for=condition=Established", "-f", file, "--timeout=60s")
    yield
    for file in files:
        installed.kubectl("delete", "-f", file, "--ignore-not-found", "--timeout=120s")


@pytest.fixture
def gateway(place: Kube, kinds: None, traefik: str, given: Given, tmp_path: Path) -> Iterator[int]:
    """A Gateway `gw` and who carries it out; the port."""
    if given.node is None:
        pytest.skip("the gateway reaches pods from this machine: needs a node on it")
    (port,) = free_ports(1)
    accepted = {
        "apiVersion": GATEWAY,
        "kind": "GatewayClass",
        "metadata": {"name": "traefik"},
        "spec": {"controllerName": "traefik.io/gateway-controller"},
    }
    listener = {"name": "web", "port": port, "protocol": "HTTP"}
    front = {
        "apiVersion": GATEWAY,
        "kind": "Gateway",
        "metadata": {"name": "gw"},
        "spec": {"gatewayClassName": "traefik", "listeners": [listener]},
    }
    place.apply(accepted, front)
    flags = ["--providers.kubernetesgateway=true", f"--entrypoints.web.address=127.0.0.1:{port}"]
    flags += ["--global.checknewversion=false", "--global.sendanonymoususage=false", "--log.level=INFO"]
    log = tmp_path / "traefik.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(place.kubeconfig))
        process = spawn([traefik, *flags], log)
    try:
        yield port
    finally:
        end(process)
        print(log.read_text()[-4000:])
        place.kubectl("delete", "gatewayclass", "traefik", "--ignore-not-found")


def ask(port: int) -> int:
    """The status of one request by the route."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = json.dumps({"model": "model", "prompt": "Hello", "max_tokens": 1})
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", "Host": HOST})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def ask_many(port: int, count: int = REQUESTS) -> list[int]:
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda _: ask(port), range(count)))


def shares(place: Kube) -> tuple[int, int]:
    """Requests that the stable pods and the canary's have answered."""
    sides = stoker.engine_pods(place, "model"), canary_pods(place)
    mine, theirs = (sum(answered(pod["status"]["podIP"]) for pod in side) for side in sides)
    return mine, theirs


def test_the_route_shares_requests_out_as_they_are_asked_to_be(
    place: Kube, gateway: int, say: Say, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    plugin = plugin_of(place, tmp_path / "bin")
    endpoint = {"httpRoute": {"parentRefs": [{"name": "gw"}], "hostnames": [HOST]}}
    place.apply(stoker.service("model", endpoint=endpoint))
    stoker.wait_ready(place, "model")
    eventually("the route leads to the service", lambda: ask(gateway) == 200, 120)
    way = Way(place, lives(place))
    judged = {"window": "10s", "requests": 5, "tolerance": {"firstToken": 10000, "tokens": 100}}
    canary = judged | {"weight": WEIGHT, "runtime": {"contextLength": 384}}
    place.merge("infsvc", "model", {"spec": {"canary": canary}})
    eventually("the canary is let in", lambda: stand(place).get("share") == WEIGHT, 240)
    backends = place.get("httproute", "model")["spec"]["rules"][0]["backendRefs"]
    assert {each["name"]: each["weight"] for each in backends} == {"model": 100 - WEIGHT, "model-canary": WEIGHT}

    def led() -> bool:
        before = shares(place)[1]
        assert ask_many(gateway, 8) == [200] * 8
        return shares(place)[1] > before

    eventually("the gateway has taken the weights up", led, 60)
    before = shares(place)
    assert ask_many(gateway) == [200] * REQUESTS
    after = shares(place)
    stable, mine = after[0] - before[0], after[1] - before[1]
    say(f"canary: of {REQUESTS} requests by a route of weight {WEIGHT} the canary had {mine}, the stable pod {stable}")
    # The operator asks its own questions, too.
    assert abs(mine - REQUESTS * WEIGHT / 100) <= 6, "the route does not share requests by its weights"
    way.until("Passed", 120)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_many, gateway, 3 * REQUESTS)
        plugin("abort", "model")
        way.until("Aborted", 120)
        assert set(asking.result()) == {200}, "a request failed while the canary was taken back"
    backends = place.get("httproute", "model")["spec"]["rules"][0]["backendRefs"]
    assert [each["name"] for each in backends] == ["model"]
    assert lives(place) == way.before
