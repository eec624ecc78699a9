"""Numbers and texts in sentences: "1 pod", "2 pods"; one line, not longer than a condition should be.

Invariants: pure. Knows nothing of what the sentences are about.
"""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST = 400


def counted(number: int, noun: str) -> str:
    """The number with its noun: "1 pod", "2 pods"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Sequence[str], word: str) -> str:
    """Names in a sentence: "a", "a or b", "a, b or c"."""
    return f" {word} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def sentence(text: str) -> str:
    """The text with a full stop, unless it ends like a sentence already."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def short(text: str) -> str:
    """The text on one line, cut where it is too long for a condition."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
