"""A published model as an image that pods can mount (cache.mode: Image): a folder in the OCI image layout, to push.

    DIR/oci-layout, index.json     the one image; crane, skopeo and oras push such a folder
    DIR/blobs/sha256/HEX           its manifest, its configuration, and layers: tars of the files, not compressed

Small files share the first layer; a large one has its own, so that nodes fetch several at a time, and a later version
moves what changed alone. The label `dev.stoker.model` says how large the model is and what shape it has.

Invariants: the same files make the same image, whoever writes it and whenever; every byte that went into it was
compared with the manifest's digest; the folder is whole when it has its name.
Knows nothing of registries.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from stoker_runtime.fetch import manifest as manifests
from stoker_runtime.fetch.bundle import Hashed, member
from stoker_runtime.fetch.errors import BadRequest, ChecksumMismatch
from stoker_runtime.fetch.manifest import Manifest
from stoker_runtime.fetch.progress import Progress
from stoker_runtime.fetch.registry.image import CONFIGURATIONS, LABEL
from stoker_runtime.fetch.registry.repository import MANIFESTS
from stoker_runtime.fetch.volume import os_errors

MARK = "oci-layout"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_INDEX = MANIFESTS[1]
_SMALL_BYTES = 64 << 20
# Container runtimes stack no more than some hundred and twenty layers.
_MOST_LAYERS = 100


@dataclass(frozen=True, slots=True)
class _Blob:
    """What an image's documents say of a blob."""

    digest: str
    size: int

    def descriptor(self, kind: str) -> dict[str, Any]:
        return {"mediaType": kind, "digest": self.digest, "size": self.size}


def write_image(
    folder: Path, manifest: Manifest, told: Mapping[str, Any], image: Path, progress: Progress, stop: threading.Event
) -> str:
    """Write what is published in `folder` to the folder `image`, in place of an image there; returns the digest.

    `told`: what the label says, {"serve", "shape"}. Raises ChecksumMismatch when a file is not what was published,
    BadRequest where something else stands at `image`, VolumeFull, FetchFailed, Interrupted.
    """
    if image.exists() and not (image / MARK).is_file():
        raise BadRequest(f"{image} is there and holds no image; name another folder.")
    staged = image.with_name(f".{image.name}.partial")
    progress.enter("publish", manifest.bytes)
    with os_errors(image):
        shutil.rmtree(staged, ignore_errors=True)
        (staged / "blobs" / "sha256").mkdir(parents=True)
        try:
            layers = [
                _layer(staged, folder, manifest, names, first=not at, progress=progress, stop=stop)
                for at, names in enumerate(_grouped(manifest))
            ]
            digest = _documents(staged, layers, {"bytes": manifest.bytes, **told})
            if image.exists():
                shutil.rmtree(image)
            staged.rename(image)
            manifests.sync_folder(image.parent)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return digest


def _grouped(manifest: Manifest) -> list[list[str]]:
    """The names of the files of each layer; the first has the small ones."""
    names = sorted(manifest.files)
    small = [name for name in names if manifest.files[name].bytes < _SMALL_BYTES]
    large = [name for name in names if name not in small]
    each = -(-len(large) // (_MOST_LAYERS - 1))
    return [small, *(large[at : at + each] for at in range(0, len(large), max(each, 1)))]


def _layer(
    staged: Path,
    folder: Path,
    manifest: Manifest,
    names: Sequence[str],
    *,
    first: bool,
    progress: Progress,
    stop: threading.Event,
) -> _Blob:
    """Write the layer of these files; the first has the model's manifest, too."""
    with _blob(staged) as (stream, found), _tar(stream) as tar:
        if first:
            # Unpacked files have the time of their entries.
            untimed = {name: replace(entry, mtime_ns=0) for name, entry in manifest.files.items()}
            head = replace(manifest, files=untimed).text.encode()
            tar.addfile(member(manifests.NAME, len(head)), io.BytesIO(head))
        for name in names:
            with open(folder / name, "rb") as source:
                hashed = Hashed(source, progress, stop)
                tar.addfile(member(name, manifest.files[name].bytes), hashed)
            if hashed.digest.hexdigest() != manifest.files[name].sha256:
                raise ChecksumMismatch(f"{folder.name}/{name} has other bytes than those published.")
    return found[0]


def _tar(stream: _Hashing) -> tarfile.TarFile:
    """A tar that is written from its beginning to its end, for which a stream needs no more than `write`."""
    return tarfile.open(fileobj=cast("BinaryIO", stream), mode="w|", format=tarfile.PAX_FORMAT)


def _documents(staged: Path, layers: Sequence[_Blob], told: Mapping[str, Any]) -> str:
    """Write the image's configuration, its manifest and the index; returns the manifest's digest."""
    config = {
        "architecture": "amd64",  # nothing in it runs; nodes of another kind take it all the same
        "os": "linux",
        "config": {"Labels": {LABEL: json.dumps(told, sort_keys=True)}},
        "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
        "history": [{"created_by": "stoker fetch --image"} for _ in layers],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFESTS[0],
        "config": _document(staged, config).descriptor(CONFIGURATIONS[0]),
        "layers": [layer.descriptor(_LAYER) for layer in layers],
    }
    blob = _document(staged, manifest)
    index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [blob.descriptor(MANIFESTS[0])]}
    (staged / "index.json").write_text(json.dumps(index))
    (staged / MARK).write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
    return blob.digest


def _document(staged: Path, document: Mapping[str, Any]) -> _Blob:
    with _blob(staged) as (stream, found):
        stream.write(json.dumps(document).encode())
    return found[0]


@contextmanager
def _blob(staged: Path) -> Iterator[tuple[_Hashing, list[_Blob]]]:
    """(a stream to write to, what was written once the block is over)."""
    folder, found = staged / "blobs" / "sha256", list[_Blob]()
    partial = folder / ".partial"
    with open(partial, "wb") as file:
        stream = _Hashing(file)
        yield stream, found
        file.flush()
        os.fsync(file.fileno())
    partial.rename(folder / stream.digest.hexdigest())
    found.append(_Blob(f"sha256:{stream.digest.hexdigest()}", stream.size))


class _Hashing:
    """A file that is hashed as it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes, /) -> int:
        """As a file's."""
        self.digest.update(data)
        self.size += len(data)
        return self._file.write(data)
