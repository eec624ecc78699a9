"""Writes a container image as a docker-archive with no daemon: one layer, of local files or of a whole root.

Used for what is a single static binary, as the sandbox's pause and CoreDNS, and for a base image that no registry has.

Invariants: the same files give the same bytes; standard library only.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LAYER = "layer.tar"


def write_image(archive: Path, name: str, config: Mapping[str, Any], files: Mapping[str, Path]) -> None:
    """Write `archive` with an image `name` (repository:tag) holding `files` (path in the image → local file)."""
    layer = _layer(files)
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w") as tar:
        _describe(tar, name, config, hashlib.sha256(layer).hexdigest(), "amd64")
        _add(tar, _LAYER, layer, 0o644)


def write_root(archive: Path, name: str, config: Mapping[str, Any], root: Path, architecture: str) -> None:
    """Write `archive` with an image `name` whose one layer is the tar file `root`, for a processor in Go's words."""
    with open(root, "rb") as layer:
        digest = hashlib.file_digest(layer, "sha256").hexdigest()
    with tarfile.open(archive, "w") as tar:
        _describe(tar, name, config, digest, architecture)
        tar.add(root, _LAYER)


def _describe(tar: tarfile.TarFile, name: str, config: Mapping[str, Any], digest: str, architecture: str) -> None:
    """What an archive says of its one layer."""
    document = {
        "architecture": architecture,
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    body = json.dumps(document, sort_keys=True).encode()
    config_name = f"{hashlib.sha256(body).hexdigest()}.json"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [name], "Layers": [_LAYER]}]).encode()
    for member, data in ((config_name, body), ("manifest.json", manifest)):
        _add(tar, member, data, 0o644)


def _layer(files: Mapping[str, Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(folder)
        for target, source in sorted(files.items()):
            _add(tar, target.lstrip("/"), source.read_bytes(), 0o755)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    tar.addfile(info, io.BytesIO(data))
