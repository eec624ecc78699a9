"""Answers that are whole, in the bytes that every route of this server writes.

Invariants: JSON has no blanks and no NaN; what is not ASCII stands as UTF-8. Nothing is validated on its way out. What
is large is written beside the event loop, in steps of a few milliseconds.
Knows nothing of routes or errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from stoker_runtime.api.http.aside import LARGE_BYTES, aside

NODES = 2048
"""Values that are written at once: Python's encoder holds the interpreter until it is done."""
TEXT = 64 * 1024
"""Characters of a text that are written at once."""
CHARACTERS = 64
"""Of a text, that take the time of one value."""


@dataclass(frozen=True, slots=True)
class Later:
    """A value that is made when it is written, and not kept: of thousands of vectors one at a time is numbers."""

    make: Callable[[], Any]


def made_now(value: Any) -> Any:
    """What `value` stands for, where it is to be made later."""
    return value.make() if isinstance(value, Later) else value


def _made(value: Any) -> Any:
    if isinstance(value, Later):
        return value.make()
    raise TypeError(f"{type(value).__name__} has no JSON.")


class JsonAnswer(Response):
    """An answer in JSON. `content`: what it says, for routes that ask others within this server."""

    media_type = "application/json"

    def __init__(
        self,
        content: Any,
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        raw: bytes | None = None,
    ) -> None:
        """`raw`: `content` as `written` wrote it."""
        self.content = content
        self._raw = raw
        super().__init__(content, status_code, headers)

    def render(self, content: Any) -> bytes:
        """`content` as it is sent."""
        return _dumps(content).encode() if self._raw is None else self._raw


async def json_answer(size: int, make: Callable[[], Any]) -> JsonAnswer:
    """The answer that says what `make` makes, of about `size` bytes: beside the event loop where these are many."""
    if size <= LARGE_BYTES:
        return JsonAnswer(make())

    def made() -> JsonAnswer:
        content = make()
        return JsonAnswer(content, raw=written(content))

    return await aside(size, made)


def in_steps(value: Any) -> bool:
    """Whether `value` is so large that it is written in several steps."""
    return _nodes(value, NODES) == NODES


def written(value: Any) -> bytes:
    """`value` as one JSON text, written in steps. Raises ValueError for a number that is none."""
    return b"".join(piece.encode() for piece in _pieces(value, _dumps))


def written_as_it_is(value: Any) -> bytes:
    """`value` as `written` writes it; what no JSON text may hold (NaN, half a character) is left to its reader."""
    return b"".join(piece.encode("utf-8", "surrogatepass") for piece in _pieces(value, _dumps_all))


def written_in_ascii(value: Any) -> str:
    """`value` as one JSON text of ASCII, written in steps."""
    return "".join(_pieces(value, _dumps_ascii))


def _dumps_ascii(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=_made)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_made)


def _dumps_all(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_made)


def _pieces(value: Any, dumps: Callable[[Any], str]) -> Iterator[str]:
    if isinstance(value, Later):
        yield from _pieces(value.make(), dumps)
    elif not in_steps(value):
        yield dumps(value)
    elif isinstance(value, str):
        yield '"'
        for at in range(0, len(value), TEXT):
            yield dumps(value[at : at + TEXT])[1:-1]
        yield '"'
    elif isinstance(value, dict):
        before = "{"
        for name, each in value.items():
            # The name as a member of an object is written, whatever its type.
            yield before + dumps({name: None})[1 : -len("null}")]
            yield from _pieces(each, dumps)
            before = ","
        yield "}"
    else:
        yield from _list(value, dumps)


def _list(value: list[Any] | tuple[Any, ...], dumps: Callable[[Any], str]) -> Iterator[str]:
    yield "["
    step = NODES // 4
    for at in range(0, len(value), step):
        some = value[at : at + step]
        if at:
            yield ","
        if not in_steps(some):
            yield dumps(some)[1:-1]
            continue
        for place, each in enumerate(some):
            if place:
                yield ","
            yield from _pieces(each, dumps)
    yield "]"


def _nodes(value: Any, most: int) -> int:
    """How many values one holds, long texts counted by their length; `most` where they are more."""
    if isinstance(value, Later):
        return most
    if isinstance(value, str):
        return min(1 + len(value) // CHARACTERS, most)
    if not isinstance(value, (dict, list, tuple)):
        return 1
    found = 1 + len(value)
    for each in value.values() if isinstance(value, dict) else value:
        if found >= most:
            return most
        if isinstance(each, (str, dict, list, tuple, Later)):
            found += _nodes(each, most - found)
    return min(found, most)
