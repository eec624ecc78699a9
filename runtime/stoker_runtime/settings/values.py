"""How the text of a setting becomes its value.

Invariants: a text that is refused raises BadValue, which says what is allowed; nothing is guessed.
Knows nothing of which settings there are.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Sequence

from stoker_runtime.config import RUNNERS, LoraModule
from stoker_runtime.kv_events_settings import KvEventsConfig


class BadValue(ValueError):
    """What is allowed, in words."""


def text(value: str) -> str:
    """Any text."""
    return value


def choice(allowed: Sequence[str]) -> Callable[[str], str]:
    """One of `allowed`."""

    def convert(value: str) -> str:
        if value not in allowed:
            near = difflib.get_close_matches(value, allowed, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise BadValue(f"one of {', '.join(allowed)}{hint}")
        return value

    return convert


_MULTIPLES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}


def integer(least: int = 0) -> Callable[[str], int]:
    """A whole number; `4k` is 4,000 and `4K` is 4,096."""

    def convert(value: str) -> int:
        found = re.fullmatch(r"(-?\d+)([kmgKMG]?)", value.strip())
        number = int(found[1]) * _MULTIPLES[found[2]] if found else None
        if number is None or number < least:
            raise BadValue(f"a whole number of at least {least}")
        return number

    return convert


def number(least: float, most: float | None = None) -> Callable[[str], float]:
    """A number in a range."""
    rule = f"a number of at least {least:g}" if most is None else f"a number between {least:g} and {most:g}"

    def convert(value: str) -> float:
        try:
            parsed = float(value)
        except ValueError:
            raise BadValue(rule) from None
        if not parsed >= least or (most is not None and parsed > most):
            raise BadValue(rule)
        return parsed

    return convert


def switch(value: str) -> bool:
    """true or false."""
    spelled = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if value.lower() not in spelled:
        raise BadValue("true or false")
    return spelled[value.lower()]


def pair(value: str) -> tuple[str, str]:
    """op=implementation."""
    op, equals, implementation = value.partition("=")
    if not (op and equals and implementation):
        raise BadValue("OP=IMPLEMENTATION, such as linear=cublas")
    return op, implementation


def lora_module(value: str) -> LoraModule:
    """NAME=PATH, or a JSON object with name, path and base_model_name."""
    rule = 'NAME=PATH, or {"name": "NAME", "path": "PATH", "base_model_name": "MODEL"}'
    given: dict[str, str]
    if not value.lstrip().startswith("{"):
        name, _, path = value.partition("=")
        given = {"name": name, "path": path}
    else:
        try:
            given = json.loads(value)
        except ValueError:
            raise BadValue(rule) from None
    known = given.keys() <= {"name", "path", "base_model_name"}
    if not known or not all(isinstance(each, str) for each in given.values()) or not given.get("name"):
        raise BadValue(rule)
    if not given.get("path"):
        raise BadValue(rule)
    return LoraModule(given["name"], given["path"], given.get("base_model_name", ""))


def kv_events(value: str) -> KvEventsConfig:
    """A JSON object with keys of vLLM's KVEventsConfig."""
    known = {each.name: each for each in dataclasses.fields(KvEventsConfig)}
    rule = f"a JSON object with keys of {', '.join(known)}"
    try:
        given = json.loads(value)
    except ValueError:
        raise BadValue(rule) from None
    if not isinstance(given, dict) or not given.keys() <= known.keys():
        raise BadValue(rule)
    for name, found in given.items():
        default = known[name].default
        if name == "publisher" and found not in (None, "zmq", "null"):
            raise BadValue(f'{rule}; publisher is "zmq" or "null"')
        optional = found is None and name in ("publisher", "replay_endpoint")
        if not optional and type(found) is not (str if default is None else type(default)):
            raise BadValue(f"{rule}; {name} is like {json.dumps(default)}")
        if type(found) is int and found < (name == "max_queue_size"):
            raise BadValue(f"{rule}; {name} is a number of messages")
    return KvEventsConfig(**{**given, "publisher": given.get("publisher") or ""})


_RUNNERS = {"embed": "pooling", "embedding": "pooling", "score": "pooling", "classify": "pooling"}


def runner(value: str) -> str:
    """auto, generate or pooling; the older names of tasks that pool mean pooling."""
    return choice(RUNNERS)(_RUNNERS.get(value, value))
