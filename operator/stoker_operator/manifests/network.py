"""The Service that clients use and the headless one that scrapers use.

Invariants: clients only reach ready pods; scrapers reach every pod, so a pod that loads is visible too.
Knows nothing of what stands in front of the Service.
"""

from __future__ import annotations

import json

from stoker_operator.manifests import tls
from stoker_operator.manifests.identity import Manifest, child, selector, shared_labels, stamped
from stoker_operator.manifests.workload import PORT
from stoker_operator.spec.service import GROUP, InferenceService

SERVICE = ("v1", "Service")
# The names of the models that are answered for at a Service, as a list in JSON: a gateway sends requests by them.
MODELS_NOTE = f"{GROUP}/models"


def service_url(service: InferenceService) -> str:
    """The OpenAI base URL inside the cluster."""
    return f"{tls.scheme(service)}://{service.name}.{service.namespace}.svc:{service.endpoint.port}/v1"


def web_service(service: InferenceService, *, shared: bool = False) -> Manifest:
    """The Service under the object's own name. `shared`: a canary's pods are among those that it leads to."""
    front = child(service, SERVICE, service.name, "engine")
    # The gateway speaks HTTP.
    if not service.suspend and service.endpoint.pod_tls is None:
        names = (*service.served_names, *(adapter.name for adapter in service.model.adapters or ()))
        front["metadata"]["annotations"] = {MODELS_NOTE: json.dumps(names)}
    number = service.endpoint.port
    port = {"name": "http", "port": number, "targetPort": "http", "protocol": "TCP"}
    port["appProtocol"] = tls.scheme(service)
    chosen = shared_labels(service) if shared else selector(service)
    return stamped(front | {"spec": {"type": "ClusterIP", "selector": chosen, "ports": [port]}})


def metrics_service(service: InferenceService) -> Manifest:
    """The headless Service whose addresses are every pod, ready or not."""
    headless = child(service, SERVICE, f"{service.name}-metrics", "metrics")
    port = {"name": "metrics", "port": PORT, "targetPort": "http", "protocol": "TCP"}
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector(service),
        "ports": [port],
    }
    return stamped(headless | {"spec": spec})
