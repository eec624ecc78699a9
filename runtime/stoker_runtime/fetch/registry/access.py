"""A login at a registry: what `docker login` left, and the tokens that a registry gives for it.

The answer to a request without a token says where one is to be had; that place gets the login, the registry the token.

Invariants: a login goes to the registry that it was made for and to the place that this registry names, over https
unless the registry itself is asked over http; helpers of a configuration are never run.
Knows nothing of manifests and layers.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from stoker_runtime.fetch.errors import BadRequest, FetchFailed

_HUB = "docker.io"
_HUB_NAMES = ("https://index.docker.io/v1/", "index.docker.io", "registry-1.docker.io")
_TOKEN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Login:
    """A user's name and password; both "" where there is no login."""

    user: str = ""
    password: str = field(default="", repr=False)

    @property
    def header(self) -> str:
        """As basic authentication has it."""
        return f"Basic {base64.b64encode(f'{self.user}:{self.password}'.encode()).decode()}"


def login_for(registry: str, environ: Mapping[str, str] = os.environ) -> Login:
    """The login for `registry` in DOCKER_CONFIG/config.json (~/.docker); none where it has none. Raises BadRequest."""
    folder = environ.get("DOCKER_CONFIG", "") or str(Path("~/.docker").expanduser())
    path = Path(folder) / "config.json"
    try:
        document = json.loads(path.read_bytes())
        logins = document.get("auths") or {}
        names = [registry, f"https://{registry}", f"https://{registry}/", *(_HUB_NAMES if registry == _HUB else ())]
        found: Mapping[str, str] = next((logins[name] for name in names if name in logins), {})
        if "auth" in found:
            user, _, password = base64.b64decode(found["auth"], validate=True).decode().partition(":")
            return Login(user, password)
        return Login(str(found.get("username", "")), str(found.get("password", "")))
    except (FileNotFoundError, NotADirectoryError):
        return Login()
    except (OSError, ValueError, AttributeError, TypeError, binascii.Error):
        raise BadRequest(f"{path} is no configuration of logins; make it anew: `docker login {registry}`.") from None


class RegistryAuth(httpx.Auth):
    """Answers a registry's challenges."""

    def __init__(self, login: Login, host: str, *, plain: bool) -> None:
        """`host` is the registry's, as in addresses; `plain`: it is asked over http."""
        self._login = login
        self._host = host
        self._plain = plain
        self._header = ""

    def sync_auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """One request, with a token that is asked for when it is wanted."""
        if self._header:
            request.headers["authorization"] = self._header
        response = yield request
        challenge = response.headers.get("www-authenticate", "")
        if response.status_code != 401 or response.url.netloc.decode() != self._host:
            return
        kind, _, rest = challenge.partition(" ")
        if kind.lower() == "basic" and self._login.user:
            self._header = self._login.header
        elif kind.lower() == "bearer":
            answer = yield self._ask(dict(re.findall(r'(\w+)="([^"]*)"', rest)))
            self._header = _bearer(answer)
        else:
            return
        if self._header:
            request.headers["authorization"] = self._header
            yield request

    def _ask(self, challenge: Mapping[str, str]) -> httpx.Request:
        """The request for a token."""
        realm = httpx.URL(challenge.get("realm", ""))
        if realm.scheme not in (("https", "http") if self._plain else ("https",)):
            raise FetchFailed(f"The registry {self._host} sends for a token to an address that is not https.")
        query = {key: challenge[key] for key in ("service", "scope") if challenge.get(key)}
        headers = {"authorization": self._login.header} if self._login.user else {}
        return httpx.Request("GET", realm, params={**dict(realm.params), **query}, headers=headers)


def _bearer(answer: httpx.Response) -> str:
    """The header of the token in an answer; "" where there is none."""
    if answer.status_code != 200 or int(answer.headers.get("content-length", 0) or 0) > _TOKEN_BYTES:
        return ""
    try:
        document = json.loads(answer.read())
        token = document.get("token") or document.get("access_token")
    except (ValueError, AttributeError):
        return ""
    return f"Bearer {token}" if isinstance(token, str) and token else ""
