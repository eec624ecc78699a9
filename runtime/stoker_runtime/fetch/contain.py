"""Keeps what a fetch writes in the folders that it owns, whoever else can write to the volume.

Names are judged by `reference.relative_path`; here it is what lies on the disk: a symbolic link in the place of a
file or of a folder would lead a write elsewhere. Links are refused, never followed.

Invariants: nothing here creates a file outside the folder it is given.
Knows nothing of sources, manifests and digests.
"""

from __future__ import annotations

import os
from pathlib import Path

from stoker_runtime.fetch.errors import FetchFailed
from stoker_runtime.fetch.reference import relative_path


def inside(folder: Path, name: str) -> Path:
    """Where the file `name` of a model lies in `folder`; the folders above it are made.

    Raises BadRequest for a name that leaves the folder, FetchFailed where a link on the disk does.
    """
    target = folder / relative_path(name, str(folder))
    target.parent.mkdir(parents=True, exist_ok=True)
    root = folder.resolve()
    if target.parent.resolve() != root.joinpath(*Path(name).parts[:-1]):
        raise FetchFailed(f"{target.parent} is, or lies below, a symbolic link; remove the link and fetch again.")
    return target


def own_folder(path: Path) -> Path:
    """Make the folder `path` if need be. Raises FetchFailed when a link stands in its place."""
    path.mkdir(exist_ok=True)
    if path.is_symlink():
        raise FetchFailed(f"{path} is a symbolic link; remove it and fetch again.")
    return path


def open_own(path: str | Path, flags: int) -> int:
    """A file descriptor of `path`, which is never a link: an opener for `open`, too. Raises OSError (ELOOP)."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
