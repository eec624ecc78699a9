"""TLS of the engine's own port: what its container is told, and the Secrets that it reads.

Invariants: keys and certificates stay in their Secrets, which the kubelet renews in place and the engine reads again,
so a renewal is no rollout. Probes and metrics need no client certificate, for a kubelet has none to show.
Knows nothing of who made the certificates.
"""

from __future__ import annotations

from typing import Any

from stoker_operator.spec.service import InferenceService

FOLDER = "/etc/stoker/tls"
CLIENTS_FOLDER = "/etc/stoker/client-ca"
_CERTIFICATE, _KEY, _AUTHORITY = "tls.crt", "tls.key", "ca.crt"


def scheme(service: InferenceService) -> str:
    """What the pods speak: http or https."""
    return "https" if service.endpoint.pod_tls is not None else "http"


def arguments(service: InferenceService) -> list[str]:
    """What `stoker serve` is told."""
    wanted = service.endpoint.pod_tls
    if wanted is None:
        return []
    found = ["--ssl-certfile", f"{FOLDER}/{_CERTIFICATE}", "--ssl-keyfile", f"{FOLDER}/{_KEY}"]
    if wanted.client_ca_secret:
        found += ["--ssl-ca-certs", f"{CLIENTS_FOLDER}/{_AUTHORITY}", "--ssl-cert-reqs", "2"]
        found += ["--ssl-probes-without-cert"]
    return found


def volumes(service: InferenceService) -> list[dict[str, Any]]:
    """The Secrets, of which the pod sees what it needs alone."""
    wanted = service.endpoint.pod_tls
    if wanted is None:
        return []
    found = [_volume("pod-tls", wanted.secret, (_CERTIFICATE, _KEY))]
    if wanted.client_ca_secret:
        found.append(_volume("client-ca", wanted.client_ca_secret, (_AUTHORITY,)))
    return found


def mounts(service: InferenceService) -> list[dict[str, Any]]:
    """Where the engine finds them."""
    folders = {"pod-tls": FOLDER, "client-ca": CLIENTS_FOLDER}
    return [{"name": each["name"], "mountPath": folders[each["name"]], "readOnly": True} for each in volumes(service)]


def _volume(name: str, secret: str, keys: tuple[str, ...]) -> dict[str, Any]:
    # Group-readable: the pod's fsGroup is the engine's own group.
    items = [{"key": key, "path": key} for key in keys]
    return {"name": name, "secret": {"secretName": secret, "items": items, "defaultMode": 0o440}}
