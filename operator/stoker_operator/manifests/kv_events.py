"""What an engine's pod publishes of its prefix cache for the picker of its InferencePool: what the container is told,
the port, and who may connect.

Invariants: nothing of it is in a pod of a service that does not ask for it. The topic names the pod as llm-d's router
does, by address and port of the API, and the model by the first name that clients use. Events hold token ids of prompts
and cache salts, so the port is open to pods of the picker's namespace alone, which is the service's own.
Knows nothing of events, and of pickers.
"""

from __future__ import annotations

import json
from typing import Any

from stoker_operator.spec.endpoint import POD_IP
from stoker_operator.spec.service import InferenceService

PORT_NAME = "kv-events"


def arguments(service: InferenceService, api_port: int) -> list[str]:
    """What `stoker serve` is told. The kubelet puts the pod's address into it."""
    wanted = service.endpoint.kv_events
    if wanted is None:
        return []
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{wanted.port}",
        "topic": f"kv@$({POD_IP}):{api_port}@{service.served_names[0]}",
    }
    return ["--kv-events-config", json.dumps(config)]


def variables(service: InferenceService) -> list[dict[str, Any]]:
    """The variable that the topic names."""
    if service.endpoint.kv_events is None:
        return []
    return [{"name": POD_IP, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}}]


def ports(service: InferenceService) -> list[dict[str, Any]]:
    """The container's port."""
    wanted = service.endpoint.kv_events
    return [] if wanted is None else [{"name": PORT_NAME, "containerPort": wanted.port, "protocol": "TCP"}]


def openings(service: InferenceService) -> list[dict[str, Any]]:
    """The rules of a NetworkPolicy that let the picker in."""
    wanted = service.endpoint.kv_events
    if wanted is None:
        return []
    labels = dict(wanted.picker_labels)
    picker = {"podSelector": {"matchLabels": labels} if labels else {}}
    return [{"from": [picker], "ports": [{"port": wanted.port, "protocol": "TCP"}]}]
