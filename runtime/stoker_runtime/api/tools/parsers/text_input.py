"""The text of one answer as a machine reads it: in pieces of any size, taken off the front once its meaning is certain.

Every method that may have to wait for more text is a generator that yields while it waits and returns what it read.
Invariants: what a method returns or passes on depends on the text alone, never on how it was cut into pieces; no
more is held back than could still turn out to be a marker; each character is looked at a bounded number of times.
Knows nothing of calls or formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[str], None]

SPACE = re.compile(r"\s+")
NEWLINES = re.compile(r"\n+")


@lru_cache(maxsize=256)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)) or r"(?!)")


def unsure(text: str, start: int, markers: tuple[str, ...]) -> int:
    """Where the longest end of `text` after `start` begins that may become one of `markers`; its length if none."""
    longest = max(map(len, markers), default=0)
    for at in range(max(start, len(text) - longest + 1), len(text)):
        if any(text.startswith(marker[: len(text) - at], at) for marker in markers):
            return at
    return len(text)


class TextInput:
    """The text that has come and was not taken yet."""

    __slots__ = ("_at", "_closed", "_record", "_text")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._closed = False
        self._record: list[str] | None = None

    def push(self, text: str) -> None:
        """Add a piece at the end."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self) -> None:
        """No more text will come."""
        self._closed = True

    def mark(self, taken: str = "") -> None:
        """Record what is taken from here on, as if it began with `taken`."""
        self._record = [taken]

    def forget(self) -> None:
        """Stop recording."""
        self._record = None

    def recorded(self) -> str:
        """What was taken since `mark`; the recording ends."""
        text = "".join(self._record or ())
        self._record = None
        return text

    def take(self, count: int = 1) -> str:
        """The next `count` characters, which must be there."""
        piece = self._text[self._at : self._at + count]
        self._at += len(piece)
        if self._record is not None:
            self._record.append(piece)
        return piece

    def peek(self) -> Steps[str]:
        """The next character, not taken; "" at the end."""
        while self._at == len(self._text):
            if self._closed:
                return ""
            yield
        return self._text[self._at]

    def literal(self, *options: str) -> Steps[str]:
        """Take and return the longest of `options` that comes next; "" when none does."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, options))]
            if self._closed or not any(len(option) > len(rest) and option.startswith(rest) for option in options):
                found = max((option for option in options if rest.startswith(option)), key=len, default="")
                return self.take(len(found)) if found else ""
            yield

    def until(self, markers: tuple[str, ...], sink: Sink) -> Steps[str | None]:
        """Pass text to `sink` up to the first of `markers`; take and return that marker, None at the end."""
        pattern = _any_of(markers)
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                if found.start() > self._at:
                    sink(self.take(found.start() - self._at))
                return self.take(len(found[0]))
            certain = len(self._text) if self._closed else unsure(self._text, self._at, markers)
            if certain > self._at:
                sink(self.take(certain - self._at))
            if self._closed:
                return None
            yield

    def flow(self, pattern: re.Pattern[str], sink: Sink) -> Steps[None]:
        """Pass on the characters that come next as long as `pattern`, one or more of a class, matches them."""
        while True:
            found = pattern.match(self._text, self._at)
            if found is not None:
                sink(self.take(found.end() - self._at))
            if self._closed or self._at < len(self._text):
                return
            yield

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """As `flow`, returned as one text."""
        parts: list[str] = []
        yield from self.flow(pattern, parts.append)
        return "".join(parts)

    def rest(self, sink: Sink) -> Steps[None]:
        """Pass on everything up to the end."""
        yield from self.until((), sink)
