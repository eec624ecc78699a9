"""documents.py: the wire format of custom.metrics.k8s.io."""

from __future__ import annotations

from stoker_operator.metrics_adapter import documents
from stoker_operator.observe.gauges import SERIES


def test_values_are_quantities() -> None:
    answer = documents.values("ns", "vllm:kv_cache_usage_perc", [("p", 0.8504, "t"), ("q", 12, "t")])
    assert [item["value"] for item in answer["items"]] == ["850m", "12000m"]
    assert answer["items"][0]["describedObject"] == {"kind": "Pod", "namespace": "ns", "name": "p", "apiVersion": "/v1"}


def test_every_series_is_offered() -> None:
    names = [item["name"] for item in documents.resources()["resources"]]
    assert names == [f"pods/{series}" for series in SERIES]
