"""capacity.py: whether a node takes one more pod, as things are and once another is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stoker_operator.manifests.pod import placement
from stoker_operator.observe.capacity import candidates, has_room, requests, takes_the_place_of
from stoker_operator.spec.service import InferenceService

Object = dict[str, Any]
TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


def node(gpus: str = "2", **spec: Any) -> Object:
    labels = {"pool": "gpu", "nvidia.com/gpu.product": "NVIDIA-L4", "cores": "32"}
    allocatable = {"nvidia.com/gpu": gpus, "cpu": "7910m", "memory": "30Gi", "pods": "10"}
    status = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": allocatable}
    return {"metadata": {"name": "n", "labels": labels}, "spec": spec, "status": status}


def asking(gpus: str = "1", **requests: str) -> Object:
    return {"containers": [{"resources": {"limits": {"nvidia.com/gpu": gpus}, "requests": requests}}]}


def pod(gpus: str = "1", phase: str = "Running", requests: Object | None = None, **meta: Any) -> Object:
    return {"metadata": meta, "spec": asking(gpus, **(requests or {})), "status": {"phase": phase}}


ROOM: dict[str, tuple[Object, list[Object], bool]] = {
    "empty": (asking(), [], True),
    "one is left": (asking(), [pod()], True),
    "full": (asking(), [pod(), pod()], False),
    "two for one rank each": (asking("2"), [], True),
    "one of two is left": (asking("2"), [pod()], False),
    "four where there are two": (asking("4"), [], False),
    "a terminating pod holds its own": (asking(), [pod(), pod(deletionTimestamp="t")], False),
    "a finished one does not": (asking(), [pod(), pod(phase="Succeeded")], True),
    "pods without GPUs": (asking(), [{"metadata": {}, "spec": {"containers": [{}]}, "status": {}}] * 9, True),
    "as many pods as it takes": (asking(), [{"metadata": {}, "spec": {"containers": [{}]}, "status": {}}] * 10, False),
    "memory for it": (asking(memory="17Gi"), [pod(requests={"memory": "13Gi"})], True),
    "no memory for it": (asking(memory="17Gi"), [pod(requests={"memory": "13.1Gi"})], False),
    "no node has so much": (asking("0", memory="900Gi"), [], False),
    "what we cannot read is a doubt": (asking(cpu="1"), [pod(requests={"cpu": "1e-3"})], False),
    "a resource that it lacks": ({"containers": [{"resources": {"limits": {"amd.com/gpu": "1"}}}]}, [], False),
}


@pytest.mark.parametrize("case", ROOM.values(), ids=ROOM)
def test_room(case: tuple[Object, list[Object], bool]) -> None:
    spec, pods, expected = case
    assert has_room(spec, node(), pods) is expected


def test_what_a_pod_holds() -> None:
    def container(cpu: str, **more: Any) -> Object:
        return {"resources": {"requests": {"cpu": cpu}}} | more

    sidecar = container("500m", restartPolicy="Always")
    spec = {"containers": [container("1"), container("250m")], "initContainers": [container("1500m"), sidecar]}
    assert {key: str(value) for key, value in requests(spec).items()} == {"cpu": "1.750"}
    spec["initContainers"][0] = container("3")
    assert requests(spec | {"overhead": {"cpu": "100m"}})["cpu"] * 10 == 31


IN = "requiredDuringSchedulingIgnoredDuringExecution"


def near(*rules: Object) -> Object:
    return {"placement": {"affinity": {"nodeAffinity": {IN: {"nodeSelectorTerms": [{"matchExpressions": [*rules]}]}}}}}


ELIGIBLE: dict[str, tuple[Object, Object, bool]] = {
    "plain": ({}, node(), True),
    "cordoned": ({}, node(unschedulable=True), False),
    "other pool": ({"placement": {"nodeSelector": {"pool": "cpu"}}}, node(), False),
    "right pool": ({"placement": {"nodeSelector": {"pool": "gpu"}}}, node(), True),
    "other product": ({"resources": {"gpus": 1, "gpuProducts": ["NVIDIA-H200"]}}, node(), False),
    "right product": ({"resources": {"gpus": 1, "gpuProducts": ["NVIDIA-H200", "NVIDIA-L4"]}}, node(), True),
    "right affinity": (near({"key": "cores", "operator": "Gt", "values": ["16"]}), node(), True),
    "other affinity": (near({"key": "cores", "operator": "Lt", "values": ["16"]}), node(), False),
    "without a label": (near({"key": "spot", "operator": "DoesNotExist"}), node(), True),
    "with a label": (near({"key": "spot", "operator": "Exists"}), node(), False),
    "not in": (near({"key": "pool", "operator": "NotIn", "values": ["gpu"]}), node(), False),
    "both rules": (near({"key": "pool", "operator": "Exists"}, {"key": "spot", "operator": "Exists"}), node(), False),
    "tainted": ({}, node(taints=[TAINT]), False),
    "soft taint": ({}, node(taints=[TAINT | {"effect": "PreferNoSchedule"}]), True),
    "tolerated": (
        {"placement": {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}},
        node(taints=[TAINT]),
        True,
    ),
    "tolerates another value": (
        {"placement": {"tolerations": [{"key": "nvidia.com/gpu", "value": "x"}]}},
        node(taints=[TAINT]),
        False,
    ),
}


@pytest.mark.parametrize("case", ELIGIBLE.values(), ids=ELIGIBLE)
def test_candidates(service: Callable[..., InferenceService], case: tuple[Object, Object, bool]) -> None:
    spec, there, expected = case
    assert bool(candidates(placement(service(**({"resources": {"gpus": 1}} | spec))), [there])) is expected


def test_a_node_that_is_not_ready_is_none() -> None:
    there = node()
    there["status"]["conditions"] = []
    assert not candidates(asking(), [there])


OWN = {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
PLACES: dict[str, tuple[Object, Object, bool]] = {
    "the same again": (asking(cpu="2"), asking(cpu="2") | {"tolerations": [OWN]}, True),
    "a smaller one": (asking(cpu="1500m"), asking(cpu="2"), True),
    "a larger one": (asking(cpu="2100m"), asking(cpu="2"), False),
    "four GPUs of two": (asking("4"), asking("2"), False),
    "two GPUs of four": (asking("2"), asking("4"), True),
    "more of what the old one had none of": (asking(memory="900Gi"), asking(), False),
    "a selector": (asking() | {"nodeSelector": {"a": "b"}}, asking(), False),
    "a selector less": (asking(), asking() | {"nodeSelector": {"a": "b"}}, False),
    "another scheduler": (asking() | {"schedulerName": "s"}, asking() | {"schedulerName": "default-scheduler"}, False),
    "a toleration less": (asking(), asking() | {"tolerations": [{"key": "x", "operator": "Exists"}]}, False),
}


@pytest.mark.parametrize("case", PLACES.values(), ids=PLACES)
def test_who_takes_whose_place(case: tuple[Object, Object, bool]) -> None:
    new, old, expected = case
    assert takes_the_place_of(new, old) is expected
