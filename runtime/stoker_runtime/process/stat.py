"""What the operating system says of a process: whether it is there, stopped, and how long it has computed.

Invariants: reads one file; a process that is gone is no error.
Knows nothing of what processes do.
"""

from __future__ import annotations

import os
from pathlib import Path


def process_exists(pid: int) -> bool:
    """Whether a process with this id is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def processor_seconds(pid: int) -> float | None:
    """Processor time that a process has used, all its threads together; None where the system does not tell."""
    # utime and stime, in ticks.
    fields = _fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else None


def is_stopped(pid: int) -> bool:
    """Whether a signal, or a debugger, holds a process."""
    fields = _fields(pid)
    return bool(fields) and fields[0] in ("T", "t")


def _fields(pid: int) -> list[str]:
    """What stands behind the name in a process's line; nothing where the system does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The name in parentheses may hold anything.
    return stat.rpartition(")")[2].split()
