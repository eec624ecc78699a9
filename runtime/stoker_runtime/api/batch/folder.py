"""The folder that files and batches live in: writes that are there whole or not at all, names, and claims.

Several processes may share the folder, on one machine or through a network file system that keeps locks (NFS does).
Invariants: a name appears only when what it names is complete and on the disk.
Knows nothing of what is stored.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stoker_runtime.errors import ConfigError, StorageError

log = logging.getLogger(__name__)
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
    temporary = path.with_name(f"{uuid.uuid4().hex}.part")
    with storage_errors():
        try:
            temporary.write_text(json.dumps(content), encoding="utf-8")
            publish(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def load_json(path: Path, name: str, fields: Mapping[str, type]) -> dict[str, Any] | None:
    """The record `name` in a file, with at least `fields`; None where there is none.

    One that cannot be read, or is not what its name says, leaves a line in the log: other processes, and people, write
    here too.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("id") != name:
            raise ValueError(f"it holds no record of {name}")
        for field, kind in fields.items():
            if not isinstance(found.get(field), kind):
                raise ValueError(f"its {field} is {found.get(field)!r:.60}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        log.error("%s cannot be read, so what it describes is left out: %s", path, error)
        return None
    return found


def owner_of(record: Mapping[str, Any]) -> str:
    """Who owns what a record describes; "" for what was made without a key."""
    return str(record.get("owner", ""))


def make_folder(folder: Path) -> Path:
    """`folder`, which is there and can be written to. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"{uuid.uuid4().hex}.part"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"batch_dir: cannot use {folder}: {error.strerror}.", param="batch_dir") from error
    return folder


def new_id(prefix: str) -> str:
    """An id that sorts by time and cannot be guessed."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


def is_id(name: str, prefix: str) -> bool:
    """Whether `name` can be an id of ours; anything else must not become a path."""
    return re.fullmatch(rf"{re.escape(prefix)}[0-9a-f]{{32}}", name, re.ASCII) is not None


class Claim:
    """The sole right to work on something, among all processes that share a folder. Ends with the process."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @classmethod
    def take(cls, path: Path) -> Claim | None:
        """The right that `path` stands for; None while another has it. Raises OSError."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:
            os.close(handle)
            raise
        return cls(handle)

    def release(self) -> None:
        """Give it up."""
        os.close(self._handle)
