"""The kubelet's part of a reconcile's tests: statuses of pods that no kubelet runs, what their containers report."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.observe.rollout import is_ready

Object = dict[str, Any]
REPORT = {
    "resolvedRevision": "c0ffee0123456789",
    "digest": "sha256:" + "ab" * 32,
    "bytes": 98362432,
    "path": "sha256-abab",
    "serve": "sha256-abab/m.gguf",
}
# No scheduler of that name: the pods stay where the tests write what becomes of them.
UNSCHEDULED = {"schedulerName": "nobody"}


class Node:
    """The kubelet's part: statuses of pods that no kubelet runs."""

    def __init__(
        self, cluster: Cluster, namespace: str, kubectl: Callable[..., str], eventually: Callable[..., Any]
    ) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.kubectl = kubectl
        self.eventually = eventually

    async def pods(self, component: str) -> list[Object]:
        found = await self.cluster.list_all(kinds.POD, self.namespace, f"app.kubernetes.io/component={component}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def patch(self, pod: Object, status: Object, *, check: bool = True) -> None:
        """`check=False`: it may be gone by now."""
        patch = ("--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
        self.kubectl("patch", "pod", pod["metadata"]["name"], *patch, check=check)

    def hold(self, pod: Object) -> None:
        """However soon it is deleted, it stays to be seen until `release`."""
        self._finalize(pod, ["test.example/hold"])

    def release(self, pod: Object) -> None:
        """Undo `hold`."""
        self._finalize(pod, None)

    def _finalize(self, pod: Object, finalizers: list[str] | None) -> None:
        patch = json.dumps({"metadata": {"finalizers": finalizers}})
        self.kubectl("patch", "pod", pod["metadata"]["name"], "--type=merge", "-p", patch)

    def bind(self, pod: Object, node: str) -> None:
        """What the scheduler does."""
        head = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod["metadata"]["name"]}}
        self.kubectl("create", "-f", "-", stdin=head | {"target": {"apiVersion": "v1", "kind": "Node", "name": node}})

    def run(self, pod: Object, *, check: bool = True) -> None:
        status = {"phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}
        self.patch(pod, status | {"conditions": [{"type": "Ready", "status": "True"}]}, check=check)

    def end(self, pod: Object, code: int, report: Object) -> None:
        ended = {"exitCode": code, "message": json.dumps(report), "finishedAt": "2026-01-01T00:00:00Z"}
        container = {"name": "fetch", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
        status = container | {"state": {"terminated": ended}}
        self.patch(pod, {"phase": "Failed" if code else "Succeeded", "containerStatuses": [status]})

    async def fetch_all(self) -> None:
        """Every prefetch succeeds."""

        async def there() -> list[Object]:
            return await self.pods("fetch")

        for pod in await self.eventually(there):
            self.end(pod, 0, REPORT)

    async def run_all(self, count: int) -> None:
        """Once there are so many engine pods, all of them run and are ready."""

        async def there() -> list[Object]:
            pods = await self.pods("engine")
            return pods if len(pods) >= count else []

        for pod in await self.eventually(there):
            if not is_ready(pod):
                self.run(pod)


def condition(service: Object, kind: str) -> Object:
    """One of a service's conditions; an empty one while it has none."""
    found = (item for item in service.get("status", {}).get("conditions", []) if item["type"] == kind)
    return next(found, {"status": "", "reason": "", "message": ""})
