"""The services by which clouds give a workload credentials in exchange for its identity, over HTTP for tests.

    POST /?Action=AssumeRoleWithWebIdentity&…                             AWS' STS, as IRSA asks it
    POST /TENANT/oauth2/v2.0/token                                        Microsoft Entra, as AKS' pods ask it
    GET /computeMetadata/v1/instance/service-accounts/default/token      the metadata server, as GKE's pods ask it

What is given opens an object store (`Access`) until it is withdrawn. Requests and refusals are as the clouds document
them.

Invariants: standard library only; nothing is given for another token, role, tenant or client.
"""

from __future__ import annotations

import json
import secrets
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl

from e2e.stores.server import Access

_METADATA = "/computeMetadata/v1/instance/service-accounts/default/token"
_STS = "https://sts.amazonaws.com/doc/2011-06-15/"


@dataclass
class Workload:
    """Who may ask: the token in its file, and what the clouds know it by. `bound`: GKE knows an account for it."""

    token: str = field(default_factory=lambda: f"web.{secrets.token_urlsafe(24)}")
    role: str = field(default_factory=lambda: f"arn:aws:iam::123456789012:role/r-{secrets.token_hex(3)}")
    tenant: str = field(default_factory=lambda: secrets.token_hex(8))
    client: str = field(default_factory=lambda: secrets.token_hex(8))
    bound: bool = True


class Identities(ThreadingHTTPServer):
    """The server; its attributes may be changed while it runs. `given`: every secret that it gave, an entry an answer;
    `lifetime`: the seconds that it says of each; `status`: what it answers in the place of anything else.
    """

    daemon_threads = True

    def __init__(self, access: Access, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.access = access
        self.workload = Workload()
        self.lifetime = 3600
        self.status = 0
        self.given: list[tuple[str, ...]] = []
        self.refused: list[str] = []
        self._scheme = "https" if tls else "http"
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True)

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.server_address[1]}"

    @property
    def url(self) -> str:
        """Its address."""
        return f"{self._scheme}://{self.address}"

    def withdraw(self) -> None:
        """What was given so far has run out."""
        self.access.sessions, self.access.google, self.access.azure = {}, frozenset(), frozenset()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Identities

    def do_GET(self) -> None:
        self._answer(*self._metadata())

    def do_POST(self) -> None:
        # As it was sent: a server of Python's own takes // for /.
        target = self.requestline.split(" ")[1]
        path, _, query = target.partition("?")
        body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
        if path == f"/{self.server.workload.tenant}/oauth2/v2.0/token":
            self._answer(*self._entra(dict(parse_qsl(body))))
        elif path == "/":
            self._answer(*self._sts(dict(parse_qsl(query))))
        else:
            self._answer(404, f"there is no {path}")

    def _metadata(self) -> tuple[int, str]:
        if self.path.partition("?")[0] != _METADATA:
            return 404, "not found"
        if self.headers.get("metadata-flavor") != "Google":
            return 403, "missing Metadata-Flavor:Google header"
        if not self.server.workload.bound:
            return 403, "Unable to generate access token; Permission 'iam.serviceAccounts.getAccessToken' denied"
        token = self._new("ya29")
        self.server.access.google |= {token}
        return 200, json.dumps({"access_token": token, "expires_in": self.server.lifetime, "token_type": "Bearer"})

    def _entra(self, form: Mapping[str, str]) -> tuple[int, str]:
        workload = self.server.workload
        asked = {
            "client_id": workload.client,
            "grant_type": "client_credentials",
            "client_assertion_type": "urn:ietf:params:oauth:client-assertion-type:jwt-bearer",
            "scope": "https://storage.azure.com/.default",
        }
        if any(form.get(name) != value for name, value in asked.items()):
            said = f"AADSTS700016: no application {form.get('client_id')}"
            return 400, json.dumps({"error": "unauthorized_client", "error_description": said})
        if form.get("client_assertion") != workload.token:
            said = f"AADSTS700211: no federated identity matches {form.get('client_assertion')}"
            return 401, json.dumps({"error": "invalid_client", "error_description": said})
        token = self._new("eyJ0")
        self.server.access.azure |= {token}
        return 200, json.dumps({"access_token": token, "expires_in": self.server.lifetime, "token_type": "Bearer"})

    def _sts(self, query: Mapping[str, str]) -> tuple[int, str]:
        workload = self.server.workload
        if (query.get("Action"), query.get("Version")) != ("AssumeRoleWithWebIdentity", "2011-06-15"):
            return 400, _sts_error("InvalidAction", "")
        if query.get("WebIdentityToken") != workload.token:
            return 400, _sts_error("InvalidIdentityToken", query.get("WebIdentityToken", ""))
        if query.get("RoleArn") != workload.role or not query.get("RoleSessionName"):
            return 403, _sts_error("AccessDenied", "Not authorized to perform sts:AssumeRoleWithWebIdentity")
        key, secret, session = f"ASIA{secrets.token_hex(6)}", secrets.token_urlsafe(24), secrets.token_urlsafe(48)
        self.server.given.append((secret, session))
        self.server.access.keys |= {key: secret}
        self.server.access.sessions |= {key: session}
        end = (datetime.now(UTC) + timedelta(seconds=self.server.lifetime)).strftime("%Y-%m-%dT%H:%M:%SZ")
        return 200, (
            f'<AssumeRoleWithWebIdentityResponse xmlns="{_STS}"><AssumeRoleWithWebIdentityResult>'
            f"<Audience>sts.amazonaws.com</Audience><Credentials><SessionToken>{session}</SessionToken>"
            f"<SecretAccessKey>{secret}</SecretAccessKey><Expiration>{end}</Expiration>"
            f"<AccessKeyId>{key}</AccessKeyId></Credentials></AssumeRoleWithWebIdentityResult>"
            "</AssumeRoleWithWebIdentityResponse>"
        )

    def _new(self, kind: str) -> str:
        token = f"{kind}.{secrets.token_urlsafe(40)}"
        self.server.given.append((token,))
        return token

    def _answer(self, status: int, text: str) -> None:
        status, body = (self.server.status or status), text.encode()
        if status != 200:
            self.server.refused.append(text)
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Tokens stand in what is asked."""


def _sts_error(code: str, message: str) -> str:
    error = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return f'<ErrorResponse xmlns="{_STS}">{error}</ErrorResponse>'
