"""The routes of a server, and the fields of their bodies and queries.

Invariants: read from the OpenAPI document that the server itself answers with.
Knows nothing of handlers.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
from docs.generate.markdown import code, heading, table

from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.api.app import Application
from stoker_runtime.config import EngineConfig, ServerConfig
from stoker_runtime.metrics import ServerMetrics

INTRODUCTION = """
What `/openapi.json` of a running server says, and `/docs` shows in a browser. A body's field that is not here is a 400
that names the nearest one. What each field does where it differs from OpenAI's or Anthropic's own is in
[the API guide](../api.md).
"""
REFERENCE = "#/components/schemas/"
Schema = dict[str, Any]


def page() -> str:
    """docs/reference/api.md."""
    found = asyncio.run(_document())
    schemas: Schema = found["components"]["schemas"]
    operations = [
        (method.upper(), path, operation)
        for path, methods in found["paths"].items()
        for method, operation in methods.items()
    ]
    routes = [
        (code(f"{method} {path}"), _linked(_body(operation)), _query(operation), _summary(operation))
        for method, path, operation in sorted(operations, key=lambda each: (each[1], each[0]))
    ]
    parts = [heading("Routes and fields", INTRODUCTION), table(("route", "body", "query", "what it does"), routes)]
    for name in _used(operations, schemas):
        parts.append(f"\n## {name}\n" + _fields(schemas[name]))
    return "".join(parts)


async def _document() -> Schema:
    """What a server answers; it needs no model for that."""
    state = ServerState(ServerConfig(EngineConfig("model")), ServerMetrics("model"))
    transport = httpx.ASGITransport(app=Application(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await client.get("/openapi.json")
    answer.raise_for_status()
    document: Schema = answer.json()
    return document


def _summary(operation: Schema) -> str:
    """The route's own sentence, without its name, which stands beside it."""
    said = str(operation.get("summary", ""))
    if re.match(r"(GET|POST|DELETE) /", said):
        said = said.partition(": ")[2]
    return said[:1].upper() + said[1:]


def _body(operation: Schema) -> str:
    """The name of the schema that a route reads; "" for none."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        return str(content["schema"].get("$ref", "")).removeprefix(REFERENCE)
    return ""


def _query(operation: Schema) -> str:
    return ", ".join(code(each["name"]) for each in operation.get("parameters", ()) if each["in"] == "query")


def _used(operations: list[tuple[str, str, Schema]], schemas: Schema) -> list[str]:
    """Every schema that a body leads to."""
    found: set[str] = set()
    waiting = [name for _, _, operation in operations if (name := _body(operation))]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _references(schemas[name])
    return sorted(found)


def _references(node: object) -> list[str]:
    if isinstance(node, dict):
        here = [str(node["$ref"]).removeprefix(REFERENCE)] if "$ref" in node else []
        return here + [name for value in node.values() for name in _references(value)]
    return [name for value in node for name in _references(value)] if isinstance(node, list) else []


def _fields(schema: Schema) -> str:
    required = schema.get("required", ())
    rows = [
        (code(name), _type(field), "yes" if name in required else "", _default(field), field.get("description", ""))
        for name, field in schema.get("properties", {}).items()
    ]
    if not rows:
        return f"\n{_type(schema)}\n"
    return table(("field", "type", "required", "default", ""), rows)


def _default(field: Schema) -> str:
    default = field.get("default")
    return "" if default is None else code(str(default).lower() if isinstance(default, bool) else str(default))


def _type(field: Schema) -> str:
    """A schema in a few words, with its limits."""
    if "$ref" in field:
        return _linked(str(field["$ref"]).removeprefix(REFERENCE))
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice in field:
            kinds = dict.fromkeys(_type(each) for each in field[choice] if each.get("type") != "null")
            return " or ".join(kinds)
    if "enum" in field or "const" in field:
        return ", ".join(code(str(value)) for value in field.get("enum", [field.get("const")]))
    kind = field.get("type", "any")
    if kind == "array":
        return f"list of {_type(field.get('items', {}))}"
    names = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {field[name]:g}" for name, sign in names.items() if name in field]
    return " ".join([" or ".join(kind) if isinstance(kind, list) else str(kind), *limits])


def _linked(name: str) -> str:
    return f"[{name}](#{name.lower()})" if name else ""
