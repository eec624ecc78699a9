"""Decides what is given up for what is to come: pure.

Invariants: what a pod uses, or a fetch is bringing, is never given up; what is left half-way goes first, then what was
used longest ago; where all of that would not be enough, nothing is given up.
Knows nothing of disks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stored:
    """Something that takes room: a copy, or what a fetch left half-way (`digest` ""). `used`: seconds since 1970."""

    folder: str
    name: str
    bytes: int
    used: float
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Bounds:
    """`limit`: the most that all may take; `free`: what the disk has left; `reserved`: what others were promised and
    have not written yet. Bytes.
    """

    limit: int
    free: int
    reserved: int = 0


def give_up(
    stored: Iterable[Stored], held: frozenset[tuple[str, str]], needed: int, bounds: Bounds
) -> list[Stored] | None:
    """What to give up so that `needed` bytes more fit, the first first; None when they never will.

    `held`: (folder, name) of what must stay.
    """
    there = list(stored)
    total = sum(item.bytes for item in there)
    over = max(total + bounds.reserved + needed - bounds.limit, bounds.reserved + needed - bounds.free)
    idle = sorted(
        (item for item in there if (item.folder, item.name) not in held),
        key=lambda item: (bool(item.digest), item.used),
    )
    chosen: list[Stored] = []
    while over > 0 and idle:
        chosen.append(idle.pop(0))
        over -= chosen[-1].bytes
    return chosen if over <= 0 else None
