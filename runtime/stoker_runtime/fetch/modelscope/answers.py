"""What ModelScope's API answers, as values: an envelope {Code, Data, Message} around lists.

Invariants: pure; what is not as the API writes it is a FetchFailed that names the repository, never a guess.
Knows nothing of requests.
"""

from __future__ import annotations

import json
import re
from typing import Any

from stoker_runtime.fetch.errors import FetchFailed
from stoker_runtime.fetch.reference import relative_path

# More entries than this are cut off by the server, which does not say so.
MAX_ENTRIES = 3000
_SHA256 = re.compile(r"[0-9a-f]{64}")


def revisions(body: bytes, repo: str) -> tuple[str, ...]:
    """The names of a repository's branches, then of its tags. Raises FetchFailed."""
    names = _data(body, repo).get("RevisionMap")
    if not isinstance(names, dict):
        raise _strange(repo)
    found = []
    for kind in ("Branches", "Tags"):
        for entry in names.get(kind) or ():
            if not isinstance(entry, dict) or not isinstance(entry.get("Revision"), str):
                raise _strange(repo)
            found.append(entry["Revision"])
    return tuple(found)


def files(body: bytes, repo: str) -> list[tuple[str, int, str]]:
    """(name, size, SHA-256 or "") of each file in a listing. Raises FetchFailed."""
    entries = _data(body, repo).get("Files")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _strange(repo)
    if len(entries) >= MAX_ENTRIES:
        raise FetchFailed(f"{repo}: ModelScope lists {MAX_ENTRIES:,} entries at most, and this repository has more.")
    return [_file(entry, repo) for entry in entries if entry.get("Type") != "tree"]


def _file(entry: dict[str, Any], repo: str) -> tuple[str, int, str]:
    name, size, digest = entry.get("Path"), entry.get("Size"), entry.get("Sha256") or ""
    if not isinstance(name, str) or not isinstance(size, int) or size < 0:
        raise _strange(repo)
    if digest and not (isinstance(digest, str) and _SHA256.fullmatch(digest)):
        raise _strange(repo)
    return relative_path(name, repo), size, digest


def _data(body: bytes, repo: str) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict) or document.get("Code") != 200 or not isinstance(document.get("Data"), dict):
        raise _strange(repo)
    data: dict[str, Any] = document["Data"]
    return data


def _strange(repo: str) -> FetchFailed:
    return FetchFailed(f"{repo}: the answer is not what ModelScope answers; is this address one?")
