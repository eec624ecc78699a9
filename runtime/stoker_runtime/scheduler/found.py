"""What of a sequence's tokens is cached, and where: what is looked up before it is placed.

Knows nothing of who looks, and holds no page.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker_runtime.scheduler.sequence import Place


@dataclass(frozen=True, slots=True)
class Found:
    """What a sequence need not compute: its first pages on the `device`, the next on the `host`, up to `covered`."""

    device: list[int]
    host: list[int]
    covered: int
    near: list[Place] = field(default_factory=list)
    """Of layers with a window that give up pages: those in sight of what follows, on the device."""
    cached: int = 0
    """Where layers keep a state: pages that are there, of which those without a state to go on from are no hit."""
    state: int | None = None
    """The host's row of the states behind what is covered; None: they are on the device, or nothing is covered."""
