"""A service whose replicas span nodes: what is planned, counted and said of its groups."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.conftest import NOW
from tests.operator.plan.groups.group_world import GroupWorld

from stoker_operator import manifests
from stoker_operator.plan.actions import Apply, Delete, Generate
from stoker_operator.plan.plan import Plan, make_plan
from stoker_operator.spec.service import InferenceService
from stoker_operator.status import status

Object = dict[str, Any]
Groups = Callable[..., GroupWorld]
SET = "demo-nodes"


def condition(plan: Plan, kind: str) -> Any:
    return next(item for item in plan.conditions if item.type == kind)


def made(plan: Plan) -> list[tuple[str, str]]:
    return [(a.manifest["kind"], a.manifest["metadata"]["name"]) for a in plan.actions if isinstance(a, Apply)]


def gone(plan: Plan) -> list[tuple[str, str]]:
    return [(action.kind, action.name) for action in plan.actions if isinstance(action, Delete)]


def ended(pod: Object, code: int, at: str, **more: Any) -> None:
    state = {"terminated": {"exitCode": code, "finishedAt": at} | more}
    pod["status"]["containerStatuses"] = [{"name": "engine", "restartCount": 0, "state": state}]


def test_a_whole_group_serves_and_its_gpus_are_counted(groups: Groups) -> None:
    there = groups(replicas=2).group(0).group(1).answered()
    plan = there.plan()
    assert not plan.actions
    assert condition(plan, "Ready").message.startswith(f"2 of 2 groups of revision {there.current} are ready")
    said = there.status()
    assert (said["replicas"], said["readyReplicas"], said["gpus"]) == (2, 2, 12)
    assert [group["index"] for group in said["groups"]] == [0, 1]


def test_a_group_waits_for_each_of_its_workers(groups: Groups) -> None:
    """The leader's word alone is not believed: a worker that has not joined is named."""
    there = groups().group(0, joined=False).answered()
    del there.workers[1]
    ready = condition(there.plan(), "Ready")
    assert ready.status == "False"
    assert f"waiting for {SET}-0-1 and {SET}-0-2 to join" in ready.message
    assert condition(there.plan(), "Servable").status == "False"


def test_a_group_that_stands_in_for_one_that_is_replaced_does_not_make_ready(groups: Groups) -> None:
    """Its controller makes a group beside those wanted, and ends it once they are of the new revision."""
    there = groups(replicas=3).group(0).group(2).group(3).answered()
    plan = there.plan()
    ready = condition(plan, "Ready")
    assert (ready.status, ready.reason) == ("False", "RollingOut")
    assert "3 of 3 groups" in ready.message
    assert "1 group beside those wanted until these are made anew" in ready.message
    assert condition(plan, "Servable").status == "True"
    there.group(1)
    del there.pods[2:3], there.workers[4:6]
    assert condition(there.plan(), "Ready").status == "True"


def test_a_set_that_nobody_looks_after_is_said(groups: Groups) -> None:
    """The kind is there and its controller is not."""
    there = groups()
    assert "lws-controller-manager" in condition(there.plan(), "Ready").message
    there.set["status"] = {"replicas": 1}
    assert "lws-controller-manager" not in condition(there.plan(), "Ready").message


def test_a_suspended_service_has_no_groups(groups: Groups) -> None:
    there = groups(replicas=4).group(0).answered()
    there.service = replace(there.service, suspend=True)
    [action] = [each for each in there.plan().actions if isinstance(each, Apply) and each.manifest["kind"] != "Service"]
    assert (action.manifest["kind"], action.manifest["spec"]["replicas"]) == ("LeaderWorkerSet", 0)


def test_a_worker_that_finds_no_node_is_named(groups: Groups) -> None:
    there = groups().group(0, ready=False, joined=False)
    words = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    there.workers[1]["status"] = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "message": words}],
    }
    ready = condition(there.plan(), "Ready")
    assert ready.reason == "Unschedulable"
    assert f"{SET}-0-2 waits for a node" in ready.message
    assert condition(there.plan(), "Scheduled").status == "False"


def test_a_dead_worker_takes_its_group_along_and_the_first_end_is_the_cause(groups: Groups) -> None:
    there = groups().group(0).answered()
    there.service = replace(there.service, status=there.service.status | there.status())
    ended(there.workers[1], 137, "2026-01-01T11:59:50Z")
    ended(there.pods[0], 1, "2026-01-01T11:59:56Z")
    for pod in (*there.pods, *there.workers):
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T11:59:57Z"
    plan = there.plan()
    ready = condition(plan, "Ready")
    assert ready.reason == "GroupRestarting"
    text = (
        f"Group 0 starts anew as a whole, because pod {SET}-0-2, container engine, ended with exit code 137 (SIGKILL)"
    )
    assert text in ready.message
    assert condition(plan, "Degraded").reason == "GroupRestarting"
    assert there.status()["terminatingReplicas"] == 1


def restarted(there: GroupWorld, times: int, apart: timedelta, why: int = 1) -> Plan:
    """The plan after a group's pods were replaced so many times, each seen dying before."""
    now = NOW
    plan = make_plan(there.service, there.observed(), there.settings, now)
    for turn in range(times):
        if why:
            ended(there.workers[0], why, f"{now:%Y-%m-%dT%H:%M:%SZ}")
        there.pods[0]["status"]["conditions"][0]["status"] = "False"
        for _ in range(2):  # seen as it dies, then anew
            plan = make_plan(there.service, there.observed(), there.settings, now)
            found = status.from_plan(there.service, there.observed(), plan, now)
            there.service = replace(there.service, status=there.service.status | found)
            there.pods, there.workers = [], []
            there.group(0, uid=f"-{turn}", ready=False, joined=False)
        plan = make_plan(there.service, there.observed(), there.settings, now)
        now += apart
    return plan


def test_a_group_that_dies_over_and_over_is_a_crash_loop(groups: Groups) -> None:
    there = groups().group(0).answered()
    code = random.randrange(2, 100)
    ready = condition(restarted(there, 3, timedelta(minutes=2), code), "Ready")
    assert ready.reason == "CrashLoop"
    assert f"exit code {code}" in ready.message
    assert condition(restarted(groups().group(0).answered(), 2, timedelta(minutes=2)), "Ready").reason != "CrashLoop"


@pytest.mark.parametrize(("apart", "why"), [(timedelta(minutes=11), 1), (timedelta(minutes=1), 0)])
def test_restarts_far_apart_or_by_others_are_no_crash_loop(groups: Groups, apart: timedelta, why: int) -> None:
    """Drained nodes take groups along, too."""
    there = groups().group(0).answered()
    ready = condition(restarted(there, 5, apart, why), "Ready")
    assert ready.reason == "GroupRestarting", ready.message


def test_where_no_api_serves_groups_the_condition_says_what_to_install(groups: Groups) -> None:
    there = groups().group(0).answered()
    there.served = frozenset()
    for key in [key for key in there.children if SET in key]:
        del there.children[key]
    there.pods, there.workers = [], []
    plan = there.plan()
    ready = condition(plan, "Ready")
    assert (ready.reason, condition(plan, "Stalled").status) == ("LeaderWorkerSetMissing", "True")
    assert "https://lws.sigs.k8s.io" in ready.message
    assert ("LeaderWorkerSet", SET) not in made(plan)
    assert plan.requeue_after is not None, "no event tells when it comes"
    there.without = frozenset({"LeaderWorkerSet"})
    assert condition(there.plan(), "Ready").reason == "FeatureOff"


def test_the_secret_comes_with_the_groups_and_again_where_a_pod_misses_it(groups: Groups) -> None:
    there = groups()
    live = there.children.pop(("LeaderWorkerSet", SET))
    actions = there.plan().actions
    [secret] = [action for action in actions if isinstance(action, Generate)]
    assert secret.owner == ("LeaderWorkerSet", SET)
    assert not {"data", "stringData"} & secret.manifest.keys()
    kinds = [action.manifest["kind"] for action in actions if not isinstance(action, Delete)]
    assert kinds.index("LeaderWorkerSet") < kinds.index("Secret")
    there.children["LeaderWorkerSet", SET] = live
    there.group(0, ready=False, joined=False)
    assert not [action for action in there.plan().actions if isinstance(action, Generate)]
    waiting = {"reason": "CreateContainerConfigError", "message": f'secret "{SET}" not found'}
    there.workers[0]["status"]["containerStatuses"] = [{"name": "engine", "state": {"waiting": waiting}}]
    assert [action for action in there.plan().actions if isinstance(action, Generate)]


def spanning(there: Any, service: Callable[..., InferenceService], **spec: Any) -> None:
    """The same service, to span two nodes."""
    wanted = service(resources={"gpus": 1, "nodes": 2}, parallelism={"pipeline": 2}, **spec)
    there.service = replace(there.service, resources=wanted.resources, parallelism=wanted.parallelism, generation=2)
    there.served = frozenset({"LeaderWorkerSet"})


def test_a_deployment_serves_until_groups_answer_in_its_place(
    world: Any, groups: Groups, service: Callable[..., InferenceService]
) -> None:
    old = world(resources={"gpus": 1}).pod().answered()
    spanning(old, service)
    plan = old.plan()
    assert ("LeaderWorkerSet", SET) in made(plan)
    assert ("Service", SET) in made(plan)
    assert not gone(plan)

    new = groups(resources={"gpus": 1, "nodes": 2}, parallelism={"pipeline": 2})
    new.children["Deployment", "demo"] = old.children["Deployment", "demo"]
    new.pods += old.pods
    assert not gone(new.group(0, ready=False, joined=False).plan())
    new.pods[-1]["status"]["conditions"][0]["status"] = "True"
    assert not gone(new.plan()), "its worker has not joined"
    new.workers[0]["status"]["conditions"][0]["status"] = "True"
    assert not gone(new.plan()), "nobody has asked it yet"
    new.answer = replace(new.group(1).answered().answer, pod=f"{SET}-0")  # type: ignore[arg-type,union-attr]
    assert gone(new.plan()) == [("Deployment", "demo")]
    [action] = [each for each in new.plan().actions if isinstance(each, Delete)]
    assert action.foreground


def test_the_old_workload_gives_its_gpus_where_there_are_no_others(world: Any, groups: Groups) -> None:
    old = world(resources={"gpus": 1}).pod().answered()
    new = groups(resources={"gpus": 1, "nodes": 2}, parallelism={"pipeline": 2})
    new.children["Deployment", "demo"] = old.children["Deployment", "demo"]
    new.pods += old.pods
    new.group(0, ready=False, joined=False)
    for pod, words in (
        (new.workers[0], "1 Insufficient rdma/hca."),
        (new.workers[0], "2 Insufficient nvidia.com/gpu."),
    ):
        pod["status"] = {
            "phase": "Pending",
            "conditions": [{"type": "PodScheduled", "status": "False", "message": f"0/2 nodes: {words}"}],
        }
        assert bool(gone(new.plan())) is ("gpu" in words)


def test_groups_end_once_a_single_pod_answers(world: Any, groups: Groups) -> None:
    """And the Service by which they found each other, and the way that they had to each other, with their last."""
    old = groups(resources={"gpus": 1, "nodes": 2}, parallelism={"pipeline": 2}).group(0)
    new = world(resources={"gpus": 1}).pod(ready=False)
    new.children |= {key: item for key, item in old.children.items() if SET in key}
    new.pods += old.pods
    plan = new.plan()
    assert not gone(plan)
    policy = next(a.manifest for a in plan.actions if isinstance(a, Apply) and a.manifest["kind"] == "NetworkPolicy")
    assert {"from": policy["spec"]["egress"][-1]["to"]} in policy["spec"]["ingress"], "groups that serve still talk"
    new.pods[0]["status"]["conditions"][0]["status"] = "True"
    new.answered()
    assert gone(new.plan()) == [("LeaderWorkerSet", SET)]
    del new.children["LeaderWorkerSet", SET]
    assert gone(new.plan()) == [("Service", SET)]


def test_a_revision_of_groups_that_is_late_is_given_up_for_the_pods_before(
    world: Any, groups: Groups, model: Any
) -> None:
    old = world(resources={"gpus": 1}).pod().answered()
    new = groups(resources={"gpus": 1, "nodes": 2}, parallelism={"pipeline": 2}, rollout={"progressDeadline": "7m"})
    new.revisions = [*old.revisions]
    new.record(new.current, 2)
    new.children["Deployment", "demo"] = old.children["Deployment", "demo"]
    new.pods += old.pods
    new.group(0, ready=False, joined=False)
    new.service = replace(new.service, status=new.service.status | new.status())
    assert make_plan(new.service, new.observed(), new.settings, NOW + timedelta(minutes=6)).failed == ""
    plan = make_plan(new.service, new.observed(), new.settings, NOW + timedelta(minutes=8))
    assert plan.failed == new.current
    assert condition(plan, "Ready").reason == "RolledBack"
    again = make_plan(new.service, new.observed(), new.settings, NOW + timedelta(minutes=9))
    assert again.failed == new.current


def test_room_is_asked_for_all_pods_of_a_group(groups: Groups) -> None:
    there = groups().group(0).answered()
    template = there.set["spec"]["leaderWorkerTemplate"]
    there.set["metadata"]["annotations"]["stoker.dev/template"] = "another"
    asked = there.plan().asks_room
    assert asked is not None
    assert len(asked) == 3
    assert [pod["containers"][0]["resources"] for pod in asked] == [
        template["leaderTemplate"]["spec"]["containers"][0]["resources"]
    ] * 3


def test_a_pause_holds_groups_too(groups: Groups) -> None:
    there = groups(rollout={"paused": True}).group(0).answered()
    there.set["metadata"]["annotations"]["stoker.dev/template"] = "another"
    there.revisions = []
    plan = there.plan()
    assert condition(plan, "Ready").reason == "RolloutPaused"
    assert ("LeaderWorkerSet", SET) not in made(plan)


def test_autoscalers_set_the_number_of_groups(groups: Groups) -> None:
    there = groups(autoscaling={"engine": "HPA", "min": 2, "max": 5}).group(0).group(1).answered()
    written = [action.manifest for action in there.plan().actions if isinstance(action, Apply)]
    [scaler] = [manifest for manifest in written if manifest["kind"] == "HorizontalPodAutoscaler"]
    target = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": SET}
    assert scaler["spec"]["scaleTargetRef"] == target
    there.served |= {"ScaledObject"}
    there.settings = replace(there.settings, prometheus_url="http://prometheus:9090")
    there.service = replace(there.service, autoscaling=replace(there.service.autoscaling, engine="KEDA"))
    written = [action.manifest for action in there.plan().actions if isinstance(action, Apply)]
    [scaler] = [manifest for manifest in written if manifest["kind"] == "ScaledObject"]
    assert scaler["spec"]["scaleTargetRef"] == target
    pods = re.search('pod=~"([^"]+)"', scaler["spec"]["triggers"][0]["metadata"]["query"])
    assert pods is not None
    names = [pod["metadata"]["name"] for pod in (*there.pods, *there.workers)]
    assert [name for name in names if re.fullmatch(pods[1], name)] == [f"{SET}-0", f"{SET}-1"], "leaders alone"
    assert manifests.is_group(manifests.revision_template(there.service, there.settings, there.model))
