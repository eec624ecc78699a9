"""Names of the parts of a split GGUF model: `NAME-00001-of-00003.gguf` and so on, as llama.cpp writes them.

Invariants: pure; the parts of a name are in order, and the name is one of them.
Knows nothing of what the files hold.
"""

from __future__ import annotations

import re

MAX_PARTS = 10_000
_PART = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<total>\d{5})\.gguf", re.DOTALL)


def part_names(name: str) -> tuple[str, ...]:
    """All parts of the model that the file `name` is a part of; empty when it is none."""
    match = _PART.fullmatch(name)
    if match is None:
        return ()
    part, total = int(match["part"]), int(match["total"])
    if not 1 <= part <= total <= MAX_PARTS:
        return ()
    return tuple(f"{match['stem']}-{number:05d}-of-{total:05d}.gguf" for number in range(1, total + 1))
