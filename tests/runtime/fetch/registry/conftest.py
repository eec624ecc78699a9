"""A registry that asks for a login, and the login."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.registry.server import Registry
from tests.serving import serving


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Registry]:
    """A registry that asks for a login; DOCKER_CONFIG has it."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    server = Registry()
    server.login = (f"user-{secrets.token_hex(2)}", secrets.token_urlsafe(12))
    log_in(tmp_path, server, *server.login)
    with serving(server):
        yield server


def log_in(folder: Path, server: Registry, user: str, password: str) -> None:
    """What `docker login` leaves."""
    (folder / "docker").mkdir(exist_ok=True)
    auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    (folder / "docker" / "config.json").write_text(json.dumps({"auths": {server.host: {"auth": auth}}}))
