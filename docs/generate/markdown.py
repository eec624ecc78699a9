"""The few forms of Markdown that the references use.

Invariants: a cell is one line, and what would end it is escaped.
Knows nothing of what it shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOTICE = "<!-- Written by `make docs` from the code; changes belong there. -->"


def heading(title: str, introduction: str) -> str:
    """The first lines of a page."""
    return f"{NOTICE}\n\n# {title}\n\n{introduction.strip()}\n"


def code(text: str) -> str:
    """`text` in backquotes; nothing for nothing."""
    return f"`{text}`" if text else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, with an empty line before it."""
    lines = [_row(columns), "|" + "---|" * len(columns), *map(_row, rows)]
    return "\n" + "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    shown = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return "| " + " | ".join(shown) + " |"
