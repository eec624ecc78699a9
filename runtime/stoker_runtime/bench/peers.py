"""What others reached, from peers.json: figures to stand beside ours, on the device that they were measured on.

Invariants: a figure of another device is never shown beside ours.
Knows nothing of how rows are measured or shown.
"""

from __future__ import annotations

import json
from importlib.resources import files

Figures = dict[str, float]


def peers_on(device: str) -> dict[str, dict[str, Figures]]:
    """Group → N (or what else a row is called) → figures; nothing where they are of another device than `device`."""
    held = json.loads(files("stoker_runtime.bench").joinpath("peers.json").read_text())
    rows: dict[str, dict[str, Figures]] = held["rows"]
    return rows if device == held["device"] else {}
