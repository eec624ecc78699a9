"""How long this process has existed, interpreter and imports included.

Invariants: counted from the moment the operating system made the process, to 1/100 s.
Knows nothing of what the time was spent on.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_IMPORTED = time.monotonic()


def process_age() -> float:
    """Seconds since this process was made; where the system does not tell, since this module was imported."""
    try:
        stat = Path("/proc/self/stat").read_text()
    except OSError:
        return time.monotonic() - _IMPORTED
    # The name in parentheses may hold anything; starttime, in ticks since boot, is the 20th field after it.
    ticks = int(stat.rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
