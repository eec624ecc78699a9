"""Cross-origin requests: what a browser may send here from a page of another origin.

Invariants: a request without an `origin` header is untouched; a preflight is answered before any key is asked for,
because a browser sends none with it. With credentials no `*` is ever answered: browsers refuse it.
Knows nothing of routes. The rules: https://fetch.spec.whatwg.org/#http-cors-protocol
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker_runtime.api.http.http import Header, Request, Response
from stoker_runtime.config import ServerConfig

ANY = "*"
METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
EXPOSED = b"x-request-id, retry-after"
MAX_AGE = b"600"


class CrossOrigin:
    """The rules of one server."""

    def __init__(self, config: ServerConfig) -> None:
        self._origins = frozenset(config.allowed_origins)
        self._methods = _listed(config.allowed_methods, METHODS)
        self._headers = None if ANY in config.allowed_headers else ", ".join(config.allowed_headers).encode()
        self._credentials = config.allow_credentials

    def headers(self, request: Request) -> list[Header]:
        """What an answer carries besides."""
        origin = request.headers.get(b"origin")
        if origin is None:
            return []
        return [*self._origin(origin), (b"access-control-expose-headers", EXPOSED)]

    def preflight(self, request: Request) -> Response | None:
        """The answer to a preflight; None for any other request."""
        wanted = request.headers.get(b"access-control-request-method")
        if request.method != "OPTIONS" or wanted is None or b"origin" not in request.headers:
            return None
        response = Response(b"", b"text/plain", 204)
        allowed = self._headers
        if allowed is None:
            allowed = request.headers.get(b"access-control-request-headers", b"")
        response.headers += [
            (b"access-control-allow-methods", self._methods),
            (b"access-control-allow-headers", allowed),
            (b"access-control-max-age", MAX_AGE),
        ]
        return response

    def _origin(self, origin: bytes) -> list[Header]:
        if ANY in self._origins and not self._credentials:
            return [(b"access-control-allow-origin", b"*")]
        if ANY not in self._origins and origin.decode("latin-1") not in self._origins:
            return [(b"vary", b"Origin")]
        found: list[Header] = [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
        if self._credentials:
            found.append((b"access-control-allow-credentials", b"true"))
        return found


def _listed(allowed: Sequence[str], everything: Sequence[str]) -> bytes:
    return ", ".join(everything if ANY in allowed else allowed).encode()
