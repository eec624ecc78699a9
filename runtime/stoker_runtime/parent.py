"""What a process that another one started does about its parent: it ends with it.

Invariants: the end comes whatever the process is doing, and leaves nothing running.
Knows nothing of why there is a parent.
"""

from __future__ import annotations

import os
from typing import BinaryIO

FORCED_EXIT = 1


def exit_with_parent(stream: BinaryIO) -> None:
    """Block until the parent's end of the pipe closes, then end the process, whatever it is doing."""
    # Not `stream.read`: a thread inside it would hold the stream's lock when the interpreter shuts down.
    while os.read(stream.fileno(), 1):
        pass
    os._exit(FORCED_EXIT)
