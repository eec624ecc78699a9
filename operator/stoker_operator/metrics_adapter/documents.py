"""The documents of custom.metrics.k8s.io/v1beta2: discovery, values, refusals.

Invariants: pure; only namespaced metrics of pods are offered.
Knows nothing of where values come from.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stoker_operator.observe.gauges import SERIES

GROUP = "custom.metrics.k8s.io"
VERSION = "v1beta2"
ROOT = f"/apis/{GROUP}/{VERSION}"
Document = dict[str, Any]


def api_groups() -> Document:
    """GET /apis."""
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [api_group()]}


def api_group() -> Document:
    """GET /apis/custom.metrics.k8s.io."""
    version = {"groupVersion": f"{GROUP}/{VERSION}", "version": VERSION}
    return {"kind": "APIGroup", "apiVersion": "v1", "name": GROUP, "versions": [version], "preferredVersion": version}


def resources() -> Document:
    """GET /apis/custom.metrics.k8s.io/v1beta2."""
    offered = [
        {"name": f"pods/{series}", "singularName": "", "namespaced": True, "kind": "MetricValueList", "verbs": ["get"]}
        for series in SERIES
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/{VERSION}", "resources": offered}


def values(namespace: str, series: str, samples: Iterable[tuple[str, float, str]]) -> Document:
    """A MetricValueList of (pod, value, RFC 3339 time) samples."""
    items = [
        {
            "describedObject": {"kind": "Pod", "namespace": namespace, "name": pod, "apiVersion": "/v1"},
            "metric": {"name": series, "selector": None},
            "timestamp": time,
            "value": f"{round(value * 1000)}m",
        }
        for pod, value, time in samples
    ]
    return {"kind": "MetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}, "items": items}


def refusal(code: int, reason: str, message: str) -> Document:
    """A Status, as every API server refuses."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "reason": reason,
        "message": message,
        "code": code,
    }
