"""Clients that ask once for each request and note when, and what of their requests the engines' logs tell.

Invariants: each request has a connection and an id of its own and is sent once: nothing hides behind a retry.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube

_SECONDS = 200


@dataclass
class Asked:
    """What became of one request: seconds by the monotonic clock; `error` "" = it was answered whole. `retry_after` is
    the header, "" = none.
    """

    id: str
    sent: float
    answered: float = 0.0
    status: int = 0
    retry_after: str = ""
    error: str = "no answer yet"


@dataclass
class Asking:
    """Requests to one address. `all` holds them in the order in which they were sent."""

    base: str
    model: str
    all: list[Asked] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def send(self, *, tokens: int = 4, stream: bool = False) -> Asked:
        """Send one and wait for nothing."""
        asked = Asked(f"{self.model}-{len(self.all)}-{time.monotonic_ns()}", time.monotonic())
        self.all.append(asked)
        thread = threading.Thread(target=self._ask, args=(asked, tokens, stream), daemon=True)
        self._threads.append(thread)
        thread.start()
        return asked

    def end(self) -> None:
        """Until every request has its end, whatever it is."""
        for thread in self._threads:
            thread.join(_SECONDS)

    def wait(self) -> None:
        """Until every request has its answer. Raises AssertionError for those that have none."""
        self.end()
        lost = [asked for asked in self.all if asked.error]
        assert not lost, f"{len(lost)} of {len(self.all)} requests were lost: {lost[0].id}: {lost[0].error}"

    def _ask(self, asked: Asked, tokens: int, stream: bool) -> None:
        try:
            self._exchange(asked, tokens, stream)
        except (OSError, http.client.HTTPException, AssertionError, ValueError, KeyError) as error:
            asked.error = f"{type(error).__name__}: {error} after {time.monotonic() - asked.sent:.1f} s"

    def _exchange(self, asked: Asked, tokens: int, stream: bool) -> None:
        address = urlsplit(self.base)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_SECONDS)
        body = {"model": self.model, "prompt": "Count:", "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        headers = {"Content-Type": "application/json", "x-request-id": asked.id}
        try:
            connection.request("POST", f"{address.path}/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            asked.answered, asked.status = time.monotonic(), answer.status
            asked.retry_after = answer.headers.get("Retry-After", "")
            assert answer.status == 200, f"status {answer.status}: {text[:300]}"
            if stream:
                assert text.rstrip().endswith("data: [DONE]"), f"the stream was cut: {text[-200:]}"
            else:
                assert json.loads(text)["usage"]["completion_tokens"] == tokens
            asked.error = ""
        finally:
            connection.close()


class Engines:
    """Every engine pod that came since, and the ids of the requests that their logs begin: how often, and of each pod
    in their order.
    """

    def __init__(self, kube: Kube, name: str) -> None:
        self._kube, self._name = kube, name
        self._stop = threading.Event()
        self._logs: dict[str, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []
        self.begun: Counter[str] = Counter()
        self.order: dict[str, list[str]] = {}
        self._first = ""
        self._used: set[str] = set()

    @property
    def pods(self) -> int:
        """How many there were."""
        return len(self._logs)

    @property
    def idle(self) -> list[str]:
        """The pods that came and began nothing; the first one came with the service."""
        return sorted(self._logs.keys() - self._used - {self._first})

    def _follow(self) -> None:
        while not self._stop.wait(0.5):
            for pod in stoker.engine_pods(self._kube, self._name):
                name = pod["metadata"]["name"]
                states = pod["status"].get("containerStatuses") or [{}]
                if name not in self._logs and states[0].get("state", {}).get("running"):
                    log = self._kube.start("logs", "--follow", name, "-c", "engine")
                    self._first = self._first or name
                    self._logs[name] = log
                    reader = threading.Thread(target=self._read, args=(name, log), daemon=True)
                    self._readers.append(reader)
                    reader.start()

    def _read(self, pod: str, log: subprocess.Popen[str]) -> None:
        for line in log.stdout or ():
            found = re.search(rf"received:.*request_id=\S*?({self._name}-\d+-\d+)", line)
            if found:
                self.begun[found[1]] += 1
                self.order.setdefault(pod, []).append(found[1])
                self._used.add(pod)

    @classmethod
    @contextmanager
    def followed(cls, kube: Kube, name: str) -> Iterator[Engines]:
        """While it lasts, all of them are."""
        engines = cls(kube, name)
        thread = threading.Thread(target=engines._follow, daemon=True)
        thread.start()
        try:
            yield engines
        finally:
            engines._stop.set()
            thread.join(30)
            for log in engines._logs.values():
                log.terminate()
            for reader in engines._readers:
                reader.join(30)
            for log in engines._logs.values():
                log.communicate()
