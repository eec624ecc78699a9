"""plan/nodes.py: which nodes get a copy, when, and what is said meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.plan.cache_world import NOW, stamp

from stoker_operator import manifests
from stoker_operator.manifests import copies
from stoker_operator.manifests.fetching.fill import node_of
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Apply, Delete
from stoker_operator.plan.nodes import NodesPlan, plan_nodes
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

Build = Callable[..., InferenceService]
Object = dict[str, Any]
SETTINGS = Settings(node_cache_class="copies")


def waiting(service: InferenceService, model: FetchedModel, node: str, **notes: str) -> Object:
    """A pod's claim that the scheduler sent to a node."""
    volume = copies.reader_volume(service, SETTINGS, model)["ephemeral"]["volumeClaimTemplate"]
    annotations = volume["metadata"]["annotations"] | {copies.SELECTED_NODE: node} | notes
    return {
        "metadata": volume["metadata"] | {"name": f"pod-{node}", "annotations": annotations},
        "spec": volume["spec"],
    }


def node(name: str, *labels: str, gpus: int = 0, **spec: Any) -> Object:
    status = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"nvidia.com/gpu": str(gpus)}}
    return {"metadata": {"name": name, "labels": dict.fromkeys(labels, "true")}, "spec": spec, "status": status}


def made(service: InferenceService, model: FetchedModel, node: str, attempt: int) -> Object:
    """A Job that runs."""
    job = manifests.fill_job(service, SETTINGS, model, node, attempt, NOW)
    job["metadata"]["uid"] = f"job-{node}"
    return job


def ended(job: Object, how: str, seconds_ago: float, uid: str = "job") -> Object:
    job["metadata"]["uid"] = uid
    job["status"] = {"conditions": [{"type": how, "status": "True", "lastTransitionTime": stamp(seconds_ago)}]}
    return job


def begun(plan: NodesPlan) -> list[tuple[str, str]]:
    """(node, attempt) of each Job that is made."""
    made = [action.manifest for action in plan.actions if isinstance(action, Apply)]
    return [(node_of(job), job["metadata"]["labels"]["stoker.dev/attempt"]) for job in made]


@pytest.fixture
def built(service: Build) -> InferenceService:
    return service(cache={"mode": "Node"}, resources={"gpus": 2}, parallelism={"tensor": 2})


def test_a_pod_waits_for_its_nodes_copy_which_a_job_brings(built: InferenceService, model: FetchedModel) -> None:
    observed = Observed(claims=(waiting(built, model, "n-17"), waiting(built, model, "n-4")))
    plan = plan_nodes(built, observed, SETTINGS, model, NOW)
    assert begun(plan) == [("n-17", "1"), ("n-4", "1")]
    assert plan.finding is not None
    assert (plan.finding.reason, "n-17" in plan.finding.message) == ("FillingNode", True)
    job = made(built, model, "n-17", 1)
    running = plan_nodes(built, Observed(claims=observed.claims[:1], jobs=(job,)), SETTINGS, model, NOW)
    assert (begun(running), running.finding is not None) == ([], True)
    idle = plan_nodes(built, Observed(jobs=(job,)), SETTINGS, model, NOW)
    assert not begun(idle)
    assert idle.finding is None


def test_nobody_waits_for_another_model_or_a_claim_that_is_served(
    built: InferenceService, service: Build, model: FetchedModel
) -> None:
    served = waiting(built, model, "n-1")
    served["spec"] |= {"volumeName": "stoker-x"}
    other = waiting(built, model, "n-2", **{copies.DIGEST: "sha256:" + "0" * 64})
    others = waiting(service("another", cache={"mode": "Node"}), model, "n-3")
    plan = plan_nodes(built, Observed(claims=(served, other, others)), SETTINGS, model, NOW)
    assert plan == NodesPlan()


def test_a_job_that_failed_is_followed_by_another_after_a_while(built: InferenceService, model: FetchedModel) -> None:
    message = json.dumps({"reason": "HubUnreachable", "message": "hub is down"})
    terminated = {"exitCode": 1, "message": message}
    job = ended(manifests.fill_job(built, SETTINGS, model, "n", 3, NOW - timedelta(hours=1)), "Failed", 100)
    pod = {
        "metadata": {"name": "p", "ownerReferences": [{"uid": "job"}]},
        "status": {"containerStatuses": [{"name": "fetch", "state": {"terminated": terminated}}]},
    }
    observed = Observed(claims=(waiting(built, model, "n"),), jobs=(job,), fill_pods=(pod,))
    early = plan_nodes(built, observed, SETTINGS, model, NOW)
    assert not begun(early)
    assert early.finding is not None
    assert (early.finding.reason, "hub is down" in early.finding.message) == ("HubUnreachable", True)
    assert early.requeue_after == 20
    assert begun(plan_nodes(built, observed, SETTINGS, model, NOW + timedelta(seconds=21))) == [("n", "4")]


def test_what_was_given_up_since_is_brought_again(built: InferenceService, model: FetchedModel) -> None:
    job = ended(manifests.fill_job(built, SETTINGS, model, "n", 1, NOW - timedelta(hours=1)), "Complete", 5)
    observed = Observed(claims=(waiting(built, model, "n"),), jobs=(job,))
    assert not begun(plan_nodes(built, observed, SETTINGS, model, NOW)), "its agent is about to serve it"
    later = plan_nodes(built, observed, SETTINGS, model, NOW + timedelta(minutes=2))
    assert begun(later) == [("n", "2")]


def test_a_node_that_has_the_copy_has_a_moment_to_lend_it(built: InferenceService, model: FetchedModel) -> None:
    """A pod's claim is seen before its agent has served it: that is no reason for a Job."""
    claim = waiting(built, model, "n-9")
    claim["metadata"] |= {"creationTimestamp": stamp(3)}
    nodes = (node("n-9", copies.SERVED, copies.copy_label(built.namespace, model.digest)), node("n-8", copies.SERVED))
    plan = plan_nodes(built, Observed(claims=(claim,), nodes=nodes), SETTINGS, model, NOW)
    assert not begun(plan)
    assert plan.finding is not None
    assert (plan.finding.reason, plan.requeue_after) == ("FillingNode", 57)
    later = plan_nodes(
        built, Observed(claims=(claim,), nodes=nodes), SETTINGS, model, NOW + timedelta(seconds=plan.requeue_after + 1)
    )
    assert begun(later) == [("n-9", "1")], "it has given it up meanwhile"
    elsewhere = waiting(built, model, "n-8")
    elsewhere["metadata"] |= {"creationTimestamp": stamp(3)}
    assert begun(plan_nodes(built, Observed(claims=(elsewhere,), nodes=nodes), SETTINGS, model, NOW)) == [("n-8", "1")]


def test_a_full_node_is_told_in_its_agents_words(built: InferenceService, model: FetchedModel) -> None:
    claim = waiting(built, model, "n", **{copies.FULL: "Node n has no room for 4.2 GB: free the disk"})
    plan = plan_nodes(built, Observed(claims=(claim,)), SETTINGS, model, NOW)
    assert plan.finding is not None
    assert (plan.finding.reason, plan.finding.message[:28]) == ("NodeFull", "Node n has no room for 4.2 G")
    claim["metadata"]["labels"] |= {"app.kubernetes.io/component": copies.FILLER}
    assert plan_nodes(built, Observed(claims=(claim,)), SETTINGS, None, NOW).finding == plan.finding


def test_a_copy_that_rotted_is_mended_where_it_lies(built: InferenceService, model: FetchedModel) -> None:
    report = json.dumps({"reason": "ChecksumMismatch", "message": "m.gguf differs"})
    state = {"terminated": {"exitCode": 3, "message": report, "finishedAt": stamp(50)}}
    pod = {
        "metadata": {"name": "p"},
        "spec": {"nodeName": "n-2"},
        "status": {"initContainerStatuses": [{"name": "verify", "state": state}]},
    }
    plan = plan_nodes(built, Observed(engine_pods=(pod,)), SETTINGS, model, NOW)
    assert begun(plan) == [("n-2", "1")]
    [action] = plan.actions
    assert isinstance(action, Apply)
    assert manifests.is_repair(action.manifest)
    mended = ended(dict(action.manifest), "Complete", 10)
    assert not plan_nodes(built, Observed(engine_pods=(pod,), jobs=(mended,)), SETTINGS, model, NOW).actions
    before = ended(dict(action.manifest), "Complete", 90)
    assert begun(plan_nodes(built, Observed(engine_pods=(pod,), jobs=(before,)), SETTINGS, model, NOW))


def test_the_node_of_the_first_fetch_is_warm(service: Build, model: FetchedModel) -> None:
    """It has the copy before its label says so."""
    built = service(cache={"mode": "Node", "prewarm": True}, resources={"gpus": 0})
    nodes = (node("first", copies.SERVED), node("second", copies.SERVED))
    job = ended(manifests.prefetch_job(built, SETTINGS, "Node", 1), "Complete", 7)
    report = {"resolvedRevision": "c" * 40, "digest": model.digest, "bytes": 5, "path": "p", "serve": "p/m.gguf"}
    container = {"name": "fetch", "state": {"terminated": {"exitCode": 0, "message": json.dumps(report)}}}
    pod = {
        "metadata": {"name": "p", "labels": job["metadata"]["labels"]},
        "spec": {"nodeName": "first"},
        "status": {"containerStatuses": [container]},
    }
    observed = Observed(nodes=nodes, jobs=(job,), fetch_pods=(pod,))
    assert begun(plan_nodes(built, observed, SETTINGS, model, NOW)) == [("second", "1")]
    later = begun(plan_nodes(built, observed, SETTINGS, model, NOW + timedelta(minutes=2)))
    assert later == [("first", "1"), ("second", "1")], "its agent would have said so by now"


def test_nodes_are_warm_before_pods_come(service: Build, model: FetchedModel) -> None:
    built = service(cache={"mode": "Node", "prewarm": True}, resources={"gpus": 2}, parallelism={"tensor": 2})
    label = copies.copy_label(built.namespace, model.digest)
    nodes = (
        node("warm", copies.SERVED, label, gpus=8),
        *(node(f"cold-{number}", copies.SERVED, gpus=2) for number in range(7)),
        node("small", copies.SERVED, gpus=1),
        node("cordoned", copies.SERVED, gpus=8, unschedulable=True),
        node("without-an-agent", gpus=8),
    )
    plan = plan_nodes(built, Observed(nodes=nodes), SETTINGS, model, NOW)
    assert [name for name, _ in begun(plan)] == ["cold-0", "cold-1", "cold-2", "cold-3"]
    assert (plan.copies, plan.finding) == (1, None), "nobody waits for them"
    assert plan.requeue_after is not None
    jobs = [
        ended(manifests.fill_job(built, SETTINGS, model, f"cold-{number}", 1, NOW), "Complete", 1) for number in (0, 1)
    ]
    jobs += [made(built, model, "cold-2", 1)]
    then = plan_nodes(built, Observed(nodes=nodes, jobs=tuple(jobs)), SETTINGS, model, NOW)
    assert [name for name, _ in begun(then)] == ["cold-3", "cold-4", "cold-5"]
    gone = plan_nodes(built, Observed(nodes=nodes[:1], jobs=tuple(jobs)), SETTINGS, model, NOW)
    assert [action.name for action in gone.actions if isinstance(action, Delete)] == [jobs[2]["metadata"]["name"]]
