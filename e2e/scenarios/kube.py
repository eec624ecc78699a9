"""kubectl and helm for scenarios: each call says what failed, each wait is on a condition.

Knows nothing of Stoker.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class CommandFailed(AssertionError):
    """A command ended with another status than 0; the message holds what it said."""


class NotInTime(AssertionError):
    """A condition did not come true; the message says what was seen last."""


@dataclass(frozen=True)
class Kube:
    """One cluster. `namespace` is where objects live that do not say so; `proxy` is the address of a `kubectl proxy`
    where this machine does not reach the Services themselves.
    """

    kubeconfig: Path
    kubectl_path: str
    helm_path: str
    namespace: str = "default"
    proxy: str = ""

    def within(self, namespace: str) -> Kube:
        """The same cluster with another default namespace."""
        return replace(self, namespace=namespace)

    def address(self, service: str) -> str:
        """The URL of a Service: its own, or by way of the API server, which picks a ready pod for each request."""
        spec = self.get("service", service)["spec"]
        port = spec["ports"][0]["port"]
        if self.proxy:
            return f"{self.proxy}/api/v1/namespaces/{self.namespace}/services/{service}:{port}/proxy"
        return f"http://{spec['clusterIP']}:{port}"

    def wait_reached(self, service: str) -> None:
        """Until a ready pod is reached by its Service: kube-proxy follows the endpoints a second behind, or more."""
        if self.proxy:
            return
        host, port = self.address(service).removeprefix("http://").split(":")

        def connects() -> bool:
            try:
                socket.create_connection((host, int(port)), timeout=2).close()
            except OSError:
                return False
            return True

        eventually(f"Service {service} leads to a pod", connects, 20, every=0.1)

    def kubectl(self, *arguments: str, text: str | None = None, seconds: float = 180) -> str:
        """Run kubectl and return its output. Raises CommandFailed."""
        return self._run([self.kubectl_path, "--namespace", self.namespace, *arguments], text, seconds)

    def helm(self, *arguments: str, seconds: float = 400) -> str:
        """Run helm and return its output. Raises CommandFailed."""
        return self._run([self.helm_path, "--namespace", self.namespace, *arguments], None, seconds)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Run kubectl in the background."""
        command = [self.kubectl_path, "--namespace", self.namespace, *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self._environment(), stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def apply(self, *documents: dict[str, Any]) -> None:
        """Apply objects as kubectl does from a file."""
        self.kubectl("apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}))

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """One object. Raises CommandFailed when it is not there."""
        found: dict[str, Any] = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        return found

    def find(self, kind: str, name: str) -> dict[str, Any] | None:
        """One object, or None."""
        text = self.kubectl("get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def items(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        """Objects of a kind in the namespace."""
        chosen = ["-l", selector] if selector else []
        items: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, *chosen, "-o", "json"))["items"]
        return items

    def merge(self, kind: str, name: str, patch: dict[str, Any], *options: str) -> None:
        """A merge patch."""
        self.kubectl("patch", kind, name, "--type=merge", f"--patch={json.dumps(patch)}", *options)

    def wait(self, condition: str, name: str, seconds: float = 240) -> None:
        """`kubectl wait` for a condition or a jsonpath; on failure the object is shown."""
        try:
            self.kubectl("wait", f"--for={condition}", name, f"--timeout={seconds:.0f}s", seconds=seconds + 30)
        except CommandFailed as error:
            raise NotInTime(f"{error}\n{self.explain(name)}") from None

    def explain(self, name: str) -> str:
        """What a person would look at: the object, the pods, the events."""
        parts = [
            ["describe", *name.split()],
            ["get", "pods", "-o", "wide"],
            ["get", "events", "--sort-by=.lastTimestamp"],
        ]
        return "\n".join(self._try(*part)[-6000:] for part in parts)

    def run_in(self, pod: str, script: str, container: str = "engine") -> str:
        """Run a Python program in a container."""
        return self.kubectl("exec", pod, "-c", container, "--", "/opt/stoker/bin/python", "-c", script)

    def _try(self, *arguments: str) -> str:
        try:
            return self.kubectl(*arguments)
        except CommandFailed as error:
            return str(error)

    def _run(self, command: list[str], text: str | None, seconds: float) -> str:
        done = subprocess.run(
            command, input=text, env=self._environment(), capture_output=True, text=True, timeout=seconds
        )
        if done.returncode:
            shown = " ".join([Path(command[0]).name, *command[1:]])
            raise CommandFailed(f"{shown}: status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return done.stdout

    def _environment(self) -> dict[str, str]:
        return os.environ | {"KUBECONFIG": str(self.kubeconfig)}


def eventually(what: str, look: Callable[[], T | None], seconds: float = 120, every: float = 0.5) -> T:
    """The first true value of `look`. Raises NotInTime with the last value, or the last failed command."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            seen: Any = look()
        except CommandFailed as error:
            seen = None
            last: object = error
        else:
            last = seen
        if seen:
            return seen  # type: ignore[no-any-return]
        if time.monotonic() > deadline:
            raise NotInTime(f"not in {seconds:.0f} s: {what}; last seen: {last}")
        time.sleep(every)


@contextmanager
def proxied(kube: Kube) -> Iterator[Kube]:
    """The same cluster, its Services reached by way of the API server. Raises NotInTime."""
    process = kube.start("proxy", "--port=0")
    try:
        line = process.stdout.readline() if process.stdout else ""
        found = re.search(r"127\.0\.0\.1:\d+", line)
        if found is None:
            raise NotInTime(f"kubectl proxy did not start: {line}")
        yield replace(kube, proxy=f"http://{found[0]}")
    finally:
        process.terminate()
        process.communicate()
