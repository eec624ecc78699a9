"""Pushes an artifact of files to a registry as ORAS lays it out, by the distribution specification's own requests.

Invariants: standard library only; each blob is uploaded in one piece.
Knows nothing of who serves the registry.
"""

from __future__ import annotations

import hashlib
import json
import urllib.request
from collections.abc import Mapping
from typing import Any

TITLE = "org.opencontainers.image.title"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def push(address: str, repository: str, tag: str, files: Mapping[str, bytes]) -> str:
    """Push `files` under a tag of the registry at `address`; returns the manifest's digest."""
    layers = []
    for title, content in files.items():
        layer = {"mediaType": "application/octet-stream", "annotations": {TITLE: title}}
        layers.append(layer | _upload(address, repository, content))
    config = {"mediaType": "application/vnd.oci.empty.v1+json"} | _upload(address, repository, b"{}")
    head = {"schemaVersion": 2, "mediaType": MANIFEST, "artifactType": "application/vnd.stoker.test"}
    body = json.dumps(head | {"config": config, "layers": layers}).encode()
    _send("PUT", f"{address}/v2/{repository}/manifests/{tag}", body, MANIFEST)
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def _upload(address: str, repository: str, content: bytes) -> dict[str, Any]:
    """Upload a blob; returns its descriptor."""
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    where = _send("POST", f"{address}/v2/{repository}/blobs/uploads/", b"", "application/octet-stream")
    where = where if where.startswith("http") else f"{address}{where}"
    mark = "&" if "?" in where else "?"
    _send("PUT", f"{where}{mark}digest={digest}", content, "application/octet-stream")
    return {"digest": digest, "size": len(content)}


def _send(method: str, url: str, body: bytes, kind: str) -> str:
    """The Location that a request was answered with; "" = none."""
    request = urllib.request.Request(url, body, {"Content-Type": kind}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.headers.get("Location", ""))
