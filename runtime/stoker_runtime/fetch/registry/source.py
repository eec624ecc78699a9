"""An oci:// source: an artifact of a registry, each of whose layers is a file of the model.

Layers tell their file's name as ORAS writes it (`org.opencontainers.image.title`) or as ModelPack does
(`org.cncf.model.filepath`). The digest of the manifest stands for the commit; a layer's is its file's SHA-256.

Invariants: a manifest that is named by its digest has it; layers that pack several files are refused, never unpacked.
Knows nothing of what is selected from the list.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from stoker_runtime.fetch.errors import BadRequest, ChecksumMismatch, FetchFailed, ModelNotFound, TokenRejected
from stoker_runtime.fetch.reference import Reference, relative_path
from stoker_runtime.fetch.registry.access import RegistryAuth, login_for
from stoker_runtime.fetch.source import Body, Listing, SourceFile
from stoker_runtime.fetch.web import Web

MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_NAMES = ("org.cncf.model.filepath", "org.opencontainers.image.title")
_UNPACK = "io.deis.oras.content.unpack"
# What distribution asks registries to take.
_MANIFEST_BYTES = 4 << 20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class Artifact:
    """An artifact of a registry. Use it as a context manager."""

    local = False

    def __init__(self, reference: Reference, endpoint: str = "", connections: int = 16) -> None:
        """`endpoint`: a mirror, or the registry's address where it is not https. Raises BadRequest."""
        registry, _, rest = reference.place.partition("/")
        self._text = reference.text
        self._registry = registry
        self._name, self._at = _split(rest)
        self._base = endpoint.rstrip("/") or _address(registry)
        if not re.fullmatch(r"https?://[^/@\s?#]+(/[^\s?#@]*)?", self._base):
            raise BadRequest("The registry's endpoint must be an http:// or https:// address without user and query.")
        host = self._base.split("/")[2]
        plain = self._base.startswith("http://")
        auth = RegistryAuth(login_for(host if endpoint else registry), host, plain=plain)
        self._web = Web(connections=connections, auth=auth, accept=", ".join((*MANIFESTS, "*/*")))

    def __enter__(self) -> Artifact:
        return self

    def __exit__(self, *exc: object) -> None:
        self._web.close()

    def listing(self, revision: str) -> Listing:
        """The files of the manifest's layers; `revision` counts where it is a manifest's digest."""
        digest, manifest = self._manifest(revision if _DIGEST.fullmatch(revision) else self._at)
        if "manifests" in manifest:
            entries = manifest["manifests"]
            if not isinstance(entries, list) or len(entries) != 1 or not isinstance(entries[0], dict):
                raise BadRequest(f"{self._text} names several manifests; name the model's by its digest: @sha256:….")
            digest, manifest = self._manifest(str(entries[0].get("digest", "")))
        layers = manifest.get("layers")
        if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
            raise FetchFailed(f"{self._text}: {self._registry} answered with no manifest of layers.")
        files = [file for layer in layers if (file := self._file(layer)) is not None]
        if not files:
            raise BadRequest(
                f"{self._text} has no layer with a file's name; push the files as they are: oras push NAME:TAG FILE…."
            )
        return Listing(digest, tuple(files))

    @contextmanager
    def open(self, file: SourceFile, offset: int) -> Iterator[Body]:
        """Stream the layer from `offset`."""
        with self._refusals(), self._web.stream(file.place, offset) as body:
            yield body

    def _file(self, layer: Mapping[str, Any]) -> SourceFile | None:
        """The file of a layer; None for one without a name."""
        notes = layer.get("annotations") or {}
        name = next((str(notes[key]) for key in _NAMES if notes.get(key)), "")
        digest, size = str(layer.get("digest", "")), layer.get("size")
        if not name:
            return None
        if not _DIGEST.fullmatch(digest) or not isinstance(size, int) or size < 0:
            raise FetchFailed(f"{self._text}: the manifest has no digest or no size for {name!r}.")
        if notes.get(_UNPACK) == "true" or re.search(r"\btar\b", str(layer.get("mediaType", ""))):
            raise BadRequest(f"{self._text} packs {name!r} in an archive; push the files as they are, one a layer.")
        return SourceFile(relative_path(name, self._text), size, self._url("blobs", digest), sha256=digest[7:])

    def _manifest(self, at: str) -> tuple[str, Mapping[str, Any]]:
        """(digest, document) of the manifest at a tag or a digest."""
        body = bytearray()
        with self._refusals(), self._web.stream(self._url("manifests", at), 0) as answer:
            for block in answer.chunks:
                body += block
                if len(body) > _MANIFEST_BYTES:
                    raise FetchFailed(f"{self._text}: the manifest has more than {_MANIFEST_BYTES:,} bytes.")
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if _DIGEST.fullmatch(at) and digest != at:
            raise ChecksumMismatch(f"{self._text}: {self._registry} gave another manifest than {at}.")
        try:
            document = json.loads(body)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise FetchFailed(f"{self._text}: {self._registry} answered with no manifest; is this a registry?")
        return digest, document

    def _url(self, kind: str, at: str) -> str:
        return f"{self._base}/v2/{self._name}/{kind}/{at}"

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Say of a refusal what a login would be."""
        try:
            yield
        except TokenRejected as error:
            status = "403" if "(403)" in error.message else "401"
            raise TokenRejected(
                f"{self._text}: {self._registry} refused access ({status}), or has no such repository. A login is "
                f"taken from DOCKER_CONFIG/config.json: docker login {self._registry}; in a cluster, from a Secret of "
                "type kubernetes.io/dockerconfigjson."
            ) from None
        except ModelNotFound:
            raise ModelNotFound(f"{self._text} does not exist at {self._registry} (404); check name and tag.") from None


def _split(rest: str) -> tuple[str, str]:
    """(repository, tag or digest)."""
    name, _, digest = rest.partition("@")
    name, _, tag = name.partition(":")
    return name, digest or tag or "latest"


def _address(registry: str) -> str:
    host = "registry-1.docker.io" if registry == "docker.io" else registry
    local = host.partition(":")[0] in ("localhost", "127.0.0.1")
    return f"{'http' if local else 'https'}://{host}"
