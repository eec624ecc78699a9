"""A service whose replicas are groups of pods, with its children in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.operator.conftest import World

from stoker_operator import manifests
from stoker_operator.observe.groups import read_groups
from stoker_operator.observe.snapshot import Answer, Observed
from stoker_operator.plan.rollout import first_variant
from stoker_operator.spec.service import FetchedModel, InferenceService

Object = dict[str, Any]
PREFIX = "leaderworkerset.sigs.k8s.io"


class GroupWorld(World):
    """World, with a LeaderWorkerSet in the Deployment's place."""

    def __init__(self, service: InferenceService, model: FetchedModel, live: Callable[..., Object]) -> None:
        super().__init__(service, model, live)
        self.served = frozenset({"LeaderWorkerSet"})
        self.workers: list[Object] = []
        del self.children["Deployment", service.name]
        made = [
            manifests.group_service(service),
            manifests.disruption_budget(service, grouped=True),
            manifests.network_policy(service, grouped=True),
            manifests.workload_manifest(service, self.settings, model, first_variant(service)),
        ]
        self.children |= {(item["kind"], item["metadata"]["name"]): live(item) for item in made}
        self.set = self.children["LeaderWorkerSet", manifests.group_name(service)]
        self.set["spec"].setdefault("replicas", 1)
        self.current = manifests.live_template_key(self.set)
        self.revisions = []
        self.record(self.current, 1, served=True)

    def group(
        self, index: int = 0, *, uid: str = "", ready: bool = True, joined: bool = True, revision: str = ""
    ) -> Any:
        """Add a group of the current revision, or of another; `joined`: its workers are ready."""
        name = f"{manifests.group_name(self.service)}-{index}"
        size = self.set["spec"]["leaderWorkerTemplate"]["size"]
        for number in range(size):
            labels = {
                "app.kubernetes.io/component": "worker" if number else "engine",
                "stoker.dev/template": revision or self.current,
                f"{PREFIX}/group-index": str(index),
                f"{PREFIX}/worker-index": str(number),
            }
            here = f"{name}-{number}" if number else name
            role = "workerTemplate" if number else "leaderTemplate"
            pod = self.set["spec"]["leaderWorkerTemplate"][role]["spec"]
            found: Object = {
                "metadata": {"name": here, "uid": f"uid-{here}{uid}", "labels": labels},
                "spec": pod | {"nodeName": f"n{number}"},
                "status": {
                    "phase": "Running",
                    "conditions": [{"type": "Ready", "status": str(joined if number else ready)}],
                },
            }
            (self.workers if number else self.pods).append(found)
        return self

    def answered(self, error: str = "") -> World:
        self.answer = Answer(self.pods[0]["metadata"]["name"], self.current, error)
        return self

    def observed(self) -> Observed:
        found = replace(super().observed(), worker_pods=tuple(self.workers))
        live = found.workload(self.service)
        if live is None or live["kind"] == "Deployment":
            return found
        state = read_groups(live, self.pods, self.workers, self._floor(), self.silent)
        return replace(found, rollout=state)
