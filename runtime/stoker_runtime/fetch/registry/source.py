"""An oci:// source: an artifact of a registry, each of whose layers is a file of the model.

Layers tell their file's name as ORAS writes it (`org.opencontainers.image.title`) or as ModelPack does
(`org.cncf.model.filepath`). The digest of the manifest stands for the commit; a layer's is its file's SHA-256.

Invariants: a manifest that is named by its digest has it; layers that pack several files are refused, never unpacked.
Knows nothing of what is selected from the list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from stoker_runtime.fetch.errors import BadRequest, FetchFailed
from stoker_runtime.fetch.reference import Reference, relative_path
from stoker_runtime.fetch.registry.image import CONFIGURATIONS
from stoker_runtime.fetch.registry.repository import DIGEST, Repository
from stoker_runtime.fetch.source import Body, Listing, SourceFile

_NAMES = ("org.cncf.model.filepath", "org.opencontainers.image.title")
_UNPACK = "io.deis.oras.content.unpack"


class Artifact:
    """An artifact of a registry. Use it as a context manager."""

    local = False

    def __init__(self, reference: Reference, endpoint: str = "", connections: int = 16) -> None:
        """`endpoint`: a mirror, or the registry's address where it is not https. Raises BadRequest."""
        self._text = reference.text
        self._there = Repository(reference, endpoint, connections)

    def __enter__(self) -> Artifact:
        return self

    def __exit__(self, *exc: object) -> None:
        self._there.close()

    def listing(self, revision: str) -> Listing:
        """The files of the manifest's layers; `revision` counts where it is a manifest's digest."""
        digest, manifest = self._there.manifest(revision if DIGEST.fullmatch(revision) else "")
        if "manifests" in manifest:
            entries = manifest["manifests"]
            if not isinstance(entries, list) or len(entries) != 1 or not isinstance(entries[0], dict):
                raise BadRequest(f"{self._text} names several manifests; name the model's by its digest: @sha256:….")
            digest, manifest = self._there.manifest(str(entries[0].get("digest", "")))
        layers = manifest.get("layers")
        if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
            raise FetchFailed(f"{self._text}: {self._there.registry} answered with no manifest of layers.")
        files = [file for layer in layers if (file := self._file(layer)) is not None]
        if not files and (manifest.get("config") or {}).get("mediaType") in CONFIGURATIONS:
            raise BadRequest(
                f"{self._text} is an image, not an artifact of files; pods mount it with cache.mode: Image."
            )
        if not files:
            raise BadRequest(
                f"{self._text} has no layer with a file's name; push the files as they are: oras push NAME:TAG FILE…."
            )
        return Listing(digest, tuple(files))

    @contextmanager
    def open(self, file: SourceFile, offset: int) -> Iterator[Body]:
        """Stream the layer from `offset`."""
        with self._there.stream(file.place, offset) as body:
            yield body

    def _file(self, layer: Mapping[str, Any]) -> SourceFile | None:
        """The file of a layer; None for one without a name."""
        notes = layer.get("annotations") or {}
        name = next((str(notes[key]) for key in _NAMES if notes.get(key)), "")
        digest, size = str(layer.get("digest", "")), layer.get("size")
        if not name:
            return None
        if not DIGEST.fullmatch(digest) or not isinstance(size, int) or size < 0:
            raise FetchFailed(f"{self._text}: the manifest has no digest or no size for {name!r}.")
        if notes.get(_UNPACK) == "true" or re.search(r"\btar\b", str(layer.get("mediaType", ""))):
            raise BadRequest(f"{self._text} packs {name!r} in an archive; push the files as they are, one a layer.")
        return SourceFile(relative_path(name, self._text), size, self._there.url("blobs", digest), sha256=digest[7:])
