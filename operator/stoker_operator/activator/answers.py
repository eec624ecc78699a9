"""What the activator says in a pod's place: to probes of a service that sleeps, and to requests that it turns away.

Invariants: what asks for no work wakes nobody. A load balancer that asks for /health is told 200, or it would take the
service's only way to be woken away; /ready, which is asked for a pod, is 503 while there is none. An error has the form
that the client's dialect reads, and says when to come again.
Knows nothing of pods.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from stoker_operator.activator.directory import Sleeper

JSON = "application/json"
# Nothing is asked of the model: probes, scrapers, and what clients poll.
QUIET = ("/health", "/ping", "/ready", "/metrics", "/load", "/version")
MODELS = "/v1/models"
# The statuses' kinds, as the engine's own errors name them.
_TYPES = {401: "authentication_error", 413: "invalid_request_error", 429: "rate_limit_error"}


def quiet_answer(sleeper: Sleeper, method: str, path: str) -> web.Response | None:
    """The answer to a request that wakes nobody; None for one that asks for work."""
    state = sleeper.sleep.state
    if path in QUIET and (method in ("GET", "HEAD") or path == "/ping"):
        if path == "/metrics":
            return web.Response(text=f"# No pod runs: {state}\n")
        if path == "/ready":
            return error_answer(503, f"The service is {state}: no pod is ready.", "asleep", sleeper.bounds.start)
        if path == "/load":
            return _json({"server_load": 0, "running": 0, "waiting": 0, "ready": False, "state": state})
        return _json({"status": "ok", "phase": state})
    if path == MODELS and method in ("GET", "HEAD") and not sleeper.bounds.keys:
        # Clients list the models before they ask one; with keys, who may see the list is the pods' to say.
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "stoker"} for name in sleeper.bounds.models]
        return _json({"object": "list", "data": models})
    return None


def lacks_key(sleeper: Sleeper, headers: Mapping[str, str]) -> bool:
    """Whether a request brings no key to a service that asks for one. Which keys are right, only the pods know."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    given = (scheme.lower() == "bearer" and key.strip()) or headers.get("x-api-key", "").strip()
    return sleeper.bounds.keys and not given


def error_answer(status: int, text: str, code: str, retry_after: int = 0, path: str = "") -> web.Response:
    """An error as the dialect of `path` has it; `retry_after` in seconds, 0 = it is no use to come again."""
    headers = {"Retry-After": str(retry_after)} if retry_after else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _json(error_body(status, text, code, path), status, headers)


def error_body(status: int, text: str, code: str, path: str = "") -> dict[str, Any]:
    """OpenAI's error object, or Anthropic's."""
    kind = _TYPES.get(status, "service_unavailable")
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": kind if status != 503 else "overloaded_error", "message": text}}
    return {"error": {"message": text, "type": kind, "param": None, "code": code}}


def error_event(body: Mapping[str, Any], path: str = "") -> bytes:
    """An error inside a stream that has begun."""
    name = b"event: error\n" if path.startswith("/v1/messages") else b""
    return name + b"data: " + json.dumps(body).encode() + b"\n\n"


def _json(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=json.dumps(body).encode(), status=status, headers=headers, content_type=JSON)
