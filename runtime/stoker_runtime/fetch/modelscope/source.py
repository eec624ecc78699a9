"""A modelscope:// source: a repository at a branch or tag, whose listing gives each file its SHA-256.

    GET /api/v1/models/ORG/NAME/revisions                              branches and tags
    GET /api/v1/models/ORG/NAME/repo/files?Revision=…&Recursive=True   names, sizes, digests
    GET /api/v1/models/ORG/NAME/repo?Revision=…&FilePath=…             a file, from where it lies

The API lists no commits: what stands for one is a digest of all names and digests. Each file is held to the digest that
was listed, so a branch that moves meanwhile breaks a fetch and never mixes two states.

Invariants: the token comes from MODELSCOPE_API_TOKEN, goes to the API's origin and to no other (httpx drops it, header
and cookie, when a redirect leaves the origin), and no message holds it.
Knows nothing of what is selected from the list.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlencode

from stoker_runtime.fetch.errors import BadRequest, FetchFailed, ModelNotFound, RevisionNotFound, TokenRejected
from stoker_runtime.fetch.modelscope import answers
from stoker_runtime.fetch.reference import Reference
from stoker_runtime.fetch.source import Body, Listing, SourceFile
from stoker_runtime.fetch.web import Web

ENDPOINT = "https://modelscope.cn"
TOKEN = "MODELSCOPE_API_TOKEN"
# Its default branch, which spec.model.revision and people call main.
DEFAULT_BRANCH = "master"
_ANSWER_BYTES = 32 << 20


class ModelScope:
    """A repository of ModelScope. Use it as a context manager."""

    local = False

    def __init__(
        self,
        reference: Reference,
        endpoint: str = "",
        connections: int = 16,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Raises BadRequest for an endpoint that is no address."""
        self._repo = reference.place
        self._endpoint = (endpoint or ENDPOINT).rstrip("/")
        if not re.fullmatch(r"https?://[^/@\s?#]+(/[^\s?#@]*)?", self._endpoint):
            raise BadRequest("ModelScope's endpoint must be an http:// or https:// address without user and query.")
        token = environ.get(TOKEN, "").strip()
        if token and not re.fullmatch(r"[\x21-\x7e]+", token):
            raise BadRequest(f"{TOKEN} holds characters that no token has.")
        self._has_token = bool(token)
        # Some of its routes know the header alone, some the cookie alone.
        self._web = Web(token, connections=connections, cookie=f"m_session_id={token}" if token else "")

    def __enter__(self) -> ModelScope:
        return self

    def __exit__(self, *exc: object) -> None:
        self._web.close()

    def listing(self, revision: str) -> Listing:
        """The files at a branch or tag; "" and main are the default branch where there is no branch main."""
        with self._refusals():
            known = answers.revisions(self._get("revisions"), self._repo)
        branch = _branch(revision, known)
        if branch not in known:
            raise RevisionNotFound(
                f"{self._repo} has no revision {revision!r} at {self._endpoint}; give a branch or tag."
            )
        with self._refusals():
            found = answers.files(self._get("repo/files", Revision=branch, Recursive="True"), self._repo)
        files = [
            SourceFile(name, size, self._url("repo", Revision=branch, FilePath=name), sha256=digest)
            for name, size, digest in found
            if not name.startswith(".git")
        ]
        state = "\n".join(sorted(f"{name} {size} {digest}" for name, size, digest in found))
        return Listing(hashlib.sha256(state.encode()).hexdigest()[:40], tuple(files))

    @contextmanager
    def open(self, file: SourceFile, offset: int) -> Iterator[Body]:
        """Stream the file from `offset`."""
        with self._refusals(), self._web.stream(file.place, offset) as body:
            yield body

    def _get(self, route: str, **query: str) -> bytes:
        url, body = self._url(route, **query), bytearray()
        with self._web.stream(url, 0) as answer:
            for block in answer.chunks:
                body += block
                if len(body) > _ANSWER_BYTES:
                    raise FetchFailed(
                        f"{self._repo}: {self._endpoint} answered with more than {_ANSWER_BYTES:,} bytes."
                    )
        return bytes(body)

    def _url(self, route: str, **query: str) -> str:
        url = f"{self._endpoint}/api/v1/models/{self._repo}/{route}"
        return f"{url}?{urlencode(query)}" if query else url

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Say of a refusal what would help."""
        try:
            yield
        except TokenRejected:
            need = f"The token in {TOKEN} has no access to it" if self._has_token else f"It needs a token: set {TOKEN}"
            raise TokenRejected(f"{self._repo} at {self._endpoint} refused access. {need}.") from None
        except ModelNotFound:
            hint = "" if self._has_token else f", or is private and needs a token in {TOKEN}"
            raise ModelNotFound(f"There is no repository {self._repo!r} at {self._endpoint}{hint}.") from None


def _branch(revision: str, known: tuple[str, ...]) -> str:
    return DEFAULT_BRANCH if revision in ("", "main") and "main" not in known else revision or "main"
