"""Calls that a request forces: the constraint that lets a model write nothing else, and what it is told of the tools.

Invariants: what the constraint allows, the parsers of parsers/forced.py (harmony.py for gpt-oss) read back.
Knows nothing of how a constraint is enforced.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stoker_runtime.api.tools.leads import HARMONY_THOUGHT
from stoker_runtime.api.tools.tools import JsonSchema, ToolUse
from stoker_runtime.request import Constraint, ConstraintKind
from stoker_runtime.sampling.grammar import closed, json_schema, with_blanks

Message = dict[str, Any]
_SHAPES = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})


def forced_constraint(use: ToolUse, *, harmony: bool) -> Constraint | None:
    """The constraint of a forced call, without the reasoning before it; None when nothing is forced."""
    if not use.forced:
        return None
    if harmony:
        return _harmony_constraint(use)
    schema = tool_choice_schema(use)
    return None if schema is None else json_schema(schema)


def _harmony_constraint(use: ToolUse) -> Constraint:
    """A message to one of the functions; the model's format has one call an answer."""
    names = [use.name] if use.choice == "named" else list(use.schemas)
    calls = []
    for name in names:
        header = json.dumps(f"commentary to=functions.{name} ", ensure_ascii=False)
        schema = with_blanks(_arguments_schema(use.schemas[name]))
        body = f"%json {json.dumps(schema, ensure_ascii=False)}"
        calls.append((f'<|channel|> {header} <|constrain|> "json" <|message|>', body))
    rules = [f"call_{at}: {header} arguments_{at}\narguments_{at}: {body}" for at, (header, body) in enumerate(calls)]
    either = " | ".join(f"call_{at}" for at in range(len(calls)))
    text = "\n".join(["%llguidance {}", f"start: {HARMONY_THOUGHT} ({either})", *rules])
    return Constraint(ConstraintKind.GRAMMAR, text)


def told(messages: Sequence[Message], use: ToolUse) -> list[Message]:
    """`messages` for a template that has no place for tools: the first one says what they are and how to call them."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in use.shown() or ())
    if use.choice == "named":
        advice = f"Answer with the arguments of {use.name} as a JSON object."
    else:
        advice = 'Answer with a JSON list of calls: [{"name": NAME, "parameters": {...}}].'
    said = f"You have these tools:\n{listed}\n{advice}\n\n"
    content = messages[0]["content"]
    parts = isinstance(content, list)
    first = {**messages[0], "content": [{"type": "text", "text": said}, *content] if parts else said + (content or "")}
    return [first, *messages[1:]]


def tool_choice_schema(use: ToolUse) -> JsonSchema | None:
    """The JSON schema that a forced call must follow; None when nothing is forced.

    A named tool: its arguments. Required: a list of `{"name", "parameters"}`, read back by parsers/forced.py; no longer
    than there are tools where none of them takes arguments.
    """
    if use.choice == "named":
        return _arguments_schema(use.schemas[use.name])
    if use.choice != "required":
        return None
    shared: JsonSchema = {}
    calls = [_call_schema(name, schema, shared) for name, schema in use.schemas.items()]
    found: JsonSchema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not use.parallel:
        found["maxItems"] = 1
    elif all(map(_takes_nothing, use.schemas.values())):
        # A second call of a tool would say nothing new, and a small model says it until its tokens are over.
        found["maxItems"] = len(calls)
    return {**found, "$defs": shared} if shared else found


def _arguments_schema(parameters: JsonSchema) -> JsonSchema:
    """What the arguments of a tool must be: an object, and an empty one where the tool names no parameters.

    Objects hold what they name and nothing else, unless they say that there may be more.
    """
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    parameters = closed(parameters, described=True)
    return parameters if _SHAPES.intersection(parameters) else {"type": "object", **parameters}


def _takes_nothing(parameters: JsonSchema) -> bool:
    arguments = _arguments_schema(parameters)
    nothing = arguments.get("properties") == {} and arguments.get("additionalProperties") is False
    return nothing and not {"patternProperties", *_SHAPES} & (arguments.keys() - {"type"})


def _call_schema(name: str, parameters: JsonSchema, shared: JsonSchema) -> JsonSchema:
    """One call. Parameters that point into themselves move to `shared`, with their pointers."""
    arguments = _arguments_schema(parameters)
    if _points(arguments):
        base = f"#/$defs/{name.replace('~', '~0').replace('/', '~1')}"
        shared[name] = _moved(arguments, base)
        arguments = {"$ref": base}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": arguments},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _points(schema: Any) -> bool:
    if isinstance(schema, dict):
        return isinstance(schema.get("$ref"), str) or any(map(_points, schema.values()))
    return isinstance(schema, list) and any(map(_points, schema))


def _moved(schema: Any, base: str) -> Any:
    """`schema` with every pointer into itself put behind `base`."""
    if isinstance(schema, list):
        return [_moved(entry, base) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"{base}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, base)
        for key, value in schema.items()
    }
