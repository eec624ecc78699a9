"""What stands in front of the Service: NetworkPolicy, Ingress, HTTPRoute, InferencePool, and the URL that clients use.

Invariants: answers are streamed, so nothing on the way may buffer them or cut them after a time of its own; an engine
pod is reached on its one port, by a picker on that of KV events, and reaches nothing itself unless it fetches its
model, or sends traces.
Knows nothing of who implements the objects.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from stoker_operator.manifests import kv_events
from stoker_operator.manifests.canary import canary_name
from stoker_operator.manifests.identity import Manifest, child, members_selector, pods_selector, selector, stamped
from stoker_operator.manifests.network import service_url
from stoker_operator.manifests.workload import PORT
from stoker_operator.spec.endpoint import HttpRoute, InferencePool, Ingress
from stoker_operator.spec.service import InferenceService

NETWORK_POLICY = ("networking.k8s.io/v1", "NetworkPolicy")
INGRESS = ("networking.k8s.io/v1", "Ingress")
INFERENCE_POOL_GROUP = "inference.networking.k8s.io"
INFERENCE_POOL = (f"{INFERENCE_POOL_GROUP}/v1", "InferencePool")
HTTP_ROUTE = ("gateway.networking.k8s.io/v1", "HTTPRoute")
# What ingress-nginx would else do to a stream of minutes; others ignore its annotations.
_STREAMING = {
    "nginx.ingress.kubernetes.io/proxy-buffering": "off",
    "nginx.ingress.kubernetes.io/proxy-read-timeout": "3600",
    "nginx.ingress.kubernetes.io/proxy-body-size": "64m",
}

# Others go by the Service's appProtocol.
_TO_TLS = {"nginx.ingress.kubernetes.io/backend-protocol": "HTTPS"}


def public_url(service: InferenceService) -> str:
    """The OpenAI base URL for clients: outside the cluster where the spec gives it a host, else inside."""
    endpoint = service.endpoint
    if endpoint.ingress is not None:
        return f"{'https' if endpoint.tls_secret else 'http'}://{endpoint.ingress.host}/v1"
    if endpoint.http_route is not None and endpoint.http_route.hostnames:
        first = endpoint.http_route.parents[0]
        secure = first.section.startswith("https") or first.port == 443
        return f"{'https' if secure else 'http'}://{endpoint.http_route.hostnames[0]}/v1"
    return service_url(service)


def network_policy(service: InferenceService, *, grouped: bool = False) -> Manifest:
    """In: the API's port, from anywhere; that of KV events, where there are any, from the picker. Out: nothing; the
    model is on a volume, and answers follow their requests; to anywhere, where each pod fetches for itself
    (cache.mode: None).

    With a collector of traces, out: its port and names. A policy knows no names of hosts, so the port is all it says.
    The pods of groups (`grouped`) reach each other on every port, for the engine's libraries let the system choose, and
    names.
    """
    policy = child(service, NETWORK_POLICY, service.name, "engine")
    collector = _to_collector(service.observability.otlp_endpoint)
    members = [{"podSelector": members_selector(service)}] if grouped else []
    # A policy sees the port of the pod behind a Service; OpenShift's pods of DNS listen on 5353.
    names = [{"port": number, "protocol": protocol} for number in (53, 5353) for protocol in ("UDP", "TCP")]
    out: list[dict[str, Any]] = [{"ports": names}] if members or collector else []
    out += [*collector, *([{"to": members}] if members else [])]
    spec = {
        "podSelector": members_selector(service) if grouped else pods_selector(service),
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"ports": [{"port": PORT, "protocol": "TCP"}]},
            *kv_events.openings(service),
            *([{"from": members}] if members else []),
        ],
        "egress": [{}] if service.cache.mode == "None" else out,
    }
    return stamped(policy | {"spec": spec})


def _to_collector(url: str) -> list[dict[str, Any]]:
    if not url:
        return []
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return [{"ports": [{"port": port, "protocol": "TCP"}]}]


def ingress(service: InferenceService, wanted: Ingress) -> Manifest:
    """The Ingress to the Service."""
    front = child(service, INGRESS, service.name, "endpoint")
    front["metadata"]["annotations"] = _STREAMING | (_TO_TLS if service.endpoint.pod_tls is not None else {})
    backend = {"service": {"name": service.name, "port": {"name": "http"}}}
    rule = {"host": wanted.host, "http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}}
    spec: dict[str, Any] = {"rules": [rule]}
    if wanted.class_name:
        spec["ingressClassName"] = wanted.class_name
    if service.endpoint.tls_secret:
        spec["tls"] = [{"hosts": [wanted.host], "secretName": service.endpoint.tls_secret}]
    return stamped(front | {"spec": spec})


def inference_pool(service: InferenceService, wanted: InferencePool) -> Manifest:
    """The InferencePool of the engine's pods, as Gateways and endpoint pickers read it."""
    pool = child(service, INFERENCE_POOL, service.name, "endpoint")
    reference = {
        "group": "",
        "kind": "Service",
        "name": wanted.picker,
        "port": {"number": wanted.port},
        "failureMode": wanted.failure_mode,
    }
    spec = {
        "selector": {"matchLabels": selector(service)},
        "targetPorts": [{"number": PORT}],
        "appProtocol": "http",
        "endpointPickerRef": reference,
    }
    return stamped(pool | {"spec": spec})


def http_route(service: InferenceService, wanted: HttpRoute, *, pool: bool, share: int = 0) -> Manifest:
    """The HTTPRoute to the Service, or with `pool` to the InferencePool of the same name; `share` of the requests, in
    percent, go to the canary's Service.
    """
    route = child(service, HTTP_ROUTE, service.name, "endpoint")
    parents: list[dict[str, Any]] = []
    for parent in wanted.parents:
        fields = {"namespace": parent.namespace, "sectionName": parent.section, "port": parent.port}
        parents.append({"name": parent.name} | {key: value for key, value in fields.items() if value})
    to_pool = {"group": INFERENCE_POOL_GROUP, "kind": "InferencePool", "name": service.name}
    backends: list[dict[str, Any]] = [to_pool if pool else {"name": service.name, "port": service.endpoint.port}]
    if share:
        other = {"name": canary_name(service), "port": service.endpoint.port, "weight": share}
        backends = [backends[0] | {"weight": 100 - share}, other]
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        "backendRefs": backends,
        "timeouts": {"request": "0s"},
    }
    spec: dict[str, Any] = {"parentRefs": parents, "rules": [rule]}
    if wanted.hostnames:
        spec["hostnames"] = list(wanted.hostnames)
    return stamped(route | {"spec": spec})
