"""What an engine pod says of its load: the gauges out of its page of metrics.

Invariants: pure; only the series that scaling, rollouts and sleep go by are read.
Knows nothing of who asks the pod.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from stoker_operator.manifests.scaling import KV_USED, QUEUED, RUNNING

SERIES = (QUEUED, RUNNING, KV_USED)
IDLE = "stoker:idle_seconds"
Gauges = Mapping[str, float]


def idle_seconds(gauges: Gauges) -> float | None:
    """For how long a pod has had no request; None where it does not say."""
    if not {QUEUED, RUNNING, IDLE} <= gauges.keys():
        return None
    return 0.0 if gauges[QUEUED] or gauges[RUNNING] else gauges[IDLE]


def parse(text: str) -> Gauges:
    """The series that we go by out of a page of metrics: counts summed over their labels, the share as the largest.

    Raises ValueError when the page is not in Prometheus' text format.
    """
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.name in SERIES or family.name == IDLE:
            values = [sample.value for sample in family.samples]
            found[family.name] = max(values) if family.name == KV_USED else sum(values)
    return found
