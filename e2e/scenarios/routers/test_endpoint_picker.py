"""Scenario 14: the endpoint picker of the Gateway API's inference extension reads the operator's InferencePool and the
pods' gauges, and chooses the pod. An Envoy asks it as a Gateway does (ext-proc), and a client asks Envoy.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster.backend import Given
from e2e.cluster.binaries import BuildError, ensure
from e2e.cluster.crds import definitions
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, eventually

TYPE = "type.googleapis.com/envoy."
PICKED = "x-gateway-destination-endpoint"
SCORERS = ("queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer")


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def envoy_config(port: int, picker: int) -> dict[str, Any]:
    """A Gateway's part: ask the picker with all of the request, and go where it says."""
    heads = [f"{side}_{part}_mode" for side in ("request", "response") for part in ("header", "trailer")]
    bodies = ("request_body_mode", "response_body_mode")
    mode = dict.fromkeys(heads, "SEND") | dict.fromkeys(bodies, "FULL_DUPLEX_STREAMED")
    ask = {
        "@type": f"{TYPE}extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "60s"},
        "processing_mode": mode,
        "message_timeout": "60s",
    }
    route = {
        "match": {"prefix": "/"},
        "route": {"cluster": "pods", "timeout": "120s"},
        "response_headers_to_add": [{"header": {"key": "x-pod", "value": "%UPSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%"}}],
    }
    manager = {
        "@type": f"{TYPE}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {"name": "picker", "typed_config": ask},
            {"name": "router", "typed_config": {"@type": f"{TYPE}extensions.filters.http.router.v3.Router"}},
        ],
    }
    pods = {
        "name": "pods",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": PICKED},
    }
    options = {"@type": f"{TYPE}extensions.upstreams.http.v3.HttpProtocolOptions"}
    picks = {
        "name": "picker",
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": "picker",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(picker)}}]}],
        },
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options
            | {"explicit_http_config": {"http2_protocol_options": {}}}
        },
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    listener = {"name": "clients", "address": address(port), "filter_chains": [chain]}
    return {"static_resources": {"listeners": [listener], "clusters": [pods, picks]}}


def address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


@pytest.fixture(scope="module")
def program() -> str:
    """The publisher's picker, built from its Go module."""
    try:
        return str(ensure(["epp"])["epp"])
    except BuildError as error:
        pytest.skip(f"the endpoint picker cannot be had: {error}")


@pytest.fixture(scope="module")
def pools(installed: Kube, program: str) -> Iterator[None]:
    """The extension's definitions; the operator finds out that they are there within a minute."""
    files = [str(file) for name in ("inference", "inference-picker") for file in definitions(name)]
    for file in files:
        installed.kubectl("apply", "--server-side", "-f", file)
    yield
    for file in files:
        installed.kubectl("delete", "-f", file, "--ignore-not-found", "--timeout=120s")


class Picker:
    """The publisher's picker and an Envoy before it, as processes of this machine."""

    def __init__(self, url: str, metrics: str) -> None:
        self.url, self._metrics = url, metrics

    def ask(self, prompt: str) -> str:
        """The address of the pod that answered."""
        body = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.loads(answer.read())["choices"][0]["finish_reason"] == "length"
            return str(answer.headers["x-pod"])

    def figures(self, name: str) -> dict[str, float]:
        """A family of the picker's own metrics, by its labels."""
        with urllib.request.urlopen(f"{self._metrics}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
        return {labels: float(value) for labels, value in found}


@pytest.fixture
def picker(place: Kube, pools: None, program: str, given: Given, envoy: Path, tmp_path: Path) -> Iterator[Picker]:
    if given.node is None:
        pytest.skip("the picker reaches pods from this machine: needs a node on it")
    port, ext_proc, health, metrics = free_ports(4)
    plugins = "\n".join(f"- type: {name}" for name in SCORERS)
    profile = "\n".join(f"  - pluginRef: {name}" for name in SCORERS)
    config = "apiVersion: inference.networking.x-k8s.io/v1alpha1\nkind: EndpointPickerConfig\n"
    config += f"plugins:\n{plugins}\nschedulingProfiles:\n- name: default\n  plugins:\n{profile}\n"
    flags = {
        "pool-name": "model", "pool-namespace": place.namespace, "grpc-port": ext_proc, "grpc-health-port": health,
        "metrics-port": metrics, "tracing": "false", "secure-serving": "false", "metrics-endpoint-auth": "false",
        "enable-pprof": "false", "config-text": config,
    }  # fmt: skip
    command = [program, *(f"--{name}={value}" for name, value in flags.items())]
    (tmp_path / "envoy.json").write_text(json.dumps(envoy_config(port, ext_proc)))
    proxy = [
        str(envoy),
        "-c",
        str(tmp_path / "envoy.json"),
        "--disable-hot-restart",
        "--concurrency",
        "1",
        "-l",
        "warning",
    ]
    environment = os.environ | {"KUBECONFIG": str(place.kubeconfig), "NAMESPACE": place.namespace}
    with open(tmp_path / "picker.log", "wb") as log:
        started = [subprocess.Popen(each, env=environment, stdout=log, stderr=log) for each in (command, proxy)]
    try:
        yield Picker(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics}")
    finally:
        for each in started:
            each.terminate()
            each.wait(60)
        print((tmp_path / "picker.log").read_text()[-6000:])


def test_the_publishers_picker_chooses_the_pod(place: Kube, picker: Picker) -> None:
    pool = {"endpointPickerRef": {"name": "model-epp", "failureMode": "FailOpen"}}
    place.apply(stoker.service("model", replicas=2, endpoint={"inferencePool": pool}))
    stoker.wait_ready(place, "model", 420)
    eventually("the pool is made", lambda: place.find("inferencepool", "model"), 90)
    addresses = {pod["status"]["podIP"] for pod in stoker.engine_pods(place, "model")}
    assert len(addresses) == 2

    def known() -> bool:
        return list(picker.figures("inference_pool_ready_pods").values()) == [2.0]

    eventually("the picker knows both pods", known, 60)
    queues = picker.figures("inference_pool_per_pod_queue_size")
    assert len(queues) == 2, f"the picker reads no queue of the pods: {queues}"
    chosen = {}
    for number in range(6):
        prompt = f"Story {number}: " + "once upon a time there was a heron " * 30
        pods = {picker.ask(prompt + f"and then {turn}") for turn in range(3)}
        assert len(pods) == 1, "what begins alike was not sent to the pod that has it cached"
        chosen[number] = pods.pop()
    assert set(chosen.values()) <= addresses
    [gone] = [pod for pod in stoker.engine_pods(place, "model") if pod["status"]["podIP"] == chosen[5]]
    place.kubectl("delete", "pod", gone["metadata"]["name"], "--wait=false")
    eventually("the picker leaves out the pod that goes", lambda: picker.ask("Story 5: again") != chosen[5], 60)
