"""What `stoker up` shows: a line whenever a service's situation changes, in the words of its Ready condition.

Invariants: on a terminal a stage redraws its own line; elsewhere a line is written when the reason changes, and now and
then while it lasts. Knows nothing of processes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from stoker_operator.manifests import service_url
from stoker_operator.spec.service import parse

_REPEAT_SECONDS = 10.0


class Report:
    """Shows the services' conditions on a stream."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._started = time.monotonic()
        self._shown: dict[str, tuple[str, str, float]] = {}
        self._open = ""

    def show(self, service: Mapping[str, Any], url: str) -> bool:
        """Show a service whose address on this machine is `url`; returns whether it is Ready."""
        name = service["metadata"]["name"]
        conditions = {item["type"]: item for item in service.get("status", {}).get("conditions", ())}
        ready = conditions.get("Ready")
        if ready is None:
            return False
        reason, message = ready["reason"], ready["message"].replace(service_url(parse(service)), url)
        if reason == "Fetching" and service["status"]["cache"].get("bytesTotal"):
            reason = f"Fetching {service['status']['cache']['progress']}"
        self._write(name, ready["reason"], f"{reason:<14} {message}")
        return bool(ready["status"] == "True")

    def say(self, text: str) -> None:
        """A line of its own."""
        self._close()
        self._stream.write(f"{self._elapsed()} {text}\n")
        self._stream.flush()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def _write(self, name: str, reason: str, text: str) -> None:
        now = time.monotonic()
        before = self._shown.get(name)
        if before is not None and before[1] == text:
            return
        same_stage = before is not None and before[0] == reason
        if same_stage and not self._live and before is not None and now - before[2] < _REPEAT_SECONDS:
            return
        self._shown[name] = (reason, text, now)
        if not (same_stage and self._open == name):
            self._close()
        line = f"{self._elapsed()} {name}  {text}"
        self._stream.write(f"\r\x1b[K{line}" if self._live else f"{line}\n")
        self._stream.flush()
        self._open = name if self._live else ""

    def _close(self) -> None:
        """End a line that may still be redrawn."""
        if self._open:
            self._stream.write("\n")
            self._open = ""

    def _elapsed(self) -> str:
        return f"{self.seconds:6.1f}s"
