"""What a server holds: requests, slots, KV pages, handles, tasks, descriptors, memory, as told and as /proc shows it.

Invariants: looking holds nothing itself: each look has a connection of its own and closes it. What cannot be seen from
here (the memory of a server elsewhere) is None, never 0.
Knows nothing of load. Memory in MiB.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stoker_runtime.bench.soak.wire import Wire
from stoker_runtime.bench.start_mode import tree

LOOKS = 24
POLL_SECONDS = 0.25
DEVICE_QUERY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True)
class Held:
    """Everything that a request may hold, of the whole server. `descriptors`: files and sockets."""

    requests: int
    slots: int
    waiting: int
    kv_pages: int
    host_kv_pages: int
    handles: int
    tasks: int
    descriptors: int

    def beyond(self, other: Held) -> list[str]:
        """What is more here than there, in words."""
        pairs = ((each.name, getattr(self, each.name), getattr(other, each.name)) for each in fields(self))
        return [f"{mine - theirs} {name.replace('_', ' ')}" for name, mine, theirs in pairs if mine > theirs]


async def look(url: str, api_key: str = "", pid: int | None = None) -> Held:
    """What the server holds now; `pid` is its first process where that runs here.

    Each API process tells of itself, and connections go to any of them, so several looks find them all.
    """
    found: dict[int, dict[str, Any]] = {}
    answer: dict[str, Any] = {}
    for _ in range(LOOKS):
        wire = Wire(url, api_key)
        try:
            answer = (await wire.ask("GET", "/load")).content
        finally:
            wire.leave()
        found[answer["process"]["pid"]] = answer["process"]
    processes = list(found.values())
    told = sum(each["descriptors"] for each in processes)
    return Held(
        requests=answer["server_load"],
        slots=answer["running"],
        waiting=answer["waiting"],
        kv_pages=answer["kv_pages"],
        host_kv_pages=answer["host_kv_pages"],
        handles=sum(each["requests"] for each in processes),
        tasks=sum(each["tasks"] for each in processes),
        descriptors=told if pid is None else descriptors_of(pid),
    )


async def settled(url: str, api_key: str, pid: int | None, before: Held | None, seconds: float) -> Held:
    """Look until nothing is held beyond `before` (without it: until no request runs), at most `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        held = await look(url, api_key, pid)
        busy = held.beyond(before) if before else held.requests + held.slots + held.waiting + held.handles
        if not busy or asyncio.get_running_loop().time() > deadline:
            return held
        await asyncio.sleep(POLL_SECONDS)


def descriptors_of(pid: int) -> int:
    """Open files and sockets of a process and all below it."""
    count = 0
    for each in tree_now(pid):
        try:
            count += len(os.listdir(f"/proc/{each}/fd"))
        except OSError:
            continue
    return count


def resident_mib(pid: int) -> float:
    """Resident memory of a process and all below it; pages that they share count once for each."""
    pages = 0
    for each in tree_now(pid):
        try:
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def tree_now(pid: int) -> list[int]:
    """A process and its descendants; those that end meanwhile are left out."""
    try:
        return list(tree(pid))
    except OSError:
        return [pid]


def device_mib() -> float | None:
    """Memory in use on all GPUs of this machine; None where there is none."""
    try:
        said = subprocess.run(DEVICE_QUERY, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return sum(float(line) for line in said.split("\n") if line.strip())
