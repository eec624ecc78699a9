"""Named background processes that outlive the Python process that started them.

What runs is written to a file: name, command, pid and the pid's start time. So another command can stop or restart a
component, and a rig whose own process was killed can still be taken down.

Invariants: a pid is only ever signalled while its start time is the one that was written, so that a pid that was
given to another program is left alone; each process has a session of its own, so Ctrl-C reaches nobody but the rig.
Standard library only. Knows nothing of Kubernetes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

_STOP_SECONDS = 15.0
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
# Those that this very process started, to be collected when they end.
_children: dict[int, subprocess.Popen[bytes]] = {}


class StartError(RuntimeError):
    """A component did not come up; the message holds the end of its log."""


class NodeStartError(StartError):
    """This machine does not carry a node, whatever its probe said."""


@dataclass(frozen=True)
class Entry:
    """One started process. `born` is field 22 of /proc/PID/stat."""

    command: tuple[str, ...]
    log: str
    pid: int
    born: str


class Processes:
    """The processes of one state file, in the order of their start."""

    def __init__(self, state: Path, logs: Path) -> None:
        self._state, self._logs = state, logs
        self._owner = state.with_name("owner.json")

    def start(self, name: str, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a process; its output is appended to NAME.log. Raises StartError when that name already runs."""
        if self.alive(name):
            raise StartError(f"{name} is already running")
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{name}.log"
        with open(log, "ab") as stream:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        _children[process.pid] = process
        entries = self._read()
        entries.pop(name, None)
        entries[name] = Entry(tuple(command), str(log), process.pid, _born(process.pid))
        self._write(entries)

    def stop(self, name: str, *, kill: bool = False) -> None:
        """End one: SIGTERM, and SIGKILL when that is not heard (or at once). The entry stays, for `restart`."""
        entry = self._read().get(name)
        if entry is None:
            return
        if not _is(entry):
            if not _stat(entry.pid) or _stat(entry.pid)[0] == "Z":
                _reap(entry.pid)
            return
        os.kill(entry.pid, signal.SIGKILL if kill else signal.SIGTERM)
        if not _gone(entry, _STOP_SECONDS):
            os.kill(entry.pid, signal.SIGKILL)
            _gone(entry, _STOP_SECONDS)

    def restart(self, name: str) -> None:
        """Start one again by the command it was started with."""
        entry = self._read()[name]
        self.stop(name)
        self.start(name, list(entry.command))

    def stop_all(self) -> None:
        """End all in the reverse order of their start, and forget them."""
        for name in reversed(self._read()):
            self.stop(name)
        self._state.unlink(missing_ok=True)
        self._owner.unlink(missing_ok=True)

    def alive(self, name: str) -> bool:
        """Whether that process runs."""
        entry = self._read().get(name)
        return entry is not None and _is(entry)

    def own(self) -> None:
        """Write down that this very process will stop them."""
        self._state.parent.mkdir(parents=True, exist_ok=True)
        entry = Entry((), "", os.getpid(), _born(os.getpid()))
        self._owner.write_text(json.dumps(asdict(entry)))

    def owned(self) -> bool:
        """Whether the process that is to stop them still runs."""
        return self._owner.exists() and _is(Entry(**json.loads(self._owner.read_text())))

    def command(self, name: str) -> tuple[str, ...]:
        """What a process was started with. Raises KeyError."""
        return self._read()[name].command

    def wait(self, name: str, ready: Callable[[], bool], seconds: float) -> None:
        """Until `ready`. Raises StartError when it takes longer or the process ends, with the end of its log."""
        deadline = time.monotonic() + seconds
        while not ready():
            if not self.alive(name):
                raise StartError(f"{name} ended:\n{self.tail(name)}")
            if time.monotonic() > deadline:
                raise StartError(f"{name} is not ready after {seconds:.0f} s:\n{self.tail(name)}")
            time.sleep(0.1)

    def tail(self, name: str) -> str:
        """The end of a log."""
        path = self._logs / f"{name}.log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""

    def _read(self) -> dict[str, Entry]:
        try:
            document = json.loads(self._state.read_text())
        except FileNotFoundError:
            return {}
        return {name: Entry(**(item | {"command": tuple(item["command"])})) for name, item in document.items()}

    def _write(self, entries: Mapping[str, Entry]) -> None:
        self._state.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._state.with_suffix(".new")
        fresh.write_text(json.dumps({name: asdict(entry) for name, entry in entries.items()}, indent=1))
        fresh.rename(self._state)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait for the end of this, and spare the commands that are run within.

    Only the main thread may say so, and only it is interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    # The mask is for the commands, which inherit it; a process of several threads gets its signals all the same.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    before = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in _INTERRUPTS}
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third (the state) on; empty when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def _born(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if fields else ""


def _is(entry: Entry) -> bool:
    fields = _stat(entry.pid)
    return bool(fields) and fields[19] == entry.born and fields[0] != "Z"


def _gone(entry: Entry, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while _is(entry):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    _reap(entry.pid)
    return True


def _reap(pid: int) -> None:
    """Collect a child of ours that ended; another's is its parent's to collect."""
    child = _children.pop(pid, None)
    if child is not None:
        child.wait()
