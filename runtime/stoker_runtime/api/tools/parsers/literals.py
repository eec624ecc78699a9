"""Python literals as JSON text, for models that write Python where clients expect JSON.

Invariants: nothing is evaluated: values are read off the syntax tree; what JSON cannot say (infinities, bytes, keys
that are no strings) is no literal here. JSON's own `true`, `false` and `null` count too.
Knows nothing of calls.
"""

from __future__ import annotations

import ast
import json
import math
import warnings
from typing import Any

from stoker_runtime.api.tools.parsers.base import speakable

_JSON_NAMES = {"true": True, "false": False, "null": None}
# What the compiler says of text that is no Python, or too much of it.
_REFUSALS = (SyntaxError, ValueError, RecursionError, MemoryError)


class NotLiteral(ValueError):
    """An expression that is no literal."""


def literal_json(text: str) -> str | None:
    """JSON text of the literal `text`; None when it is none."""
    try:
        return _dumps(_literal(_parse(text)))
    except _REFUSALS:
        return None


def keywords_json(parenthesis: str) -> str | None:
    """JSON text of `(a=1, b="x")`; None unless every argument is a literal with a name."""
    try:
        call = _parse(f"f{parenthesis}")
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)) or call.args:
            return None
        return _dumps({_name(keyword.arg): _literal(keyword.value) for keyword in call.keywords})
    except _REFUSALS:
        return None


def _parse(text: str) -> ast.expr:
    with warnings.catch_warnings():
        # A model's odd escapes are no business of this process's warnings.
        warnings.simplefilter("ignore")
        return ast.parse(text, mode="eval").body


def _dumps(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if speakable(text) else json.dumps(value)


def _name(name: str | None) -> str:
    if name is None:
        raise NotLiteral
    return name


def _literal(node: ast.expr) -> Any:
    """The value of a literal that JSON can say. Raises NotLiteral."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        if isinstance(node.value, float) and not math.isfinite(node.value):
            raise NotLiteral
        return node.value
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(entry) for entry in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True)}
    raise NotLiteral


def _key(node: ast.expr | None) -> str:
    value = None if node is None else _literal(node)
    if not isinstance(value, str):
        raise NotLiteral
    return value
