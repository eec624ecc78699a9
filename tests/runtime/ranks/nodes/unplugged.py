"""In a network that is a loopback alone: a leader and a node that lose each other, and how long it takes.

Prints the seconds until the leader knew, and until the node had ended, and why each thinks it ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from tests.runtime.ranks.nodes.conftest import Group
from tests.runtime.ranks.test_faults import wait_for

from stoker_runtime.config import EngineConfig


def loopback(state: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


def main() -> None:
    loopback("up")
    config = EngineConfig(
        "shape:tiny", device="cpu", pipeline_parallel_size=2, nnodes=2, master_addr="127.0.0.1", master_port=29501
    )
    group = Group(config)
    try:
        crew = group.complete()
        loopback("down")
        began = time.monotonic()
        wait_for(lambda: bool(crew.fault), "the leader does not notice")
        noticed = time.monotonic() - began
        status = group.nodes[0].status()
        ended = time.monotonic() - began
        sys.stdout.write(json.dumps([noticed, crew.fault, ended, status, group.nodes[0].log]))
    finally:
        group.close()


if __name__ == "__main__":
    main()
