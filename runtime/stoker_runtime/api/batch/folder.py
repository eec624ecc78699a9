"""The folder that files and batches live in: one owner, and writes that are either there whole or not at all.

Invariants: a name appears only when what it names is complete and on the disk; a folder has one server at a time.
Knows nothing of what is stored.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stoker_runtime.errors import ConfigError, StorageError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def storage_errors() -> Iterator[None]:
    """Let what the disk refuses be a StorageError."""
    try:
        yield
    except OSError as error:
        reason = "The server's disk is full." if error.errno in NO_ROOM else "The server's disk failed."
        raise StorageError(reason, code="disk_full" if error.errno in NO_ROOM else "disk_failed") from error


def publish(temporary: Path, final: Path) -> None:
    """Give a file that was written its name, durably. Raises OSError."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(final)
    folder = os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace `path` as a whole. Raises StorageError."""
    temporary = path.with_suffix(".part")
    with storage_errors():
        try:
            temporary.write_text(json.dumps(content), encoding="utf-8")
            publish(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


class FolderLock:
    """The right to use a folder, held until `close` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        """Take it. Raises ConfigError when the folder cannot be used, or another server uses it."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"batch_dir: cannot use {folder}: {error.strerror}.", param="batch_dir") from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._handle)
            raise ConfigError(f"batch_dir: another server uses {folder}.", param="batch_dir") from error

    def close(self) -> None:
        """Give it up."""
        os.close(self._handle)
