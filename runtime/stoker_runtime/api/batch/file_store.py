"""Files that clients uploaded and that batches made, in a folder that several processes may share.

A file is two: `ID.data`, and `ID.json` that makes it known and never changes. Invariants: what is known is complete;
what a crash left half done is removed by a later start.
Knows nothing of HTTP, or of what files hold.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from stoker_runtime.api.batch.folder import (
    is_id,
    load_json,
    make_folder,
    new_id,
    owner_of,
    publish,
    storage_errors,
    write_json,
)
from stoker_runtime.errors import NotFoundError

PREFIX = "file-"
PIECE = 1024 * 1024
FIELDS = {"purpose": str, "bytes": int}
LEFTOVER_SECONDS = 24 * 3600
"""Older than any upload that may still be under way."""


class FileStore:
    """The files of one folder, by id, oldest first. Its methods block, so call them from a thread."""

    def __init__(self, folder: Path, coming: Container[str] = ()) -> None:
        """Clean up what old crashes left, but no file that is `coming`. Raises ConfigError."""
        self._folder = make_folder(folder)
        self._seen: dict[str, dict[str, Any]] = {}
        now = time.time()
        for path in folder.iterdir():
            known = path.with_suffix(".json").exists() or path.stem in coming
            if not known and path.suffix in (".data", ".part") and now - path.stat().st_mtime > LEFTOVER_SECONDS:
                path.unlink(missing_ok=True)

    def records(self, purpose: str | None = None, owner: str = "") -> list[dict[str, Any]]:
        """The files of an owner, all or of one purpose."""
        names = sorted(path.stem for path in self._folder.glob(f"{PREFIX}*.json"))
        for name in names:
            if name not in self._seen and (found := self._load(name)) is not None:
                self._seen[name] = found
        self._seen = {name: self._seen[name] for name in names if name in self._seen}
        owned = (record for record in self._seen.values() if owner_of(record) == owner)
        return [record for record in owned if purpose in (None, record["purpose"])]

    def get(self, name: str, owner: str | None = None) -> dict[str, Any]:
        """One file's record, if it is its owner's (None: whoever that is). Raises NotFoundError."""
        found = self._load(name) if is_id(name, PREFIX) else None
        if found is None or owner not in (None, owner_of(found)):
            raise NotFoundError(f"No such File object: {name[:80]}", param="id")
        return found

    def path(self, name: str, owner: str | None = None) -> Path:
        """Where a file's content is; raises as `get` does."""
        self.get(name, owner)
        return self._folder / f"{name}.data"

    def _load(self, name: str) -> dict[str, Any] | None:
        return load_json(self._folder / f"{name}.json", name, FIELDS)

    def temporary(self) -> Path:
        """A place in the same file system for a file to come."""
        return self._folder / f"{new_id('')}.part"

    def add(self, temporary: Path, filename: str, purpose: str, name: str = "", owner: str = "") -> dict[str, Any]:
        """Make a finished temporary file known; harmless for a `name` that is known already. Raises StorageError."""
        name = name or new_id(PREFIX)
        record_path, final = self._folder / f"{name}.json", self._folder / f"{name}.data"
        if record_path.exists():
            return self.get(name)
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
            "owner": owner,
        }
        write_json(record_path, record)
        return record

    def delete(self, name: str) -> None:
        """Forget a file. Raises NotFoundError or StorageError."""
        path = self.path(name)
        with storage_errors():
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)


def read_pieces(path: Path) -> Iterator[bytes]:
    """The content of a file, piece by piece. Raises OSError."""
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece
