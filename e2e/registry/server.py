"""A registry over HTTP for tests: the reading half of the distribution API, with the logins that registries ask for.

    GET /v2/NAME/manifests/TAG|DIGEST     GET /v2/NAME/blobs/DIGEST, in ranges, by way of a redirect to storage
    GET /token                            a bearer token for a login, as the challenge says

Invariants: standard library only; nothing is given without a login once there is one, and storage refuses a request
that carries the registry's token.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TITLE = "org.opencontainers.image.title"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Registry(ThreadingHTTPServer):
    """The server; its attributes may be changed while it runs. `login` is (user, password), or None."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.manifests: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.login: tuple[str, str] | None = None
        self.basic = False
        self.token = secrets.token_urlsafe(16)
        self.cut_once = 0
        self.log: list[tuple[str, str]] = []

    @property
    def host(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.server_address[1]}"

    def push(self, name: str, tag: str, files: Mapping[str, bytes], **layer: Any) -> str:
        """Push an artifact of files as ORAS does; returns its digest. `layer` replaces fields of each layer."""
        layers = []
        for title, content in files.items():
            digest = _digest(content)
            self.blobs[digest] = content
            entry = {"mediaType": "application/octet-stream", "digest": digest, "size": len(content)}
            layers.append(entry | {"annotations": {TITLE: title}} | layer)
        empty = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": _digest(b"{}"), "size": 2}
        return self.put(name, tag, {"schemaVersion": 2, "mediaType": MANIFEST, "config": empty, "layers": layers})

    def put(self, name: str, tag: str, manifest: Mapping[str, Any]) -> str:
        """Keep a manifest under its tag and its digest."""
        body = json.dumps(manifest).encode()
        for at in (tag, _digest(body)):
            self.manifests[f"/v2/{name}/manifests/{at}"] = body
        return _digest(body)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Registry

    def do_GET(self) -> None:
        url, given = urlsplit(self.path), self.headers.get("authorization", "")
        self.server.log.append((url.path, self.headers.get("range", "")))
        if url.path == "/token":
            self._token(parse_qs(url.query), given)
        elif url.path.startswith("/storage/"):
            # A signed address carries its own credentials; storage refuses a second kind.
            self._answer(400, b"") if given else self._blob(url.path.rpartition("/")[2])
        elif not self._admitted(given):
            realm = f'Bearer realm="http://{self.server.host}/token",service="here",scope="repository:pull"'
            self._answer(401, b"{}", {"www-authenticate": "Basic" if self.server.basic else realm})
        elif "/blobs/" in url.path:
            # Another origin: the same server under another name.
            where = f"http://localhost:{self.server.server_address[1]}/storage/{url.path.rpartition('/')[2]}?sig=secret"
            self._answer(307, b"", {"location": where})
        elif url.path in self.server.manifests:
            self._answer(200, self.server.manifests[url.path], {"content-type": MANIFEST})
        else:
            self._answer(404, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}')

    def _admitted(self, given: str) -> bool:
        if self.server.login is None:
            return True
        return given == (_basic(self.server.login) if self.server.basic else f"Bearer {self.server.token}")

    def _token(self, query: Mapping[str, list[str]], given: str) -> None:
        right = self.server.login is not None and given == _basic(self.server.login)
        if right and (query.get("service"), query.get("scope")) == (["here"], ["repository:pull"]):
            self._answer(200, json.dumps({"token": self.server.token}).encode())
        else:
            self._answer(401, b"{}")

    def _blob(self, digest: str) -> None:
        content = self.server.blobs.get(digest)
        if content is None:
            self._answer(404, b"{}")
            return
        asked = self.headers.get("range", "")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        head = {"content-range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if asked else {}
        self._answer(206 if asked else 200, content[start:], head)

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if 0 < self.server.cut_once < len(body):
            body, self.server.cut_once, self.close_connection = body[: self.server.cut_once], 0, True
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """The log is a list."""


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _basic(login: tuple[str, str]) -> str:
    return f"Basic {base64.b64encode(':'.join(login).encode()).decode()}"
