"""What a running `stoker up` writes down of its services, for `kubectl stoker --up` on the same machine.

Invariants: a record is whole or not there (it is renamed into place); the records of a process that is gone do not
count; values of Secrets are in none.
Knows nothing of what is made of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Object = Mapping[str, Any]
_FOLDER = "running"
_EVENTS = 20


class Record:
    """The file of one service below `data`."""

    def __init__(self, data: Path, name: str) -> None:
        self._file = data / _FOLDER / f"{name}.json"
        self._written = ""
        self._events: list[Object] = []

    def note(self, event: Object) -> None:
        """Remember an event of this service; the last ones are kept."""
        self._events = [*self._events, event][-_EVENTS:]

    def write(self, service: Object, url: str, pods: Sequence[Object]) -> None:
        """Write down how the service stands, where that is new."""
        document = {"pid": os.getpid(), "url": url, "service": service, "pods": list(pods), "events": self._events}
        text = json.dumps(document)
        if text == self._written:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(f".{os.getpid()}")
        part.write_text(text)
        part.replace(self._file)
        self._written = text

    def remove(self) -> None:
        """The service runs no more."""
        if self._written:
            self._file.unlink(missing_ok=True)


def read_records(data: Path) -> Iterator[dict[str, Any]]:
    """The records of what runs from this folder, by name: pid, url, service, pods, events (oldest first)."""
    for file in sorted((data / _FOLDER).glob("*.json")):
        try:
            record: dict[str, Any] = json.loads(file.read_text())
            os.kill(record["pid"], 0)
        except PermissionError:
            pass  # it runs, as another user
        except (OSError, ValueError):
            continue
        yield record
