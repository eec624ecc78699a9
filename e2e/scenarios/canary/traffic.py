"""What canary scenarios look at: pods that may not change, where a canary stands, and how many requests each pod had.

Knows nothing of what makes a canary good.
"""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, eventually

# What it became in the end: nothing else comes of it.
_OVER = ("Promoted", "Failed", "Aborted")


def stand(kube: Kube) -> dict[str, Any]:
    """status.canary of the service `model`."""
    return dict(kube.get("infsvc", "model").get("status", {}).get("canary") or {})


def canary_pods(kube: Kube) -> list[dict[str, Any]]:
    """Its pods, those on their way out included."""
    return kube.items("pods", "app.kubernetes.io/component=canary,app.kubernetes.io/instance=model")


def lives(kube: Kube) -> dict[str, tuple[str, list[int]]]:
    """The stable pods by their uids, with what a rollout, a restart or an edit would change."""
    return {
        pod["metadata"]["uid"]: (
            pod["metadata"]["labels"]["pod-template-hash"],
            [each["restartCount"] for each in pod["status"].get("containerStatuses") or ()],
        )
        for pod in stoker.engine_pods(kube, "model")
    }


@dataclass
class Way:
    """The way of a canary as the status told it: each (state, step) once, in its order, and whether every look found
    the stable pods as they were while it was judged.
    """

    kube: Kube
    before: dict[str, tuple[str, list[int]]]
    stations: list[tuple[str, int]] = field(default_factory=list)
    shares: dict[int, int] = field(default_factory=dict)

    def until(self, state: str, seconds: float = 300) -> dict[str, Any]:
        """status.canary, once it has this state. Raises NotInTime, AssertionError."""
        try:
            return eventually(f"the canary is {state}", lambda: self._look(state), seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.stations}\n{self.kube.explain('infsvc model')}") from None

    def _look(self, state: str) -> dict[str, Any] | None:
        pods, there = lives(self.kube), stand(self.kube)
        now, step = str(there.get("state", "")), int(there.get("step", 0))
        if now and (now, step) not in self.stations:
            self.stations.append((now, step))
        if now == "Running":
            # Looked at before the status: nothing had been promoted by then.
            assert pods == self.before, "the stable pods changed while the canary was judged"
            self.shares[step] = int(there.get("share", 0))
        # One before it may still be told of, until the operator has seen this one.
        begun = any(station not in _OVER for station, _ in self.stations)
        assert now == state or now not in _OVER or not begun, f"the canary is {now}: {there.get('why', '')}"
        return there if now == state else None


def answered(address: str) -> int:
    """How many requests a pod has answered by its own count."""
    with urllib.request.urlopen(f"http://{address}:8000/metrics", timeout=30) as page:
        text = page.read().decode()
    found = re.findall(r"^vllm:request_success_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return round(sum(map(float, found)))
