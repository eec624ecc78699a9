#!/usr/bin/env python3
"""A hub-compatible server over folders, for tests and for machines that cannot reach a hub. Standard library
only.

    python e2e/hub/server.py --repo ORG/NAME=FOLDER_OR_FILE [--repo …] [--port 8090] [--token TOKEN]

Speaks what huggingface_hub needs: model info by revision, the tree by pages, files with ranges and the headers
that describe them, access to Xet's storage where a test has filled one. The commit of a repository is a hash of its
content: change a file and `main` moves. `--repo ORG/NAME@BRANCH=FOLDER` adds a branch. Large and binary files are LFS
files: they come with a SHA-256, and with `--redirect` from another origin, as hubs' content networks do.

For tests: `GET /_log` tells what was asked, and how many bytes of files were `sent`; `POST /_faults` sets faults (the
fields of `Faults`).

Invariants: serves nothing outside the given folders. Knows nothing of Stoker.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

_LFS_SUFFIXES = (".safetensors", ".gguf", ".bin", ".model")
_LFS_BYTES = 1 << 20
_BLOCK = 64 * 1024


@dataclass
class Faults:
    """What goes wrong. A `…_times` counts down with each fault; -1 means always."""

    cut_after: int = 0
    """Bytes of a file's body after which the connection is cut."""
    cut_times: int = 0
    corrupt_times: int = 0
    """Files that are sent with one wrong byte."""
    status: int = 0
    """Answer this status to everything."""
    status_times: int = 0
    bytes_per_second: int = 0
    """Send bodies no faster than this; 0 = no limit."""
    ignore_ranges: bool = False

    def take(self, name: str) -> bool:
        """Count one fault of a kind down; True when it is to happen."""
        left: int = getattr(self, name)
        if left > 0:
            setattr(self, name, left - 1)
        return left != 0


@dataclass(frozen=True)
class Entry:
    """One file of a repository."""

    path: Path
    size: int
    sha256: str
    blob: str
    lfs: bool


class Repository:
    """One repository at one branch: a folder, or a single file."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._hashes: dict[tuple[str, int, int], tuple[str, str]] = {}

    def entries(self) -> dict[str, Entry]:
        """All files by name, hashed once per change."""
        if self._place.is_file():
            return {self._place.name: self._entry(self._place)}
        files = sorted(path for path in self._place.rglob("*") if path.is_file())
        return {path.relative_to(self._place).as_posix(): self._entry(path) for path in files}

    def commit(self) -> str:
        """40 hex digits that name this content."""
        text = "".join(f"{name} {entry.sha256}\n" for name, entry in self.entries().items())
        return hashlib.sha1(text.encode()).hexdigest()

    def _entry(self, path: Path) -> Entry:
        stat = path.stat()
        key = (str(path), stat.st_size, stat.st_mtime_ns)
        if key not in self._hashes:
            sha256 = hashlib.sha256()
            blob = hashlib.sha1(b"blob %d\0" % stat.st_size)
            with open(path, "rb") as stream:
                while block := stream.read(1 << 20):
                    sha256.update(block)
                    blob.update(block)
            self._hashes[key] = (sha256.hexdigest(), blob.hexdigest())
        sha, oid = self._hashes[key]
        lfs = path.suffix in _LFS_SUFFIXES or stat.st_size >= _LFS_BYTES
        return Entry(path, stat.st_size, sha, oid, lfs)


class Hub(ThreadingHTTPServer):
    """The server. `repositories` maps "org/name" to its branches."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0), *, token: str = "", redirect: bool = False) -> None:
        super().__init__(address, Handler)
        self.repositories: dict[str, dict[str, Repository]] = {}
        self.token = token
        self.redirect = redirect
        self.page = 1000
        self.gated: set[str] = set()
        """Repositories whose terms no token has accepted: they are listed, and their files refused."""
        self.cas = ""
        """Where Xet's chunks lie, for hf_xet: `local:///FOLDER`, or a server."""
        self.xet: dict[str, str] = {}
        """SHA-256 of a file → its hash in Xet; such files are offered by Xet too."""
        self.faults = Faults()
        self.log: list[dict[str, str]] = []
        self.mutex = threading.Lock()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """The endpoint for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.port}"

    def add(self, name: str, place: Path) -> None:
        """Serve `place` as "org/name" or "org/name@branch"."""
        repo, _, branch = name.partition("@")
        self.repositories.setdefault(repo, {})[branch or "main"] = Repository(place)

    def find(self, repo: str, revision: str) -> Repository | None:
        """The branch, or the branch whose commit this is."""
        branches = self.repositories.get(repo, {})
        if revision in branches:
            return branches[revision]
        return next((branch for branch in branches.values() if branch.commit() == revision), None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is everyday life; anything else is shown."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        if self.path != "/_faults":
            self._json(404, {"error": "Not found"})
            return
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
        unknown = set(body) - {field.name for field in fields(Faults)}
        if unknown:
            self._json(400, {"error": f"unknown fault {sorted(unknown)[0]!r}"})
            return
        self.server.faults = Faults(**body)
        self._json(200, asdict(self.server.faults))

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/_log":
            self._json(200, self.server.log)
            return
        self._record(url.path)
        faults = self.server.faults
        with self.server.mutex:
            broken = bool(faults.status) and faults.take("status_times")
        if broken:
            self._json(faults.status, {"error": "A fault was asked for"})
            return
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[0] == "cdn":
            self._file(parts[1:], through_cdn=True)
        elif not self._authorized():
            self._json(401, {"error": "Invalid username or password."}, {"X-Error-Message": "Invalid credentials"})
        elif parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._api("/".join(parts[2:4]), parts[4:], parse_qs(url.query))
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._file(parts, through_cdn=False)
        else:
            self._json(404, {"error": "Not found"})

    def _authorized(self) -> bool:
        return not self.server.token or self.headers.get("authorization") == f"Bearer {self.server.token}"

    def _record(self, path: str) -> None:
        entry = {
            "method": self.command,
            "path": path,
            "range": self.headers.get("range", ""),
            "authorized": "yes" if "authorization" in self.headers else "",
            "sent": "",
        }
        self._noted = entry
        with self.server.mutex:
            self.server.log.append(entry)

    def _api(self, repo: str, rest: list[str], query: dict[str, list[str]]) -> None:
        if repo not in self.server.repositories:
            self._json(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return
        revision = rest[1] if len(rest) > 1 else "main"
        branch = self.server.find(repo, revision)
        if branch is None:
            self._json(404, {"error": f"Invalid rev id: {revision}"}, {"X-Error-Code": "RevisionNotFound"})
        elif not rest or rest[0] == "revision":
            names = [{"rfilename": name} for name in branch.entries()]
            self._json(200, {"id": repo, "modelId": repo, "sha": branch.commit(), "siblings": names})
        elif rest[0] == "xet-read-token" and self.server.cas:
            self._xet_token()
        elif rest[0] == "tree":
            self._tree(repo, branch, int(query.get("cursor", ["0"])[0]))
        else:
            self._json(404, {"error": "Not found"})

    def _tree(self, repo: str, branch: Repository, start: int) -> None:
        entries: list[dict[str, Any]] = []
        for name, entry in branch.entries().items():
            item: dict[str, Any] = {"type": "file", "oid": entry.blob, "size": entry.size, "path": name}
            if entry.lfs:
                item["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": 134}
            if entry.sha256 in self.server.xet:
                item["xetHash"] = self.server.xet[entry.sha256]
            entries.append(item)
        end = start + self.server.page
        headers = {}
        if end < len(entries):
            host = self.headers.get("host", "")
            following = f"http://{host}/api/models/{repo}/tree/{branch.commit()}?recursive=true&cursor={end}"
            headers["Link"] = f'<{following}>; rel="next"'
        self._json(200, entries[start:end], headers)

    def _file(self, parts: list[str], *, through_cdn: bool) -> None:
        repo, revision, name = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        branch = self.server.find(repo, revision)
        entry = branch.entries().get(name) if branch else None
        if repo in self.server.gated:
            self._json(403, {"error": f"Access to model {repo} is restricted."}, {"X-Error-Code": "GatedRepo"})
        elif branch is None or entry is None:
            code = "EntryNotFound" if branch else "RevisionNotFound"
            self._json(404, {"error": "Entry not found"}, {"X-Error-Code": code})
        elif self.server.redirect and entry.lfs and not through_cdn:
            place = quote(f"/cdn/{repo}/resolve/{branch.commit()}/{name}")
            where = {"Location": f"http://localhost:{self.server.port}{place}?signature=secret"}
            self._empty(302, where | self._described(repo, branch.commit(), entry))
        else:
            self._send(entry, self._described(repo, branch.commit(), entry))

    def _described(self, repo: str, commit: str, entry: Entry) -> dict[str, str]:
        """What the answer for a file says of it: huggingface_hub asks by HEAD, and looks at a redirect itself."""
        etag = f'"{entry.sha256 if entry.lfs else entry.blob}"'
        found = {"ETag": etag, "X-Repo-Commit": commit}
        if entry.lfs:
            found |= {"X-Linked-Etag": etag, "X-Linked-Size": str(entry.size)}
        if entry.sha256 in self.server.xet:
            route = f"{self.server.url}/api/models/{repo}/xet-read-token/{commit}"
            found |= {"X-Xet-Hash": self.server.xet[entry.sha256], "Link": f'<{route}>; rel="xet-auth"'}
        return found

    def _xet_token(self) -> None:
        """Access to Xet's storage for an hour."""
        end = int(time.time()) + 3600
        headers = {
            "X-Xet-Cas-Url": self.server.cas,
            "X-Xet-Access-Token": "xet-token",
            "X-Xet-Token-Expiration": str(end),
        }
        self._json(200, {"casUrl": self.server.cas, "accessToken": "xet-token", "exp": end}, headers)

    def _send(self, entry: Entry, described: dict[str, str]) -> None:
        faults, start = self.server.faults, 0
        asked = self.headers.get("range", "")
        if asked.startswith("bytes=") and not faults.ignore_ranges:
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            if start >= entry.size:
                self._empty(416, {"Content-Range": f"bytes */{entry.size}"})
                return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{entry.size - 1}/{entry.size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(entry.size - start))
        self.send_header("Content-Type", "application/octet-stream")
        for name, value in described.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._body(entry, start)

    def _body(self, entry: Entry, start: int) -> None:
        faults = self.server.faults
        with self.server.mutex:
            cut = faults.cut_after if faults.cut_after and faults.take("cut_times") else 0
            corrupt = faults.take("corrupt_times")
        sent = 0
        with open(entry.path, "rb") as stream, self._counting(lambda: sent):
            stream.seek(start)
            while block := stream.read(min(_BLOCK, cut - sent) if cut else _BLOCK):
                if corrupt:
                    block, corrupt = bytes([block[0] ^ 0xFF]) + block[1:], False
                self.wfile.write(block)
                sent += len(block)
                if faults.bytes_per_second:
                    time.sleep(len(block) / faults.bytes_per_second)
                if cut and sent >= cut:
                    self.close_connection = True
                    return

    @contextmanager
    def _counting(self, sent: Callable[[], int]) -> Iterator[None]:
        """Note how many bytes of a file went out, also where the client hangs up."""
        try:
            yield
        finally:
            with self.server.mutex:
                self._noted["sent"] = str(sent())

    def _json(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
        self._empty(status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(document).encode())

    def _empty(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are in `/_log`; stderr stays quiet."""


def main() -> int:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="Serve folders as a hub-compatible endpoint.")
    parser.add_argument("--repo", action="append", required=True, metavar="ORG/NAME[@BRANCH]=PLACE")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8090)
    parser.add_argument("--token", default="", help="refuse every other bearer token")
    parser.add_argument("--redirect", action="store_true", help="send LFS files from another origin")
    options = parser.parse_args()
    hub = Hub((options.host, options.port), token=options.token, redirect=options.redirect)
    for text in options.repo:
        name, _, place = text.partition("=")
        if not Path(place).exists():
            parser.error(f"--repo {text}: there is no file or folder {place!r}")
        hub.add(name, Path(place))
    print(f"hub: serving {', '.join(hub.repositories)} at http://{options.host}:{hub.port}", flush=True)
    try:
        hub.serve_forever()
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
