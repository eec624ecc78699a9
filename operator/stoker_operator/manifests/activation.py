"""The EndpointSlice by which a service that sleeps is answered by the activator, and what it says of the sleep.

A Service's endpoints are all slices that name it. Kubernetes fills one from the service's pods; this one is ours beside
it. Its endpoints are the activator's pods while requests are to be held, and none while pods run, so the activator is
off their way. Its port is the service's own at every replica of the activator: that is how the activator knows whom a
request is for, whatever host, key or path it carries.
Invariants: what is noted here outlives the operator: a sleep begun by one replica is ended by another. A sleep has a
name of its own, and who asks to be woken names it, so that no clocks are compared.
Knows nothing of when a service sleeps and of how requests are held.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stoker_operator.manifests.identity import Manifest, child, stamped
from stoker_operator.spec.service import GROUP, InferenceService

ENDPOINT_SLICE = ("discovery.k8s.io/v1", "EndpointSlice")
COMPONENT_NAME = "activator"
SERVICE_LABEL = "kubernetes.io/service-name"
SLICE_MANAGER_LABEL = "endpointslice.kubernetes.io/managed-by"
NOTE = f"{GROUP}/activation"
AWAKE, FALLING, ASLEEP, WAKING = "Awake", "FallingAsleep", "Asleep", "Waking"
# Below the ports that Linux gives to outgoing connections.
PORTS = range(20000, 30000)


@dataclass(frozen=True, slots=True)
class Sleep:
    """Where a service stands. `name` is the sleep's own, "" = it has none; times are ISO 8601, "" = never.

    `since` is when the state began and `why` says so; `ready_at`, of one that wakes, when a pod was first seen ready;
    `replicas` is what the spec asked for when it fell asleep. `wish` is what people asked for last that was carried
    out; by it the service is awake until `until`, or has no heed of its schedule until `skips`.
    """

    state: str = AWAKE
    name: str = ""
    since: str = ""
    why: str = ""
    ready_at: str = ""
    replicas: int | None = None
    wish: str = ""
    until: str = ""
    skips: str = ""

    @property
    def holds(self) -> bool:
        """Whether requests may reach the activator."""
        return self.state != AWAKE


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the activator may do for a service. Seconds: `max_wait`, and `start`, how long its pods take to start.

    `keys`: its pods ask for a key; `models` are the names that it serves.
    """

    max_queued: int
    max_wait: int
    start: int
    keys: bool
    models: tuple[str, ...]


def slice_name(service: InferenceService) -> str:
    """The name of a service's EndpointSlice for the activator."""
    return f"{service.name}-{COMPONENT_NAME}"


def activator_slice(service: InferenceService, sleep: Sleep, bounds: Bounds, port: int, address: str) -> Manifest:
    """The EndpointSlice. `address` is that of the activator's pod that holds this service's requests."""
    found = child(service, ENDPOINT_SLICE, slice_name(service), COMPONENT_NAME)
    found["metadata"]["labels"] |= {SERVICE_LABEL: service.name, SLICE_MANAGER_LABEL: "stoker-operator"}
    note = {"sleep": asdict(sleep), "bounds": asdict(bounds)}
    found["metadata"]["annotations"] = {NOTE: json.dumps(note, sort_keys=True)}
    endpoints = [{"addresses": [address], "conditions": {"ready": True}}]
    body = {
        "addressType": f"IPv{ipaddress.ip_address(address).version}",
        # The Service's own name of its port: by it the two are matched.
        "ports": [{"name": "http", "port": port, "protocol": "TCP", "appProtocol": "http"}],
        "endpoints": endpoints if sleep.holds else [],
    }
    return stamped(found | body)


def read_sleep(live: Mapping[str, Any] | None) -> Sleep:
    """What a live EndpointSlice of ours notes; of none, that the service is awake."""
    note = _note(live, "sleep")
    return Sleep(**{key: note[key] for key in Sleep.__slots__ if key in note})


def read_bounds(live: Mapping[str, Any]) -> Bounds | None:
    """The bounds that a live EndpointSlice of ours names; None for one that is not ours."""
    note = _note(live, "bounds")
    if not note.keys() >= set(Bounds.__slots__):
        return None
    return Bounds(**{key: note[key] for key in Bounds.__slots__} | {"models": tuple(note["models"])})


def slice_port(live: Mapping[str, Any]) -> int:
    """The port at which a live EndpointSlice's endpoints answer; 0 when it names none."""
    ports = live.get("ports") or ()
    return int(ports[0].get("port") or 0) if ports else 0


def slice_addresses(live: Mapping[str, Any]) -> tuple[str, ...]:
    """The addresses of a live EndpointSlice's endpoints that take requests."""
    ready = [item for item in live.get("endpoints") or () if (item.get("conditions") or {}).get("ready", True)]
    return tuple(address for item in ready for address in item.get("addresses") or ())


def _note(live: Mapping[str, Any] | None, part: str) -> dict[str, Any]:
    """A part of the note, whatever other version wrote it; {} where there is none."""
    text = ((live or {}).get("metadata", {}).get("annotations") or {}).get(NOTE, "")
    try:
        note = json.loads(text) if text else {}
    except ValueError:
        return {}
    found = note.get(part) if isinstance(note, dict) else None
    return found if isinstance(found, dict) else {}
