"""The server that a soak starts: its command, its log, its processes, and who starts it again.

Invariants: ended with all its processes, whatever happens; it keeps its port over its restarts, so that clients find
the next one where the last one was.
Knows nothing of load. It does what a kubelet would: wait for readiness, restart what ended, end what is not healthy.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stoker_runtime.bench.soak.held import tree_now
from stoker_runtime.bench.start_mode import PATIENCE_SECONDS, StartFailed, end, free_port, request

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
POLL_SECONDS = 0.02
SHOWN_LINES = 15
API_PROCESS, ENGINE_PROCESS = b"stoker_runtime.serve.api_process", b"stoker_runtime.engine"


class Server:
    """`stoker serve` with `arguments`, on a port of its own. `small`: a folder where its files go."""

    def __init__(self, arguments: list[str], folder: Path, small: Path | None = None) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.starts = 0
        self._log = tempfile.NamedTemporaryFile("w+", dir=folder, suffix=".log", errors="replace")  # noqa: SIM115
        self._command = [sys.executable, "-m", "stoker_cli", "serve", *arguments]
        self._command += ["--host", "127.0.0.1", "--port", str(self._port), "--no-access-log"]
        self._environment = dict(os.environ)
        if small is not None:
            self._environment["TMPDIR"] = str(small)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its first process."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether its first process is gone."""
        return self._process is None or self._process.poll() is not None

    def start(self) -> None:
        """Start the process, and return at once."""
        self.starts += 1
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log, env=self._environment)

    def wait_ready(self) -> None:
        """Wait until it takes requests. Raises StartFailed with its last words."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while request(self._port, "GET", "/ready") != 200:
            if self.ended or time.monotonic() > deadline:
                raise StartFailed("the server did not become ready\n" + "\n".join(self.lines()[-SHOWN_LINES:]))
            time.sleep(POLL_SECONDS)

    def processes(self, module: bytes) -> list[int]:
        """Its processes that run a module."""
        found = []
        for pid in tree_now(self.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            found += [pid] if module in command else []
        return found

    def lines(self) -> list[str]:
        """What it has logged."""
        return Path(self._log.name).read_text(errors="replace").splitlines()

    def stop(self) -> tuple[int, list[int]]:
        """End it as a pod is ended; its exit status, and processes of it that are left (none, if all is well)."""
        if self._process is None:
            return 0, []
        family = tree_now(self.pid)
        end(self._process)
        left = [pid for pid in family if Path(f"/proc/{pid}").exists() and not _is_dead(pid)]
        return self._process.returncode, left

    def kill(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to one of its processes."""
        if pid not in tree_now(self.pid):
            raise ProcessLookupError(f"{pid} is no process of the server")
        os.kill(pid, number)

    def close(self) -> None:
        """End what is left of it."""
        if self._process is not None:
            for pid in reversed(tree_now(self.pid)):
                if not self.ended or pid != self.pid:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
            self._process.wait()
        self._log.close()


def _is_dead(pid: int) -> bool:
    """Whether a process has ended and only waits for its parent to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
