"""Arguments that models write one by one between tags, turned into the JSON object that clients expect.

Invariants: an argument whose schema says string passes on as it comes, escaped; any other is held until its end tag,
because only the whole shows whether it is JSON (kept as written), a Python literal, or plain text.
Knows nothing of any family's tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker_runtime.api.tools.parsers.base import NO_SCHEMAS, Schemas, ToolParser
from stoker_runtime.api.tools.parsers.literals import literal_json
from stoker_runtime.api.tools.parsers.text_input import SPACE, Steps


@dataclass(frozen=True, slots=True)
class ParameterTags:
    """Arguments as `begin` key `named` value and one of `ends`, each; `last` ends the call.

    `key` is what a key consists of, `lead` belongs to the format where a value begins with it.
    """

    begin: str
    key: re.Pattern[str]
    named: str
    ends: tuple[str, ...]
    last: str
    lead: str = ""


def quoted(text: str) -> str:
    """`text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


class TaggedCallParser(ToolParser):
    """A parser whose calls hold tagged arguments."""

    def __init__(self, schemas: Schemas = NO_SCHEMAS) -> None:
        self._schema: Mapping[str, Any] = {}
        self._count = 0
        self._held: list[str] = []
        self._is_text = False
        super().__init__(schemas)

    def _open(self, name: str) -> None:
        """Begin a call and its object."""
        self._start(name)
        self._schema, self._count = self._schemas.get(name, {}), 0
        self._arguments("{")

    def _parameters(self, tags: ParameterTags) -> Steps[bool]:
        """All arguments up to the call's end tag; False when one of them was cut short."""
        source = self._input
        while True:
            yield from source.run(SPACE)
            if (yield from source.literal(tags.begin, tags.last)) != tags.begin:
                return True
            key = yield from source.run(tags.key)
            if not (yield from source.literal(tags.named)):
                self._arguments(quoted(key))
                return False
            yield from source.literal(tags.lead)
            self._open_argument(key)
            complete = bool((yield from source.until(tags.ends, self._value)))
            self._close_argument(complete)
            if not complete:
                return False

    def _open_argument(self, key: str) -> None:
        """Begin one argument."""
        self._held = []
        self._is_text = _is_text(self._schema, key)
        separator, quote = ", " if self._count else "", '"' if self._is_text else ""
        self._arguments(f"{separator}{quoted(key)}: {quote}")
        self._count += 1

    def _value(self, text: str) -> None:
        """Go on with the value of the argument."""
        if self._is_text:
            self._arguments(quoted(text)[1:-1])
        else:
            self._held.append(text)

    def _close_argument(self, complete: bool) -> None:
        """End the argument; one that was cut short keeps what there is of it."""
        if self._is_text:
            self._arguments('"' if complete else "")
            return
        raw = "".join(self._held)
        self._arguments(_value_text(raw) if complete else raw)

    def _close(self) -> None:
        """End the object."""
        self._arguments("}")


def _is_text(schema: Mapping[str, Any], key: str) -> bool:
    properties = schema.get("properties")
    declared = properties.get(key) if isinstance(properties, Mapping) else None
    kind = declared.get("type") if isinstance(declared, Mapping) else None
    return kind == "string" or kind == ["string"]


def _value_text(raw: str) -> str:
    """JSON text of a value that is no declared string."""
    stripped = raw.strip()
    if _is_json(stripped):
        return stripped
    return literal_json(stripped) or quoted(raw)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _is_json(text: str) -> bool:
    try:
        # Python's reader takes NaN and infinities, which JSON does not have.
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True
