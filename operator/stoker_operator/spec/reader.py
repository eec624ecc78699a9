"""Reads typed values out of a raw mapping and collects what is wrong, each problem with its path.

Invariants: a method never raises for bad input: it records a sentence and returns a usable value, so that
one pass finds every problem; `finish` reports keys nobody asked for.
Knows nothing of InferenceServices.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from stoker_operator.spec.quantity import is_quantity, seconds


class Reader:
    """One mapping of a manifest, at `path`. Problems go to the list shared by all readers of the manifest."""

    def __init__(self, raw: object, path: str, problems: list[str]) -> None:
        self.path = path
        self.problems = problems
        self.raw: Mapping[str, Any] = raw if isinstance(raw, Mapping) else {}
        self._known: set[str] = set()
        if not isinstance(raw, Mapping):
            problems.append(f"{path or 'the manifest'}: must be a mapping, is {type(raw).__name__}")

    def _at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _get(self, key: str, kind: type, fallback: Any, required: bool = False) -> Any:
        self._known.add(key)
        value = self.raw.get(key)
        if value is None:
            if required:
                self.problems.append(f"{self._at(key)}: is required")
            return fallback
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            names = {
                str: "a string",
                int: "an integer",
                bool: "true or false",
                list: "a list",
                dict: "a mapping",
            }
            self.problems.append(f"{self._at(key)}: must be {names[kind]}, is {value!r}")
            return fallback
        return value

    def _matches(self, where: str, value: str, pattern: str, longest: int) -> None:
        if len(value) > longest:
            self.problems.append(f"{where}: is {len(value)} characters long; at most {longest}")
        elif pattern and re.search(pattern if pattern[0] == "^" else f"^{pattern}$", value) is None:
            self.problems.append(f"{where}: {value!r} must match {pattern}")

    def mapping(self, key: str, *, required: bool = False) -> Reader:
        """A reader for a nested mapping; an empty one when it is absent."""
        return Reader(self._get(key, dict, {}, required), self._at(key), self.problems)

    def text(
        self, key: str, *, default: str = "", pattern: str = "", longest: int = 4096, required: bool = False
    ) -> str:
        """A string that matches `pattern`."""
        value: str = self._get(key, str, default, required)
        if key in self.raw:
            self._matches(self._at(key), value, pattern, longest)
        return value

    def integer(self, key: str, *, default: int = 0, least: int | None = None, most: int | None = None,
                required: bool = False) -> int:  # fmt: skip
        """An integer within bounds."""
        value: int = self._get(key, int, default, required)
        if (least is not None and value < least) or (most is not None and value > most):
            self.problems.append(f"{self._at(key)}: is {value}; must be between {least} and {most}")
        return value

    def boolean(self, key: str, *, default: bool = False) -> bool:
        """True or false."""
        value: bool = self._get(key, bool, default)
        return value

    def choice(self, key: str, allowed: tuple[str, ...]) -> str:
        """One of `allowed`, the first being the default."""
        value = self.text(key, default=allowed[0])
        if value not in allowed:
            self.problems.append(f"{self._at(key)}: is {value!r}; must be one of {', '.join(allowed)}")
        return value

    def quantity(self, key: str, *, default: str = "") -> str:
        """A Kubernetes quantity as a string; a bare number is taken as one."""
        self._known.add(key)
        value = self.raw.get(key, default)
        text = str(value)
        if text and (isinstance(value, bool) or not is_quantity(text)):
            self.problems.append(f"{self._at(key)}: {value!r} is not a quantity such as 4, 500m or 32Gi")
            return default
        return text

    def duration(self, key: str, default: int, *, least: int = 0, most: int) -> int:
        """Seconds of a duration such as "15s"."""
        text = self.text(key, default=f"{default}s")
        try:
            value = seconds(text)
        except ValueError:
            self.problems.append(f"{self._at(key)}: {text!r} is not a duration such as 15s, 2m or 1h")
            return default
        if value > most:
            self.problems.append(f"{self._at(key)}: is {value} s; at most {most} s")
        elif value < least:
            self.problems.append(f"{self._at(key)}: is {value} s; at least {least} s")
        return value

    def texts(self, key: str, *, pattern: str = "", most: int, longest: int) -> tuple[str, ...]:
        """A bounded list of strings."""
        values: list[Any] = self._get(key, list, [])
        if len(values) > most:
            self.problems.append(f"{self._at(key)}: has {len(values)} items; at most {most}")
        for index, value in enumerate(values):
            where = f"{self._at(key)}[{index}]"
            if isinstance(value, str):
                self._matches(where, value, pattern, longest)
            else:
                self.problems.append(f"{where}: must be a string, is {value!r}")
        return tuple(value for value in values if isinstance(value, str))

    def integers(self, key: str, *, least: int, most: int, longest: int) -> tuple[int, ...]:
        """A list of at most `longest` integers within bounds."""
        values: list[Any] = self._get(key, list, [])
        if len(values) > longest:
            self.problems.append(f"{self._at(key)}: has {len(values)} items; at most {longest}")
        for index, value in enumerate(values):
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                self.problems.append(f"{self._at(key)}[{index}]: is {value!r}; must be between {least} and {most}")
        return tuple(value for value in values if isinstance(value, int))

    def text_map(self, key: str, *, pattern: str = "", most: int, longest: int = 256) -> dict[str, str]:
        """A bounded map of strings."""
        values: dict[Any, Any] = self._get(key, dict, {})
        if len(values) > most:
            self.problems.append(f"{self._at(key)}: has {len(values)} entries; at most {most}")
        for name, value in values.items():
            if not isinstance(name, str) or not isinstance(value, str):
                self.problems.append(f"{self._at(key)}.{name}: must be a string, is {value!r}")
            else:
                self._matches(f"{self._at(key)}.{name}", value, pattern, longest)
        return {str(name): str(value) for name, value in values.items()}

    def objects(self, key: str, *, most: int) -> tuple[Mapping[str, Any], ...]:
        """A bounded list of mappings."""
        values: list[Any] = self._get(key, list, [])
        if len(values) > most:
            self.problems.append(f"{self._at(key)}: has {len(values)} items; at most {most}")
        for index, value in enumerate(values):
            if not isinstance(value, Mapping):
                self.problems.append(f"{self._at(key)}[{index}]: must be a mapping, is {value!r}")
        return tuple(value for value in values if isinstance(value, Mapping))

    def refuse(self, key: str, pattern: str, why: str, *, index: int | None = None) -> None:
        """Record a problem when the string at `key` (or item `index` of the list there) matches `pattern`."""
        value = self.raw.get(key)
        if index is not None:
            value = value[index] if isinstance(value, list) and index < len(value) else None
        if isinstance(value, str) and re.search(pattern, value):
            where = self._at(key) if index is None else f"{self._at(key)}[{index}]"
            self.problems.append(f"{where}: {value!r} is not allowed: {why}")

    def refuse_key(self, key: str, name: str, pattern: str, why: str) -> None:
        """Record a problem when `name`, a key of the map at `key`, matches `pattern`."""
        if re.search(pattern, name):
            self.problems.append(f"{self._at(key)}: {name!r} is not allowed: {why}")

    def expect(self, *keys: str) -> None:
        """Take keys for known that are read elsewhere."""
        self._known.update(keys)

    def finish(self) -> None:
        """Record every key that was never asked for, with the nearest one that was."""
        for key in self.raw:
            if key not in self._known:
                near = difflib.get_close_matches(str(key), self._known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                self.problems.append(f"{self._at(str(key))}: is not a field{hint}")
