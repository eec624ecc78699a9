"""Read a large JSON text in small steps: pydantic's parser holds the interpreter until a text is read as a whole.

What is long (texts, lists of numbers) is cut out, read piece by piece, and put back into what the short rest became.
Invariants: no step holds the interpreter longer than some ten milliseconds, whatever the text; the outcome is what a
parser of the whole would give, or a RequestError. What is many and not long is bounded, before it is read.
Knows nothing of fields.
"""

from __future__ import annotations

import re
import secrets
from typing import Any, NoReturn

from pydantic_core import from_json

from stoker_runtime.errors import RequestError

MAX_TEXTS = 65_536
"""Texts and names of members of one body."""
MAX_VALUES = 131_072
"""Commas outside of texts and of long lists of numbers."""
MAX_NUMBERS = 1 << 20
"""Numbers in long lists, beside those that the caller allows."""
MAX_MEMBERS = 4096
"""Of one object: an unknown one costs more than all that is known."""
LONG_TEXT = 256
PIECE = 64 * 1024
_NUMBERS = re.compile(rb"\[[-+.\deE,\s]{64,}+")
_MORE_NUMBERS = re.compile(rb"[-+.\deE,\s]*+")
# Not possessive, though nothing is tried twice: Python before 3.11.5 ends such groups too early.
_TEXT = re.compile(
    rb'(?:[^"\\]+|\\[^u]|\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}'
    rb"|\\u(?![dD][89a-fA-F])[\da-fA-F]{4})*",
    re.DOTALL,
)
_UNIT = len(rb"\ud83d\ude00")
"""The longest escape."""


def read_large(raw: bytes, numbers: int = 0) -> Any:
    """The value that `raw` holds; `numbers` may come in long lists beside MAX_NUMBERS. Raises RequestError."""
    return _Reader(raw, MAX_NUMBERS + numbers).read()


class _Reader:
    """One text. `_parts` is what is left of it, `_cut` what was cut out, by the name that stands in its place."""

    def __init__(self, raw: bytes, numbers: int) -> None:
        self._raw = raw
        self._left = numbers
        self._most = numbers
        self._parts: list[bytes] = []
        self._cut: dict[str, Any] = {}
        self._token = secrets.token_hex(8)

    def read(self) -> Any:
        raw, at, texts, values = self._raw, 0, 0, 0
        while at < len(raw):
            quote = raw.find(b'"', at)
            end = len(raw) if quote < 0 else quote
            values += self._outside(at, end)
            if values > MAX_VALUES:
                raise _too_many(f"{MAX_VALUES} values outside of its texts and long lists of numbers")
            if quote < 0:
                break
            texts += 1
            if texts > MAX_TEXTS:
                raise _too_many(f"{MAX_TEXTS} texts and names of fields")
            at = self._text(quote + 1)
        try:
            found = from_json(b"".join(self._parts), allow_inf_nan=False)
        except ValueError as error:
            # The place is one of the short rest.
            _refuse(str(error).split(" at line ")[0])
        return self._whole(found, "")

    def _outside(self, at: int, end: int) -> int:
        """Take what stands between two texts; how many commas are left of it."""
        raw, commas = self._raw, 0
        while at < end:
            found = _NUMBERS.search(raw, at, min(at + PIECE, end))
            if found is None:
                # A list that begins in this window and is short in it is looked at again in the next one.
                stop = min(at + PIECE, end)
                again = raw.rfind(b"[", max(at + 1, stop - 64), stop) if stop < end else -1
                stop = again if again > 0 else stop
                commas += self._keep(at, stop)
                at = stop
                continue
            first, after = found.start() + 1, found.end()
            while after < end and (more := _MORE_NUMBERS.match(raw, after, min(after + PIECE, end))):
                if more.end() == after:
                    break
                after = more.end()
            if raw[after : after + 1] != b"]":
                commas += self._keep(at, after)
            else:
                commas += self._keep(at, first)
                self._place(self._list(first, after))
            at = after
        return commas

    def _keep(self, at: int, end: int) -> int:
        commas = 0
        for begin in range(at, end, PIECE):
            part = self._raw[begin : min(begin + PIECE, end)]
            commas += part.count(b",")
            self._parts.append(part)
        return commas

    def _place(self, value: Any) -> None:
        name = f"{self._token}{len(self._cut)}"
        self._cut[name] = value
        self._parts.append(b'"%s"' % name.encode())

    def _list(self, at: int, end: int) -> list[Any]:
        raw, found, first = self._raw, [], True
        while at <= end:
            comma = raw.find(b",", min(at + PIECE, end), end)
            stop = end if comma < 0 else comma
            some = self._read(b"[", raw[at:stop], b"]")
            if not some and not (first and stop == end):
                _refuse("expected value")
            self._left -= len(some)
            if self._left < 0:
                raise _too_many(f"{self._most} numbers")
            found += some
            at, first = stop + 1, False
        return found

    def _text(self, at: int) -> int:
        """Take a text that begins at `at`; where the rest begins."""
        raw = self._raw
        close = raw.find(b'"', at, at + LONG_TEXT)
        if close >= 0 and b"\\" not in raw[at:close]:
            self._parts.append(raw[at - 1 : close + 1])
            return close + 1
        begin, pieces = at, []
        while True:
            end = self._end_of_piece(at)
            if raw[end : end + 1] == b'"' and end - begin <= LONG_TEXT:
                self._parts.append(raw[begin - 1 : end + 1])
                return end + 1
            pieces.append(self._read(b'"', raw[at:end], b'"'))
            at = end
            if raw[end : end + 1] == b'"':
                self._place("".join(pieces))
                return end + 1

    def _end_of_piece(self, at: int) -> int:
        """Where a piece of a text ends that may be read by itself: at the text's end, or between two characters."""
        raw = self._raw
        window = min(at + PIECE, len(raw))
        found = _TEXT.match(raw, at, window)
        end = at if found is None else found.end()
        if end == len(raw):
            _refuse("EOF while parsing a string")
        if raw[end : end + 1] == b'"' and end < window:
            return end
        if end < window - _UNIT:
            _refuse("invalid escape")
        while raw[end] & 0xC0 == 0x80 and end > at:
            end -= 1
        if end == at:
            _refuse("EOF while parsing a string")
        return end

    def _read(self, before: bytes, piece: bytes, after: bytes) -> Any:
        try:
            return from_json(before + piece + after, allow_inf_nan=False)
        except ValueError as error:
            _refuse(str(error).split(" at line ")[0])

    def _whole(self, value: Any, where: str) -> Any:
        """`value` with what was cut out of it."""
        if isinstance(value, str):
            return self._cut.get(value, value)
        if isinstance(value, dict):
            if len(value) > MAX_MEMBERS:
                field = where or "The body"
                raise RequestError(
                    f"{field} has {len(value)} members; an object has at most {MAX_MEMBERS}. Send fewer.",
                    param=where or None,
                )
            inner = f"{where}." if where else ""
            return {self._cut.get(key, key): self._whole(each, f"{inner}{key[:64]}") for key, each in value.items()}
        if isinstance(value, list):
            if len(value) == 1 and isinstance(self._cut.get(value[0]) if isinstance(value[0], str) else None, list):
                return self._cut[value[0]]
            return [each if type(each) is int else self._whole(each, f"{where}[{at}]") for at, each in enumerate(value)]
        return value


def _too_many(what: str) -> RequestError:
    return RequestError(f"The body holds more than {what}, which is the most allowed. Send several smaller requests.")


def _refuse(reason: str) -> NoReturn:
    raise RequestError(f"The body is not valid JSON: {reason}.")
