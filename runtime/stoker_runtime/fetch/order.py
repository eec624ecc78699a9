"""What is asked of a fetch, and the source that can answer it.

Invariants: an order holds no secret but `token`, which no `repr` shows; what a source needs is imported for those who
name one, because the libraries of hubs and stores take a third of a second each.
Knows nothing of how an order is carried out.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stoker_runtime.fetch.bundle import Bundle
from stoker_runtime.fetch.folder import Folder
from stoker_runtime.fetch.reference import STORES, Reference
from stoker_runtime.fetch.source import Source
from stoker_runtime.fetch.web import Web, WebFile

_ENDPOINTS = {
    "hf": ("HF_ENDPOINT",),
    "modelscope": ("MODELSCOPE_ENDPOINT",),
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


@dataclass(frozen=True, slots=True)
class Order:
    """What to fetch, and where to. `revision` "" is the source's default; `sha256` pins files by name.

    `token` goes to a hub, and to a web server only with `send_token`.
    `endpoint` is another hub, or another server of the store's protocol, than the URI's own.
    `only` narrows the default choice, of a model with a config.json, to what matches.
    `refresh` looks up a branch again although an earlier run answered it; `repair` hashes what is published.
    `digest` is what the result must have, wherever it comes from, and `most_bytes` the most that it may have; "" and 0
    demand nothing.
    """

    uri: str
    dest: Path
    revision: str = ""
    endpoint: str = ""
    token: str = field(default="", repr=False)
    send_token: bool = False
    allow: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    sha256: Mapping[str, str] = field(default_factory=dict)
    mount_root: Path = Path("/source")
    parallel: int = 4
    refresh: bool = False
    repair: bool = False
    digest: str = ""
    most_bytes: int = 0
    only: tuple[str, ...] = ()

    def key(self, revision: str) -> str:
        """Names the answer to this order at `revision`."""
        parts: list[object] = [self.uri, revision, self.allow, self.ignore, sorted(self.sha256.items())]
        parts += [self.only] if self.only else []
        # Two servers have buckets of one name; a hub's mirror has the same commits.
        if self.endpoint and self.uri.partition("://")[0] in (*STORES, "oci", "modelscope"):
            parts.append({"endpoint": self.endpoint})
        text = json.dumps(parts)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def endpoint_for(uri: str, given: str, environ: Mapping[str, str] = os.environ) -> str:
    """The server to ask in place of the URI's own: the one given, else the environment's for that scheme, else ""."""
    names = _ENDPOINTS.get(uri.partition("://")[0], ())
    return given or next((environ[name].strip() for name in names if environ.get(name, "").strip()), "")


@contextmanager
def opened(order: Order, reference: Reference) -> Iterator[Source]:
    """The source of an order, whose URI is `reference`; its connections are closed at the end."""
    if reference.scheme == "hf":
        from stoker_runtime.fetch.hub.session import Session
        from stoker_runtime.fetch.hub.source import Hub

        with Session(order.endpoint, order.token) as session:
            yield Hub(reference.place, session)
    elif reference.scheme in STORES:
        from stoker_runtime.fetch.stores.source import Store

        with Store(reference, order.endpoint) as store:
            yield store
    elif reference.scheme == "oci":
        from stoker_runtime.fetch.registry.source import Artifact

        with Artifact(reference, order.endpoint, order.parallel + 2) as artifact:
            yield artifact
    elif reference.scheme == "modelscope":
        from stoker_runtime.fetch.modelscope.source import ModelScope

        with ModelScope(reference, order.endpoint, order.parallel + 2) as repository:
            yield repository
    elif reference.scheme == "https":
        web = Web(order.token if order.send_token else "", connections=order.parallel + 2)
        try:
            yield WebFile(reference, web)
        finally:
            web.close()
    elif reference.bundle:
        root = order.mount_root if reference.scheme == "pvc" else Path("/")
        yield Bundle(root / reference.place, reference.text)
    else:
        yield Folder(reference, order.mount_root)
