"""Writes every page of docs/reference; what is current already is left alone.

Invariants: the same code gives the same bytes on every machine.
Knows nothing of what a page says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from docs.generate import conditions, flags, metrics, models, resource, routes

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
PAGES: Mapping[str, Callable[[], str]] = {
    "flags.md": flags.page,
    "api.md": routes.page,
    "metrics.md": metrics.page,
    "models.md": models.page,
    "inferenceservice.md": resource.page,
    "conditions.md": conditions.page,
}


def main() -> None:
    """Write what has changed, and name it."""
    for name, page in PAGES.items():
        file, text = REFERENCE / name, page()
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(f"written: {file.relative_to(REFERENCE.parents[1])}")


if __name__ == "__main__":
    main()
