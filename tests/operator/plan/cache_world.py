"""A volume, and what Jobs and pods of it would say."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from stoker_operator import manifests
from stoker_operator.observe.snapshot import Observed, Progress
from stoker_operator.plan.cache import CachePlan, plan_cache
from stoker_operator.settings import Settings
from stoker_operator.spec.service import InferenceService

Object = dict[str, Any]
NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
REPORT = {
    "resolvedRevision": "c0ffee",
    "digest": "sha256:aa",
    "bytes": 10**9,
    "path": "sha256-aa",
    "serve": "sha256-aa",
}


def stamp(seconds_ago: float) -> str:
    return (NOW - timedelta(seconds=seconds_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


class World:
    """What one service's cache looks like; each method adds a piece."""

    def __init__(self, service: InferenceService, live: Callable[..., Object]) -> None:
        self.service = service
        self.live = live
        self.claim = live(manifests.volume_claim(service, Settings()))
        self.jobs: list[Object] = []
        self.fetch_pods: list[Object] = []
        self.engine_pods: list[Object] = []
        self.progress: Progress | None = None

    def job(self, attempt: int = 1, *, ended: str = "", seconds_ago: float = 10, repair: bool = False) -> World:
        uid = self.claim["metadata"]["uid"]
        found = self.live(manifests.prefetch_job(self.service, Settings(), uid, attempt, repair=repair))
        if ended:
            condition = {"type": ended, "status": "True", "lastTransitionTime": stamp(seconds_ago)}
            found["status"] = {"conditions": [condition]}
        self.jobs.append(found)
        return self

    def pod(self, report: Object | None = None, *, code: int = 0, phase: str = "Running", **status: Any) -> World:
        """A pod of the newest Job, with its termination message."""
        labels = self.jobs[-1]["metadata"]["labels"]
        containers = [{"name": "fetch", "state": {"terminated": {"exitCode": code, "message": json.dumps(report)}}}]
        self.fetch_pods.append(
            {
                "metadata": {"name": "fetcher", "labels": labels},
                "status": {"phase": phase, "containerStatuses": containers if report else []} | status,
            }
        )
        return self

    def broken(self, seconds_ago: float) -> World:
        message = json.dumps({"reason": "ChecksumMismatch", "message": "m.gguf differs"})
        terminated = {"exitCode": 3, "message": message, "finishedAt": stamp(seconds_ago)}
        status = {"initContainerStatuses": [{"name": "verify", "state": {"terminated": terminated}}]}
        self.engine_pods.append({"metadata": {"name": "engine"}, "status": status})
        return self

    def observed(self) -> Observed:
        return Observed(
            children={("PersistentVolumeClaim", self.claim["metadata"]["name"]): self.claim},
            jobs=tuple(self.jobs),
            fetch_pods=tuple(self.fetch_pods),
            engine_pods=tuple(self.engine_pods),
            progress=self.progress,
        )

    def plan(self, now: datetime = NOW) -> CachePlan:
        return plan_cache(self.service, self.observed(), Settings(), now)
