"""Numbers and texts in sentences: "1 pod", "2 pods"; one line, not longer than a condition should be.

Invariants: pure. Knows nothing of what the sentences are about.
"""

from __future__ import annotations

_LONGEST = 400


def counted(number: int, noun: str) -> str:
    """The number with its noun: "1 pod", "2 pods"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def sentence(text: str) -> str:
    """The text with a full stop, unless it ends like a sentence already."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def short(text: str) -> str:
    """The text on one line, cut where it is too long for a condition."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
