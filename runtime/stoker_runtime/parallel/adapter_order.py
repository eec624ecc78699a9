"""What the leader tells the other ranks of an adapter.

Invariants: plain data, torch-free.
Knows nothing of how it travels, and of what ranks do about it (`adapters.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Act(StrEnum):
    """What the leader tells of an adapter."""

    BEGIN = "begin"
    AGREE = "agree"
    KEEP = "keep"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """What the other ranks are to do with adapter `number`; `path` is the folder, to begin."""

    act: Act
    number: int
    path: str = ""
