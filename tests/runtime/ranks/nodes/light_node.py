"""A node whose ranks have no model, in a process of its own: the leader's, which then waits, or another one's."""

from __future__ import annotations

import pickle
import sys
import threading
from pathlib import Path

from stoker_runtime.config import ServerConfig
from stoker_runtime.process.exit_status import run_until_exit
from stoker_runtime.process.log import set_up
from stoker_runtime.ranks.crew import Crew
from stoker_runtime.serve.node import NodeServer

COMMAND = (sys.executable, str(Path(__file__).parent / "light_follower.py"))


def main() -> int:
    config = pickle.load(sys.stdin.buffer)
    assert isinstance(config, ServerConfig)
    set_up("info")
    if config.engine.node_rank:
        return run_until_exit(NodeServer(config, COMMAND).run(), "the node")
    crew = Crew(config.engine, command=COMMAND)
    crew.watch()
    crew.gather()
    crew.ready(on_gpu=False)
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
