"""What flags of vLLM that are read and ignored may be given: words, numbers, and JSON objects key by key.

Invariants: what a value says is checked as vLLM would check it, to the keys of its objects; nothing is guessed.
Knows nothing of which flags there are; see vllm_ignored.py.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Values:
    """What one word after a flag may be, in `words`; `wrong` says what is wrong with a text, "" where nothing is.

    `many`: several words may follow. Of a `wrong` that has no more to say than `words`, the answer is `words`.
    """

    words: str
    wrong: Callable[[str], str]
    many: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """What the value of a JSON object's key may be."""

    words: str
    fits: Callable[[object], bool]


def near(name: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    """"; did you mean …?" where something known is near, else ""."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def listed(words: tuple[str, ...]) -> str:
    """"a, b or c"."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def one_of(*allowed: str, any_case: bool = False) -> Values:
    """One of these words."""

    def wrong(text: str) -> str:
        if (text.upper() if any_case else text) in allowed:
            return ""
        return listed(allowed) + near(text.upper() if any_case else text, allowed)

    return Values(listed(allowed), wrong)


def whole(least: int, most: int | None = None) -> Values:
    """A whole number in a range."""
    words = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"

    def wrong(text: str) -> str:
        number = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else least - 1
        return "" if number >= least and (most is None or number <= most) else words

    return Values(words, wrong)


def decimal(least: float) -> Values:
    """A number of at least `least`."""
    words = f"a number of at least {least:g}"

    def wrong(text: str) -> str:
        try:
            number = float(text)
        except ValueError:
            return words
        return "" if least <= number < math.inf else words

    return Values(words, wrong)


def wholes(least: int) -> Values:
    """Whole numbers: one a word, separated by commas, or a JSON list."""
    words = f"whole numbers of at least {least}"
    one = whole(least)

    def wrong(text: str) -> str:
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        return "" if all(not one.wrong(each.strip()) for each in inner.split(",")) else words

    return Values(words, wrong, many=True)


def matching(pattern: str, words: str, *, many: bool = False) -> Values:
    """A word of this pattern."""
    return Values(words, lambda text: "" if re.fullmatch(pattern, text) else words, many)


def either(first: Values, second: Values) -> Values:
    """What one of the two allows; the second says what is wrong with an object."""
    words = f"{first.words}, or {second.words}"

    def wrong(text: str) -> str:
        if not first.wrong(text):
            return ""
        found = second.wrong(text)
        return words if found == second.words else found

    return Values(words, wrong)


def json_object(keys: Mapping[str, Kind] | None = None, refused: Mapping[str, str] | None = None) -> Values:
    """A JSON object: of any keys (None), or of these. A key of `refused` may only be off, for the reason beside it."""
    words = "a JSON object"

    def wrong(text: str) -> str:
        try:
            given = json.loads(text)
        except (ValueError, RecursionError):
            return words
        return words_of_object(given, keys, refused or {})

    return Values(words, wrong)


def words_of_object(given: object, keys: Mapping[str, Kind] | None, refused: Mapping[str, str]) -> str:
    """What an object must be that `given` is not; "" where it is."""
    if not isinstance(given, dict):
        return "a JSON object"
    for key, value in given.items():
        if keys is not None and key not in keys:
            return f"a JSON object without the unknown key {key!r}{near(key, keys)}"
        if keys is not None and not keys[key].fits(value):
            return f"a JSON object whose {key} is {keys[key].words}"
        if value and key in refused:
            return f"a JSON object without {key}: {refused[key]}"
    return ""


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
LIST = Kind("a list", lambda value: isinstance(value, list))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
COUNT = Kind("a whole number of at least 0", lambda value: type(value) is int and value >= 0)


def word(*allowed: str | int) -> Kind:
    """One of these texts or numbers."""
    words = listed(tuple(map(str, allowed)))
    return Kind(words, lambda value: type(value) in (int, str) and value in allowed)


def or_null(kind: Kind) -> Kind:
    """The same, or null."""
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.fits(value))


def of_each(least: Kind, keys: tuple[str, ...]) -> Kind:
    """A value of `least`, or an object that has one for each of `keys`, or for some."""

    def fits(value: object) -> bool:
        return least.fits(value) or not words_of_object(value, dict.fromkeys(keys, least), {})

    return Kind(f"{least.words}, or an object of such with keys of {listed(keys)}", fits)
