"""What is wrong with a JSON schema: values that could have no end, and the keyword that a compiler's message is about.

Invariants: pure; says no only to schemas that no finite value matches.
Knows nothing of grammars or tokens.
"""

from __future__ import annotations

import re
from typing import Any

# What llguidance says without the keyword that it is about.
_BLAMED = (
    ("regex parse error", "pattern"),
    ("Pointer ", "$ref"),
    ("Resource ", "$ref"),
    ("Unsatisfiable schema: anyOf is empty", "anyOf, enum or type"),
    ("Unsatisfiable schema: incompatible types", "type"),
    ("Unsatisfiable schema: required property", "required"),
    ("Unsatisfiable schema: required item", "minItems"),
    ("Unsatisfiable schema: Regex is empty", "pattern, format or length"),
    ("Unsatisfiable schema: range", "multipleOf"),
    ("invalid multiple of", "multipleOf"),
    ("Unknown format", "format"),
    ("Invalid type", "type"),
)
_DUMP = re.compile(r":\s+\(And .*", re.DOTALL)


def blame(message: str) -> str:
    """`message` of llguidance, with the keyword in front where it names none."""
    short = _DUMP.sub("", message)
    return next((f"{keyword}: {short}" for start, keyword in _BLAMED if short.startswith(start)), short)


def endless(schema: Any) -> str | None:
    """The `$ref` by which every value that matches would have to hold itself; None when some value is finite."""
    search = _Search(schema)
    return None if search.finite(schema) else search.loop


class _Search:
    """A search for a finite value. A reference that is being followed already gives none."""

    def __init__(self, root: Any) -> None:
        self.loop = ""
        self._root = root
        self._open: set[str] = set()
        self._finite: set[str] = set()

    def finite(self, schema: Any) -> bool:
        """Whether some finite value matches, as far as references go."""
        if not isinstance(schema, dict):
            return True
        parts = [self._reference(schema), self._members(schema), self._items(schema)]
        parts += [all(map(self.finite, schema["allOf"]))] if _is_list(schema, "allOf") else []
        parts += [any(map(self.finite, schema[word])) for word in ("anyOf", "oneOf") if _is_list(schema, word)]
        return all(parts)

    def _reference(self, schema: dict[str, Any]) -> bool:
        name = schema.get("$ref")
        if not isinstance(name, str) or not name.startswith("#") or name in self._finite:
            return True
        if name in self._open:
            self.loop = name
            return False
        self._open.add(name)
        found = self.finite(self._target(name))
        self._open.discard(name)
        if found:
            self._finite.add(name)
        return found

    def _target(self, name: str) -> Any:
        """What a pointer into this schema points to; True, which says nothing, where it points nowhere."""
        at = self._root
        for part in filter(None, name.removeprefix("#").split("/")):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(at, list) and key.isdigit() and int(key) < len(at):
                at = at[int(key)]
            elif isinstance(at, dict) and key in at:
                at = at[key]
            else:
                return True
        return at

    def _members(self, schema: dict[str, Any]) -> bool:
        properties, required = schema.get("properties"), schema.get("required")
        if schema.get("type") != "object" or not isinstance(properties, dict) or not isinstance(required, list):
            return True
        return all(self.finite(properties.get(name)) for name in required if isinstance(name, str))

    def _items(self, schema: dict[str, Any]) -> bool:
        least = schema.get("minItems")
        if schema.get("type") != "array" or not isinstance(least, int) or least < 1:
            return True
        first = schema["prefixItems"] if _is_list(schema, "prefixItems") else []
        return all(map(self.finite, first[:least])) and (least <= len(first) or self.finite(schema.get("items")))


def _is_list(schema: dict[str, Any], word: str) -> bool:
    return isinstance(schema.get(word), list) and bool(schema[word])
