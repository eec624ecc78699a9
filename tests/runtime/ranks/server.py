"""`stoker serve` in a process of its own; its log is read as it comes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time

import httpx


class Server:
    """A server on a free port."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        command = [sys.executable, "-m", "stoker_cli", "serve", *arguments, "--port", "0"]
        self._popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | variables)
        self.pid = self._popen.pid
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stderr is not None
        for line in self._popen.stderr:
            self._log.append(line)

    def wait_ready(self, seconds: float) -> str:
        """Its URL, once it is ready."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._popen.poll() is None:
            found = re.findall(r"listening on (http://[^:]+:\d+)", "".join(self._log))
            try:
                if found and httpx.get(f"{found[0]}/ready", timeout=5).status_code == 200:
                    return str(found[0])
            except httpx.TransportError:
                pass  # It has opened its port and does not answer yet.
            time.sleep(0.1)
        raise AssertionError("".join(self._log))

    @property
    def log(self) -> str:
        """What it has said. Once it has ended, all of it."""
        if self._popen.poll() is not None:
            self._reader.join(10)
        return "".join(self._log)

    def exit_status(self, seconds: float) -> int:
        """How it ended."""
        return self._popen.wait(seconds)

    def close(self) -> None:
        """End it, if it lives."""
        self._popen.kill()
        self._popen.wait()
        self._reader.join(10)
        assert self._popen.stderr is not None
        self._popen.stderr.close()
