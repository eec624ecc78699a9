"""The OpenAPI document, made from the table of routes and the bodies they read.

Invariants: what it says of a body is what the validator checks, because both come from the same class.
Knows nothing of handlers beyond their names and docstrings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

from stoker_runtime.api.http.fields import Body
from stoker_runtime.version import VERSION

Query = Mapping[str, dict[str, Any]]
"""The fields of a query and their schemas."""
Described = tuple[str, str, Callable[..., Any], type[Body] | None, Query]
REFERENCE = "#/components/schemas/"
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


def openapi_document(routes: Iterable[Described]) -> dict[str, Any]:
    """The document of (method, path, handler, body, query) routes."""
    listed = list(routes)
    bodies = dict.fromkeys(body for *_, body, _ in listed if body is not None)
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=REFERENCE + "{model}")
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler, body, query in listed:
        spelled = path.replace("*", "{name}")
        operation = _operation(handler, spelled, method, body)
        parameters = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        parameters = parameters if "{name}" in spelled else []
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
        paths.setdefault(spelled, {})[method.lower()] = operation | ({"parameters": parameters} if parameters else {})
    return {
        "openapi": "3.1.0",
        "info": {"title": "Stoker", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Error": ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(handler: Callable[..., Any], path: str, method: str, body: type[Body] | None) -> dict[str, Any]:
    error = {"description": "an error", "content": _json({"$ref": f"{REFERENCE}Error"})}
    operation: dict[str, Any] = {
        "operationId": f"{handler.__name__}_{method.lower()}_{path.strip('/').replace('/', '_')}",
        "summary": (handler.__doc__ or "").split("\n")[0].partition(" Raises ")[0],
        "responses": {"200": {"description": "the answer"}, "default": error},
    }
    if body is not None:
        schema = {"$ref": REFERENCE + body.__name__}
        operation["requestBody"] = {"required": True, "content": {body.MEDIA_TYPE: {"schema": schema}}}
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
