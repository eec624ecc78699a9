"""file:// and pvc:// sources: a folder or one file on a mounted volume.

Invariants: reads only; a file that changes while it is copied is seen by its size and modification time.
Knows nothing of claims beyond the mount root under which each claim's volume stands by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker_runtime.checkpoint.gguf_split import part_names
from stoker_runtime.fetch.errors import FetchFailed, ModelNotFound
from stoker_runtime.fetch.reference import Reference, relative_path
from stoker_runtime.fetch.source import Body, Listing, SourceFile, Transient

_BLOCK = 1 << 20


class Folder:
    """A folder, or a single file, on this machine."""

    local = True

    def __init__(self, reference: Reference, mount_root: Path) -> None:
        self._path = mount_root / reference.place if reference.scheme == "pvc" else Path(reference.place)
        self._text = reference.text

    def listing(self, revision: str) -> Listing:
        """Every regular file below the folder; hidden ones are left out."""
        del revision
        try:
            if self._path.is_file():
                return Listing("", tuple(self._parts()))
            if not self._path.is_dir():
                raise ModelNotFound(f"{self._text}: there is no file or folder {self._path}.")
            return Listing("", tuple(self._walk()))
        except PermissionError as error:
            raise FetchFailed(f"{self._text}: {error.filename} cannot be read.") from None

    @contextmanager
    def open(self, file: SourceFile, offset: int) -> Iterator[Body]:
        """Read the file from `offset`."""
        try:
            with open(file.place, "rb") as stream:
                if _version(os.fstat(stream.fileno())) != file.version:
                    raise Transient(FetchFailed(f"{file.place} changed while it was copied."))
                stream.seek(offset)
                yield Body(offset, iter(lambda: stream.read(_BLOCK), b""))
        except FileNotFoundError:
            raise ModelNotFound(f"{file.place} went away while it was copied.") from None

    def _parts(self) -> Iterator[SourceFile]:
        """The file alone, or with the other parts when it is one of a split GGUF model."""
        for name in part_names(self._path.name) or (self._path.name,):
            path = self._path.with_name(name)
            if not path.is_file():
                raise ModelNotFound(f"{self._text}: the split model lacks its part {path}.")
            yield self._file(path, name)

    def _walk(self) -> Iterator[SourceFile]:
        for folder, folders, names in os.walk(self._path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                path = Path(folder) / name
                if not name.startswith(".") and name != "stoker-manifest.json" and path.is_file():
                    yield self._file(path, path.relative_to(self._path).as_posix())

    def _file(self, path: Path, name: str) -> SourceFile:
        stat = path.stat()
        return SourceFile(relative_path(name, self._text), stat.st_size, str(path), version=_version(stat))


def _version(stat: os.stat_result) -> str:
    return f"{stat.st_size}-{stat.st_mtime_ns}"
