"""Shell completion: `kubectl_complete-stoker`, which kubectl calls with the words that were typed so far.

Invariants: prints candidates, one a line, then `:4`, kubectl's word for "and no file names"; where the cluster does not
answer it offers no names and says nothing.
Knows nothing of shells: kubectl's own completion script asks it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence

NO_FILES = ":4"
FILES = ":0"
# Flags whose value is a file.
_FILES = ("-f", "--file", "--data", "--kubeconfig")


def candidates(
    parser: argparse.ArgumentParser, words: Sequence[str], services: Callable[[Sequence[str]], Iterable[str]],
    presets: Callable[[], Iterable[str]],
) -> tuple[list[str], str]:  # fmt: skip
    """(what the last of `words` may become, kubectl's directive). `services` gets the words, which name the cluster."""
    *before, last = words or [""]
    verbs = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    if before and before[-1] in _FILES:
        return [], FILES
    verb = next((word for word in before if word in verbs), "")
    if last.startswith("-"):
        flags = _flags(verbs[verb] if verb else parser)
        return sorted(flag for flag in flags if flag.startswith(last)), NO_FILES
    if not verb:
        return sorted(name for name in verbs if name.startswith(last)), NO_FILES
    names = presets() if verb == "presets" else services(before)
    return sorted(name for name in names if name.startswith(last)), NO_FILES


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
