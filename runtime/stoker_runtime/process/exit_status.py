"""The exit statuses of a server's processes.

Invariants: a configuration that cannot work is told apart from a start that failed, in every process alike.
Knows nothing of what went wrong.
"""

from __future__ import annotations

FAILED = 1
BAD_CONFIGURATION = 2
FORCED_EXIT = 1
"""Of a process that was ended before its work was."""
