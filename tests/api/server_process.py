"""A server in a process of its own, and what tests do with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
from api_server import CLIENT, wait_until

ROOT = Path(__file__).parents[2]
UNIFORM = Path(__file__).parent / "uniform_server.py"
FRESH = {"connection": "close"}


class ServerProcess:
    """A server process; its log is read as it comes."""

    def __init__(self, program: list[str], *flags: str) -> None:
        roots = [str(ROOT / name) for name in ("runtime", "kernels", "cli", "operator")]
        roots += [given] if (given := os.environ.get("PYTHONPATH")) else []
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots), "OMP_NUM_THREADS": "1"}
        self.popen = subprocess.Popen(
            [*program, "--port", "0", *flags], env=environment, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        assert wait_until(lambda: "listening on" in self.log or self.popen.poll() is not None, 30), self.log
        scheme, port = re.findall(r"listening on (https?)://[^:]+:(\d+)", self.log)[0]
        return f"{scheme}://127.0.0.1:{port}"

    def wait_ready(self, seconds: float = 30) -> ServerProcess:
        url = self.url
        try:
            ready = wait_until(lambda: CLIENT.get(f"{url}/ready").status_code == 200, seconds)
        except httpx.TransportError as error:
            raise AssertionError(f"{error!r} of a server that starts:\n{self.log}") from error
        assert ready, self.log
        return self

    def engine_pids(self) -> list[int]:
        """Children of the server."""
        return [int(pid) for pid in Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()]

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def exit_status(self, seconds: float = 20) -> int:
        status = self.popen.wait(seconds)
        self._reader.join(5)
        return status

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._reader.join(5)
        assert self.popen.stderr is not None
        self.popen.stderr.close()


def fleet(mode: str, *flags: str) -> ServerProcess:
    """A server with two API processes whose engine behaves as `mode` says."""
    return ServerProcess([sys.executable, str(UNIFORM), mode], "--api-server-count", "2", *flags)


def children(pid: int) -> dict[str, int]:
    """The processes that a server started, by the last word of their command."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    api = [each for each in found if b"stoker_runtime.serve.api_process" in Path(f"/proc/{each}/cmdline").read_bytes()]
    engines = [each for each in found if each not in api]
    return {f"api {at}": int(each) for at, each in enumerate(api)} | {"engine": int(engines[0])}


def figures(url: str) -> dict[str, float]:
    """What a scrape over a new connection shows."""
    lines = CLIENT.get(f"{url}/metrics", headers=FRESH).text.splitlines()
    return {name: float(value) for line in lines if line[0] != "#" for name, value in [line.rsplit(" ", 1)]}
