"""Every metric of the operator, defined once, with its unit in its name."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

RECONCILES = Counter("stoker_reconciles", "Reconciles by how they ended.", ["result"])
RECONCILE_SECONDS = Histogram("stoker_reconcile_seconds", "Duration of a reconcile.")
ACTIONS = Counter("stoker_actions", "Actions carried out, by verb and kind.", ["verb", "kind"])
QUEUE_LENGTH = Gauge("stoker_queue_length", "Services that wait for a reconcile now.")
METRICS_API = Gauge("stoker_metrics_api_registered", "1 while the built-in custom metrics API is the cluster's.")
LEADER = Gauge("stoker_leader", "1 on the replica that leads.")
API_REQUESTS = Counter("stoker_api_requests", "Requests to the API server.", ["verb", "kind", "code"])
WATCH_ERRORS = Counter("stoker_watch_errors", "Watches that the API server ended with an error.", ["kind", "code"])
API_SECONDS = Histogram("stoker_api_request_seconds", "Duration of requests to the API server.", ["verb"])
