"""One repository of a registry: its manifests by tag or digest, and its blobs.

Invariants: a manifest that is named by its digest has it, and so has a blob that is read whole; a refusal says what a
login would be.
Knows nothing of what manifests and blobs hold.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from stoker_runtime.fetch.errors import BadRequest, ChecksumMismatch, FetchFailed, ModelNotFound, TokenRejected
from stoker_runtime.fetch.reference import Reference
from stoker_runtime.fetch.registry.access import RegistryAuth, login_for
from stoker_runtime.fetch.source import Body
from stoker_runtime.fetch.web import Web

MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# What distribution asks registries to take of a manifest; an image's configuration is no longer.
_DOCUMENT_BYTES = 4 << 20


class Repository:
    """A repository, over connections that `close` ends."""

    def __init__(self, reference: Reference, endpoint: str = "", connections: int = 4) -> None:
        """`endpoint`: a mirror, or the registry's address where it is not https. Raises BadRequest."""
        registry, _, rest = reference.place.partition("/")
        self._text = reference.text
        self.registry = registry
        self._name, self._at = _split(rest)
        self._base = endpoint.rstrip("/") or _address(registry)
        if not re.fullmatch(r"https?://[^/@\s?#]+(/[^\s?#@]*)?", self._base):
            raise BadRequest("The registry's endpoint must be an http:// or https:// address without user and query.")
        host = self._base.split("/")[2]
        plain = self._base.startswith("http://")
        auth = RegistryAuth(login_for(host if endpoint else registry), host, plain=plain)
        self._web = Web(connections=connections, auth=auth, accept=", ".join((*MANIFESTS, "*/*")))

    def close(self) -> None:
        """Close all connections."""
        self._web.close()

    def manifest(self, at: str = "") -> tuple[str, Mapping[str, Any]]:
        """(digest, document) of the manifest at a tag or a digest; "" = the one that the reference names."""
        return self._document("manifests", at or self._at)

    def document(self, digest: str) -> Mapping[str, Any]:
        """A blob that is a JSON object. Raises FetchFailed where it is none."""
        return self._document("blobs", digest)[1]

    @contextmanager
    def stream(self, url: str, offset: int) -> Iterator[Body]:
        """What lies at an address of `url`, from `offset`."""
        with self._refusals(), self._web.stream(url, offset) as body:
            yield body

    def url(self, kind: str, at: str) -> str:
        """The address of a manifest ("manifests") or a blob ("blobs")."""
        return f"{self._base}/v2/{self._name}/{kind}/{at}"

    def _document(self, kind: str, at: str) -> tuple[str, Mapping[str, Any]]:
        with self.stream(self.url(kind, at), 0) as answer:
            body = self._whole(answer.chunks)
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if DIGEST.fullmatch(at) and digest != at:
            raise ChecksumMismatch(f"{self._text}: {self.registry} gave another {kind[:-1]} than {at}.")
        try:
            document = json.loads(body)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise FetchFailed(f"{self._text}: {self.registry} answered with no manifest; is this a registry?")
        return digest, document

    def _whole(self, chunks: Iterable[bytes]) -> bytes:
        body = bytearray()
        for block in chunks:
            body += block
            if len(body) > _DOCUMENT_BYTES:
                raise FetchFailed(f"{self._text}: the manifest has more than {_DOCUMENT_BYTES:,} bytes.")
        return bytes(body)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Say of a refusal what a login would be."""
        try:
            yield
        except TokenRejected as error:
            status = "403" if "(403)" in error.message else "401"
            raise TokenRejected(
                f"{self._text}: {self.registry} refused access ({status}), or has no such repository. A login is "
                f"taken from DOCKER_CONFIG/config.json: docker login {self.registry}; in a cluster, from a Secret of "
                "type kubernetes.io/dockerconfigjson."
            ) from None
        except ModelNotFound:
            raise ModelNotFound(f"{self._text} does not exist at {self.registry} (404); check name and tag.") from None


def _split(rest: str) -> tuple[str, str]:
    """(repository, tag or digest)."""
    name, _, digest = rest.partition("@")
    name, _, tag = name.partition(":")
    return name, digest or tag or "latest"


def _address(registry: str) -> str:
    host = "registry-1.docker.io" if registry == "docker.io" else registry
    local = host.partition(":")[0] in ("localhost", "127.0.0.1")
    return f"{'http' if local else 'https'}://{host}"
