"""Structural tags as a grammar: free text in which certain beginnings commit the model to a structure.

Two notations are read: `structures` with `triggers`, and `format`, a tree of parts. The grammar is Lark in llguidance's
dialect; a trigger is found by a lazy lexeme, which ends where the trigger does.

Invariants: a text that is one of the model's special tokens is written as that token, because as characters it is
never generated. A part of an unknown kind is refused by its name.
Knows nothing of bodies beyond this one field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from stoker_runtime.api.tools.leads import ANY_TEXT, special_texts
from stoker_runtime.errors import RequestError
from stoker_runtime.request import Constraint, ConstraintKind
from stoker_runtime.sampling.grammar import with_blanks
from stoker_runtime.text.tokenizer import Tokenizer

MAX_DEPTH = 32

Part = dict[str, Any]


def structural_tag(value: Part, tokenizer: Tokenizer, param: str) -> Constraint:
    """The constraint that `value` describes. Raises RequestError blaming `param` for what cannot be read."""
    rules = _Rules(tokenizer, param)
    if "format" in value:
        start = rules.part(value["format"], 0)
    else:
        structures = rules.field(value, "structures", list)
        tags = [_from_structure(structure, rules) for structure in structures]
        start = rules.triggered({"triggers": value.get("triggers"), "tags": tags}, 0)
    return Constraint(ConstraintKind.GRAMMAR, "\n".join(["%llguidance {}", f"start: {start}", *rules.lines]))


def _from_structure(structure: Any, rules: _Rules) -> Part:
    begin, end = rules.field(structure, "begin", str), rules.field(structure, "end", str)
    return {"begin": begin, "end": end, "content": {"type": "json_schema", "json_schema": structure.get("schema", {})}}


class _Rules:
    """The rules of one grammar, as they come to be needed."""

    def __init__(self, tokenizer: Tokenizer, param: str) -> None:
        self.lines: list[str] = []
        self._param = param
        self._specials = special_texts(tokenizer)
        names = sorted(filter(None, self._specials), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._kinds: dict[str, Callable[[Part, int], str]] = {
            "const_string": lambda part, depth: self.literal(self.field(part, "value", str)),
            "any_text": lambda part, depth: ANY_TEXT,
            "regex": lambda part, depth: self._regex(self.field(part, "pattern", str)),
            "json_schema": lambda part, depth: self._schema(part.get("json_schema")),
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self.triggered,
            "tags_with_separator": self._separated,
        }

    def part(self, part: Any, depth: int) -> str:
        """The name of the rule for one part of the tree, or an expression that is as good as a name."""
        kind = self.field(part, "type", str)
        if kind not in self._kinds:
            raise self._refuse(f"the type {kind!r} is not supported; use one of {', '.join(self._kinds)}")
        if depth > MAX_DEPTH:
            raise self._refuse(f"it is nested more than {MAX_DEPTH} deep")
        return self._kinds[kind](part, depth + 1)

    def field(self, part: Any, name: str, kind: type) -> Any:
        """A field that must be there."""
        if not isinstance(part, dict) or not isinstance(part.get(name), kind):
            raise self._refuse(f"every such part needs {name!r}, which is a {kind.__name__}")
        return part[name]

    def triggered(self, part: Part, depth: int) -> str:
        """Free text in which each trigger begins one of the tags that start with it."""
        triggers = self.field(part, "triggers", list)
        found = [self._triggered_tag(tag, triggers, depth) for tag in self.field(part, "tags", list)]
        if not found:
            raise self._refuse("it names no tags")
        either = f"({' | '.join(found)})"
        if part.get("stop_after_first"):
            return self._rule(either if part.get("at_least_one") else f"{either} | {ANY_TEXT}")
        tail = self._rule(ANY_TEXT)
        return self._rule(f"{either}{'+' if part.get('at_least_one') else '*'} {tail}")

    def literal(self, text: str) -> str:
        """A text, with the special tokens in it as tokens."""
        pieces: list[str] = []
        at = 0
        for match in self._special_pattern.finditer(text):
            name = match.group()
            if not (name.startswith("<") and name.endswith(">")):
                raise self._refuse(f"the special token {name!r} cannot stand in a grammar")
            pieces += [_quoted(text[at : match.start()]), name]
            at = match.end()
        pieces.append(_quoted(text[at:]))
        return " ".join(filter(None, pieces)) or '""'

    def _triggered_tag(self, tag: Any, triggers: list[Any], depth: int) -> str:
        begin = self.field(tag, "begin", str)
        known = [trigger for trigger in triggers if isinstance(trigger, str) and trigger and begin.startswith(trigger)]
        if not known:
            raise self._refuse(f"the beginning {begin!r} starts with none of the triggers")
        trigger = max(known, key=len)
        rest = self.literal(begin.removeprefix(trigger))
        if trigger in self._specials:
            head = self._rule(f"{ANY_TEXT} {self.literal(trigger)}")
        else:
            head = self._rule(f"{ANY_TEXT} {_quoted(trigger)}", lazy=True)
        return self._rule(f"{head} {rest} {self._ended(tag, depth)}")

    def _tag(self, part: Part, depth: int) -> str:
        return self._rule(f"{self.literal(self.field(part, 'begin', str))} {self._ended(part, depth)}")

    def _ended(self, part: Part, depth: int) -> str:
        """A tag's content and its end. Free text goes on until the end is there."""
        end, content = self.field(part, "end", str), self.field(part, "content", dict)
        if content.get("type") == "any_text" and end and not self._special_pattern.search(end):
            return self._rule(f"{ANY_TEXT} {_quoted(end)}", lazy=True)
        return self._rule(f"{self.part(content, depth)} {self.literal(end)}")

    def _sequence(self, part: Part, depth: int) -> str:
        return self._rule(" ".join(self.part(each, depth) for each in self.field(part, "elements", list)) or '""')

    def _or(self, part: Part, depth: int) -> str:
        elements = self.field(part, "elements", list)
        if not elements:
            raise self._refuse("'or' has no elements")
        return self._rule(" | ".join(self.part(each, depth) for each in elements))

    def _separated(self, part: Part, depth: int) -> str:
        tags = [self._tag(tag, depth) for tag in self.field(part, "tags", list)]
        if not tags:
            raise self._refuse("it names no tags")
        one = self._rule(" | ".join(tags))
        several = one
        if not part.get("stop_after_first"):
            several = f"{one} ({self.literal(self.field(part, 'separator', str))} {one})*"
        return self._rule(several if part.get("at_least_one") else f"({several})?")

    def _regex(self, pattern: str) -> str:
        if not pattern:
            return '""'
        slashes_escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern)
        return f"/{slashes_escaped}/"

    def _schema(self, schema: Any) -> str:
        if not isinstance(schema, (dict, bool)) or schema is False:
            raise self._refuse("'json_schema' must be a schema that allows something")
        return self._rule(f"%json {json.dumps(with_blanks(schema), ensure_ascii=False)}")

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"part_{len(self.lines)}"
        self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _refuse(self, message: str) -> RequestError:
        return RequestError(f"{self._param}: {message}.", param=self._param)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
