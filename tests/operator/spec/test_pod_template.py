"""spec/pod_template.py: what is read as it is written; tests/operator/bad_specs.yaml has what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker_operator.spec.service import InferenceService


def test_containers_are_read_as_they_are_written(service: Callable[..., InferenceService]) -> None:
    proxy = {"name": "proxy", "image": "x", "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]}
    engine = {"name": "engine", "resources": {"limits": {"a/b": 2}}}
    spec: dict[str, Any] = {"containers": [engine, proxy], "volumes": [{"name": "v", "secret": {"secretName": "s"}}]}
    found = service(podTemplate={"spec": spec}).pod_template
    assert list(found.containers) == [engine, proxy]
    assert found.sidecars == (proxy,)
    assert list(found.volumes) == spec["volumes"]
