"""Scenario 5: a HorizontalPodAutoscaler on the queue's depth, from the built-in metrics API alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, eventually
from e2e.scenarios.streams import streaming

API = "apiservice/v1beta2.custom.metrics.k8s.io"
OTHER = "v1beta1.custom.metrics.k8s.io"
MOST = 2
AUTOSCALING = {
    "engine": "HPA",
    "min": 1,
    "max": MOST,
    "targets": {"queued": 1, "running": 0},
    "scaleDown": {"stabilization": "5s", "maxPods": 1, "period": "5s"},
}


def replicas(kube: Kube) -> int:
    return int(kube.get("deployment", "model")["spec"]["replicas"])


@contextmanager
def watched(kube: Kube) -> Iterator[list[int]]:
    """Every value that the Deployment's `replicas` had meanwhile, in order, without repeats."""
    seen: list[int] = []
    path = "-o=jsonpath={.spec.replicas}{'\\n'}"
    watch = kube.start("get", "deployment", "model", "--watch", path)

    def read() -> None:
        for line in watch.stdout or ():
            if not seen or seen[-1] != int(line):
                seen.append(int(line))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield seen
    finally:
        watch.terminate()
        watch.wait()
        reader.join(10)
        if watch.stdout:
            watch.stdout.close()


def test_load_raises_replicas_and_silence_lowers_them(place: Kube) -> None:
    place.apply(stoker.service("model", autoscaling=AUTOSCALING, runtime={"maxConcurrency": 2}))
    stoker.wait_ready(place, "model")
    eventually("the series exists", lambda: _active(place) == "True", 120)
    assert replicas(place) == 1
    with watched(place) as values:
        with streaming(stoker.url(place, "model"), "model", clients=12) as streams:
            streams.wait_running(2)
            eventually("load raises replicas", lambda: replicas(place) == MOST, 180)
            eventually("the second pod serves", lambda: _ready_replicas(place) == MOST, 180)
            streams.wait_more(12)
        eventually("silence lowers replicas", lambda: replicas(place) == 1, 240)
        stoker.wait_ready(place, "model")
    assert values == [1, MOST, 1], f"replicas went {values}: two writers, or above max"


def test_a_rollout_under_load_leaves_the_number_of_pods_to_the_autoscaler(place: Kube) -> None:
    """The queue moves from pod to pod meanwhile: the autoscaler looks back long enough not to follow its every move."""
    steady = {"stabilization": "90s", "maxPods": 1, "period": "5s"}
    scaling = AUTOSCALING | {"scaleDown": steady}
    place.apply(stoker.service("model", autoscaling=scaling, runtime={"maxConcurrency": 2}))
    stoker.wait_ready(place, "model")
    eventually("the series exists", lambda: _active(place) == "True", 120)
    with watched(place) as values:
        with streaming(stoker.url(place, "model"), "model", clients=12) as streams:
            streams.wait_running(2)
            eventually("load raises replicas", lambda: replicas(place) == MOST, 180)
            place.merge("infsvc", "model", {"spec": {"runtime": {"args": ["--seed", "7"]}}})
            stoker.wait_ready(place, "model", 600)
            assert replicas(place) == MOST, "the rollout changed what the autoscaler had set"
            streams.wait_more(6)
        eventually("silence lowers replicas", lambda: replicas(place) == 1, 300)
        stoker.wait_ready(place, "model")
    assert values == [1, MOST, 1], f"replicas went {values}: two writers, or above max"
    assert "stoker-operator" not in _writers(place), "the operator took the number of pods over"


def _writers(kube: Kube) -> set[str]:
    """Who set the Deployment's `replicas`."""
    text = kube.kubectl("get", "deployment", "model", "-o", "json", "--show-managed-fields")
    entries = json.loads(text)["metadata"]["managedFields"]
    return {item["manager"] for item in entries if "f:replicas" in item.get("fieldsV1", {}).get("f:spec", {})}


def test_another_adapter_keeps_the_api_and_the_condition_says_so(place: Kube) -> None:
    """Registered by somebody else, here without a backend: ours gives way, and comes back when that one goes."""
    place.apply(stoker.service("model", autoscaling=AUTOSCALING))
    stoker.wait_ready(place, "model")
    eventually("the series exists", lambda: _active(place) == "True", 120)
    spec = {"group": "custom.metrics.k8s.io", "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100}
    backend = {"service": {"name": "prometheus-adapter", "namespace": place.namespace}, "insecureSkipTLSVerify": True}
    head = {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": OTHER}}
    place.apply(head | {"spec": spec | backend})
    try:
        eventually("ours gives way", lambda: place.find(*API.split("/")) is None, 120)
        eventually("the condition says so", lambda: "stays off" in _said(place), 240)
        assert f"{OTHER} (Service {place.namespace}/prometheus-adapter)" in _said(place)
        assert replicas(place) == 1, "without a series the number of pods was changed"
        stoker.ask(stoker.url(place, "model"), "model")
    finally:
        place.kubectl("delete", "apiservice", OTHER)
    eventually("the series is back", lambda: _active(place) == "True", 180)


def _said(kube: Kube) -> str:
    return str(stoker.conditions(kube, "model").get("AutoscalingActive", {}).get("message"))


def _active(kube: Kube) -> str:
    return str(stoker.conditions(kube, "model").get("AutoscalingActive", {}).get("status"))


def _ready_replicas(kube: Kube) -> int:
    return int(kube.get("infsvc", "model")["status"].get("readyReplicas", 0))
