"""Reads `runtime.args` as the engine's own parser does, flag by flag, without importing the engine.

The engine's names stand in engine_table.py, which is made from its own table; the rules are its rules: any number of
dashes in front, underscores as dashes, aliases, `--no-` forms, `=`, and how many words belong to which flag. A property
test gives random spellings to both.
Invariants: pure; what the engine would take for one flag is never read as another or as none.
Knows nothing of what flags mean and of which are the operator's own.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker_operator.spec.engine_table import (
    ALIASES,
    OPPOSITES,
    OTHER_VARIABLES,
    SETTINGS,
    SWITCHES,
    VLLM_ONE_WORD,
    VLLM_SWITCHES,
    VLLM_UNSUPPORTED,
    VLLM_WORD,
    VLLM_WORDS,
    WORDS,
)

PREFIX = "STOKER_"


@dataclass(frozen=True, slots=True)
class Argument:
    """One setting as it was given, at `index`. `name` is the engine's own, "" = it has none; `values` are its words.

    `ours` is False for a flag of vLLM that has no setting in the engine.
    """

    index: int
    spelled: str
    name: str
    values: tuple[str, ...] = ()
    ours: bool = True


def read(arguments: Sequence[str]) -> Iterator[Argument]:
    """Every setting, in order. A word that belongs to no flag is the setting `model`, as in the engine."""
    at = 0
    while at < len(arguments):
        index, argument = at, arguments[at]
        at += 1
        if not argument.startswith("-") or argument == "-":
            yield Argument(index, argument, "model", (argument,))
            continue
        spelled, equals, value = argument.partition("=")
        name, ours = _find(spelled)
        values = (value,) if equals else ()
        for _ in range(0 if equals else _words(name, ours)):
            # Where the engine knows of exactly one word, it takes it whatever it is. What follows a flag that it does
            # not know are that flag's words, in the engine that does.
            ends = "-" if not name else "" if name in VLLM_ONE_WORD else "--"
            if at >= len(arguments) or (ends and arguments[at].startswith(ends)):
                break
            values, at = (*values, arguments[at]), at + 1
        yield Argument(index, spelled, name, values, ours)


def _words(name: str, ours: bool) -> int:
    """How many words after it belong to a flag at most."""
    if ours:
        return 0 if name in SWITCHES else 10**6 if name in WORDS or not name else 1
    return 1 if name in VLLM_ONE_WORD or name in VLLM_WORD else 10**6 if name in VLLM_WORDS else 0


def _find(spelled: str) -> tuple[str, bool]:
    """(name, whether it is a setting of the engine's); ("", True) for one that it does not know."""
    name = spelled.lstrip("-").replace("_", "-")
    plain = name.removeprefix("no-")
    if any(name in names for names in (VLLM_UNSUPPORTED, VLLM_SWITCHES, VLLM_ONE_WORD, VLLM_WORD, VLLM_WORDS)):
        return name, False
    if plain in VLLM_UNSUPPORTED or plain in VLLM_SWITCHES:
        return plain, False
    name = ALIASES.get(name, name)
    if name in SETTINGS:
        return name, True
    if name in OPPOSITES:
        return OPPOSITES[name], True
    return (plain, True) if plain != name and plain in SWITCHES else ("", True)


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.replace("-", "_").upper()


VARIABLES = {variable(name): name for name in SETTINGS}
VLLM_VARIABLES = frozenset(map(variable, (*VLLM_SWITCHES, *VLLM_ONE_WORD, *VLLM_WORD, *VLLM_WORDS)))


def told(args: Sequence[str], env: Sequence[Mapping[str, Any]], names: Container[str]) -> dict[str, str]:
    """What arguments and variables say of some settings, by their names: a flag wins over a variable, and the last flag
    over those before it.
    """
    found = {
        VARIABLES[item["name"]]: str(item["value"])
        for item in env
        if VARIABLES.get(item["name"], "") in names and "value" in item
    }
    for each in read(args):
        if each.ours and each.name in names and (each.values or each.name in SWITCHES):
            switched = "false" if each.spelled.lstrip("-").startswith("no") else "true"
            found[each.name] = each.values[0] if each.values else switched
    return found


def is_unknown_variable(name: str) -> bool:
    """Whether the engine would refuse to start for a variable of this name."""
    known = name in VARIABLES or name in VLLM_VARIABLES or name.startswith(OTHER_VARIABLES)
    return name.startswith(PREFIX) and not known


def nearest(spelled: str, known: Iterable[str]) -> str:
    """"; did you mean …?" where something known is near, else ""."""
    near = difflib.get_close_matches(spelled, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
