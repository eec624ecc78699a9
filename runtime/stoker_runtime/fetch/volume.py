"""The folder that models are published in, usually a volume shared by replicas.

    ROOT/sha256-HEX/…              a published model; stoker-manifest.json is written last, before the rename
    ROOT/.partial-KEY/             one source's work: partial files, then the tree that is renamed
    ROOT/.lock-KEY                 one source, one fetcher at a time
    ROOT/.orders/KEY               which published folder answers an order, so that a second run asks no one

Invariants: a folder named sha256-… is complete from the moment it has that name; work and result are on one
file system, so publishing is one rename; a link that stands where a file or folder of ours belongs is refused.
Knows nothing of sources.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker_runtime.fetch.contain import inside, open_own, own_folder
from stoker_runtime.fetch.errors import FetchError, FetchFailed, Interrupted, VolumeFull
from stoker_runtime.fetch.manifest import Manifest, sync_folder
from stoker_runtime.fetch.progress import size

DEFAULT_ROOT = Path("~/.cache/stoker/models")
"""Where `stoker fetch` publishes unless told otherwise."""
# Directory entries, the manifest and the file system's own growth.
_SPARE_BYTES = 1 << 20
_LOCK_POLL_SECONDS = 0.2
_PUBLISHED = re.compile(r"sha256-[0-9a-f]{64}")


class Volume:
    """Where models are published."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Make the root if need be, and find out now whether it can be written."""
        with os_errors(self.root):
            (self.root / ".orders").mkdir(parents=True, exist_ok=True)

    def work(self, key: str) -> Path:
        """The work folder of one source, made if need be."""
        path = self.root / f".partial-{key}"
        with os_errors(path):
            return own_folder(path)

    def folder(self, manifest: Manifest) -> Path:
        """Where a manifest's files are, or will be, published."""
        return self.root / manifest.digest.replace(":", "-")

    @contextmanager
    def lock(self, key: str, *, seconds: float, stop: threading.Event, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold the source's lock. Calls `waiting` once when another process has it.

        Raises FetchFailed after `seconds`, Interrupted when told to stop.
        """
        path = self.root / f".lock-{key}"
        end = time.monotonic() + seconds
        with os_errors(path), open(path, "a", opener=open_own) as stream:
            told = False
            while not _try_lock(stream.fileno()):
                if not told:
                    waiting()
                    told = True
                if time.monotonic() >= end:
                    raise FetchFailed(f"Another fetch has kept {path} for {seconds:.0f} s; is it stuck?")
                if stop.wait(_LOCK_POLL_SECONDS):
                    raise Interrupted("Stopped while waiting for another fetch of the same model.")
            yield

    def require(self, count: int) -> None:
        """Raise VolumeFull unless `count` more bytes fit."""
        free = free_bytes(self.root)
        if count > free:
            stat = os.statvfs(self.root)
            raise VolumeFull(
                f"The volume at {self.root} has {size(free + _SPARE_BYTES)} free of "
                f"{size(stat.f_blocks * stat.f_frsize)}; {size(count + _SPARE_BYTES)} more are needed. "
                "Use a larger volume or remove another model."
            )

    def publish(self, key: str, manifest: Manifest, parts: dict[str, Path]) -> Path:
        """Build the tree from verified `parts` (file name → partial file) and rename it to its final name."""
        work, final = self.work(key), self.folder(manifest)
        tree = work / "tree"
        with os_errors(tree):
            shutil.rmtree(tree, ignore_errors=True)
            _build(tree, manifest, parts)
            try:
                tree.rename(final)
                sync_folder(self.root)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                # The same bytes under another revision or source, or damaged ones: pods may read it, so it keeps its
                # name.
                self.replace(final, manifest, {name: tree / name for name in parts})
            shutil.rmtree(work)
        return final

    def replace(self, folder: Path, manifest: Manifest, parts: dict[str, Path]) -> None:
        """Put verified files in the place of bad ones; readers that have the old one open keep it."""
        with os_errors(folder):
            for name, part in parts.items():
                target = inside(folder, name)
                part.rename(target)
                sync_folder(target.parent)
            manifest.write(folder)

    def remember(self, order: str, folder: Path, pin: str) -> None:
        """Note that `folder` answers `order`; `pin` identifies a source that has no commits."""
        path = self.root / ".orders" / order
        staged = path.with_suffix(".new")
        with os_errors(path):
            staged.unlink(missing_ok=True)
            with open(staged, "w", opener=open_own) as stream:
                stream.write(f"{folder.name}\n{pin}\n")
            staged.rename(path)

    def recall(self, order: str) -> tuple[Path, str] | None:
        """The folder noted for `order` and its pin, or None."""
        try:
            name, pin = (self.root / ".orders" / order).read_text().splitlines()
        except (FileNotFoundError, ValueError):
            return None
        return (self.root / name, pin) if _PUBLISHED.fullmatch(name) else None


def free_bytes(folder: Path) -> int:
    """What the volume of `folder` has room for, beside the little that publishing itself takes."""
    with os_errors(folder):
        stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize - _SPARE_BYTES


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Turn the system's errors on `path` into ours."""
    try:
        yield
    except FetchError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise VolumeFull(f"The volume at {path} became full while it was written; use a larger one.") from None
        if error.errno == errno.ELOOP:
            raise FetchFailed(f"{error.filename or path} is a symbolic link; remove it and fetch again.") from None
        raise FetchFailed(
            f"{error.filename or path}: {error.strerror}; the destination must be a writable folder."
        ) from None


def _build(tree: Path, manifest: Manifest, parts: dict[str, Path]) -> None:
    tree.mkdir()
    for name, part in parts.items():
        part.rename(inside(tree, name))
    for folder in {(tree / name).parent for name in parts} - {tree}:
        sync_folder(folder)
    manifest.write(tree)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
