"""What ranks leave for each other before they exchange anything: the words of their meeting, and what they decided on.

Machines may differ, and what a rank decides by its own (its type, the sizes of a step) has to be the same on all. So
each compares what it has decided on with the leader, and ends by name where it differs.

Invariants: nobody waits here for longer than START_TIMEOUT.
Knows nothing of what ranks exchange.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import FileStore, Store, TCPStore

from stoker_runtime.errors import ConfigError
from stoker_runtime.parallel.meeting import Meeting
from stoker_runtime.parallel.place import Place

# A rank that waits longer for another one's start gives up; how long a step may take is for `ranks/watch.py` to say.
START_TIMEOUT = timedelta(minutes=30)
DECIDED = "what the leader has decided on"


def open_store(meeting: Meeting, place: Place) -> Store:
    """The store at `meeting`. Sets by which interface they exchange, unless the environment says it."""
    if meeting.interface:
        # Looking up the machine's name, as gloo does by default, may fail in a container, or give another network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", meeting.interface)
    if meeting.file:
        return FileStore(meeting.file, place.world)
    if meeting.interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={meeting.interface}")
    return TCPStore(
        meeting.host,
        meeting.port,
        world_size=place.world,
        is_master=place.leads,
        timeout=START_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=meeting.listener if place.leads else None,
    )


def agree(store: Store, place: Place, decided: Mapping[str, str]) -> None:
    """Raises ConfigError where this rank has decided on anything else than the leader. Waits for the leader."""
    if place.leads:
        store.set(DECIDED, json.dumps(dict(decided)))
        return
    for name, leaders in json.loads(store.get(DECIDED)).items():
        if decided[name] != leaders:
            raise ConfigError(
                f"{name} is {decided[name]} on node {place.node} and {leaders} on node 0: they are different machines; "
                f"give all nodes the same --{name.replace('_', '-')}.",
                param=name,
            )
