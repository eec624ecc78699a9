"""Texts kept as files: what a user sees must not change unnoticed.

What differs from run to run (ages, hashes, addresses, times) is replaced by a word first. `STOKER_UPDATE_GOLDEN=1`
writes the files anew.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

_VOLATILE = [
    (r"\b[0-9a-f]{40}\b", "COMMIT"),
    (r"sha256:[0-9a-f]{64}", "sha256:DIGEST"),
    (r"sha256-[0-9a-f]{64}", "sha256-DIGEST"),
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "UID"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "TIME"),
    (r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) \w{3} +\d+ \d\d:\d\d:\d\d \d{4}", "TIME"),
    (r"\bmodels-[0-9a-f]{10}\b", "models-KEY"),
    (r"-fetch-[0-9a-f]{10}-(\d+)(-[a-z0-9]{5})?\b", r"-fetch-KEY-\1"),
    (r"\bsmollm2-[0-9a-f]{8,10}(-[a-z0-9]{5})?\b", "smollm2-HASH"),
    (r"\brevision [0-9a-f]{8,10}\b", "revision HASH"),
    (r"(Answered|Current|Previous):( +)[0-9a-f]{8,10}\b", r"\1:\2HASH"),
    (r"Source:( +)[0-9a-f]{10}\b", r"Source:\1KEY"),
    (r"(Short Revision:) +[0-9a-f]{7}\b", r"\1 COMMIT"),
    (r"\b[0-9a-f]{7}\b(?=  )", "COMMIT "),
    (r"(Resource Version|Generation): +\d+", r"\1: N"),
    (r"\b\d+\.\d MB of \d+\.\d MB, about \d+ s to go", "SOME MB of ALL MB, about N s to go"),
    (r"\b\d+(\.\d+)?% +", "PERCENT  "),
]
_AGES = [
    (r"(?<=[ )])\d+(m\d+)?s(?=\s|$| \(x)", "AGE"),
    (r" \(x\d+ over \w+\)", ""),
]


def normalized(text: str) -> str:
    """The text with all that differs between runs replaced, and without trailing or repeated blanks."""
    for pattern, word in _VOLATILE + _AGES:
        text = re.sub(pattern, word, text)
    lines = [re.sub(r"(?<=\S) {2,}", "   ", line).rstrip() for line in text.strip().splitlines()]
    return "\n".join(lines) + "\n"


def check(path: Path, text: str) -> None:
    """Compare a normalized text with the file; the difference is the error."""
    seen = normalized(text)
    if os.environ.get("STOKER_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(seen)
        return
    kept = path.read_text()
    if seen != kept:
        changes = difflib.unified_diff(kept.splitlines(), seen.splitlines(), str(path), "seen", lineterm="", n=1)
        raise AssertionError("\n".join(changes))
