"""What a process that another one started does about its parent: it ends with it.

Invariants: the end comes whatever the process is doing, and leaves nothing running.
Knows nothing of why there is a parent.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import BinaryIO

from stoker_runtime.process.exit_status import FORCED_EXIT


def exit_with_parent(stream: BinaryIO, clean_up: Callable[[], None] | None = None) -> None:
    """Block until the parent's end of the pipe closes, then end the process, whatever it is doing.

    `clean_up` runs before, and does away with what only the parent would have.
    """
    # Not `stream.read`: a thread inside it would hold the stream's lock when the interpreter shuts down.
    while os.read(stream.fileno(), 1):
        pass
    if clean_up is not None:
        clean_up()
    os._exit(FORCED_EXIT)
