"""ModelScope's API over HTTP for tests: the routes by which its own client lists and downloads a model.

    GET /api/v1/models/ORG/NAME/revisions
    GET /api/v1/models/ORG/NAME/repo/files?Revision=…&Recursive=True
    GET /api/v1/models/ORG/NAME/repo?Revision=…&FilePath=…      large files by way of a redirect to storage, in ranges

Invariants: standard library only; a private repository is a 404 without its token, which counts as a header with a
listing and as a cookie with a file; storage refuses a request that carries the token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

_LARGE = 1 << 10


class ModelScope(ThreadingHTTPServer):
    """The server; its attributes may be changed while it runs. `repositories`: name → branch or tag → file → bytes."""

    daemon_threads = True

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((host, port), _Handler)
        self.storage = f"http://localhost:{self.server_address[1]}"
        """Another origin, where large files lie: the same server under another name."""
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.token = ""
        self.cut_once = 0
        self.moves_to: dict[str, bytes] | None = None
        """What the branch that was listed holds from then on."""
        self.log: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ModelScope

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.server.log.append((unquote(self.path), self.headers.get("range", "")))
        if url.path.startswith("/storage/"):
            given = self.headers.get("authorization") or self.headers.get("cookie")
            self._answer(400, b"") if given else self._content(*unquote(url.path[9:]).split("|"))
            return
        parts = url.path.removeprefix("/api/v1/models/").split("/", 2)
        repo, route = "/".join(parts[:2]), parts[2] if len(parts) == 3 else ""
        branches = self.server.repositories.get(repo)
        if branches is None or not self._admitted(route):
            self._refuse(404, 10010205001, "Not found or no permission")
        elif route == "revisions":
            names = [{"Revision": name, "CreatedAt": 1} for name in branches]
            self._data({"RevisionMap": {"Branches": names[:1], "Tags": names[1:]}})
        elif query.get("Revision") not in branches:
            self._refuse(404, 10010205002, "no such revision")
        elif route == "repo/files" and query.get("Recursive") == "True":
            self._files(branches, query["Revision"])
        elif route == "repo" and query.get("FilePath") in branches[query["Revision"]]:
            self._file(repo, query["Revision"], query["FilePath"])
        else:
            self._refuse(404, 10010205003, "no such file")

    def _admitted(self, route: str) -> bool:
        if not self.server.token:
            return True
        if route == "repo":
            return self.headers.get("cookie") == f"m_session_id={self.server.token}"
        return self.headers.get("authorization") == f"Bearer {self.server.token}"

    def _files(self, branches: dict[str, dict[str, bytes]], branch: str) -> None:
        files = branches[branch]
        folders = sorted({name.rpartition("/")[0] for name in files if "/" in name})
        entries: list[dict[str, object]] = [{"Type": "tree", "Path": name, "Size": 0} for name in folders]
        for name, content in files.items():
            digest = hashlib.sha256(content).hexdigest()
            entries.append({"Type": "blob", "Path": name, "Size": len(content), "Sha256": digest, "IsLFS": False})
        self._data({"Files": entries})
        if self.server.moves_to is not None:
            branches[branch] = self.server.moves_to

    def _file(self, repo: str, branch: str, name: str) -> None:
        if len(self.server.repositories[repo][branch][name]) < _LARGE:
            self._content(repo, branch, name)
            return
        place = quote(f"{repo}|{branch}|{name}")
        self._answer(302, b"", {"location": f"{self.server.storage}/storage/{place}?Signature=secret"})

    def _content(self, repo: str, branch: str, name: str) -> None:
        content, asked = self.server.repositories[repo][branch][name], self.headers.get("range", "")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        head = {"content-range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if asked else {}
        self._answer(206 if asked else 200, content[start:], head)

    def _data(self, data: Mapping[str, object]) -> None:
        document = {"Code": 200, "Data": data, "Message": "success", "Success": True}
        self._answer(200, json.dumps(document).encode(), {"content-type": "application/json"})

    def _refuse(self, status: int, code: int, message: str) -> None:
        self._answer(status, json.dumps({"Code": code, "Message": message, "Success": False}).encode())

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if _LARGE < self.server.cut_once < len(body):
            body, self.server.cut_once, self.close_connection = body[: self.server.cut_once], 0, True
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """The log is a list."""
