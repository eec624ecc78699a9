"""How many threads compute on a CPU: no more than this process may run at once, nor than its work keeps busy.

What may run at once is the smallest of the affinity, the quota of the control groups that it is in (versions 1 and 2),
and OMP_NUM_THREADS where it is set. torch looks at none but the first and the last, and a thread beyond the quota costs
more than it brings: all of them wait for the one that is held back.
Invariants: torch-free; at least one. `--cpu-threads` is taken as it is.
Knows nothing of models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
BYTES_PER_THREAD = 16 * 1024**2
"""A step reads all weights; a thread that reads less of them than this waits longer than it works."""


def compute_threads(asked: int, weights: int, ranks: int = 1) -> int:
    """Threads of a step that reads `weights` bytes, in one of `ranks` processes; `asked` unless that is 0."""
    if asked:
        return asked
    limits = [max(1, len(os.sched_getaffinity(0)) // ranks), max(1, weights // BYTES_PER_THREAD)]
    quota = quota_processors()
    if quota is not None:
        # A part of a processor that is left over is for the API's process.
        limits.append(max(1, int(quota) // ranks))
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        limits.append(max(1, int(os.environ["OMP_NUM_THREADS"])))
    return min(limits)


def quota_processors(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> float | None:
    """Processors that the control groups of this process let it use; None where none of them has a quota."""
    found = [quota for folder in _groups(root, own) if (quota := _quota(folder)) is not None]
    return min(found, default=None)


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """The folders of the groups that this process is in, and of those around them."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        inner = base / path.lstrip("/")
        # In a container's own namespace the path may be that of the host, and the group itself lies at the top.
        yield from (each for each in (inner, *inner.parents) if each == base or base in each.parents)


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if quota == "max" or int(quota) <= 0:
            return None
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None
