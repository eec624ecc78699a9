"""An hf:// source: revision → commit → file list → bytes, by huggingface_hub.

A file that lies in the user's hub cache is read from there; else its bytes come by Xet where the hub offers it and
hf_xet is there (HF_HUB_DISABLE_XET=1 turns it off), else over HTTP. With HF_HUB_OFFLINE=1 the cache is all there is.

Invariants: everything after the first call names the commit, so a branch that moves meanwhile changes nothing; a
cached copy with wrong bytes is tried once, then the hub is asked.
Knows nothing of what is selected from the list.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils._http import hf_raise_for_status, http_stream_backoff
from huggingface_hub.utils._runtime import is_xet_available
from huggingface_hub.utils._xet import (
    XetFileData,
    XetTokenType,
    refresh_xet_connection_info,
    xet_connection_info_refresh_url,
    xet_headers_without_auth,
)

from stoker_runtime.fetch.errors import FetchFailed, HubUnreachable, ModelNotFound, RevisionNotFound, TokenRejected
from stoker_runtime.fetch.hub.cache import HubCache
from stoker_runtime.fetch.hub.session import FILE, Session
from stoker_runtime.fetch.progress import size
from stoker_runtime.fetch.reference import relative_path
from stoker_runtime.fetch.source import Body, Listing, SourceFile, Transient
from stoker_runtime.fetch.web import reason_of, shown, start_of

MAX_FILES = 100_000
_BLOCK = 1 << 20


class Hub:
    """A repository of a hub."""

    local = False

    def __init__(self, repo: str, session: Session) -> None:
        """Raises BadRequest for a name that no repository can have."""
        self._repo = repo
        self._session = session
        with session.errors(repo, ""):
            self._cache = HubCache(repo)
        self._commit = ""
        self._xet: dict[str, str] = {}
        self._tried: set[str] = set()
        self._mutex = threading.Lock()
        self._connections: Any = None

    def listing(self, revision: str) -> Listing:
        """Resolve a branch, tag or commit, and list the files of that commit."""
        revision = revision or constants.DEFAULT_REVISION
        if self._session.offline:
            return self._cached_listing(revision)
        self._commit = commit = self._resolve(revision)
        with self._session.errors(self._repo, revision):
            files: list[SourceFile] = []
            for entry in self._session.api.list_repo_tree(self._repo, recursive=True, revision=commit):
                if isinstance(entry, RepoFile) and not entry.path.startswith(".git"):
                    files.append(self._file(entry))
                if len(files) > MAX_FILES:
                    raise FetchFailed(f"{self._repo}: the hub's file list does not end.")
        return Listing(commit, tuple(files))

    @contextmanager
    def open(self, file: SourceFile, offset: int) -> Iterator[Body]:
        """Stream the file from `offset`: from the cache, by Xet, or over HTTP."""
        cached = self._cache.file(self._commit, file) or self._cache.blob(file)
        if cached is not None and file.name not in self._tried:
            self._tried.add(file.name)
            with open(cached, "rb") as stream:
                stream.seek(offset)
                yield Body(offset, iter(lambda: stream.read(_BLOCK), b""))
            return
        self.refuse_offline()
        hash = self._xet.get(file.name, "")
        if hash and offset < file.size and is_xet_available():
            yield Body(offset, self._by_xet(file, hash, offset))
            return
        with ExitStack() as stack:
            yield self._by_http(file, offset, stack)

    def refuse_offline(self) -> None:
        """Raise HubUnreachable with what to do about it when the hub must not be asked."""
        if self._session.offline:
            with self._session.errors(self._repo, ""):
                raise OfflineModeIsEnabled(self._repo)

    def _resolve(self, revision: str) -> str:
        """The commit of a revision. Raises FetchError or Transient."""
        try:
            with self._session.errors(self._repo, revision):
                commit = self._session.api.model_info(self._repo, revision=revision).sha
        except ModelNotFound:
            self._raise_missing(revision)
        if not isinstance(commit, str) or not commit.isalnum() or not commit.isascii() or len(commit) > 64:
            raise FetchFailed(f"{self._repo}: the hub names no commit for revision {revision!r}.")
        return commit

    def _raise_missing(self, revision: str) -> None:
        """Tell a missing revision from a missing repository: not every hub's 404 does."""
        try:
            with self._session.errors(self._repo, revision):
                self._session.api.model_info(self._repo)
        except (ModelNotFound, TokenRejected):
            raise ModelNotFound(f"There is no repository {self._repo!r} at {self._session.endpoint}.") from None
        raise RevisionNotFound(f"{self._repo} has no revision {revision!r}; give a branch, a tag or a commit.")

    def _file(self, entry: RepoFile) -> SourceFile:
        name = relative_path(entry.path, self._repo)
        if not isinstance(entry.size, int) or entry.size < 0:
            raise FetchFailed(f"{self._repo}: the hub's file list has no size for {name}.")
        if entry.xet_hash and not constants.HF_HUB_DISABLE_XET:
            self._xet[name] = entry.xet_hash
        url = hf_hub_url(self._repo, name, revision=self._commit, endpoint=self._session.endpoint)
        if entry.lfs is None:
            return SourceFile(name, entry.size, url, git_blob=entry.blob_id)
        # An LFS entry's own id names the pointer file, not the content.
        return SourceFile(name, int(entry.lfs.size), url, sha256=entry.lfs.sha256.removeprefix("sha256:"))

    def _cached_listing(self, revision: str) -> Listing:
        """What the cache knows of a revision. Raises HubUnreachable when that is nothing."""
        self._commit = commit = self._cache.commit(revision)
        files = {file.name: file for file in self._cache.files(commit)} if commit else {}
        if not files:
            self.refuse_offline()
        for name in self._cache.listed(commit) or ():
            files.setdefault(name, SourceFile(relative_path(name, self._repo), 0, ""))
        return Listing(commit, tuple(files.values()))

    def _by_http(self, file: SourceFile, offset: int, stack: ExitStack) -> Body:
        """The answer to one GET, closed by `stack`. There are no retries here: the downloader makes them."""
        headers = self._session.headers()
        if offset:
            headers["range"] = f"bytes={offset}-"
        asked = http_stream_backoff(
            "GET",
            file.place,
            headers=headers,
            extensions={FILE: True},
            max_retries=0,
            retry_on_exceptions=(),
            retry_on_status_codes=(),
        )
        with self._session.errors(self._repo, self._commit):
            response = stack.enter_context(asked)
            hf_raise_for_status(response)
        start = start_of(response.headers, shown(file.place)) if response.status_code == 206 else 0
        packed = response.headers.get("content-encoding", "identity") != "identity"
        if start not in (0, offset) or (packed and start):
            what = "a compressed part of the file" if packed else f"bytes from {start} on"
            raise FetchFailed(f"{shown(file.place)} was asked for bytes from {offset} on and answered with {what}.")
        return Body(start, self._mapped(response.iter_bytes() if packed else response.iter_raw()))

    def _mapped(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        with self._session.errors(self._repo, self._commit):
            yield from blocks

    def _xet_session(self) -> Any:
        """hf_xet's connections, made when they are first needed and shared by all files."""
        import hf_xet

        with self._mutex:
            if self._connections is None:
                self._connections = hf_xet.XetSession()
        return self._connections

    def _by_xet(self, file: SourceFile, hash: str, offset: int) -> Iterator[bytes]:
        """The file from `offset`, put together by hf_xet from chunks; the access token of Xet is asked of the hub."""
        import hf_xet

        headers = self._session.headers(marked=False)
        route = xet_connection_info_refresh_url(
            token_type=XetTokenType.READ,
            repo_id=self._repo,
            repo_type="model",
            revision=self._commit,
            endpoint=self._session.endpoint,
        )
        with self._session.errors(self._repo, self._commit):
            access = refresh_xet_connection_info(file_data=XetFileData(hash, route), headers=self._session.headers())
        try:
            # A group does not survive an error, so each stream has its own; connections are the session's.
            group = self._xet_session().new_download_stream_group(
                endpoint=access.endpoint,
                token=access.access_token,
                token_expiry_unix_secs=access.expiration_unix_epoch,
                token_refresh_url=route,
                token_refresh_headers=headers,
                custom_headers=xet_headers_without_auth(headers),
            )
            for block in group.download_stream(hf_xet.XetFileInfo(hash, file.size), start=offset):
                offset += len(block)
                yield block
            why = "its log lies in HF_HOME/xet/logs"
        except (RuntimeError, ValueError, OSError) as error:
            # Addresses in these texts are signed.
            why = re.sub(r"\?[^\s\"')>]*", "", reason_of(error))[:300]
        if offset < file.size:
            # With and without an error: its streams may just end when their storage cannot be reached.
            raise Transient(
                HubUnreachable(
                    f"{file.name} of {self._repo}: Xet's storage stopped after {size(offset)} of {size(file.size)} "
                    f"({why}). HF_HUB_DISABLE_XET=1 fetches over plain HTTP."
                )
            )
