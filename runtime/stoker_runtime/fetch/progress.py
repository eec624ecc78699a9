"""How far a fetch is: counters, a terminal line, and an HTTP endpoint that the operator polls.

    GET /progress → {"phase": "resolve|download|verify|publish", "bytesDone": n, "bytesTotal": n,
    "etaSeconds": n}

Invariants: `bytesDone` never passes `bytesTotal`; the rate counts only bytes that moved in this run, not
resumed ones. Knows nothing of where the bytes come from.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TextIO

_WINDOW_SECONDS = 15.0
_BAR_CELLS = 24


class Progress:
    """Thread-safe counters of one fetch. All sizes in bytes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._phase = "resolve"
        self._done = 0
        self._total = 0
        self._moved = 0
        self._samples: deque[tuple[float, int]] = deque([(clock(), 0)])

    def enter(self, phase: str, total: int = 0) -> None:
        """Start a phase with `total` bytes to go through."""
        with self._mutex:
            self._phase, self._done, self._total, self._moved = phase, 0, total, 0
            self._samples = deque([(self._clock(), 0)])

    def kept(self, count: int) -> None:
        """Count bytes that were there already (negative: bytes that turned out to be of no use)."""
        with self._mutex:
            self._done += count

    def moved(self, count: int) -> None:
        """Count bytes that were read or written now."""
        now = self._clock()
        with self._mutex:
            self._done += count
            self._moved += count
            if now - self._samples[-1][0] >= 0.2:
                self._samples.append((now, self._moved))
                while len(self._samples) > 2 and now - self._samples[0][0] > _WINDOW_SECONDS:
                    self._samples.popleft()

    def snapshot(self) -> dict[str, int | str]:
        """The state as the endpoint serves it; etaSeconds and bytesPerSecond are 0 while unknown."""
        with self._mutex:
            then, moved = self._samples[0]
            rate = (self._moved - moved) / max(self._clock() - then, 1e-3)
            left = max(self._total - self._done, 0)
            return {
                "phase": self._phase,
                "bytesDone": min(self._done, self._total) if self._total else self._done,
                "bytesTotal": self._total,
                "bytesPerSecond": int(rate),
                "etaSeconds": int(left / rate + 0.999) if rate >= 1 else 0,
            }


class Terminal:
    """Shows a Progress on a stream: a bar that redraws itself on a terminal, else a line now and then."""

    def __init__(
        self,
        progress: Progress,
        stream: TextIO | None = None,
        every_seconds: float = 10.0,
        log: Callable[[str], None] | None = None,
    ) -> None:
        """`log` takes whole lines in the place of the stream, which then shows the bar alone, on a terminal."""
        self._progress = progress
        self._log = log
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._every = 0.2 if self._live else every_seconds
        self._stop = threading.Event()
        self._mutex = threading.Lock()
        self._drawn = False
        self._thread = threading.Thread(target=self._run, name="fetch-progress", daemon=True)

    def __enter__(self) -> Terminal:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._clear()

    def say(self, text: str) -> None:
        """Print a line of text without tearing the bar."""
        with self._mutex:
            self._clear()
            self._line(text)

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            state = self._progress.snapshot()
            if not state["bytesTotal"]:
                continue
            with self._mutex:
                self._clear()
                if self._live:
                    self._stream.write(line(state))
                    self._stream.flush()
                    self._drawn = True
                else:
                    self._line(line(state))

    def _line(self, text: str) -> None:
        if self._log is not None:
            self._log(text)
            return
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def _clear(self) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._drawn = False


def line(state: dict[str, int | str]) -> str:
    """One line for people: phase, bar, bytes, rate, time to go."""
    done, total, rate = int(state["bytesDone"]), int(state["bytesTotal"]), int(state["bytesPerSecond"])
    share = done / total if total else 0.0
    bar = "█" * int(share * _BAR_CELLS) + "░" * (_BAR_CELLS - int(share * _BAR_CELLS))
    eta = int(state["etaSeconds"])
    left = f"  {eta // 60}:{eta % 60:02d} left" if eta and done < total else ""
    return f"{state['phase']:<8} {bar} {share:4.0%}  {size(done)} of {size(total)}  {size(rate)}/s{left}"


def files(count: int) -> str:
    """`1 file`, `2 files`."""
    return f"{count:,} file{'' if count == 1 else 's'}"


def size(count: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


class ProgressServer:
    """Serves a Progress over HTTP until closed."""

    def __init__(self, progress: Progress, host: str, port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path == "/progress"
                body = json.dumps(progress.snapshot() if found else {"error": "ask for /progress"}).encode()
                self.send_response(200 if found else 404)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """One poll a second is not worth a line each."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="fetch-progress-http", daemon=True)

    def __enter__(self) -> ProgressServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
