"""A hub-compatible endpoint: revision → commit → file list → bytes.

    GET {endpoint}/api/models/{repo}/revision/{revision}     → {"sha": commit}
    GET {endpoint}/api/models/{repo}/tree/{commit}?recursive → paths, sizes, LFS SHA-256, git blob ids
    GET {endpoint}/{repo}/resolve/{commit}/{path}            → bytes, with ranges

Invariants: everything after the first call names the commit, so a branch that moves meanwhile changes
nothing. Knows nothing of what is selected from the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from stoker_runtime.fetch.errors import (
    BadRequest,
    FetchFailed,
    ModelNotFound,
    RevisionNotFound,
    TokenRejected,
)
from stoker_runtime.fetch.reference import Reference, relative_path
from stoker_runtime.fetch.source import Body, Listing, SourceFile
from stoker_runtime.fetch.web import Web

DEFAULT_ENDPOINT = "https://huggingface.co"
_MAX_PAGES = 1000


class Hub:
    """An hf:// source."""

    local = False

    def __init__(self, reference: Reference, web: Web, endpoint: str = "") -> None:
        self._repo = reference.place
        self._endpoint = (endpoint or DEFAULT_ENDPOINT).rstrip("/")
        parts = urlsplit(self._endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise BadRequest("The hub's endpoint must be an http:// or https:// address without a user name.")
        self._web = web

    def listing(self, revision: str) -> Listing:
        """Resolve a branch, tag or commit, and list the files of that commit."""
        commit = self._commit(revision or "main")
        url = f"{self._endpoint}/api/models/{self._repo}/tree/{commit}?recursive=true&expand=false"
        files: list[SourceFile] = []
        for _ in range(_MAX_PAGES):
            entries, following = self._web.json(url)
            if not isinstance(entries, list):
                raise FetchFailed(f"{self._repo}: the hub's file list is no list.")
            files += [self._file(entry, commit) for entry in entries if entry.get("type") == "file"]
            if not following:
                return Listing(commit, tuple(file for file in files if not file.name.startswith(".git")))
            url = self._same_origin(urljoin(url, following))
        raise FetchFailed(f"{self._repo}: the hub's file list does not end.")

    @contextmanager
    def open(self, file: SourceFile, offset: int) -> Iterator[Body]:
        """Stream the file from `offset`."""
        with self._web.stream(file.place, offset) as body:
            yield body

    def _commit(self, revision: str) -> str:
        url = f"{self._endpoint}/api/models/{self._repo}/revision/{quote(revision, safe='')}"
        try:
            answer, _ = self._web.json(url)
        except ModelNotFound:
            self._raise_missing(revision)
        except TokenRejected:
            if self._web.has_token:
                raise
            # Hubs answer 401 for a repository that does not exist, so as not to tell which private ones do.
            raise TokenRejected(
                f"{self._repo} does not exist at {self._endpoint}, or is private or gated and needs a token."
            ) from None
        commit = answer.get("sha") if isinstance(answer, dict) else None
        if not isinstance(commit, str) or not commit or not commit.isalnum():
            raise FetchFailed(f"{self._repo}: the hub names no commit for revision {revision!r}.")
        return commit

    def _raise_missing(self, revision: str) -> None:
        """Tell a missing revision from a missing repository; a 404 alone does not."""
        try:
            self._web.json(f"{self._endpoint}/api/models/{self._repo}")
        except (ModelNotFound, TokenRejected):
            raise ModelNotFound(f"There is no repository {self._repo!r} at {self._endpoint}.") from None
        raise RevisionNotFound(f"{self._repo} has no revision {revision!r}; give a branch, a tag or a commit.")

    def _file(self, entry: dict[str, Any], commit: str) -> SourceFile:
        try:
            name = relative_path(entry["path"], self._repo)
            lfs = entry.get("lfs") or {}
            place = f"{self._endpoint}/{self._repo}/resolve/{commit}/{quote(name)}"
            # An LFS entry's own oid names the pointer file, not the content.
            digest, blob = lfs.get("oid", ""), "" if lfs else entry.get("oid", "")
            return SourceFile(
                name,
                int(lfs.get("size", entry["size"])),
                place,
                sha256=digest.removeprefix("sha256:"),
                git_blob=blob,
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise FetchFailed(f"{self._repo}: the hub's file list has an entry without path, size or id.") from None

    def _same_origin(self, url: str) -> str:
        """The next page must be the hub's: the token goes with the request."""
        if urlsplit(url)[:2] != urlsplit(self._endpoint)[:2]:
            raise FetchFailed(f"{self._repo}: the hub's next page leads to another host.")
        return url
