"""Texts kept as files: what a user sees must not change unnoticed.

What differs from run to run (ages, hashes, addresses, times) is replaced by a word first. `STOKER_UPDATE_GOLDEN=1`
writes the files anew.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from e2e.scenarios.kube import Kube

_VOLATILE = [
    (r"\b[0-9a-f]{40}\b", "COMMIT"),
    (r"sha256:[0-9a-f]{64}", "sha256:DIGEST"),
    (r"sha256-[0-9a-f]{64}", "sha256-DIGEST"),
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "UID"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "TIME"),
    (r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) \w{3} +\d+ \d\d:\d\d:\d\d \d{4}", "TIME"),
    (r"\bmodels-[0-9a-f]{10}\b", "models-KEY"),
    (r"-fetch-[0-9a-f]{10}-(\d+)(-[a-z0-9]{5})?\b", r"-fetch-KEY-\1"),
    (r"\b(smollm2|model)-[0-9a-f]{8,10}(-[a-z0-9]{5})?\b", r"\1-HASH"),
    (r"\b([Rr])evision [0-9a-f]{8,10}\b", r"\1evision HASH"),
    (r"\b\d\d:\d\d:\d\d UTC\b", "TIME"),
    (r"\b10\.\d+\.\d+\.\d+\b", "ADDRESS"),
    (r"\bnode1\b", "NODE"),
    (r"\b[Pp]rocess \d+\b", "process PID"),
    (r"\bended \d+ times\b", "ended N times"),
    # A registry that says no and one that is out of reach are both without the image.
    (r"cannot be pulled: .*?\. Check", "cannot be pulled: CAUSE. Check"),
    (r"\b((?:Schedule|Fetch|Verify|Load) Seconds): +\d+", r"\1: N"),
    (r"(?m)^( +Revision:) +[0-9a-f]{8,10}$", r"\1 HASH"),
    (r"(Answered|Current|Previous|Rolled Out):( +)[0-9a-f]{8,10}\b", r"\1:\2HASH"),
    (r"Source:( +)[0-9a-f]{10}\b", r"Source:\1KEY"),
    (r"(Short Revision:) +[0-9a-f]{7}\b", r"\1 COMMIT"),
    (r"\b[0-9a-f]{7}\b(?=  )", "COMMIT "),
    (r"(Resource Version|Generation): +\d+", r"\1: N"),
    (r"\b[\d.]+ [kMG]?B of [\d.]+ [kMG]?B, about \d+ s to go", "SOME MB of ALL MB, about N s to go"),
    (r"\b\d+(\.\d+)?% +", "PERCENT  "),
]
_AGES = [
    (r"(?<=[ )])\d+(?:h\d+m|m\d+s|[hms])(?=\s|$| \(x)", "AGE"),
    (r" \(x\d+ over \w+\)", ""),
]


def normalized(text: str) -> str:
    """The text with all that differs between runs replaced, and without trailing or repeated blanks."""
    for pattern, word in _VOLATILE + _AGES:
        text = re.sub(pattern, word, text)
    lines = [re.sub(r"(?<=\S) {2,}", "   ", line).rstrip() for line in text.strip().splitlines()]
    return "\n".join(lines) + "\n"


def situation(kube: Kube, name: str) -> str:
    """What a person sees who looks at a service in trouble: its row, its conditions, and the event that told of it."""
    conditions = {item["type"]: item for item in kube.get("infsvc", name)["status"]["conditions"]}
    ready = conditions.pop("Ready")
    others = [
        f"{kind}={item['status']} {item['reason']}: {_unless(item['message'], ready['message'])}"
        for kind, item in conditions.items()
    ]
    own = [item for item in kube.items("events") if item["involvedObject"]["kind"] == "InferenceService"]
    told = {normalized(_unless(item["message"], ready["message"])) for item in own if item["reason"] == ready["reason"]}
    kind = next((item["type"] for item in own if item["reason"] == ready["reason"]), "No")
    row = kube.kubectl("get", "infsvc", name)
    first = f"Ready={ready['status']} {ready['reason']}: {ready['message']}"
    return "\n".join([row, first, *others, f"{kind} event:", *sorted(line.strip() for line in told)])


def _unless(text: str, said: str) -> str:
    """The text, or that it was said already."""
    return "(as Ready)" if normalized(text) == normalized(said) else text


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
