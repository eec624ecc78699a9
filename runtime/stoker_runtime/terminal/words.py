"""How the terminal says what it found.

Knows nothing of what is said.
"""

from __future__ import annotations

GIB = 1024**3
Line = tuple[str, str]
"""What, and what of it."""


def gib(size: int) -> str:
    """Bytes as GiB."""
    return f"{size / GIB:.2f} GiB"
