"""The engine process: `python -m stoker_runtime.engine` with a pickled `Start` on its standard input.

What a start waits for longest is begun before anything large is imported: that alone takes half a second, and torch
two. The pipe stays open; its end means that the parent died, and the engine exits. Signals of the terminal are the
parent's to handle.
Knows nothing of what the process does once all is imported (`core.py`).
"""

from __future__ import annotations

import gc
import pickle
import signal
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from stoker_runtime.engine import head_start
from stoker_runtime.engine.messages import Start
from stoker_runtime.process.exit_status import leave
from stoker_runtime.process.log import set_up
from stoker_runtime.process.parent import exit_with_parent

if TYPE_CHECKING:
    from stoker_runtime.engine.executor_protocol import ExecutorFactory


def main(build: ExecutorFactory | None = None) -> int:
    """The life of the process; its exit status. `build` makes the executor; without it, the real one."""
    # Millions of objects are imported and none is garbage: the collector would only walk them, again and again.
    gc.disable()
    start = read_start(sys.stdin.buffer)
    config = start.config
    ahead = head_start.begin(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=exit_with_parent, args=(sys.stdin.buffer,), daemon=True).start()
    name = f"engine {config.data_parallel_rank}" if config.data_parallel_size > 1 else ""
    set_up(start.log_level, start.log_json, name)
    crew = head_start.begin_ranks(config)
    from stoker_runtime.engine.core import build_executor, run

    return run(start, ahead, build or partial(build_executor, crew=crew))


def read_start(stream: BinaryIO) -> Start:
    """The pickled Start, which comes from the parent through a pipe."""
    start = pickle.load(stream)
    if not isinstance(start, Start):
        raise TypeError(f"the engine process needs a Start on its standard input, not a {type(start).__name__}")
    return start


if __name__ == "__main__":
    leave(main())
