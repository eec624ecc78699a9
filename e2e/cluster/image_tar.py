"""Writes a container image as a docker-archive with no daemon: one layer of local files.

Used for what is a single static binary: the sandbox's pause and CoreDNS.

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


def write_image(archive: Path, name: str, config: Mapping[str, Any], files: Mapping[str, Path]) -> None:
    """Write `archive` with an image `name` (repository:tag) holding `files` (path in the image → local file)."""
    layer = _layer(files)
    document = {
        "architecture": "amd64",
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    body = json.dumps(document, sort_keys=True).encode()
    config_name = f"{hashlib.sha256(body).hexdigest()}.json"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w") as tar:
        for member, data in ((config_name, body), ("layer.tar", layer), ("manifest.json", manifest)):
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
