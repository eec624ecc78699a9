"""Calls written as JSON objects, `{"name": …, "arguments": {…}}`, read while they are written.

Invariants: a call begins when its name is known and its arguments begin, in whichever order the keys come; its
arguments pass on as the model wrote them, except that control characters inside strings become escapes, without
which the text would be no JSON. Outside strings JSON has no `<`, so a marker ends an object that was left open.
Knows nothing of the markers around a call.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from stoker_runtime.api.tools.parsers.base import ToolParser, speakable
from stoker_runtime.api.tools.parsers.text_input import SPACE, Sink, Steps

_OUTSIDE = re.compile(r'[^"{}\[\]<]+')
_INSIDE = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r'[^\s,{}\[\]<"]+')
_CONTROL = {at: f"\\u{at:04x}" for at in range(0x20)} | {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}
ARGUMENT_KEYS = ("arguments", "parameters")
EMPTY = "{}"


def loads(text: str) -> Any:
    """The value of `text`, None when it is no JSON."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


class JsonCallParser(ToolParser):
    """A parser whose calls hold JSON.

    `OTHER_KEYS` may stand in a call besides its name and arguments; any else before the arguments means that it is
    none.
    """

    NAME_KEY: ClassVar[str] = "name"
    OTHER_KEYS: ClassVar[frozenset[str]] = frozenset({"id", "type", "index"})

    def _json_string(self, sink: Sink) -> Steps[None]:
        """Pass on a string with its quotes; the next character must be the first of them."""
        source = self._input
        sink(source.take())
        while True:
            yield from source.flow(_INSIDE, lambda text: sink(text.translate(_CONTROL)))
            character = yield from source.peek()
            if not character:
                return
            sink(source.take())
            if character == '"':
                return
            if (yield from source.peek()):
                sink(source.take().translate(_CONTROL))

    def _json_value(self, sink: Sink) -> Steps[None]:
        """Pass on one value, or what there is of it before the end or a marker."""
        first = yield from self._input.peek()
        if first == '"':
            yield from self._json_string(sink)
        elif first not in ("{", "["):
            yield from self._input.flow(_SCALAR, sink)
        else:
            yield from self._json_nested(sink, 0)

    def _json_nested(self, sink: Sink, depth: int) -> Steps[None]:
        """Pass on an object or a list of which so many braces and brackets have come and were not closed."""
        source = self._input
        while True:
            yield from source.flow(_OUTSIDE, sink)
            character = yield from source.peek()
            if character in ("", "<"):
                return
            if character == '"':
                yield from self._json_string(sink)
                continue
            sink(source.take())
            depth += 1 if character in "{[" else -1
            if not depth:
                return

    def _decoded(self) -> Steps[str]:
        """The text of the string that comes next; "" when it is none, or cannot be said."""
        if (yield from self._input.peek()) != '"':
            return ""
        parts: list[str] = []
        yield from self._json_string(parts.append)
        value = loads("".join(parts))
        return value if isinstance(value, str) and speakable(value) else ""

    def _call(self, bare: bool = False) -> Steps[bool]:
        """Read one call. False: no call was begun, and what was taken stands in the record.

        `bare`: an object without arguments is none, since no marker around it says otherwise.
        """
        source = self._input
        if (yield from source.peek()) != "{":
            return False
        source.take()
        name, held, started = "", "", False
        while True:
            yield from source.run(SPACE)
            character = yield from source.peek()
            if character == "}":
                source.take()
                break
            if character == ",":
                source.take()
                continue
            key = yield from self._key()
            if not key or (not started and key not in (self.NAME_KEY, *ARGUMENT_KEYS, *self.OTHER_KEYS)):
                return started
            if key == self.NAME_KEY and not started:
                name = yield from self._decoded()
                if not name:
                    return False
            elif key in ARGUMENT_KEYS and not started:
                started, held = yield from self._argument_value(name)
            else:
                yield from self._json_value(_drop)
        return started or self._settle(name, held, bare)

    def _key(self) -> Steps[str]:
        """A key and its colon; "" when the object goes on otherwise."""
        source = self._input
        key = yield from self._decoded()
        yield from source.run(SPACE)
        if not (yield from source.literal(":")):
            return ""
        yield from source.run(SPACE)
        return key

    def _argument_value(self, name: str) -> Steps[tuple[bool, str]]:
        """Begin the call when its name is known and an object comes; else hold the value back."""
        if name and (yield from self._input.peek()) == "{":
            self._start(name)
            yield from self._json_value(self._arguments)
            return True, ""
        parts: list[str] = []
        yield from self._json_value(parts.append)
        return False, "".join(parts)

    def _settle(self, name: str, held: str, bare: bool) -> bool:
        """Make a whole call of an object that has ended before it could begin one."""
        if not name or (bare and not held):
            return False
        self._start(name)
        self._arguments(_as_object(held))
        return True


def _drop(_: str) -> None:
    return


def _as_object(held: str) -> str:
    """Arguments as JSON text: some models write the object as a string, and null for none."""
    value = loads(held)
    if isinstance(value, str) and isinstance(loads(value), dict) and speakable(value):
        return value
    return EMPTY if value is None and held in ("", "null") else held
