"""An object store over HTTP for tests: S3, the XML API of Google, and Azure's blobs, over one set of buckets.

    GET /BUCKET?list-type=2…            S3 and Google       GET /ACCOUNT/CONTAINER?comp=list…      Azure
    GET /BUCKET/KEY                                         GET /ACCOUNT/CONTAINER/KEY
    PUT /latest/api/token, GET /latest/meta-data/…          an instance's role, as EC2 gives it
    GET /v1/credentials                                     a pod's identity, as EKS gives it

Nobody is let in without a signature that holds, unless a bucket is public; ranges, ETags, If-Match, pages, regions and
the clouds' own errors are as the clouds document them. `faults` say what goes wrong.

Invariants: standard library only; what is written is never served half: tests change `buckets` in one assignment.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

from e2e.stores.signatures import (
    aws_key_and_region,
    aws_signature_holds,
    azure_signature_holds,
    google_signature_holds,
)


@dataclass
class Access:
    """Who may ask. `keys`: AWS access key → secret; `account`: Azure's name and key; `token`: Google's bearer.

    `signers`: Google's service accounts, address → the public key's modulus and exponent.
    What identities were given: `sessions`, AWS access key → the token that goes with it; bearers of Google and Azure.
    """

    keys: dict[str, str] = field(default_factory=dict)
    account: tuple[str, str] = ("", "")
    token: str = ""
    signers: dict[str, tuple[int, int]] = field(default_factory=dict)
    region: str = ""
    role: str = ""
    pod_token: str = ""
    public: set[str] = field(default_factory=set)
    sessions: dict[str, str] = field(default_factory=dict)
    google: frozenset[str] = frozenset()
    azure: frozenset[str] = frozenset()


@dataclass
class Faults:
    """What goes wrong from now on. `refuse`: so many requests for objects get 503; `cuts`: so many connections are cut
    in the middle; `beyond`: no byte from there on is given; `first_waits_for`: an object's first bytes are held until
    so many requests are under way; `listing` is called before each page of one is sent, `listed` after the last."""

    refuse: int = 0
    cuts: int = 0
    beyond: int = 0
    first_waits_for: int = 0
    listing: Callable[[], None] | None = None
    listed: Callable[[], None] | None = None


class ObjectStore(ThreadingHTTPServer):
    """The server; its attributes may be changed while it runs."""

    daemon_threads = True

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((host, port), _Handler)
        self.buckets: dict[str, dict[str, bytes]] = {}
        self.access = Access()
        self.faults = Faults()
        self.page = 1000
        self.log: list[tuple[str, str, str]] = []
        self.begun = 0
        self.asked = threading.Condition()
        self.mutex = threading.Lock()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def etag(self, content: bytes) -> str:
        """Changes with the content."""
        return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ObjectStore

    def do_GET(self) -> None:
        self._headers = {name.lower(): value for name, value in self.headers.items()}
        path, _, query = self.path.partition("?")
        self._query = {key: values[0] for key, values in parse_qs(query, keep_blank_values=True).items()}
        with self.server.mutex:
            self.server.log.append((self.command, self.path, self._headers.get("range", "")))
        if path.startswith(("/latest/", "/v1/credentials")):
            self._identity(path)
            return
        account = self.server.access.account[0]
        azure = bool(account) and path.startswith(f"/{account}/")
        bucket, _, key = unquote(path.removeprefix(f"/{account}" if azure else "")).lstrip("/").partition("/")
        refusal = self._refusal(bucket, azure)
        if refusal:
            self._error(*refusal)
        elif bucket not in self.server.buckets:
            self._error(404, "ContainerNotFound" if azure else "NoSuchBucket")
        elif key:
            self._object(bucket, key, azure)
        else:
            self._list(bucket, azure)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self._identity(self.path)

    def _identity(self, path: str) -> None:
        access, role = self.server.access, self.server.access.role
        pod = access.pod_token and self.headers.get("authorization") == access.pod_token
        if not (pod if path == "/v1/credentials" else role):
            self._error(404, "NotFound")
        elif path.endswith("/api/token"):
            self._send(200, "instance-token")
        elif path.endswith("/security-credentials/"):
            self._send(200, role)
        else:
            key, secret = next(iter(access.keys.items()))
            access.sessions = {key: "session"}
            given = {"Code": "Success", "AccessKeyId": key, "SecretAccessKey": secret, "Token": "session"}
            dated = {"Expiration": "2099-01-01T00:00:00Z", "LastUpdated": "2020-01-01T00:00:00Z", "Type": "AWS-HMAC"}
            self._send(200, json.dumps(given | dated))

    def _refusal(self, bucket: str, azure: bool) -> tuple[int, str, str] | None:
        """Why the request is not let in: status, the cloud's code, what else its body tells."""
        access, given = self.server.access, self._headers.get("authorization", "")
        if bucket in access.public and not given:
            return None
        if azure and given.startswith("Bearer "):
            # Azure knows bearers from this version of its protocol on.
            known = self._headers.get("x-ms-version", "") >= "2017-11-09" and given[7:] in access.azure
            return None if known else (401, "InvalidAuthenticationInfo", "")
        if azure:
            name, secret = access.account
            held = given and azure_signature_holds(name, secret, self.command, self.path, self._headers)
            return None if held else (403, "AuthenticationFailed", "")
        if given.startswith("AWS4-HMAC-SHA256 "):
            key, region = aws_key_and_region(given)
            if key not in access.keys:
                return 403, "InvalidAccessKeyId", f"<AWSAccessKeyId>{key}</AWSAccessKeyId>"
            session = self._headers.get("x-amz-security-token", "")
            if access.sessions.get(key, "") != session:
                return 400, "ExpiredToken", f"<Token-0>{session}</Token-0>"
            if access.region and region != access.region:
                return 400, "AuthorizationHeaderMalformed", f"<Region>{access.region}</Region>"
            held = aws_signature_holds(access.keys[key], self.command, self.path, self._headers)
            return None if held else (403, "SignatureDoesNotMatch", f"<StringToSign>{given}</StringToSign>")
        if given.startswith("Bearer ") and given[7:] in access.google | ({access.token} - {""}):
            return None
        if given.startswith("Bearer ") and google_signature_holds(access.signers, given[7:]):
            return None
        return 403, "AccessDenied", ""

    def _list(self, bucket: str, azure: bool) -> None:
        prefix, mark = self._query.get("prefix", ""), self._query.get("delimiter", "")
        after = self._query.get("marker" if azure else "continuation-token", "")
        found = {
            name: content
            for name, content in sorted(self.server.buckets[bucket].items())
            if name.startswith(prefix) and name > after and not (mark and mark in name[len(prefix) :])
        }
        names = list(found)[: self.server.page]
        more = names[-1] if len(found) > len(names) else ""
        if self.server.faults.listing is not None:
            self.server.faults.listing()
        self._send(200, (_azure_page if azure else _page)(self.server, {name: found[name] for name in names}, more))
        if self.server.faults.listed is not None and not more:
            self.server.faults.listed()

    def _object(self, bucket: str, key: str, azure: bool) -> None:
        content = self.server.buckets[bucket].get(key)
        faults = self.server.faults
        if faults.refuse > 0:
            faults.refuse -= 1
            self._error(503, "SlowDown")
            return
        if content is None:
            self._error(404, "BlobNotFound" if azure else "NoSuchKey")
            return
        etag = self.server.etag(content)
        if self._headers.get("if-match", etag) != etag:
            self._error(412, "ConditionNotMet" if azure else "PreconditionFailed")
            return
        start, end = 0, len(content)
        if asked := self._headers.get("range", self._headers.get("x-ms-range", "")):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1 if last else end, end)
        if 0 < faults.beyond <= start:
            self._error(403, "AccessDenied")
            return
        head = {"etag": etag, "last-modified": formatdate(0, usegmt=True)}
        head |= {"content-range": f"bytes {start}-{end - 1}/{len(content)}"} if asked else {}
        with self.server.asked:
            self.server.begun += 1
            self.server.asked.notify_all()
            if start == 0 and faults.first_waits_for:
                self.server.asked.wait_for(lambda: self.server.begun >= faults.first_waits_for, 20)
        self._send(206 if asked else 200, content[start:end], head)

    def _error(self, status: int, code: str, more: str = "") -> None:
        self._send(status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>No.</Message>{more}</Error>")

    def _send(self, status: int, content: str | bytes, headers: Mapping[str, str] | None = None) -> None:
        body = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        faults = self.server.faults
        if headers and len(body) > 1 and faults.cuts > 0:
            faults.cuts -= 1
            body, self.close_connection = body[: len(body) // 2], True
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """The log is a list."""


def _page(server: ObjectStore, found: Mapping[str, bytes], more: str) -> str:
    entries = "".join(
        f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>"
        f"<ETag>{escape(server.etag(content))}</ETag><Size>{len(content)}</Size></Contents>"
        for name, content in found.items()
    )
    rest = f"<NextContinuationToken>{escape(more)}</NextContinuationToken>" if more else ""
    cut = "true" if more else "false"
    return f"<ListBucketResult><IsTruncated>{cut}</IsTruncated>{rest}{entries}</ListBucketResult>"


def _azure_page(server: ObjectStore, found: Mapping[str, bytes], more: str) -> str:
    entries = "".join(
        f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{formatdate(0, usegmt=True)}</Last-Modified>"
        f"<Etag>{escape(server.etag(content))}</Etag><Content-Length>{len(content)}</Content-Length>"
        "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
        for name, content in found.items()
    )
    return f"<EnumerationResults><Blobs>{entries}</Blobs><NextMarker>{escape(more)}</NextMarker></EnumerationResults>"
