"""Requests to one hub through huggingface_hub's own client, within limits, and its errors as ours.

The library's client is one for the whole process and has hooks; while a `Session` is open, its requests get a timeout,
may go to the hub and, for a file's bytes, to where the hub sends them, may be answered by `MAX_ANSWER_BYTES` at most,
and fail at once with what a retry of ours needs to know: the library's own waits cannot be stopped. Requests of others
in the process stay as they are.

Invariants: the token is sent to the hub's origin and to no other; no message holds it, or a query string; headers end
at what h11 takes (100 KiB).
Knows nothing of listings and files.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import httpx2
from huggingface_hub import HfApi, constants, get_token, set_client_factory
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import _http

from stoker_runtime.fetch.errors import (
    BadRequest,
    FetchError,
    FetchFailed,
    HubUnreachable,
    ModelNotFound,
    RevisionNotFound,
    TokenRejected,
)
from stoker_runtime.fetch.source import Bounded, Transient
from stoker_runtime.fetch.web import CONNECT_SECONDS, STALL_SECONDS, product, reason_of, retry_after, shown

# A page of a listing holds 1,000 files in some 300 KB. Compressed answers were not asked for and may unfold.
MAX_ANSWER_BYTES = 32 << 20
MAX_PACKED_BYTES = 1 << 20
# Of a session, beside files' bytes: pages of a listing, access to Xet, attempts.
MAX_REQUESTS = 2000
MARK = "x-stoker-session"
"""The header that names a session within this process; it is taken off before the request leaves."""
FILE = "stoker_file"
"""The extension that marks a request for a file's bytes."""
_TIMEOUT = {"connect": CONNECT_SECONDS, "read": STALL_SECONDS, "write": STALL_SECONDS, "pool": STALL_SECONDS}


class _Stream(Bounded, httpx2.SyncByteStream):
    """A bounded answer of httpx2."""


def endpoint_of(given: str) -> str:
    """The hub's address: the one given, else HF_ENDPOINT's, else huggingface.co. Raises BadRequest."""
    endpoint = (given or constants.ENDPOINT).rstrip("/")
    try:
        url = httpx2.URL(endpoint)
    except httpx2.InvalidURL:
        url = httpx2.URL("")
    if url.scheme not in ("http", "https") or not url.host or url.userinfo:
        raise BadRequest("The hub's endpoint must be an http:// or https:// address without a user name.")
    return endpoint


def token_for(endpoint: str, given: str) -> str:
    """The token for a hub: the one given, else the one that `hf auth login` left, if it was meant for this hub."""
    if given or constants.HF_HUB_DISABLE_IMPLICIT_TOKEN or endpoint != constants.ENDPOINT:
        return given
    return get_token() or ""


class Session:
    """One hub. Use it as a context manager; several may be open at a time."""

    def __init__(self, endpoint: str = "", token: str = "") -> None:
        """`endpoint` "": HF_ENDPOINT, then huggingface.co; `token` "": the user's login there. Raises BadRequest."""
        self.endpoint = endpoint_of(endpoint)
        self.token = token_for(self.endpoint, token)
        self.origin = _origin(httpx2.URL(self.endpoint))
        self._name = str(id(self))
        self._asked = 0
        name, version = product()
        self.api = HfApi(
            endpoint=self.endpoint,
            token=self.token or False,
            library_name=name,
            library_version=version,
            headers={"accept-encoding": "identity", MARK: self._name},
        )

    def __enter__(self) -> Session:
        _GUARD.admit(self._name, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _GUARD.dismiss(self._name)

    def count(self) -> None:
        """Count a request that is for no file's bytes. Raises FetchFailed where they do not end."""
        self._asked += 1
        if self._asked > MAX_REQUESTS:
            raise FetchFailed(f"{self.endpoint}: the hub's file list does not end.")

    @property
    def offline(self) -> bool:
        """Whether HF_HUB_OFFLINE forbids every request."""
        return bool(constants.is_offline_mode())

    def headers(self, *, marked: bool = True) -> dict[str, str]:
        """Of a request that the library does not make itself; without our mark for a client that is not its own."""
        headers = dict(self.api._build_hf_headers(token=self.token or False))
        return headers if marked else {name: value for name, value in headers.items() if name != MARK}

    @contextmanager
    def errors(self, repo: str, revision: str) -> Iterator[None]:
        """Turn the library's errors on a repository into ours."""
        try:
            yield
        except FetchError:
            raise
        except OfflineModeIsEnabled:
            raise HubUnreachable(
                f"HF_HUB_OFFLINE is set, so {self.endpoint} is not asked for {repo}, and the cache at "
                f"{constants.HF_HUB_CACHE} does not hold what is needed of it. Fetch it where there is a network, or "
                "unset HF_HUB_OFFLINE."
            ) from None
        except HfHubHTTPError as error:
            raise self._refused(error, repo, revision) from None
        except httpx2.TimeoutException as error:
            what = "no connection" if isinstance(error, httpx2.ConnectTimeout) else "no bytes"
            raise Transient(HubUnreachable(f"{self.endpoint}: {what} in time.")) from None
        except (httpx2.TransportError, httpx2.StreamError) as error:
            raise Transient(HubUnreachable(f"{self.endpoint} cannot be reached: {reason_of(error)}.")) from None
        except (httpx2.InvalidURL, httpx2.TooManyRedirects) as error:
            raise FetchFailed(f"{self.endpoint}: {error}") from None
        except HFValidationError as error:
            raise BadRequest(f"{repo!r} is no name that a repository can have: {reason_of(error)[:200]}.") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FetchFailed(
                f"{repo}: {self.endpoint} answered with something that a hub does not answer; is this address a hub?"
            ) from None

    def _refused(self, error: HfHubHTTPError, repo: str, revision: str) -> FetchError:
        """What a refusal means, by the library's class and the status."""
        status = error.response.status_code
        given = f"{repo} at {self.endpoint}"
        if isinstance(error, RevisionNotFoundError):
            return RevisionNotFound(f"{repo} has no revision {revision!r}; give a branch, a tag or a commit.")
        if isinstance(error, GatedRepoError) or status == 403:
            need = "The token has no access to it" if self.token else "It needs a token: set HF_TOKEN"
            return TokenRejected(f"{given} refused access ({status}). {need}; if it is gated, accept its terms there.")
        if status == 401 and self.token:
            return TokenRejected(f"{self.endpoint} rejected the token for {repo} (401).")
        if status == 401:
            # Hubs answer 401 for a repository that does not exist, so as not to tell which private ones do.
            return TokenRejected(
                f"{repo} does not exist at {self.endpoint}, or is private or gated and needs a token: set HF_TOKEN."
            )
        if isinstance(error, RepositoryNotFoundError):
            return ModelNotFound(f"There is no repository {repo!r} at {self.endpoint}.")
        where = shown(str(error.response.url))
        if isinstance(error, RemoteEntryNotFoundError) or status == 404:
            return ModelNotFound(f"{where} does not exist (404).")
        return FetchFailed(f"{where} answered with status {status}.")


class _Guard:
    """Hooks in the library's client while sessions are open; requests find their session by its mark."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._previous = _http.default_client_factory

    def admit(self, name: str, session: Session) -> None:
        """Let a session's requests through."""
        with self._mutex:
            if not self._sessions:
                # There is no public way to ask for the factory, which may be the user's own, with their proxy in it.
                self._previous = getattr(_http, "_GLOBAL_CLIENT_FACTORY", _http.default_client_factory)
                set_client_factory(self._client)
            self._sessions[name] = session

    def dismiss(self, name: str) -> None:
        """End a session; after the last one the library's client is as it was."""
        with self._mutex:
            del self._sessions[name]
            if not self._sessions:
                set_client_factory(self._previous)

    def _client(self) -> httpx2.Client:
        client = self._previous()
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks["request"], self._before],
            "response": [*hooks["response"], self._after],
        }
        return client

    def _before(self, request: httpx2.Request) -> None:
        """Hold a request of ours to its hub, with a timeout."""
        if request.url.path.endswith("/api/agent-harnesses"):
            # The library would tell the hub which program runs it, and ask huggingface.co whichever hub is used.
            raise OfflineModeIsEnabled("Stoker makes no requests that a model does not need.")
        name = request.headers.pop(MARK, "")
        session = request.extensions.get(MARK) or self._sessions.get(name)
        if session is None:
            return
        # A redirect's request takes the extensions along.
        request.extensions[MARK] = session
        request.extensions["timeout"] = _TIMEOUT
        if FILE not in request.extensions:
            session.count()
        if _origin(request.url) != session.origin:
            if FILE not in request.extensions:
                raise FetchFailed(f"The hub at {session.endpoint} leads to another host, {request.url.host}.")
            request.headers.pop("authorization", None)

    def _after(self, response: httpx2.Response) -> None:
        """Bound an answer to us; what may pass by itself is ours to try again."""
        if MARK not in response.request.extensions:
            return
        status, where = response.status_code, shown(str(response.url))
        if status in (408, 425, 429) or status >= 500:
            raise Transient(FetchFailed(f"{where} answered with status {status}."), retry_after(response.headers))
        if (FILE not in response.request.extensions or status not in (200, 206)) and isinstance(
            response.stream, httpx2.SyncByteStream
        ):
            packed = response.headers.get("content-encoding", "identity") != "identity"
            response.stream = _Stream(response.stream, MAX_PACKED_BYTES if packed else MAX_ANSWER_BYTES, where)


_GUARD = _Guard()


def _origin(url: httpx2.URL) -> tuple[str, str, int]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme, 0)
