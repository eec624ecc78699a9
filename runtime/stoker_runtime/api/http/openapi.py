"""The OpenAPI document: FastAPI's of the routes, with the bodies that they read.

Invariants: every body class that a route reads stands among the schemas.
Knows nothing of what routes do.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import iter_route_contexts
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from stoker_runtime.api.http.answers import JsonAnswer
from stoker_runtime.api.http.routing import REFERENCE, Route, body_of

document_route = APIRouter(route_class=Route)

ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


@document_route.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """GET /openapi.json: what this server understands."""
    return JsonAnswer(document(request.app))


def document(app: FastAPI) -> dict[str, Any]:
    """The document of `app`, made once."""
    if app.openapi_schema is None:
        app.openapi_schema = _document(app)
    return app.openapi_schema


def _document(app: FastAPI) -> dict[str, Any]:
    endpoints = [found.endpoint for found in iter_route_contexts(app.routes) if found.endpoint is not None]
    bodies = dict.fromkeys(body for endpoint in endpoints if (body := body_of(endpoint)) is not None)
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=REFERENCE + "{model}")
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = found.setdefault("components", {})
    components.setdefault("schemas", {}).update({**schemas.get("$defs", {}), "Error": ERROR})
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {**found, "security": [{}, {"bearer": []}, {"key": []}]}
