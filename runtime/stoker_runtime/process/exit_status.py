"""The exit statuses of a server's processes, and which error ends in which.

Invariants: a configuration that cannot work is told apart from a start that failed, in every process alike; each is
one line of the log, a traceback is for bugs only.
Knows nothing of what a process does.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn

from stoker_runtime.errors import ConfigError, StokerError

FAILED = 1
BAD_CONFIGURATION = 2
FORCED_EXIT = 1
"""Of a process that was ended before its work was."""


def leave(status: int) -> NoReturn:
    """End the process; at once where it has failed: a thread may wait within NCCL or gloo then, for ranks that are
    gone, and an ordinary end would pull its memory from under it.
    """
    if status:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(0)


def run_until_exit(served: Coroutine[Any, Any, int], what: str) -> int:
    """Run `served` in an event loop of its own; its exit status, or that of the error which ended it.

    `what` begins the sentence of a failed start, as "the server".
    """
    # Imported only now, so that --help and a wrong flag answer at once.
    import uvloop

    log = logging.getLogger("stoker_runtime.serve")
    try:
        return uvloop.run(served)
    except ConfigError as error:
        log.error("%s", error.message)
        return BAD_CONFIGURATION
    except StokerError as error:
        log.error("%s could not start: %s", what, error.message)
        return FAILED
