"""What a browser may send from another origin."""

from __future__ import annotations

from typing import Any

import pytest
from api_server import CLIENT, KEY, make_state, serve
from fake_engine import FakeEngine

PAGE = "https://page.example"
ASK = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


@pytest.mark.parametrize(
    ("settings", "allowed", "credentials"),
    [
        ({}, "*", None),
        ({"allowed_origins": (PAGE,)}, PAGE, None),
        ({"allowed_origins": ("https://other.example",)}, None, None),
        ({"allow_credentials": True}, PAGE, "true"),
    ],
)
def test_origins(settings: dict[str, Any], allowed: str | None, credentials: str | None) -> None:
    engine = FakeEngine()
    for running in serve(make_state(engine, api_keys=(KEY,), **settings), engine):
        url = f"{running.url}/v1/completions"
        asked = CLIENT.options(url, headers=ASK)
        assert asked.status_code == (200 if allowed else 400)
        assert asked.headers.get("access-control-allow-origin") == allowed
        assert asked.headers["access-control-allow-headers"] == "authorization"
        assert "POST" in asked.headers["access-control-allow-methods"]
        headers = {"origin": PAGE, "authorization": f"Bearer {KEY}"}
        for stream in (False, True):
            answer = CLIENT.post(url, json={"prompt": "hi", "stream": stream}, headers=headers)
            assert answer.status_code == 200
            assert answer.headers.get("access-control-allow-origin") == allowed
            assert answer.headers.get("access-control-allow-credentials") == credentials
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = CLIENT.post(url, json={}, headers={"origin": PAGE})
        assert (refused.status_code, refused.headers.get("access-control-allow-origin")) == (401, allowed)
        assert "access-control-allow-origin" not in CLIENT.get(f"{running.url}/health").headers


def test_methods_and_headers_can_be_named() -> None:
    engine = FakeEngine()
    for running in serve(make_state(engine, allowed_methods=("GET",), allowed_headers=("x-a", "x-b")), engine):
        wanted = {"access-control-request-method": "GET", "access-control-request-headers": "x-b"}
        asked = CLIENT.options(f"{running.url}/v1/models", headers={**ASK, **wanted})
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-methods"] == "GET"
        assert {"x-a", "x-b"} < set(asked.headers["access-control-allow-headers"].split(", "))
        for other in ({"access-control-request-method": "PUT"}, {"access-control-request-headers": "x-c"}):
            assert CLIENT.options(f"{running.url}/v1/models", headers={**ASK, **wanted, **other}).status_code == 400
        plain = CLIENT.options(f"{running.url}/v1/models")
        assert plain.status_code == 405
