"""The kinds of frames between nodes that have joined, and what those of a node say of its ranks.

Invariants: what is read gives back what was written.
Knows nothing of how frames travel.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from stoker_runtime.ranks.watch import Life

STEP, BEAT, READY, END, FAULT = 16, 17, 18, 19, 20
"""From the leader: a message to all ranks; it lives; all ranks are ready; the ranks end, and why. From a node: its
ranks' lives, as a beat; what befell them; that they have ended as they were told.
"""
LIFE = struct.Struct("<?d")


def encode_lives(lives: Sequence[Life]) -> bytes:
    """The payload of a node's beat."""
    return b"".join(LIFE.pack(life.stopped, life.seconds) for life in lives)


def decode_lives(payload: bytes) -> list[Life]:
    """What a node's beat says of its ranks."""
    return [Life(stopped, seconds) for stopped, seconds in LIFE.iter_unpack(payload)]
