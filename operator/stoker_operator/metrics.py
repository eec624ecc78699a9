"""Every metric of the operator, defined once, with its unit in its name."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

RECONCILES = Counter("stoker_reconciles", "Reconciles by how they ended.", ["result"])
RECONCILE_SECONDS = Histogram("stoker_reconcile_seconds", "Duration of a reconcile.")
ACTIONS = Counter("stoker_actions", "Actions carried out, by verb and kind.", ["verb", "kind"])
QUEUE_LENGTH = Gauge("stoker_queue_length", "Services that wait for a reconcile now.")
METRICS_API = Gauge("stoker_metrics_api_registered", "1 while the built-in custom metrics API is the cluster's.")
FILLED = Gauge("stoker_filled", "1 once all that a reconcile reads is listed and watched, leading or not.")
LEADER = Gauge("stoker_leader", "1 on the replica that leads.")
API_REQUESTS = Counter("stoker_api_requests", "Requests to the API server.", ["verb", "kind", "code"])
WATCH_ERRORS = Counter("stoker_watch_errors", "Watches that the API server ended with an error.", ["kind", "code"])
API_SECONDS = Histogram("stoker_api_request_seconds", "Duration of requests to the API server.", ["verb"])
CANARIES = Counter("stoker_canaries", "Canaries by what became of them: passed, promoted, failed, aborted.", ["result"])
# Of the node cache agent's process.
NODE_CACHE_BYTES = Gauge("stoker_node_cache_bytes", "Bytes of all models, and parts of models, on this node's disk.")
NODE_CACHE_COPIES = Gauge("stoker_node_cache_copies", "Models that are whole on this node's disk.")
NODE_CACHE_GIVEN_UP = Counter("stoker_node_cache_given_up", "Models, and parts of models, given up for others' room.")
# Of the gateway's process; requests are counted by Envoy.
GATEWAY_MODELS = Gauge("stoker_gateway_models", "Names of models that the gateway answers to.")
GATEWAY_SHADOWED = Gauge("stoker_gateway_shadowed_models", "Names that a service serves, and another one answers to.")
# Of the activator's process.
_SERVICE = ("service_namespace", "inferenceservice")
ACTIVATOR_HELD = Gauge("stoker_activator_held_requests", "Requests that wait for a pod now.", _SERVICE)
ACTIVATOR_BYTES = Gauge("stoker_activator_held_bytes", "Bytes of all requests' bodies that are kept now.")
ACTIVATOR_REQUESTS = Counter(
    "stoker_activator_requests",
    "Requests by what became of them: forwarded, or full, expired, ended, gone, refused, large, failed, left.",
    (*_SERVICE, "result"),
)
ACTIVATOR_WAKES = Counter("stoker_activator_wakes", "Sleeps that this replica asked to end.", _SERVICE)
ACTIVATOR_WAIT = Histogram(
    "stoker_activator_wait_seconds",
    "How long a request that reached a pod had waited for it.",
    _SERVICE,
    buckets=(0.1, 0.5, 1, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1800, 3600),
)
