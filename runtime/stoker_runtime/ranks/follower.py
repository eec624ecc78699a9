"""The process of a rank beside the leader's: builds its part of the model, then runs step after step.

Started as `python -m stoker_runtime.ranks.follower` with a pickled `RankStart` on its standard input, which stays open:
its end means that whoever started it died (the leader, or on another node its member), and the rank ends. Signals of
the terminal are the server's to handle.

Invariants: it does what the ring says, in its order, and nothing else. Any exception ends it, and with it all ranks.
Knows nothing of requests.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import cast

from stoker_runtime.errors import ConfigError, StokerError
from stoker_runtime.parallel.adapter_order import AdapterOrder
from stoker_runtime.process.exit_status import BAD_CONFIGURATION, FAILED, leave
from stoker_runtime.process.log import set_up
from stoker_runtime.process.parent import exit_with_parent
from stoker_runtime.process.stat import is_stopped
from stoker_runtime.ranks.ring import Ring
from stoker_runtime.ranks.team import RankStart
from stoker_runtime.ranks.watch import STOPPED_SECONDS, WATCH_SECONDS
from stoker_runtime.ranks.wire import IDLE, STOP, Wire
from stoker_runtime.step.batch import Batch
from stoker_runtime.weights.cuda_driver import begin_context

PR_SET_PDEATHSIG = 1

log = logging.getLogger("stoker_runtime.ranks")


def main(follow: Callable[[RankStart], None] | None = None) -> int:
    """The life of the process; its exit status."""
    # A rank that is stopped would not notice that its pipe has closed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    start = pickle.load(sys.stdin.buffer)
    if not isinstance(start, RankStart):
        raise TypeError(f"a rank needs a RankStart on its standard input, not a {type(start).__name__}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=exit_with_parent, args=(sys.stdin.buffer,), daemon=True).start()
    threading.Thread(target=end_stopped, args=(os.getppid(),), daemon=True).start()
    set_up(start.log_level, start.log_json, f"rank {start.place.rank}")
    # Nothing that is imported or loaded is garbage.
    gc.disable()
    try:
        (follow or follow_leader)(start)
    except StokerError as error:
        log.error("the rank ends: %s", error.message)
        return BAD_CONFIGURATION if isinstance(error, ConfigError) else FAILED
    except Exception:
        log.exception("the rank is broken and ends")
        return FAILED
    return 0


def end_stopped(parent: int) -> None:
    """Kill the process that watches the ranks once it has been stopped for a while: it cannot watch itself. They end
    with it.
    """
    stopped = 0
    while stopped * WATCH_SECONDS <= STOPPED_SECONDS:
        time.sleep(WATCH_SECONDS)
        stopped = stopped + 1 if is_stopped(parent) else 0
    log.critical("process %d, which watches the ranks, has been stopped for %.0f s; all end", parent, STOPPED_SECONDS)
    os.kill(parent, signal.SIGKILL)


def follow_leader(start: RankStart) -> None:
    """Build the rank's executor and run what the leader says, until it says stop. Raises what breaks it."""
    ring = Ring(os.open(start.ring, os.O_RDWR), start.readers)
    config, place = start.config, start.place
    if config.device != "cpu":
        begin_context(config.gpu_of(place.rank))
    from stoker_runtime.parallel.group import EarlyGroup

    early = EarlyGroup.begin(config, place, start.meeting) if place.nodes == 1 else None
    from stoker_runtime.executor.build import build_rank
    from stoker_runtime.parallel.adapters import RankAdapters
    from stoker_runtime.parallel.rank import Rank
    from stoker_runtime.ranks.executors import FollowingExecutor
    from stoker_runtime.ranks.sleep import obey

    executor = build_rank(config, Rank(config, place, start.meeting, early), FollowingExecutor)
    gc.collect()
    gc.freeze()
    gc.enable()
    wire = Wire()
    while (task := wire.decode(ring.read(start.reader))) != STOP:
        if isinstance(task, Batch):
            executor.execute(task)
        elif isinstance(task, AdapterOrder):
            cast(RankAdapters, executor.adapters).obey(task)
        elif task == IDLE:
            executor.idle()
        else:
            obey(executor.sleeper, task)
    executor.close()
    ring.close()


if __name__ == "__main__":
    leave(main())
