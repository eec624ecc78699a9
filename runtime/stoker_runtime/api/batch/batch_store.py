"""The records of batches, in a folder that several processes may share.

A batch is a folder: `batch.json`, its results as they come, `owner`, which the process that runs it has locked, and
`cancel`, which appears when somebody wants its end. Invariants: only the owner writes `batch.json` after its creation;
a batch that has come to its end never changes.
Knows nothing of how batches run.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from stoker_runtime.api.batch.folder import Claim, is_id, load_json, make_folder, owner_of, storage_errors, write_json
from stoker_runtime.api.batch.records import BATCH_PREFIX, STATUSES, UNFINISHED, entered
from stoker_runtime.errors import NotFoundError, RequestError, StorageError

Record = dict[str, Any]
FIELDS = {"status": str, "endpoint": str, "input_file_id": str, "expires_at": int, "request_counts": dict}

log = logging.getLogger(__name__)


class BatchStore:
    """The batches of one folder, by id, oldest first. Its methods block, so call them from a thread."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when the folder cannot be used."""
        self._folder = make_folder(folder)
        self._ended: set[str] = set()

    def place(self, name: str) -> Path:
        """The folder of one batch."""
        return self._folder / name

    def get(self, name: str, owner: str | None = None) -> Record:
        """One batch, if it is its owner's (None: whoever that is). Raises NotFoundError."""
        found = self._load(name) if is_id(name, BATCH_PREFIX) else None
        if found is None or owner not in (None, owner_of(found)):
            raise NotFoundError(f"No batch found with id '{name[:80]}'.", param="batch_id")
        return found

    def records(self) -> list[Record]:
        """All batches."""
        return [record for name in self._names() if (record := self._load(name)) is not None]

    def unfinished(self) -> list[Record]:
        """Those that have not come to their end: who asks again and again reads each other one once."""
        found = (self._load(name) for name in self._names() if name not in self._ended)
        return [record for record in found if record is not None and record["status"] in UNFINISHED]

    def add(self, record: Record) -> None:
        """Take in a new batch. Raises StorageError."""
        place = self.place(record["id"])
        try:
            with storage_errors():
                place.mkdir()
            self.save(record)
        except StorageError:
            shutil.rmtree(place, ignore_errors=True)
            raise

    def save(self, record: Record) -> None:
        """Replace a batch's record. Raises StorageError."""
        write_json(self.place(record["id"]) / "batch.json", record)

    def claim(self, name: str) -> Claim | None:
        """The right to run a batch; None while another process has it. Raises OSError."""
        return Claim.take(self.place(name) / "owner")

    def cancel(self, name: str, owner: str | None = None) -> Record:
        """Ask whoever runs a batch to end it. Raises as `get` does, RequestError or StorageError."""
        record = self.get(name, owner)
        if record["status"] not in ("validating", "in_progress", "cancelling"):
            raise RequestError(f"Cannot cancel a batch with status '{record['status']}'.", param="batch_id")
        with storage_errors():
            (self.place(name) / "cancel").touch()
        return self.get(name)

    def cancel_asked(self, name: str) -> bool:
        """Whether somebody wants the end of a batch."""
        return (self.place(name) / "cancel").exists()

    def _names(self) -> list[str]:
        with os.scandir(self._folder) as entries:
            return sorted(entry.name for entry in entries if entry.name.startswith(BATCH_PREFIX))

    def _load(self, name: str) -> Record | None:
        path = self.place(name) / "batch.json"
        record = load_json(path, name, FIELDS)
        if record is None:
            return None
        if record["status"] not in STATUSES:
            log.error("%s has the status %.60r, so what it describes is left out", path, record["status"])
            return None
        if record["status"] not in UNFINISHED:
            self._ended.add(name)
        elif record["status"] in ("validating", "in_progress") and self.cancel_asked(name):
            # What the owner is about to write.
            return entered(record, "cancelling")
        return record
