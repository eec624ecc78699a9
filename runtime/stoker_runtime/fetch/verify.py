"""Does a published folder still hold the bytes its manifest promises?

`quick` trusts a file whose size and modification time are those of the moment it was verified, and hashes
the others; `full` hashes all. Files are hashed side by side: a volume gives its bandwidth to several readers.

Invariants: writes nothing, so it works on a read-only mount.
"""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stoker_runtime.fetch.errors import ChecksumMismatch, Interrupted, NotPublished
from stoker_runtime.fetch.manifest import Manifest, ManifestFile, read
from stoker_runtime.fetch.progress import Progress

_THREADS = 4
_BLOCK = 1 << 20


def check(folder: Path, manifest: Manifest, *, full: bool, progress: Progress, stop: threading.Event) -> dict[str, str]:
    """Return what is wrong: file name → a phrase for people; empty when all is well. Raises Interrupted."""
    progress.enter("verify", manifest.bytes)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda item: _problem(folder / item[0], item[1], full, progress, stop), manifest.files.items())
        return {name: problem for name, problem in zip(manifest.files, found, strict=True) if problem}


def verify_only(folder: Path, digest: str, *, full: bool, progress: Progress, stop: threading.Event) -> Manifest:
    """Check a published folder without writing to it.

    Raises NotPublished when there is none with this digest, ChecksumMismatch when a file is damaged.
    """
    manifest = read(folder)
    if digest and manifest.digest != digest:
        raise NotPublished(f"{folder} holds {manifest.digest}, not {digest}.")
    bad = check(folder, manifest, full=full, progress=progress, stop=stop)
    if bad:
        name, problem = next(iter(bad.items()))
        more = f" ({len(bad) - 1} more files are damaged.)" if len(bad) > 1 else ""
        raise ChecksumMismatch(f"{folder.name}/{name} {problem}.{more}")
    return manifest


def hash_file(path: Path, progress: Progress, stop: threading.Event) -> str:
    """SHA-256 of a file in hex."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as stream:
        while block := stream.read(_BLOCK):
            if stop.is_set():
                raise Interrupted("Stopped while verifying.")
            digest.update(block)
            progress.moved(len(block))
    return digest.hexdigest()


def _problem(path: Path, expected: ManifestFile, full: bool, progress: Progress, stop: threading.Event) -> str:
    try:
        stat = path.stat()
        if stat.st_size != expected.bytes:
            return f"has {stat.st_size} bytes instead of {expected.bytes}"
        if not full and stat.st_mtime_ns == expected.mtime_ns:
            progress.kept(stat.st_size)
            return ""
        return "" if hash_file(path, progress, stop) == expected.sha256 else "has other bytes than those published"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
