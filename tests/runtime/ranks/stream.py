"""A stream of a server whose rank fails meanwhile: when it began, and when and how it ended."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import httpx

STRIKE = Path(__file__).parent / "strike"


class Stream:
    """One long completion, read in a thread."""

    def __init__(self, url: str, model: str, max_tokens: int, patience: float) -> None:
        self._patience = patience
        self._begun = threading.Event()
        self.errors: list[str] = []
        self.tokens = 0
        self.ended = 0.0
        """When the first error came, or the end; `time.monotonic`."""
        body = {"model": model, "prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self._thread = threading.Thread(target=self._read, args=(f"{url}/v1/completions", body))
        self._thread.start()

    def _read(self, url: str, body: dict[str, object]) -> None:
        with httpx.stream("POST", url, json=body, timeout=self._patience) as answer:
            for line in answer.iter_lines():
                if '"error"' in line:
                    self.ended = self.ended or time.monotonic()
                    self.errors.append(line)
                elif '"text"' in line:
                    self.tokens += 1
                    self._begun.set()
        self.ended = self.ended or time.monotonic()

    def wait_begun(self) -> None:
        """Until its first token is there."""
        assert self._begun.wait(self._patience)

    def wait_ended(self) -> None:
        """Until the server has closed it."""
        self._thread.join(self._patience)
        assert not self._thread.is_alive()


def struck(fault: str, rank: int, folder: Path) -> dict[str, str]:
    """The environment of a server of which a rank has a fault once `folder / "now"` is there."""
    path = os.environ.get("PYTHONPATH")
    return {"STRIKE": f"{fault}:{rank}:{folder}", "PYTHONPATH": f"{STRIKE}:{path}" if path else str(STRIKE)}
