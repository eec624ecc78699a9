"""One container as a process: start, probe, end; and its state in Kubernetes' words.

Invariants: a process is in a session of its own and is ended as a group, so nothing outlives its container; output goes
to a log file; a probe's budget is the manifest's, though a success is looked for more often.
Knows nothing of pods and restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from stoker_operator.local.process import LOOPBACK, Mapped
from stoker_operator.local.store import timestamp

# Asking costs little here, and whoever waits at a terminal sees the difference.
_POLL_SECONDS = 0.2
# What the kubelet keeps of a log when a container ends without a message of its own.
_TAIL_BYTES = 2048


class Container:
    """A container's process and what is known of it."""

    def __init__(self, mapped: Mapped, manifest: Mapping[str, Any], log: Path) -> None:
        self.name = mapped.name
        self.log = log
        self._mapped = mapped
        self._manifest = manifest
        self._process: asyncio.subprocess.Process | None = None
        self._started_at = ""
        self.state: dict[str, Any] = {"waiting": {"reason": "ContainerCreating", "message": ""}}
        self.last_state: dict[str, Any] = {}
        self.restarts = 0
        self.ready = False

    def status(self) -> dict[str, Any]:
        """The entry of `containerStatuses`."""
        image = str(self._manifest.get("image", ""))
        return {
            "name": self.name,
            "image": image,
            "ready": self.ready,
            "restartCount": self.restarts,
            "state": self.state,
            "lastState": self.last_state,
        }

    async def start(self) -> None:
        """Start the process."""
        self._mapped.termination_log.parent.mkdir(parents=True, exist_ok=True)
        self._mapped.termination_log.unlink(missing_ok=True)
        with open(self.log, "ab") as stream:
            self._process = await asyncio.create_subprocess_exec(
                *self._mapped.command,
                env=dict(self._mapped.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        self._started_at = timestamp()
        self.state = {"running": {"startedAt": self._started_at}}

    async def wait(self) -> int:
        """Wait for the end; returns the exit status as Kubernetes counts it (128 + the signal's number)."""
        process = self._running()
        code = await process.wait()
        # What the process started and left behind ends with it, as with its container.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = 128 - code if code < 0 else code
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "message": self._message(code)}
        self.state = {"terminated": ended | {"startedAt": self._started_at, "finishedAt": timestamp()}}
        self.ready = False
        return code

    async def end(self, grace_seconds: float) -> None:
        """SIGTERM, and SIGKILL to the whole group when the grace is over."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), grace_seconds)
        except TimeoutError:
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """SIGKILL, at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def reaped(self) -> None:
        """Wait until a process that was told to end has ended and its parts are closed."""
        if self._process is not None:
            await self._process.wait()
            await asyncio.sleep(0)

    async def succeeds_once(self, probe: Mapping[str, Any], ports: Mapping[int, int], names: Mapping[str, int]) -> bool:
        """Probe until a success, for as long as the manifest allows; False when that time is over."""
        budget = float(probe.get("periodSeconds", 10)) * int(probe.get("failureThreshold", 3))
        end = asyncio.get_running_loop().time() + budget
        while asyncio.get_running_loop().time() < end:
            if await ask(probe, ports, names):
                return True
            await asyncio.sleep(min(_POLL_SECONDS, float(probe.get("periodSeconds", 10))))
        return False

    def tail(self, size: int = _TAIL_BYTES) -> str:
        """The end of the log."""
        if not self.log.exists():
            return ""
        with open(self.log, "rb") as stream:
            stream.seek(max(self.log.stat().st_size - size, 0))
            return stream.read().decode("utf-8", "replace").strip()

    def _message(self, code: int) -> str:
        """The termination message; after a failure without one, the end of the log."""
        if self._mapped.termination_log.exists():
            text = self._mapped.termination_log.read_text(errors="replace").strip()
            if text:
                return text
        return self.tail() if code else ""

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError(f"container {self.name} was never started")
        return self._process


async def ask(probe: Mapping[str, Any], ports: Mapping[int, int], names: Mapping[str, int]) -> bool:
    """One HTTP probe: does it answer with success in time? `names`: port name → port in the manifest."""
    get = probe["httpGet"]
    port = names[get["port"]] if isinstance(get["port"], str) else int(get["port"])
    url = f"http://{LOOPBACK}:{ports[port]}{get.get('path', '/')}"
    timeout = aiohttp.ClientTimeout(total=float(probe.get("timeoutSeconds", 1)))
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
            return 200 <= answer.status < 400
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
