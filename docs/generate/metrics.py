"""Every series that a server and the operator expose.

Invariants: read from the collectors that are scraped.
Knows nothing of what a value should be; see the operations guide.
"""

from __future__ import annotations

from collections.abc import Iterable

from docs.generate.markdown import code, heading, table
from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase

from stoker_operator import metrics as operator
from stoker_runtime.metrics import EngineView, ServerMetrics
from stoker_runtime.request import EngineStats

INTRODUCTION = """
The server answers at `/metrics` of its port, without a key; operator, activator, node cache and gateway at `/metrics`
of `--http-port`. A counter's series ends in `_total`, a histogram's in `_bucket`, `_count` and `_sum`. Seconds and
tokens are the units; a share is of 1. The label `engine` is there where a server has several (`--data-parallel-size`).
"""


def page() -> str:
    """docs/reference/metrics.md."""
    server = ServerMetrics("model")
    drafting = EngineStats(accepted_by_position=(0,), draft_costs=((1, 1, 1.0, True),), draft_gains=((1, 0.0),))
    server.attach([EngineView(lambda: drafting, page_size=16, num_pages=1)] * 2)
    server.attach_adapters(max_loras=1)
    own = [found for each in vars(operator).values() if isinstance(each, MetricWrapperBase) for found in each.collect()]
    labels = {each._name: each._labelnames for each in vars(operator).values() if isinstance(each, MetricWrapperBase)}
    return (
        heading("Metrics", INTRODUCTION)
        + "\n## The server\n"
        + _families(server.collect(), {})
        + "\n## The operator, the activator, the node cache and the gateway\n"
        + _families(own, labels)
    )


def _families(families: Iterable[Metric], labels: dict[str, tuple[str, ...]]) -> str:
    rows = []
    for family in families:
        names = labels.get(family.name) or dict.fromkeys(
            name for sample in family.samples for name in sample.labels if name != "le"
        )
        rows.append((code(family.name), family.type, ", ".join(map(code, names)), family.documentation))
    return table(("metric", "kind", "labels", "what it says"), rows)
