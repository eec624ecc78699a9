"""The file of API keys, one a line, as the kubelet brings it up to date.

Invariants: a file that cannot be read opens the gateway to nobody: at the start it is an error, later what was read
last holds. A file without keys lets nobody in. Keys are never logged.
Knows nothing of who uses them.
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger("stoker.gateway")


class KeysError(Exception):
    """The file cannot be read; the message names it."""


class Keys:
    """The keys of the file at `path`."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._known: tuple[str, ...] | None = None

    def read(self) -> tuple[str, ...]:
        """The keys as they are now. Raises KeysError where there were never any to read."""
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            if self._known is None:
                raise KeysError(f"the API keys in {self._path} cannot be read: {error}") from None
            log.warning("the API keys in %s cannot be read; those of before hold: %s", self._path, type(error).__name__)
            return self._known
        found = tuple(dict.fromkeys(line.strip() for line in lines if line.strip() and not line.startswith("#")))
        if not found and self._known != ():
            log.warning("%s holds no API key: nobody may use the gateway", self._path)
        self._known = found
        return found
