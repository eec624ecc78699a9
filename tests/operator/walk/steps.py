"""What may befall a service: changes of its spec, edits of its children, fates of its pods, its nodes and its source,
deaths of the operator, jumps of the clock.

Invariants: a step is named by its function; `n` chooses among its variants. `harmless` are those after which whoever
serves must go on serving.
Knows nothing of what the operator does about it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tests.operator.walk.kubelets import FATES, FROZEN, LOST, UP
from tests.operator.walk.seat import Died
from tests.operator.walk.world import World

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError
from stoker_operator.cluster.kinds import Kind
from stoker_operator.manifests.identity import WORKER
from stoker_operator.reconcile import ApplyFailed

Act = Callable[[World, int], Coroutine[Any, Any, None]]
Step = tuple[str, int]


@dataclass(frozen=True)
class What:
    """A step. `harmless`: to one who serves; `on_gpu`: even on GPUs that others wait for; `grouped`: even to a group of
    pods, which the stand-in for their controller changes where it is, as the publisher's does without a surge.
    """

    act: Act
    harmless: bool
    on_gpu: bool
    grouped: bool


STEPS: dict[str, What] = {}
MANAGED_BY = "app.kubernetes.io/managed-by"
GROUPS = "demo-nodes"


def step(*, harmless: bool = True, on_gpu: bool = True, grouped: bool = True) -> Callable[[Act], Act]:
    """Enter a step. `on_gpu`: whether it is harmless where a change may have to take an old pod's place, too."""

    def enter(act: Act) -> Act:
        STEPS[act.__name__] = What(act, harmless, on_gpu, grouped and on_gpu)
        return act

    return enter


# Changes of the spec.


@step(on_gpu=False)
async def another_revision(world: World, n: int) -> None:
    await world.change({"runtime": {"args": ["--seed", str(n)]}})


@step(on_gpu=False)
async def a_wrong_image(world: World, n: int) -> None:
    await world.change({"runtime": {"image": f"nowhere/none:{n}"}})


@step(on_gpu=False)
async def a_right_image(world: World, n: int) -> None:
    await world.change({"runtime": {"image": f"stoker/runtime:{n % 3}"}})


@step(grouped=False)
async def a_selector_without_a_node(world: World, n: int) -> None:
    await world.change({"placement": {"nodeSelector": {"no": f"node-{n}"}}})


@step(on_gpu=False)
async def no_selector(world: World, n: int) -> None:
    await world.change({"placement": {"nodeSelector": {"no": None}}})


@step(on_gpu=False)
async def memory(world: World, n: int) -> None:
    await world.change({"resources": {"memory": ("4Gi", "40Gi", "900Gi")[n % 3]}})


@step(on_gpu=False)
async def gpus(world: World, n: int) -> None:
    await world.change({"resources": {"gpus": n % 3}})


@step(on_gpu=False)
async def nodes(world: World, n: int) -> None:
    """A replica comes to be a group of so many pods, or ceases to."""
    await world.change({"resources": {"nodes": 1 + n % 3}, "parallelism": {"pipeline": 1 + n % 3}})


@step(harmless=False)
async def replicas(world: World, n: int) -> None:
    await world.change({"replicas": n % 3})


@step(harmless=False)
async def suspend(world: World, n: int) -> None:
    await world.change({"suspend": n % 2 == 0})


@step(on_gpu=False)
async def another_model(world: World, n: int) -> None:
    await world.change({"model": {"uri": f"hf://org/model-{n % 3}"}})


@step(on_gpu=False)
async def another_secret(world: World, n: int) -> None:
    await world.change({"model": {"secretRef": {"name": f"token-{n % 2}"}}})


@step(on_gpu=False)
async def other_adapters(world: World, n: int) -> None:
    """From none to some is a rollout, from some to others is none."""
    asked = [{"name": f"a{each}", "uri": f"hf://org/lora-{each}", "revision": f"v{n % 4}"} for each in range(n % 3)]
    await world.change({"model": {"adapters": asked if n % 5 else None}})


@step(on_gpu=False)
async def a_rollout_policy(world: World, n: int) -> None:
    policies: list[dict[str, Any]] = [
        {"paused": True},
        {"paused": False},
        {"autoRollback": False},
        {"waitForIdle": "60s"},
        {"progressDeadline": "5s"},
        {"strategy": "Recreate"},
    ]
    await world.change({"rollout": policies[n % len(policies)]})


@step(on_gpu=False)
async def an_autoscaler(world: World, n: int) -> None:
    """It has no metrics to go by."""
    await world.change({"replicas": None, "autoscaling": {"min": 1, "max": 1 + n % 3}})


@step()
async def no_autoscaler(world: World, n: int) -> None:
    await world.change({"replicas": 1 + n % 2, "autoscaling": None})


@step()
async def another_cache(world: World, n: int) -> None:
    caches: list[dict[str, Any]] = [{"retain": "1h"}, {"retain": None}, {"verify": None, "verifyEvery": None}]
    caches += [{"verify": "Scheduled", "verifyEvery": "300s"}, {"pvc": {"size": f"{60 + n}Gi"}}]
    await world.change({"cache": caches[n % len(caches)]})


@step(on_gpu=False)
async def another_endpoint(world: World, n: int) -> None:
    ends: list[dict[str, Any]] = [
        {"ingress": {"host": f"demo-{n}.example.com"}},
        {"ingress": None},
        {"auth": {"apiKeysSecretRef": {"name": f"keys-{n}"}}},
        {"auth": None},
    ]
    await world.change({"endpoint": ends[n % len(ends)]})


@step(on_gpu=False)
async def another_pod_template(world: World, n: int) -> None:
    await world.change({"podTemplate": {"metadata": {"labels": {"team": f"t{n}"}}} if n % 2 else None})


# Edits and deletions of children.


@step()
async def a_child_is_edited(world: World, n: int) -> None:
    edits: list[tuple[Kind, dict[str, Any]]] = [
        (kinds.SERVICE, {"spec": {"selector": {"nobody": "has"}}}),
        (kinds.NETWORK_POLICY, {"spec": {"podSelector": {"matchLabels": {"only": "this"}}}}),
        (kinds.DISRUPTION_BUDGET, {"spec": {"maxUnavailable": 9}}),
        (kinds.DEPLOYMENT, {"metadata": {"annotations": {"team": "search"}}}),
        (kinds.SERVICE_ACCOUNT, {"automountServiceAccountToken": True}),
    ]
    await world.edit(*edits[n % len(edits)])


@step(on_gpu=False)
async def the_deployment_is_edited(world: World, n: int) -> None:
    edits: list[dict[str, Any]] = [
        {"template": {"spec": {"nodeSelector": {"no": "node"}}}},
        {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}},
        {"template": {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": f"then-{n}"}}}},
        {"paused": True},
        {"replicas": 3},
    ]
    await world.edit(kinds.DEPLOYMENT, {"spec": edits[n % len(edits)]})


@step(harmless=False)
async def the_groups_are_edited(world: World, n: int) -> None:
    edits: list[dict[str, Any]] = [
        {"metadata": {"annotations": {"team": "search"}}},
        {"spec": {"replicas": 3}},
        {"spec": {"leaderWorkerTemplate": {"size": 4}}},
        {"spec": {"leaderWorkerTemplate": {"leaderTemplate": {"spec": {"nodeSelector": {"no": "node"}}}}}},
        {"metadata": {"ownerReferences": None}},
    ]
    await world.edit(kinds.LEADER_WORKER_SET, edits[n % len(edits)], GROUPS)


@step(harmless=False)
async def the_groups_are_deleted(world: World, n: int) -> None:
    await world.delete(kinds.LEADER_WORKER_SET, GROUPS)


@step()
async def a_child_loses_its_marks(world: World, n: int) -> None:
    """Its owner, or the label by which it is looked for."""
    kind = (kinds.SERVICE, kinds.NETWORK_POLICY, kinds.DISRUPTION_BUDGET, kinds.SERVICE_ACCOUNT, kinds.CLAIM)[n % 5]
    marks: dict[str, Any] = {"ownerReferences": None} if n % 2 else {"labels": {MANAGED_BY: None}}
    for name in [item["metadata"]["name"] for item in world.here(kind) if item["metadata"]["name"] != "theirs"]:
        await world.edit(kind, {"metadata": marks}, name)


@step()
async def a_child_is_deleted(world: World, n: int) -> None:
    kind = (kinds.SERVICE, kinds.NETWORK_POLICY, kinds.DISRUPTION_BUDGET, kinds.SERVICE_ACCOUNT)[n % 4]
    await world.delete(kind)


@step(harmless=False)
async def the_deployment_is_deleted(world: World, n: int) -> None:
    await world.delete(kinds.DEPLOYMENT)


@step()
async def jobs_are_deleted(world: World, n: int) -> None:
    for job in world.here(kinds.JOB):
        if job["metadata"]["name"] != "theirs":
            await world.delete(kinds.JOB, job["metadata"]["name"])


@step()
async def records_are_deleted(world: World, n: int) -> None:
    for record in world.here(kinds.CONTROLLER_REVISION)[n % 2 :]:
        if record["metadata"]["name"] != "theirs":
            await world.delete(kinds.CONTROLLER_REVISION, record["metadata"]["name"])


@step()
async def a_stranger_takes_a_name(world: World, n: int) -> None:
    """A child is deleted, and somebody else's object has its name before the operator looks."""
    kind, spec = [
        (kinds.SERVICE, {"selector": {"app": "theirs"}, "ports": [{"port": 80}]}),
        (kinds.NETWORK_POLICY, {"podSelector": {}}),
        (kinds.DISRUPTION_BUDGET, {"maxUnavailable": 1}),
    ][n % 3]
    await world.delete(kind)
    with contextlib.suppress(ApiError):
        await world.own(kind, {"metadata": {"name": "demo"}, "spec": spec})
        world.taken.append(kind)


@step()
async def strangers_leave(world: World, n: int) -> None:
    while world.taken:
        await world.delete(world.taken.pop())


# Fates of pods, nodes and the source.


@step(on_gpu=False)
async def new_pods_fare_badly(world: World, n: int) -> None:
    world.kubelets.fate = FATES[n % len(FATES)]


@step(harmless=False)
async def a_pod_is_deleted(world: World, n: int) -> None:
    for pod in world.pods()[n % 2 :][:1]:
        await world.delete(kinds.POD, pod["metadata"]["name"])


@step(harmless=False)
async def a_pod_is_struck(world: World, n: int) -> None:
    for pod in world.pods()[n % 2 :][:1]:
        world.kubelets.fates[pod["metadata"]["uid"]] = ("evicted", "unready")[n % 2]


@step(harmless=False)
async def a_worker_is_deleted(world: World, n: int) -> None:
    for pod in world.pods(WORKER)[n % 2 :][:1]:
        await world.delete(kinds.POD, pod["metadata"]["name"])


@step(harmless=False)
async def a_worker_is_struck(world: World, n: int) -> None:
    for pod in world.pods(WORKER)[n % 2 :][:1]:
        world.kubelets.fates[pod["metadata"]["uid"]] = ("evicted", "unready")[n % 2]


@step()
async def pods_end_slowly(world: World, n: int) -> None:
    world.kubelets.slow_ends = n % 2 == 0


@step(harmless=False)
async def a_node_is_lost(world: World, n: int) -> None:
    """Its kubelet hangs, so that its pods go on being called ready, or the whole node does not report."""
    name = sorted(world.kubelets.nodes)[n % 2]
    world.kubelets.nodes[name] = (FROZEN, LOST)[n // 2 % 2]


@step()
async def nodes_come_back(world: World, n: int) -> None:
    world.kubelets.nodes = dict.fromkeys(world.kubelets.nodes, UP)
    world.kubelets.fates.clear()


@step()
async def fetches_fail(world: World, n: int) -> None:
    world.kubelets.fetch_fails = ("", "TokenRejected", "HubUnreachable", "VolumeFull")[n % 4]


@step()
async def a_file_rots(world: World, n: int) -> None:
    """With its size and time, or so that every pod sees it that starts; pods that serve have read it."""
    world.kubelets.rotten, world.kubelets.damaged = n % 2 == 0, n % 2 == 1


# The operator and its clock.


@step()
async def time_passes(world: World, n: int) -> None:
    world.later += timedelta(seconds=(20, 100, 700, 4000)[n % 4])


@step()
async def the_clock_is_set_back(world: World, n: int) -> None:
    """As where the next leader's clock is behind."""
    world.later -= timedelta(seconds=(2, 30, 300)[n % 3])


@step()
async def the_operator_starts_anew(world: World, n: int) -> None:
    world.restart()


@step(on_gpu=False)
async def the_operator_is_killed(world: World, n: int) -> None:
    """In the midst of a change, before its write number n; another process takes over."""
    await world.change({"runtime": {"args": ["--seed", str(1000 + n)]}})
    world.seat.dies_before(n % 5)
    with contextlib.suppress(Died, ApplyFailed):
        await world.reconciler.reconcile(world.namespace, "demo")
    world.restart()
