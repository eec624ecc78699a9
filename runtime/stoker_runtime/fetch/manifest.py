"""`stoker-manifest.json`: what a published model folder holds. Its presence is what makes a folder published.

Invariants: the digest is SHA-256 over the sorted lines "NAME SHA256\\n", so the same files have the same
digest wherever they came from; writing replaces the file in one rename.
Knows nothing of volumes and locks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker_runtime.fetch.contain import open_own
from stoker_runtime.fetch.errors import BadRequest, ChecksumMismatch, NotPublished
from stoker_runtime.fetch.reference import relative_path

NAME = "stoker-manifest.json"


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One file: SHA-256 in hex, size in bytes, modification time in ns at the moment it was verified."""

    sha256: str
    bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A published folder. `resolved_revision` is a commit, an ETag, or the digest where the source has
    neither.
    """

    uri: str
    resolved_revision: str
    files: Mapping[str, ManifestFile]

    @property
    def digest(self) -> str:
        """sha256:HEX over the files' names and digests."""
        lines = "".join(f"{name} {self.files[name].sha256}\n" for name in sorted(self.files))
        return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"

    @property
    def bytes(self) -> int:
        """The sum of all files' sizes."""
        return sum(file.bytes for file in self.files.values())

    @property
    def text(self) -> str:
        """As it stands in a folder."""
        document = {
            "uri": self.uri,
            "resolvedRevision": self.resolved_revision,
            "digest": self.digest,
            "bytes": self.bytes,
            "files": {
                name: {"sha256": file.sha256, "bytes": file.bytes, "mtimeNs": file.mtime_ns}
                for name, file in sorted(self.files.items())
            },
        }
        return json.dumps(document, indent=1) + "\n"

    def write(self, folder: Path) -> None:
        """Write into `folder`, durably and in one step."""
        staged = folder / f".{NAME}"
        staged.unlink(missing_ok=True)
        with open(staged, "w", opener=open_own) as stream:
            stream.write(self.text)
            stream.flush()
            os.fsync(stream.fileno())
        staged.rename(folder / NAME)
        sync_folder(folder)


def read(folder: Path) -> Manifest:
    """Read a folder's manifest. Raises NotPublished when there is none, ChecksumMismatch when it is
    damaged.
    """
    try:
        document = json.loads((folder / NAME).read_bytes())
        manifest = parse(document)
    except (FileNotFoundError, NotADirectoryError):
        raise NotPublished(f"{folder} holds no published model: there is no {NAME}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, BadRequest):
        raise ChecksumMismatch(f"{folder / NAME} is damaged.") from None
    if manifest.digest != document["digest"]:
        raise ChecksumMismatch(f"{folder / NAME} is damaged: its files do not add up to its digest.")
    return manifest


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def parse(document: dict[str, Any]) -> Manifest:
    files = {
        relative_path(str(name), NAME): ManifestFile(
            str(file["sha256"]), int(file["bytes"]), int(file.get("mtimeNs", 0))
        )
        for name, file in document["files"].items()
    }
    return Manifest(str(document["uri"]), str(document["resolvedRevision"]), files)
