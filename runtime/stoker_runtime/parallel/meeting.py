"""Where the ranks of a model meet before they exchange anything.

Invariants: plain data, torch-free.
Knows nothing of what is left there (`store.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

LOOPBACK = "lo"


@dataclass(frozen=True, slots=True)
class Meeting:
    """A `file` that all ranks can read, or port `port` of the leader's `host`, which the leader has as `listener`.

    `interface` is the one by which they exchange; "": what gloo and NCCL choose.
    """

    file: str = ""
    host: str = ""
    port: int = 0
    listener: int = -1
    interface: str = LOOPBACK
