"""Which constraint a body asks for: response_format, structured_outputs, or vLLM's older guided_* fields.

Invariants: at most one is asked for, and it can be enforced, or the request is refused with the field's name.
Knows nothing of engines, and nothing of tools.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from stoker_runtime.api.constraints.constraint_checker import ConstraintChecker
from stoker_runtime.api.constraints.structural_tags import structural_tag
from stoker_runtime.api.http.aside import aside
from stoker_runtime.api.http.fields import ResponseFormat, SamplingFields, Schema, StructuredOutputs
from stoker_runtime.errors import RequestError
from stoker_runtime.request import Constraint, ConstraintKind
from stoker_runtime.sampling.grammar import choice, closed, json_schema
from stoker_runtime.text.tokenizer import Tokenizer

ANY_OBJECT: dict[str, Any] = {"type": "object"}

Asked = tuple[str, Constraint]
"""A field and the constraint that it asks for."""


async def read_constraint(checker: ConstraintChecker, tokenizer: Tokenizer, body: SamplingFields) -> Constraint | None:
    """The constraint of `body`, checked. Raises RequestError for two at once, and for what cannot be enforced."""
    asked = await aside(body.size, lambda: asked_constraints(tokenizer, body))
    return await checked(checker, tokenizer, asked) if asked else None


async def checked(checker: ConstraintChecker, tokenizer: Tokenizer, asked: list[Asked], lead: str = "") -> Constraint:
    """The one constraint that was asked for, with what may come around it. Raises as `read_constraint` does."""
    param, constraint = single(asked)
    return await checker.check(replace(constraint, lead=lead), tokenizer, param)


def single(asked: list[Asked]) -> Asked:
    """The one constraint that was asked for. Raises RequestError for two."""
    if len(asked) > 1:
        raise RequestError(f"{asked[0][0]} and {asked[1][0]} exclude each other.", param=asked[1][0])
    return asked[0]


def asked_constraints(tokenizer: Tokenizer, body: SamplingFields) -> list[Asked]:
    """Every constraint that a field of `body` asks for, unchecked."""
    return [
        *_of_response_format(body.response_format, tokenizer),
        *(structured_outputs(body.structured_outputs, tokenizer) if body.structured_outputs else ()),
        *_of_guided(body, tokenizer),
    ]


def _of_response_format(format_: ResponseFormat | None, tokenizer: Tokenizer) -> list[Asked]:
    name = "response_format"
    if format_ is None or format_.type == "text":
        return []
    if format_.type == "json_object":
        return [(name, json_schema(ANY_OBJECT))]
    if format_.type == "structural_tag":
        tags = format_.model_dump(exclude_unset=True, exclude_none=True)
        return [(name, structural_tag(tags, tokenizer, name))]
    described = format_.json_schema
    if described is None or described.schema_ is None:
        missing = f"{name}.json_schema" if described is None else f"{name}.json_schema.schema"
        raise RequestError(f"{missing} is required where {name}.type is 'json_schema'.", param=missing)
    schema = closed(described.schema_, described=True) if described.strict else described.schema_
    return [(f"{name}.json_schema.schema", json_schema(schema))]


def structured_outputs(
    wanted: StructuredOutputs, tokenizer: Tokenizer, name: str = "structured_outputs"
) -> list[Asked]:
    """Every constraint that `wanted`, the field `name`, asks for, unchecked. Raises RequestError for none."""
    blanks = "" if wanted.disable_any_whitespace else wanted.whitespace_pattern
    asked: list[Asked] = []
    if wanted.json_ is not None:
        schema = _schema(wanted.json_, f"{name}.json")
        schema = closed(schema) if wanted.disable_additional_properties else schema
        asked.append((f"{name}.json", json_schema(schema, blanks)))
    if wanted.json_object:
        asked.append((f"{name}.json_object", json_schema(ANY_OBJECT, blanks)))
    asked += _plain(f"{name}.", wanted.regex, wanted.choice, wanted.grammar)
    asked += _tags(f"{name}.structural_tag", wanted.structural_tag, tokenizer)
    if not asked:
        raise RequestError(
            f"{name} needs one of json, regex, choice, grammar, json_object and structural_tag.", param=name
        )
    return asked


def _of_guided(body: SamplingFields, tokenizer: Tokenizer) -> list[Asked]:
    asked: list[Asked] = []
    if body.guided_json is not None:
        schema = _schema(body.guided_json, "guided_json")
        asked.append(("guided_json", json_schema(schema, body.guided_whitespace_pattern)))
    elif body.guided_whitespace_pattern is not None:
        raise RequestError(
            "guided_whitespace_pattern is only allowed with guided_json.", param="guided_whitespace_pattern"
        )
    asked += _plain("guided_", body.guided_regex, body.guided_choice, body.guided_grammar)
    return asked + _tags("structural_tag", body.structural_tag, tokenizer)


def _plain(prefix: str, regex: str | None, options: list[str] | None, grammar: str | None) -> list[Asked]:
    asked: list[Asked] = []
    if regex is not None:
        asked.append((f"{prefix}regex", Constraint(ConstraintKind.REGEX, regex)))
    if options is not None:
        asked.append((f"{prefix}choice", choice(options)))
    if grammar is not None:
        asked.append((f"{prefix}grammar", Constraint(ConstraintKind.GRAMMAR, grammar)))
    return asked


def _tags(name: str, tags: dict[str, Any] | str | None, tokenizer: Tokenizer) -> list[Asked]:
    if tags is None:
        return []
    found = _parse(tags, name) if isinstance(tags, str) else tags
    if not isinstance(found, dict):
        raise RequestError(f"{name} must be an object.", param=name)
    return [(name, structural_tag(found, tokenizer, name))]


def _schema(schema: Schema | str, name: str) -> Schema:
    """A schema that may come as its JSON text."""
    found = _parse(schema, name) if isinstance(schema, str) else schema
    if not isinstance(found, (dict, bool)):
        raise RequestError(f"{name} must be a JSON schema, that is an object.", param=name)
    return found


def _parse(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not valid JSON: {error}.", param=name) from error
