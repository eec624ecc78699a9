"""Who answers for a model: the services as their Services and EndpointSlices tell, and the names that they serve.

Invariants: pure. A name is answered by one service: where several say that they serve it, by the one that has been
there longest, so a new service takes nobody's clients away. A service without a pod is known all the same: its
activator answers, or nobody does.
Knows nothing of Envoy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from stoker_operator.manifests.activation import SERVICE_LABEL, slice_addresses, slice_port
from stoker_operator.manifests.network import MODELS_NOTE

Object = Mapping[str, Any]
Endpoint = tuple[str, int]
_PLAIN = ("", "http")


@dataclass(frozen=True, slots=True)
class Backend:
    """A service: the `models` that it serves, and the (address, port) of whoever takes its requests now.

    `created` is when its Service was, in seconds since the epoch.
    """

    namespace: str
    name: str
    created: int
    models: tuple[str, ...]
    endpoints: tuple[Endpoint, ...] = ()

    @property
    def cluster(self) -> str:
        """Its name among all."""
        return f"{self.namespace}.{self.name}"


@dataclass(frozen=True, slots=True)
class Table:
    """Every model's name with its service; `shadowed` are the (name, service) that another one answers for."""

    models: Mapping[str, Backend]
    backends: tuple[Backend, ...]
    shadowed: tuple[tuple[str, Backend], ...] = ()


def read_backends(services: Iterable[Object], slices: Iterable[Object]) -> tuple[Backend, ...]:
    """The services that say which models they serve, the oldest first."""
    places: dict[tuple[str, str], set[Endpoint]] = {}
    for each in slices:
        meta = each["metadata"]
        port = slice_port(each)
        if port and not meta.get("deletionTimestamp") and _speaks_plainly(each):
            key = (meta["namespace"], (meta.get("labels") or {}).get(SERVICE_LABEL, ""))
            places.setdefault(key, set()).update((address, port) for address in slice_addresses(each))
    found = []
    for service in services:
        meta = service["metadata"]
        models = _models(meta)
        if models and not meta.get("deletionTimestamp"):
            key = (meta["namespace"], meta["name"])
            created = int(datetime.fromisoformat(meta["creationTimestamp"]).timestamp())
            found.append(Backend(*key, created, models, tuple(sorted(places.get(key, ())))))
    return tuple(sorted(found, key=lambda each: (each.created, each.cluster)))


def make_table(backends: tuple[Backend, ...]) -> Table:
    """Who answers for which name; `backends` from the oldest on."""
    models: dict[str, Backend] = {}
    shadowed = []
    for backend in backends:
        for name in backend.models:
            if models.setdefault(name, backend) is not backend:
                shadowed.append((name, backend))
    return Table(models, backends, tuple(shadowed))


def _models(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """What the operator noted on the Service; () for a Service that is no way to a model."""
    try:
        names = json.loads((meta.get("annotations") or {}).get(MODELS_NOTE, "[]"))
    except ValueError:
        return ()
    return tuple(str(name) for name in names) if isinstance(names, list) else ()


def _speaks_plainly(each: Object) -> bool:
    ports = each.get("ports") or [{}]
    return ports[0].get("appProtocol", "") in _PLAIN
