"""What the Prometheus operator is told of a service: which pods to scrape, and what to wake a person for.

Invariants: series carry the engine's own names; an alert names the service and says what to look at.
Knows nothing of Prometheus' setup.
"""

from __future__ import annotations

from typing import Any

from stoker_operator.manifests.canary import canary_name
from stoker_operator.manifests.identity import Manifest, child, pods_selector, stamped
from stoker_operator.spec.service import InferenceService
from stoker_operator.spec.sleeping import ScaleToZero

POD_MONITOR = ("monitoring.coreos.com/v1", "PodMonitor")
RULE = ("monitoring.coreos.com/v1", "PrometheusRule")


def pod_monitor(service: InferenceService) -> Manifest:
    """Scrape every engine pod, ready or not."""
    monitor = child(service, POD_MONITOR, service.name, "metrics")
    endpoint: dict[str, Any] = {"port": "http", "path": "/metrics", "interval": "15s"}
    if service.endpoint.pod_tls is not None:
        # Pods are scraped by their addresses, for which no certificate is made.
        endpoint |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    spec = {"selector": pods_selector(service), "podMetricsEndpoints": [endpoint]}
    return stamped(monitor | {"spec": spec})


def prometheus_rule(service: InferenceService) -> Manifest:
    """The alerts of one service."""
    rule = child(service, RULE, service.name, "metrics")
    pods = f'{{namespace="{service.namespace}",pod=~"{service.name}-[a-z0-9]+-[a-z0-9]+"}}'
    first_token = f"sum by (le) (rate(vllm:time_to_first_token_seconds_bucket{pods}[5m]))"
    alerts = [
        _alert(service, "StokerQueueGrows", f"avg(vllm:num_requests_waiting{pods}) > 10",
               "requests wait in every pod's queue: raise autoscaling.max or replicas"),
        _alert(service, "StokerFirstTokenSlow", f"histogram_quantile(0.95, {first_token}) > 10",
               "one request in twenty waits more than 10 s for its first token"),
        _alert(service, "StokerKvCacheFull", f"avg(vllm:kv_cache_usage_perc{pods}) > 0.95",
               "the KV cache is full, so sequences are preempted: lower runtime.maxConcurrency or add pods"),
    ]  # fmt: skip
    scaling = service.autoscaling
    zero = scaling.scale_to_zero if scaling is not None else None
    if zero is not None:
        alerts += _sleep_alerts(service, zero)
    if service.canary is not None:
        alerts.append(_canary_alert(service))
    if service.model.adapters:
        waits = pods.replace("}", ',waiting_lora_adapters!=""}')
        alerts.append(
            _alert(service, "StokerAdapterWaits", f"count(vllm:lora_requests_info{waits}) > 0",
                   "requests wait for a place for their adapter: raise --max-loras in runtime.args, or add pods")
        )  # fmt: skip
    if not service.suspend and service.replicas != 0 and zero is None:
        alerts.append(
            _alert(service, "StokerNoPodAnswers", f"absent(vllm:num_requests_running{pods})",
                   "no pod is there to be scraped: see kubectl describe infsvc")
        )  # fmt: skip
    return stamped(rule | {"spec": {"groups": [{"name": f"stoker-{service.name}", "rules": alerts}]}})


def _canary_alert(service: InferenceService) -> dict[str, Any]:
    """A verdict takes requests, and one with a weight takes a person."""
    pods = f'{{namespace="{service.namespace}",pod=~"{canary_name(service)}-[a-z0-9]+-[a-z0-9]+"}}'
    text = "its canary has run for a day: kubectl stoker status says for what it waits; promote it or take it back"
    return _alert(service, "StokerCanaryStands", f"count(vllm:num_requests_running{pods}) > 0", text) | {"for": "24h"}


def _sleep_alerts(service: InferenceService, zero: ScaleToZero) -> list[dict[str, Any]]:
    """Those of a service that may sleep."""
    own = f'service_namespace="{service.namespace}",inferenceservice="{service.name}"'
    turned_away = f'stoker_activator_requests_total{{{own},result=~"full|expired"}}'
    waited = f"sum by (le) (rate(stoker_activator_wait_seconds_bucket{{{own}}}[30m]))"
    wakes = f"sum(increase(stoker_activator_wakes_total{{{own}}}[1h]))"
    return [
        _alert(service, "StokerHeldTooLong", f"sum(increase({turned_away}[10m])) > 0",
               "requests were turned away while no pod ran: see kubectl describe infsvc"),
        _alert(service, "StokerWakesSlowly", f"histogram_quantile(0.9, {waited}) > {zero.max_wait / 2:g}",
               "one held request in ten waits for more than half of maxWait: look at status.startup"),
        _alert(service, "StokerWakesOften", f"{wakes} > 6",
               "it fell asleep and was woken more than six times in an hour: raise scaleToZero.idleAfter"),
    ]  # fmt: skip


def _alert(service: InferenceService, name: str, expression: str, text: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        "for": "10m",
        "labels": {"severity": "warning", "inferenceservice": service.name},
        "annotations": {"summary": f"InferenceService {service.namespace}/{service.name}: {text}."},
    }
