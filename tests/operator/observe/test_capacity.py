"""capacity.py: whether a node has a GPU to spare, terminating pods counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stoker_operator.observe.capacity import candidates, has_room
from stoker_operator.spec.service import InferenceService

Object = dict[str, Any]
TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


def node(gpus: str = "2", **spec: Any) -> Object:
    labels = {"pool": "gpu", "nvidia.com/gpu.product": "NVIDIA-L4"}
    status = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"nvidia.com/gpu": gpus}}
    return {"metadata": {"name": "n", "labels": labels}, "spec": spec, "status": status}


def pod(gpus: str = "1", phase: str = "Running", **meta: Any) -> Object:
    container = {"resources": {"limits": {"nvidia.com/gpu": gpus}}}
    return {"metadata": meta, "spec": {"containers": [container]}, "status": {"phase": phase}}


ROOM: dict[str, tuple[list[Object], bool]] = {
    "empty": ([], True),
    "one is left": ([pod()], True),
    "full": ([pod(), pod()], False),
    "a terminating pod holds its own": ([pod(), pod(deletionTimestamp="t")], False),
    "a finished one does not": ([pod(), pod(phase="Succeeded")], True),
    "pods without GPUs": ([{"metadata": {}, "spec": {"containers": [{}]}, "status": {}}] * 9, True),
}


@pytest.mark.parametrize("case", ROOM.values(), ids=ROOM)
def test_room(service: Callable[..., InferenceService], case: tuple[list[Object], bool]) -> None:
    pods, expected = case
    assert has_room(service(resources={"gpus": 1}), node(), pods) is expected


ELIGIBLE: dict[str, tuple[Object, Object, bool]] = {
    "plain": ({}, node(), True),
    "cordoned": ({}, node(unschedulable=True), False),
    "no GPUs": ({}, node("0"), False),
    "other pool": ({"placement": {"nodeSelector": {"pool": "cpu"}}}, node(), False),
    "right pool": ({"placement": {"nodeSelector": {"pool": "gpu"}}}, node(), True),
    "other product": ({"resources": {"gpus": 1, "gpuProducts": ["NVIDIA-H200"]}}, node(), False),
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
    assert bool(candidates(service(**({"resources": {"gpus": 1}} | spec)), [there])) is expected


def test_a_node_that_is_not_ready_is_none(service: Callable[..., InferenceService]) -> None:
    there = node()
    there["status"]["conditions"] = []
    assert not candidates(service(resources={"gpus": 1}), [there])
