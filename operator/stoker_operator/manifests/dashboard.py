"""The dashboard of one service: a ConfigMap that Grafana's sidecar finds by its label.

Invariants: the series are those that the engine publishes under its own names; the same service gives the same text, so
it is written once; the data source is chosen in Grafana.
Knows nothing of Grafana's setup.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from stoker_operator.manifests.canary import canary_name
from stoker_operator.manifests.identity import Manifest, child, short_hash, stamped
from stoker_operator.spec.service import InferenceService

CONFIG_MAP = ("v1", "ConfigMap")
LABEL = {"grafana_dashboard": "1"}
_WIDTH, _HEIGHT, _COLUMNS = 12, 8, 2
_WINDOW = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph: what it shows, in which of Grafana's units, and its lines as (name, query with PODS for the stable
    pods, TRIAL for those of a canary, and SERVICE for the service as the activator names it).
    """

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]


def _quantiles(series: str, of: str = "PODS") -> tuple[tuple[str, str], ...]:
    rate = f"sum by (le) (rate({series}_bucket{of}{_WINDOW}))"
    return tuple((f"p{share}", f"histogram_quantile({share / 100:g}, {rate})") for share in (50, 95, 99))


def _both(query: str) -> tuple[tuple[str, str], ...]:
    """A query with PODS in it, of the stable pods and of a canary's."""
    return (("stable", query), ("canary", query.replace("PODS", "TRIAL")))


def _mean(series: str) -> str:
    return f"sum(rate({series}_sumPODS{_WINDOW})) / sum(rate({series}_countPODS{_WINDOW}))"


PANELS = (
    Panel(
        "Requests",
        "short",
        (("running", "sum(vllm:num_requests_runningPODS)"), ("waiting", "sum(vllm:num_requests_waitingPODS)")),
    ),
    Panel(
        "Tokens per second",
        "short",
        (
            ("prompt", f"sum(rate(vllm:prompt_tokens_totalPODS{_WINDOW}))"),
            ("generated", f"sum(rate(vllm:generation_tokens_totalPODS{_WINDOW}))"),
        ),
    ),
    Panel("Time to first token", "s", _quantiles("vllm:time_to_first_token_seconds")),
    Panel("Time between tokens", "s", _quantiles("vllm:inter_token_latency_seconds")),
    Panel("Whole request", "s", _quantiles("vllm:e2e_request_latency_seconds")),
    Panel("Time in the queue", "s", _quantiles("vllm:request_queue_time_seconds")),
    Panel("KV cache in use, by pod", "percentunit", (("{{pod}}", "vllm:kv_cache_usage_percPODS"),)),
    Panel(
        "Prefix cache hits",
        "percentunit",
        (
            (
                "share of prompt tokens",
                f"sum(rate(vllm:prefix_cache_hits_totalPODS{_WINDOW})) / "
                f"sum(rate(vllm:prefix_cache_queries_totalPODS{_WINDOW}))",
            ),
        ),
    ),
    Panel(
        "Requests that ended, by reason",
        "reqps",
        (("{{finished_reason}}", f"sum by (finished_reason) (rate(vllm:request_success_totalPODS{_WINDOW}))"),),
    ),
    Panel("Preemptions", "ops", (("preempted", f"sum(rate(vllm:num_preemptions_totalPODS{_WINDOW}))"),)),
)

# Of a service that may sleep: what its activator says of it.
SLEEP_PANELS = (
    Panel("Pods that run", "short", (("pods", "count(vllm:num_requests_runningPODS) or vector(0)"),)),
    Panel("Requests that wait for a pod", "short", (("held", "sum(stoker_activator_held_requestsSERVICE)"),)),
    Panel("For how long they waited", "s", _quantiles("stoker_activator_wait_seconds", "SERVICE")),
    Panel(
        "Requests without a pod, by what became of them",
        "reqps",
        (("{{result}}", f"sum by (result) (rate(stoker_activator_requests_totalSERVICE{_WINDOW}))"),),
    ),
    Panel(
        "Sleeps that requests ended, in an hour",
        "short",
        (("wakes", "sum(increase(stoker_activator_wakes_totalSERVICE[1h]))"),),
    ),
)

# Of a service with a canary: by what the operator judges it, both sides in one graph.
_ENDED = f"sum(rate(vllm:request_success_totalPODS{_WINDOW}))"
_FAILED = f'sum(rate(vllm:request_success_totalPODS{{finished_reason="error"}}{_WINDOW}))'
_REFUSED = f"sum(rate(stoker:requests_rejected_totalPODS{_WINDOW}))"
_BETWEEN = "vllm:inter_token_latency_seconds"
CANARY_PANELS = (
    Panel("Canary: pods", "short", _both("count(vllm:num_requests_runningPODS) or vector(0)")),
    Panel("Canary: requests that ended", "reqps", _both(_ENDED)),
    Panel(
        "Canary: share that failed or was refused",
        "percentunit",
        _both(f"(({_FAILED} or vector(0)) + ({_REFUSED} or vector(0))) / ({_ENDED} + ({_REFUSED} or vector(0)))"),
    ),
    Panel("Canary: mean time to first token", "s", _both(_mean("vllm:time_to_first_token_seconds"))),
    Panel(
        "Canary: tokens per second of a stream",
        "short",
        _both(f"sum(rate({_BETWEEN}_countPODS{_WINDOW})) / sum(rate({_BETWEEN}_sumPODS{_WINDOW}))"),
    ),
)

# Of a service with adapters.
ADAPTER_PANELS = (
    Panel(
        "Adapters that requests run with, by pods",
        "short",
        (
            (
                "{{running_lora_adapters}}",
                'count by (running_lora_adapters) (vllm:lora_requests_infoPODS{running_lora_adapters!=""})',
            ),
        ),
    ),
    Panel(
        "Adapters that requests wait for, by pods",
        "short",
        (
            (
                "{{waiting_lora_adapters}}",
                'count by (waiting_lora_adapters) (vllm:lora_requests_infoPODS{waiting_lora_adapters!=""})',
            ),
        ),
    ),
)


def dashboard(service: InferenceService) -> Manifest:
    """The ConfigMap with the dashboard's JSON."""
    carrier = child(service, CONFIG_MAP, f"{service.name}-dashboard", "metrics")
    carrier["metadata"]["labels"] |= LABEL
    text = json.dumps(_document(service), sort_keys=True, separators=(",", ":"))
    return stamped(carrier | {"data": {f"{service.namespace}-{service.name}.json": text}})


def _document(service: InferenceService) -> dict[str, Any]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": short_hash(["stoker", service.namespace, service.name], 20),
        "title": f"Stoker / {service.namespace} / {service.name}",
        "tags": ["stoker"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": [_panel(service, number, panel) for number, panel in enumerate(_panels(service))],
    }


def _panels(service: InferenceService) -> tuple[Panel, ...]:
    scaling = service.autoscaling
    sleeps = SLEEP_PANELS if scaling is not None and scaling.scale_to_zero is not None else ()
    trial = CANARY_PANELS if service.canary is not None else ()
    return PANELS + sleeps + trial + (ADAPTER_PANELS if service.model.adapters else ())


def _panel(service: InferenceService, number: int, panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "legendFormat": name, "expr": _query(service, query)}
        for index, (name, query) in enumerate(panel.lines)
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {
            "x": number % _COLUMNS * _WIDTH,
            "y": number // _COLUMNS * _HEIGHT,
            "w": _WIDTH,
            "h": _HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def _query(service: InferenceService, query: str) -> str:
    """A panel's query, of this service."""
    sides = {"PODS": service.name, "TRIAL": canary_name(service)}
    own = f'{{service_namespace="{service.namespace}",inferenceservice="{service.name}"}}'
    for word, name in sides.items():
        labels = f'namespace="{service.namespace}",pod=~"{name}-[a-z0-9]+-[a-z0-9]+"'
        query = query.replace(f"{word}{{", f"{{{labels},").replace(word, f"{{{labels}}}")
    return query.replace("SERVICE", own)
