"""Files that clients uploaded and that batches made, in a folder.

A file is two: `ID.data`, and `ID.json` that makes it known. Invariants: what is known is complete; what a crash left
half done is removed at the next start.
Knows nothing of HTTP, or of what files hold.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from stoker_runtime.api.batch.folder import publish, storage_errors, write_json
from stoker_runtime.errors import NotFoundError

log = logging.getLogger(__name__)
PIECE = 1024 * 1024


def new_file_id() -> str:
    """The id of a file to come."""
    return f"file-{uuid.uuid4().hex}"


class FileStore:
    """The files of one server, by id, oldest first."""

    def __init__(self, folder: Path, coming: Container[str] = ()) -> None:
        """Read what is there; files that are `coming` may be half added, and stay."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        found = [record for path in folder.glob("*.json") if (record := load_record(path)) is not None]
        self._records: dict[str, dict[str, Any]] = {
            record["id"]: record for record in sorted(found, key=lambda record: (record["created_at"], record["id"]))
        }
        for path in folder.iterdir():
            known = path.stem in self._records or path.stem in coming
            if not known and path.suffix in (".data", ".part"):
                path.unlink()

    def records(self, purpose: str | None = None) -> list[dict[str, Any]]:
        """The files, all or of one purpose."""
        return [record for record in self._records.values() if purpose in (None, record["purpose"])]

    def get(self, name: str) -> dict[str, Any]:
        """One file's record. Raises NotFoundError."""
        if name not in self._records:
            raise NotFoundError(f"No such File object: {name}", param="id")
        return self._records[name]

    def path(self, name: str) -> Path:
        """Where a file's content is. Raises NotFoundError."""
        self.get(name)
        return self._folder / f"{name}.data"

    def temporary(self) -> Path:
        """A place in the same file system for a file to come."""
        return self._folder / f"{uuid.uuid4().hex}.part"

    def add(self, temporary: Path, filename: str, purpose: str, name: str = "") -> dict[str, Any]:
        """Make a finished temporary file known; harmless for a `name` that is known already. Raises StorageError."""
        name = name or new_file_id()
        if name in self._records:
            return self._records[name]
        final = self._folder / f"{name}.data"
        with storage_errors():
            # After a crash between the two steps below, the content has its name already.
            if temporary.exists():
                publish(temporary, final)
            size = final.stat().st_size
        record = {
            "id": name,
            "object": "file",
            "bytes": size,
            "created_at": int(time.time()),
            "expires_at": None,
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
        }
        write_json(self._folder / f"{name}.json", record)
        self._records[name] = record
        return record

    def delete(self, name: str) -> None:
        """Forget a file. Raises NotFoundError or StorageError."""
        path = self.path(name)
        with storage_errors():
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        del self._records[name]


def load_record(path: Path) -> dict[str, Any] | None:
    """What a record's file holds; None, and a line in the log, where it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        log.error("%s cannot be read, so what it describes is left out: %s", path, error)
        return None
    return found if isinstance(found, dict) and "id" in found else None


def read_pieces(path: Path) -> Iterator[bytes]:
    """The content of a file, piece by piece. Raises OSError."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while piece := file.read(PIECE):
            yield piece
