"""The node cache agent's process: settings → health endpoint → the loop. `stoker node-cache`.

Invariants: it is ready after its first whole look, and ill while a look hangs; one that fails is tried again.
Exit status: 0 after a signal, 1 when its folder cannot be used, 2 for a bad setting.
Knows nothing of what the loop does.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from stoker_operator import process
from stoker_operator.cluster.api import Cluster
from stoker_operator.node_cache.agent import Agent
from stoker_operator.node_cache.disk import Disk
from stoker_operator.node_cache.settings import NodeCacheSettings, from_arguments
from stoker_operator.settings import SettingsError

log = logging.getLogger("stoker.node-cache")
_API_REQUESTS = 8


async def run(settings: NodeCacheSettings, stop: asyncio.Event) -> int:
    """The whole life of one agent; returns the exit status."""
    disk = Disk(Path(settings.folder), settings.group)
    try:
        await asyncio.to_thread(disk.prepare)
    except OSError as error:
        log.error("the folder %s cannot be used: %s", settings.folder, error)
        return 1
    cluster = await Cluster.connect(_API_REQUESTS)
    agent = Agent(cluster, settings, disk)
    runner = await process.serve_health(
        settings.http_host or None,
        settings.http_port,
        sick=lambda: "a look at the node hangs" if agent.hangs() else "",
        unready=lambda: "" if agent.synced else "starting",
    )
    try:
        await process.work_until(stop, agent.run())
    finally:
        await runner.cleanup()
        await cluster.close()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """`stoker node-cache`: parse the settings and run."""
    try:
        settings = from_arguments(sys.argv[1:] if argv is None else argv)
    except SettingsError as error:
        sys.stderr.write(f"stoker node-cache: {error}\n")
        return 2
    process.write_logs(settings.log_level)
    return process.until_signal(functools.partial(run, settings))
