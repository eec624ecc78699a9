"""Faults under load: the engine is killed or hung, an API process is killed, the disk is filled; and how it heals.

A kubelet's part is played here: a server that ended is started again, one whose /health fails is ended first. Time
counts from the fault (of the disk: from when there is room again) to the first answer of everything that suffered.

Invariants: each fault finds a server that answers; every request that was open at the fault is followed to its end.
Knows nothing of verdicts.
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from stoker_runtime.bench.soak.kinds import batch, stored, upload, whole
from stoker_runtime.bench.soak.load import Load
from stoker_runtime.bench.soak.server import API_PROCESS, ENGINE_PROCESS, Server
from stoker_runtime.bench.soak.tally import Tally
from stoker_runtime.bench.soak.visit import Full, Visit, Wrong
from stoker_runtime.bench.soak.wire import GONE, Wire
from stoker_runtime.bench.start_mode import StartFailed
from stoker_runtime.errors import ConfigError

SMALL_MIB = 64
POLL_SECONDS = 0.05
HEALING_SECONDS = 300.0
WELL_SECONDS = 2.0
FULL_SECONDS = 3.0
UPLOADED = b"x" * 2**20
NO_ROOM = "status 507"


@dataclass(frozen=True, slots=True)
class Healed:
    """One fault: requests open when it came and how they ended, seconds to the last of them and to ready again."""

    fault: str
    opened: int
    ends: dict[str, int]
    unended: int
    ended_seconds: float
    ready_seconds: float
    trouble: str

    @property
    def said(self) -> str:
        """In words."""
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        said = f"{self.opened} requests open, the last ended after {self.ended_seconds:.1f} s, {self.unended} never; "
        said += f"ready again in {self.ready_seconds:.1f} s (meanwhile: {ends or 'none'})"
        return f"{said}; {self.trouble}" if self.trouble else said


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a fault happens."""

    server: Server
    small: Path | None
    load: Load

    async def tries(self, run: Callable[[Visit], Awaitable[object]]) -> str:
        """Try a kind of request once: what went wrong, empty if nothing did."""
        plan, wire = self.load.plan, Wire(self.server.url, self.load.plan.api_key)
        visit = Visit(wire, random.Random(time.monotonic_ns()), self.load.facts, Tally(), lambda _: None)
        try:
            async with asyncio.timeout(plan.patience):
                await run(visit)
        except (Wrong, Full, TimeoutError, *GONE) as error:
            return str(error) or type(error).__name__
        finally:
            wire.leave()
        return ""

    async def health(self) -> int:
        """The status of /health; 0 where nothing listens."""
        wire = Wire(self.server.url)
        try:
            return (await wire.ask("GET", "/health")).status
        except GONE:
            return 0
        finally:
            wire.leave()

    async def restarted(self) -> None:
        """Play the kubelet until the server was started anew and answers."""
        starts = self.server.starts
        while self.server.starts == starts or await self.tries(whole):
            if self.server.ended:
                self.server.start()
            elif self.server.starts == starts and await self.health() == 503:
                await asyncio.to_thread(self.server.stop)
            await asyncio.sleep(POLL_SECONDS)


async def kill_engine(scene: Scene) -> tuple[float, str]:
    """The engine process ends from one moment to the next; the server ends after it, and is started again."""
    return await _engine(scene, signal.SIGKILL)


async def hang_engine(scene: Scene) -> tuple[float, str]:
    """The engine process stops without ending; the server finds out, and fails its health."""
    return await _engine(scene, signal.SIGSTOP)


async def _engine(scene: Scene, number: signal.Signals) -> tuple[float, str]:
    (engine,) = scene.server.processes(ENGINE_PROCESS)
    began = time.monotonic()
    scene.server.kill(engine, number)
    await scene.restarted()
    return began, ""


async def kill_api(scene: Scene) -> tuple[float, str]:
    """One of two API processes ends; another takes its place while the other one goes on."""
    before = scene.server.processes(API_PROCESS)
    began, lost = time.monotonic(), before[0]
    scene.server.kill(lost, signal.SIGKILL)
    while lost in (now := scene.server.processes(API_PROCESS)) or len(now) < len(before) or await scene.tries(whole):
        await asyncio.sleep(POLL_SECONDS)
    # The new one listens from the moment when it can answer: every one of many fresh connections is answered.
    troubles = [trouble for _ in range(2 * len(before)) if (trouble := await scene.tries(whole))]
    return began, troubles[0] if troubles else ""


async def fill_disk(scene: Scene) -> tuple[float, str]:
    """There is no room for files for a while: who needs none goes on, who does is told, and all is well afterwards."""
    assert scene.small is not None, "the disk to fill is missing"
    ballast = scene.small / "ballast"
    fill(ballast)
    trouble, until = "", time.monotonic() + FULL_SECONDS
    failed = scene.load.tally.count("failed")
    others = _failed_without_files(scene.load.tally)
    while time.monotonic() < until:
        said = await scene.tries(lambda visit: upload(visit, UPLOADED))
        if not said.startswith(NO_ROOM):
            trouble = f"a file was uploaded to a full disk: {said or 'status 200'}"
        await asyncio.sleep(POLL_SECONDS)
        fill(ballast)
    if more := _failed_without_files(scene.load.tally) - others:
        trouble = f"{more} requests that need no disk failed ({scene.load.tally.count('failed') - failed} in all)"
    ballast.unlink()
    began = time.monotonic()
    for kind in (batch, stored, whole):
        while await scene.tries(kind):
            await asyncio.sleep(POLL_SECONDS)
    return began, trouble


def _failed_without_files(tally: Tally) -> int:
    """Requests of kinds that store nothing that failed or were cut."""
    return sum(
        count
        for (kind, end), count in tally.ends.items()
        if end in ("failed", "cut") and kind not in ("batch", "stored")
    )


def fill(ballast: Path) -> None:
    """Make a file grow until there is no room left."""
    with ballast.open("ab", buffering=0) as file:
        write_all_there_is(file)


def write_all_there_is(file: FileIO) -> None:
    """Write until not one byte more is taken."""
    size = 2**20
    while size:
        try:
            file.write(bytes(size))
        except OSError:
            size //= 2


FAULTS: dict[str, Callable[[Scene], Awaitable[tuple[float, str]]]] = {
    "kill-engine": kill_engine,
    "hang-engine": hang_engine,
    "kill-api": kill_api,
    "fill-disk": fill_disk,
}


@contextmanager
def small_folder(folder: Path) -> Iterator[Path]:
    """A small file system of its own. Raises ConfigError where none may be mounted."""
    place = folder / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_MIB}m,mode=0700", "stoker-soak", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise ConfigError(f"fill-disk mounts a small tmpfs, for which root is needed: {said.strip()}") from error
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


async def run_faults(faults: Sequence[str], server: Server, small: Path | None, load: Load) -> list[Healed]:
    """Let each fault happen under the load, and end the load."""
    scene = Scene(server, small, load)
    running = asyncio.create_task(load.run(lambda: None))
    try:
        healed = []
        for fault in faults:
            healed.append(await _one(fault, scene))
            print(f"# {fault}: {healed[-1].said}", flush=True)
    finally:
        load.stopped = True
        await running
    return healed


async def _one(fault: str, scene: Scene) -> Healed:
    await _well(scene)
    load, before = scene.load, scene.load.tally.ends.copy()
    opened = dict(load.under_way)
    following = asyncio.create_task(_follow(load, opened))
    try:
        async with asyncio.timeout(HEALING_SECONDS):
            began, trouble = await FAULTS[fault](scene)
        ready = time.monotonic() - began
    except TimeoutError:
        ready, trouble = HEALING_SECONDS, f"not ready again after {HEALING_SECONDS:.0f} s"
    last = await following
    ends = load.tally.ends - before
    named = {end: sum(count for (_, each), count in ends.items() if each == end) for end in {end for _, end in ends}}
    if wrong := named.get("wrong", 0):
        words = [each for (_, end), kept in load.tally.wrong.items() if end == "wrong" for each in kept]
        trouble = f"{wrong} answers were wrong: {words[-3:]}"
    return Healed(fault, len(opened), named, named.get("unended", 0), last, ready, trouble)


async def _well(scene: Scene) -> None:
    """Wait until the load runs: for a while, nothing but good ends, and half of its streams under way."""
    tally, deadline = scene.load.tally, time.monotonic() + HEALING_SECONDS
    while time.monotonic() < deadline:
        before = tally.ends.copy()
        await asyncio.sleep(WELL_SECONDS)
        ends = {end for _, end in (tally.ends - before)}
        if "ok" in ends and not ends - {"ok", "full"} and len(scene.load.under_way) * 2 >= scene.load.plan.streams:
            return
    words = [each for kept in tally.wrong.values() for each in kept][-3:]
    raise StartFailed(f"the load did not run well for {HEALING_SECONDS:.0f} s before the next fault: {words}")


async def _follow(load: Load, opened: dict[object, float]) -> float:
    """Seconds until none of the requests in `opened` is under way any more."""
    began = time.monotonic()
    while opened.keys() & load.under_way.keys():
        await asyncio.sleep(POLL_SECONDS)
    return time.monotonic() - began
