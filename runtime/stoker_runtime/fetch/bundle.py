"""A published model in one file, to be carried where no network leads: a tar, its manifest first.

    FILE.tar: stoker-manifest.json, then each file under its name, in the order of the names

As a source a bundle is what a hub is: a listing with the digest of every file, and bytes from an offset. So what comes
out of it is verified, continued where it broke off, and published like everything else.
Invariants: a bundle has its name from the moment it is whole; every byte that went into it was compared with the
manifest's digest; a member that its manifest does not name, or that is no plain file, is refused.
Knows nothing of where a bundle is published.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from stoker_runtime.fetch import manifest as manifests
from stoker_runtime.fetch.contain import open_own
from stoker_runtime.fetch.errors import BadRequest, ChecksumMismatch, FetchFailed, Interrupted, ModelNotFound
from stoker_runtime.fetch.manifest import Manifest
from stoker_runtime.fetch.progress import Progress
from stoker_runtime.fetch.source import Body, Listing, SourceFile, Transient
from stoker_runtime.fetch.volume import os_errors

ENDING = ".tar"
_BLOCK = 1 << 20
# A manifest has some hundred bytes a file.
_MOST_MANIFEST = 64 << 20


def write_bundle(folder: Path, manifest: Manifest, bundle: Path, progress: Progress, stop: threading.Event) -> None:
    """Write what is published in `folder` to `bundle`, in place of what is there.

    Raises ChecksumMismatch when a file is not what was published, VolumeFull, FetchFailed, Interrupted.
    """
    staged = bundle.with_name(f".{bundle.name}.partial")
    progress.enter("publish", manifest.bytes)
    with os_errors(bundle):
        bundle.parent.mkdir(parents=True, exist_ok=True)
        staged.unlink(missing_ok=True)
        try:
            with (
                open(staged, "wb", opener=open_own) as stream,
                tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar,
            ):
                head = (folder / manifests.NAME).read_bytes()
                tar.addfile(member(manifests.NAME, len(head)), io.BytesIO(head))
                for name, entry in sorted(manifest.files.items()):
                    with open(folder / name, "rb") as source:
                        hashed = Hashed(source, progress, stop)
                        tar.addfile(member(name, entry.bytes), hashed)
                    if hashed.digest.hexdigest() != entry.sha256:
                        raise ChecksumMismatch(f"{folder.name}/{name} has other bytes than those published.")
            staged.rename(bundle)
            manifests.sync_folder(bundle.parent)
        finally:
            staged.unlink(missing_ok=True)


class Bundle:
    """A bundle as a source."""

    local = True

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._text = text

    def listing(self, revision: str) -> Listing:
        """Every file, with the digest that it had where the bundle was made."""
        del revision
        try:
            with open(self._path, "rb") as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
                return self._listing(tar, stream)
        except FileNotFoundError:
            raise ModelNotFound(f"{self._text}: there is no file {self._path}.") from None
        except OSError as error:
            raise FetchFailed(f"{self._text}: {self._path} cannot be read: {error.strerror}.") from None
        except tarfile.TarError as error:
            raise BadRequest(f"{self._text} is no bundle, or only a part of one: {error}.") from None

    @contextmanager
    def open(self, file: SourceFile, offset: int) -> Iterator[Body]:
        """Read the file from `offset`."""
        try:
            with open(self._path, "rb") as stream:
                if _version(stream) != file.version:
                    raise Transient(FetchFailed(f"{self._path} changed while it was read."))
                stream.seek(int(file.place) + offset)
                yield Body(offset, _upto(stream, file.size - offset))
        except FileNotFoundError:
            raise ModelNotFound(f"{self._path} went away while it was read.") from None

    def _listing(self, tar: tarfile.TarFile, stream: BinaryIO) -> Listing:
        first = tar.next()
        if first is None or first.name != manifests.NAME or not first.isreg() or first.size > _MOST_MANIFEST:
            raise BadRequest(f"{self._text} is no bundle: `stoker fetch URI --bundle FILE{ENDING}` makes one.")
        manifest = self._manifest(tar, first)
        version, found = _version(stream), {}
        for member in tar:
            entry = manifest.files.get(member.name)
            if member is first or member.name == manifests.NAME:
                continue
            if entry is None or not member.isreg() or member.size != entry.bytes or member.name in found:
                raise BadRequest(f"{self._text} holds {member.name!r}, which is not as its manifest says.")
            found[member.name] = SourceFile(
                member.name, member.size, str(member.offset_data), entry.sha256, version=version
            )
        missing = sorted(set(manifest.files) - set(found))
        size = stream.seek(0, io.SEEK_END)
        if missing or any(int(file.place) + file.size > size for file in found.values()):
            raise BadRequest(f"{self._text} is cut short: {missing[0] if missing else 'its last file'} is missing.")
        return Listing(manifest.resolved_revision, tuple(found[name] for name in sorted(found)))

    def _manifest(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> Manifest:
        body = tar.extractfile(member)
        assert body is not None  # it is a regular file
        try:
            document = json.loads(body.read())
            manifest = manifests.parse(document)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadRequest(f"{self._text}: its {manifests.NAME} is damaged.") from None
        if manifest.digest != document["digest"]:
            raise BadRequest(f"{self._text}: the files of its {manifests.NAME} do not add up to its digest.")
        return manifest


class Hashed:
    """A published file that is hashed as it is read into something else."""

    def __init__(self, stream: BinaryIO, progress: Progress, stop: threading.Event) -> None:
        self._stream = stream
        self._progress = progress
        self._stop = stop
        self.digest = hashlib.sha256()

    def read(self, count: int = -1, /) -> bytes:
        """As a file's."""
        if self._stop.is_set():
            raise Interrupted("Stopped while it was written.")
        data = self._stream.read(count)
        self.digest.update(data)
        self._progress.moved(len(data))
        return data


def _upto(stream: BinaryIO, count: int) -> Iterator[bytes]:
    while count > 0 and (block := stream.read(min(_BLOCK, count))):
        count -= len(block)
        yield block


def member(name: str, size: int) -> tarfile.TarInfo:
    """The entry of a file, the same whoever writes it, and whenever."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info


def _version(stream: BinaryIO) -> str:
    stat = os.fstat(stream.fileno())
    return f"{stat.st_size}-{stat.st_mtime_ns}"
