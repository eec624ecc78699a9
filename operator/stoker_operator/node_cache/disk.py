"""The folder of one node: a folder a namespace, in it what `stoker fetch` publishes there.

    FOLDER/NAMESPACE.UID/sha256-HEX/…       a copy; its stoker-manifest.json makes it whole
    FOLDER/NAMESPACE.UID/.partial-…         a fetch, under way or broken off
    FOLDER/NAMESPACE.UID/.given-up-…        on its way out

Invariants: a namespace that was deleted and made anew has another folder; what is given up loses its name in one step,
before the first file goes; links that a pod may have left are never followed.
Knows nothing of claims and volumes.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from stoker_operator.node_cache.room import Stored

_COPY = re.compile(r"sha256-[0-9a-f]{64}")
_GIVEN_UP = ".given-up-"
_MANIFEST = "stoker-manifest.json"


class Disk:
    """The folder. Every method may take as long as a disk does."""

    def __init__(self, root: Path, group: int) -> None:
        self._root = root
        self._group = group

    def prepare(self) -> None:
        """Make the folder if need be, and end what an earlier agent began to give up. Raises OSError."""
        self._root.mkdir(parents=True, exist_ok=True)
        for folder in self._folders():
            for left in folder.glob(f"{_GIVEN_UP}*"):
                shutil.rmtree(left, ignore_errors=True)

    def open(self, folder: str) -> Path:
        """The folder of a namespace, made if need be, so that pods of the group may write there. Raises OSError."""
        path = self._root / folder
        if not path.is_dir():
            path.mkdir()
            os.chown(path, -1, self._group)
            path.chmod(0o2770)
        return path

    def free(self) -> int:
        """Bytes that the disk has left."""
        found = os.statvfs(self._root)
        return found.f_bavail * found.f_frsize

    def has(self, folder: str, digest: str) -> bool:
        """Whether a copy is there, whole."""
        return _whole(self._root / folder / digest.replace(":", "-"))

    def stored(self) -> list[Stored]:
        """Everything that takes room."""
        found = []
        for folder in self._folders():
            for item in _entries(folder):
                whole = bool(_COPY.fullmatch(item.name)) and _whole(item)
                if not whole and not item.name.startswith((".partial-", _GIVEN_UP)):
                    continue
                digest = item.name.replace("-", ":", 1) if whole else ""
                found.append(Stored(folder.name, item.name, _size(item), item.lstat().st_mtime, digest))
        return found

    def touch(self, folder: str, digest: str) -> None:
        """Note that a copy is used now."""
        with suppress(FileNotFoundError):
            os.utime(self._root / folder / digest.replace(":", "-"), follow_symlinks=False)

    def remove(self, item: Stored) -> None:
        """Give something up. Raises OSError."""
        path = self._root / item.folder / item.name
        gone = path
        if not item.name.startswith(_GIVEN_UP):
            gone = path.with_name(f"{_GIVEN_UP}{item.name.lstrip('.')}")
            shutil.rmtree(gone, ignore_errors=True)
            path.rename(gone)
        shutil.rmtree(gone)

    def _folders(self) -> list[Path]:
        return [item for item in _entries(self._root) if "." in item.name]


def _entries(folder: Path) -> list[Path]:
    """The folders in a folder, links apart."""
    try:
        with os.scandir(folder) as found:
            return sorted(Path(item.path) for item in found if item.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _whole(copy: Path) -> bool:
    try:
        return stat.S_ISDIR(copy.lstat().st_mode) and stat.S_ISREG((copy / _MANIFEST).lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(where) / name).lstat().st_size
    return total
