"""Writes what Envoy follows, each document moved into its place whole, in the order in which one needs another.

Invariants: a document is written only when it changed; nobody but this user may read the folder's files. A service is
known before a route leads to it, and is forgotten after none does.
Knows nothing of what the documents say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Document = Mapping[str, Any]


class Files:
    """The folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written = {each.name: each.read_text(encoding="utf-8") for each in folder.glob("[!.]*.json")}

    def write(self, name: str, document: Document) -> bool:
        """Put one in its place; whether it was another before."""
        text = json.dumps(document, sort_keys=True)
        if self._written.get(name) == text:
            return False
        staged = self._folder / f".{name}"
        with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        staged.rename(self._folder / name)
        self._written[name] = text
        return True

    def forget(self, name: str) -> None:
        """Take one away that nothing names any more."""
        if self._written.pop(name, None) is not None:
            (self._folder / name).unlink(missing_ok=True)

    @property
    def names(self) -> frozenset[str]:
        """Those that are there."""
        return frozenset(self._written)
