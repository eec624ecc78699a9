"""A registry of images, by crane: images, the indexes that join them, and documents that belong to them.

Invariants: what is pushed is known by its digest from then on; a document names the image that it is about (`subject`),
so that a registry finds it by the image. Credentials are docker's.
Knows nothing of what images hold.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_EMPTY = "application/vnd.oci.empty.v1+json"


class ReleaseError(RuntimeError):
    """A part of a release could not be published; the message says which and why."""


@dataclass(frozen=True)
class Registry:
    """`place` is HOST[:PORT]/PATH; `plain`: it speaks HTTP, as one on this machine does."""

    crane: str
    place: str
    plain: bool = False

    def push(self, image: Path, name: str) -> str:
        """Push an archive, or a folder of OCI's layout, under a name; its digest. Raises ReleaseError."""
        self._crane("push", str(image), f"{self.place}/{name}")
        return self._crane("digest", f"{self.place}/{name}").strip()

    def join(self, names: Sequence[str], name: str) -> str:
        """One name for images of several platforms; the digest of their index. Raises ReleaseError."""
        manifests = [f"--manifest={self.place}/{each}" for each in names]
        self._crane("index", "append", *manifests, f"--tag={self.place}/{name}")
        return self._crane("digest", f"{self.place}/{name}").strip()

    def attach(self, repository: str, subject: str, kind: str, content: bytes) -> str:
        """Push a document about the image of a digest; its own digest. Raises ReleaseError."""
        about = self._crane("manifest", f"{self.place}/{repository}@{subject}").encode()
        described = {"mediaType": json.loads(about)["mediaType"], "digest": subject, "size": len(about)}
        with tempfile.TemporaryDirectory() as folder:
            _write_document(Path(folder), kind, content, described)
            return self.push(Path(folder), f"{repository}:{subject.replace(':', '-')}.sbom")

    def _crane(self, *words: str) -> str:
        done = subprocess.run([self.crane, *words, *(["--insecure"] if self.plain else [])], capture_output=True)
        if done.returncode:
            raise ReleaseError(f"crane {' '.join(words)}: {done.stderr.decode('utf-8', 'replace').strip()[-1000:]}")
        return done.stdout.decode()


def _write_document(folder: Path, kind: str, content: bytes, subject: dict[str, Any]) -> None:
    """A folder of OCI's layout with one artifact in it."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def keep(data: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    head = {"schemaVersion": 2, "mediaType": MANIFEST, "artifactType": kind, "subject": subject}
    body = head | {"config": keep(b"{}", _EMPTY), "layers": [keep(content, kind)]}
    manifest = keep(json.dumps(body, sort_keys=True).encode(), MANIFEST)
    index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [manifest]}
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
