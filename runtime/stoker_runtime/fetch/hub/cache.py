"""The user's hub cache: what other programs fetched is used, and what is fetched by name is put where they find it.

    HUB_CACHE/models--ORG--NAME/refs/REVISION             the commit of a branch or tag
                               /snapshots/COMMIT/FILE     a link to the blob
                               /blobs/ETAG                the content, named by its SHA-256 or git blob id

The layout is huggingface_hub's, as its guide to the cache describes it. Its downloader is not used to fill it, because
it throws the partial file of a broken download away.

Invariants: a file appears here whole and verified, by a rename; a commit's snapshot only grows.
Knows nothing of networks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from huggingface_hub import constants, get_cached_repo_tree, try_to_load_from_cache
from huggingface_hub.errors import CachedRepoTreeNotFoundError
from huggingface_hub.file_download import repo_folder_name

from stoker_runtime.fetch.contain import inside
from stoker_runtime.fetch.manifest import sync_folder
from stoker_runtime.fetch.reference import relative_path
from stoker_runtime.fetch.source import SourceFile

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class HubCache:
    """One repository in the cache of HF_HUB_CACHE, or HF_HOME."""

    def __init__(self, repo: str) -> None:
        self.repo = repo
        self.root = Path(constants.HF_HUB_CACHE)
        self.folder = self.root / repo_folder_name(repo_id=repo, repo_type="model")

    def commit(self, revision: str) -> str:
        """The commit that a branch or tag had when it was fetched last, or "" when it was not."""
        if _COMMIT.fullmatch(revision):
            return revision
        try:
            found = (self.folder / "refs" / relative_path(revision, "the revision")).read_text().strip()
        except OSError:
            return ""
        return found if _COMMIT.fullmatch(found) else ""

    def snapshot(self, commit: str) -> Path:
        """The folder of a commit's files."""
        return self.folder / "snapshots" / commit

    def file(self, commit: str, file: SourceFile) -> Path | None:
        """A file of a commit, whole by its size; None when it does not lie here."""
        found = try_to_load_from_cache(self.repo, file.name, cache_dir=self.root, revision=commit)
        return Path(found) if isinstance(found, str) and os.path.getsize(found) == file.size else None

    def blob(self, file: SourceFile) -> Path | None:
        """The same content, whole by its size, as any commit has it; None when it does not lie here."""
        name = file.sha256 or file.git_blob
        path = self.folder / "blobs" / name
        return path if _BLOB.fullmatch(name) and path.is_file() and path.stat().st_size == file.size else None

    def listed(self, commit: str) -> list[str] | None:
        """The names of all files that the commit has at the hub; None when the cache does not know them all."""
        try:
            return [file.path for file in get_cached_repo_tree(self.repo, revision=commit, cache_dir=self.root)]
        except CachedRepoTreeNotFoundError:
            return None

    def files(self, commit: str) -> Iterator[SourceFile]:
        """What lies here of a commit, with the digests that the blobs' names promise."""
        root = self.snapshot(commit)
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder) / name
                if path.is_file():
                    yield _cached(path, path.relative_to(root).as_posix())

    def publish(self, revision: str, commit: str, parts: Mapping[str, tuple[SourceFile, Path | None]]) -> Path:
        """Move verified files here: name → its listing's entry and where it lies on this volume; None: as a blob."""
        root = self.snapshot(commit)
        for folder in (self.folder / "blobs", root):
            folder.mkdir(parents=True, exist_ok=True)
        for name, (file, part) in parts.items():
            blob = inside(self.folder / "blobs", file.sha256 or file.git_blob)
            if part is not None:
                part.replace(blob)
            link = inside(root, name)
            staged = link.with_name(f".{link.name[:200]}.{os.getpid()}")
            staged.unlink(missing_ok=True)
            staged.symlink_to(os.path.relpath(blob, link.parent))
            staged.replace(link)
        sync_folder(self.folder / "blobs")
        sync_folder(root)
        if revision != commit:
            ref = inside(self.folder / "refs", revision)
            staged = ref.with_name(f".{ref.name[:200]}.{os.getpid()}")
            staged.write_text(commit)
            staged.replace(ref)
        return root


def _cached(path: Path, name: str) -> SourceFile:
    pin = path.resolve().name
    pin = pin if _BLOB.fullmatch(pin) else ""
    sha256, blob = (pin, "") if len(pin) == 64 else ("", pin)
    return SourceFile(name, path.stat().st_size, str(path), sha256=sha256, git_blob=blob)
