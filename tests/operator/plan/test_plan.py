"""plan.py and status.py: what is done, and what is said, in each situation of a service with its model in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stoker_operator import manifests
from stoker_operator.observe.gpu import Gpu
from stoker_operator.observe.rollout import Rollout
from stoker_operator.observe.snapshot import Observed, Progress
from stoker_operator.plan.actions import Apply, Condition, Delete, Finding
from stoker_operator.plan.plan import Plan, make_plan
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService, model_status
from stoker_operator.spec.weights import told_weights
from stoker_operator.status import status

Object = dict[str, Any]
NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


def condition(plan: Plan, kind: str) -> Condition:
    return next(item for item in plan.conditions if item.type == kind)


def test_nothing_there_yet_makes_everything_that_needs_no_model(
    service: Callable[..., InferenceService], settings: Settings
) -> None:
    plan = make_plan(service(), Observed(), settings, NOW)
    kinds = [action.manifest["kind"] for action in plan.actions if isinstance(action, Apply)]
    assert kinds == [
        "ServiceAccount",
        "Service",
        "Service",
        "PodDisruptionBudget",
        "PersistentVolumeClaim",
        "NetworkPolicy",
    ]
    assert all(action.reason for action in plan.actions)
    assert condition(plan, "Ready").reason == "CreatingVolume"


def test_everything_in_place_needs_no_action(world: Any) -> None:
    plan = world().pod().answered().plan()
    assert plan.actions == ()
    assert plan.requeue_after is None
    assert condition(plan, "Ready") == Condition(
        "Ready",
        "True",
        "Serving",
        "1 of 1 pods of revision new are ready, and one answered a completion; clients use "
        "http://demo.default.svc:8000/v1.",
    )


def test_the_deployment_follows_the_model(world: Any) -> None:
    there = world()
    del there.children["Deployment", "demo"]
    [action] = there.plan().actions
    assert action.manifest["kind"] == "Deployment"
    assert action.event == (
        "Created",
        "Created Deployment demo: revision 0123456789abcdef0123456789abcdef01234567 is published and verified.",
    )


SITUATIONS: dict[str, tuple[Callable[[Any], Any], str, str, str, str]] = {
    # name: (what is there, Ready's reason, Servable, Reconciling, Stalled)
    "no pod yet": (lambda w: w, "RollingOut", "False", "True", "False"),
    "pod loads": (lambda w: w.pod(ready=False), "RollingOut", "False", "True", "False"),
    "old pod serves": (lambda w: w.pod("old").pod(ready=False), "RollingOut", "True", "True", "False"),
    "ready, not asked": (lambda w: w.pod(), "AwaitingAnswer", "True", "True", "False"),
    "ready, silent": (lambda w: w.pod().answered("refused"), "NoAnswer", "True", "True", "False"),
    "unschedulable": (
        lambda w: w.pod(
            ready=False,
            phase="Pending",
            conditions=[{"type": "PodScheduled", "status": "False", "message": "Insufficient cpu"}],
        ),
        "Unschedulable",
        "False",
        "True",
        "False",
    ),
    "image": (
        lambda w: w.pod(
            ready=False,
            containerStatuses=[{"name": "engine", "state": {"waiting": {"reason": "ErrImagePull", "message": "no"}}}],
        ),
        "ImagePullFailed",
        "False",
        "False",
        "True",
    ),
}


@pytest.mark.parametrize("case", SITUATIONS.values(), ids=SITUATIONS)
def test_situations(world: Any, case: tuple[Callable[[Any], Any], str, str, str, str]) -> None:
    arrange, reason, servable, reconciling, stalled = case
    plan = arrange(world()).plan()
    assert condition(plan, "Ready").status == "False"
    assert condition(plan, "Ready").reason == reason
    found = [condition(plan, kind).status for kind in ("Servable", "Reconciling", "Stalled")]
    assert found == [servable, reconciling, stalled]
    assert plan.requeue_after is not None


def test_trouble_of_old_pods_is_not_this_generations(world: Any) -> None:
    crashing = {"name": "engine", "restartCount": 9, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    plan = world().pod("old", ready=False, containerStatuses=[crashing]).pod(ready=False).plan()
    assert condition(plan, "Ready").reason == "RollingOut"


def test_a_write_of_the_deployment_is_not_ready_whatever_the_pods_say(world: Any) -> None:
    there = world().pod().answered()
    there.service = replace(there.service, runtime=replace(there.service.runtime, args=("--seed", "1")))
    plan = there.plan()
    [action] = plan.actions
    assert action.manifest["kind"] == "Deployment"
    assert condition(plan, "Ready").reason == "RollingOut"
    assert condition(plan, "Servable").status == "True"


def test_a_revision_that_answered_stays_answered(world: Any) -> None:
    there = world().pod()
    there.service = replace(there.service, status=there.service.status | {"revisions": {"answered": "new"}})
    assert condition(there.plan(), "Ready").status == "True"
    there.service = replace(there.service, status=there.service.status | {"revisions": {"answered": "older"}})
    assert condition(there.plan(), "Ready").reason == "AwaitingAnswer"


@pytest.mark.parametrize(("spec", "reason"), [({"suspend": True}, "Suspended"), ({"replicas": 0}, "ScaledToZero")])
def test_no_pods_by_choice_is_neither_progress_nor_a_stall(world: Any, spec: dict[str, Any], reason: str) -> None:
    plan = world(**spec).plan()
    assert condition(plan, "Ready").reason == reason
    assert [condition(plan, kind).status for kind in ("Reconciling", "Stalled")] == ["False", "False"]
    assert plan.requeue_after is None


def test_a_model_that_does_not_fit_starts_no_pod(world: Any, model: FetchedModel) -> None:
    resources = {"gpus": 1, "gpuProducts": ["Tesla-T4"]}
    there = world(resources=resources)
    there.weights(60 * 10**9)
    del there.children["Deployment", "demo"]
    plan = there.plan()
    assert plan.actions == ()
    assert condition(plan, "Fits").status == "False"
    assert (condition(plan, "Ready").reason, condition(plan, "Stalled").status) == ("DoesNotFit", "True")
    there.service = replace(there.service, resources=replace(there.service.resources, fit_check="Warn"))
    assert [a.manifest["kind"] for a in there.plan().actions if isinstance(a, Apply)] == ["Deployment"]
    assert there.status()["fit"]["verdict"] == "TooLarge"


def test_a_pod_without_room_for_its_kv_pages_is_not_started(world: Any) -> None:
    there = world(resources={"gpus": 1, "memory": "8Gi"}, runtime={"args": ["--swap-space", "16"]})
    del there.children["Deployment", "demo"]
    plan = there.plan()
    assert plan.actions == ()
    ready = condition(plan, "Ready")
    assert (ready.reason, condition(plan, "Stalled").status) == ("DoesNotFit", "True")
    assert "18.1 GiB of 8.0 GiB" in ready.message
    fit = there.status()["fit"]
    assert (fit["verdict"], fit["hostKvGiB"], fit["hostRequiredGiB"], fit["hostGiB"]) == ("TooLarge", 16.0, 18.1, 8.0)
    there.service = replace(there.service, resources=replace(there.service.resources, memory=""))
    assert [a.manifest["kind"] for a in there.plan().actions if isinstance(a, Apply)] == ["Deployment"]
    assert there.status()["fit"]["hostGiB"] == 0


def test_old_caches_go_once_the_new_one_serves(world: Any) -> None:
    there = world().pod()
    mine = {"metadata": {"name": "models-old", "uid": "u1", "ownerReferences": [{"uid": "uid-1"}]}}
    foreign = {"metadata": {"name": "models-two", "uid": "u2", "ownerReferences": [{"uid": "x"}]}}
    job = {"metadata": {"name": "demo-fetch-old-1", "uid": "u3", "labels": {"stoker.dev/source": "old"}}}
    there.claims += [mine, foreign]
    there.jobs = [job]
    assert there.plan().actions == ()  # not before a pod answered
    actions = there.answered().plan().actions
    assert [(a.kind, a.name) for a in actions if isinstance(a, Delete)] == [
        ("PersistentVolumeClaim", "models-old"),
        ("Job", "demo-fetch-old-1"),
    ]


def test_who_moves_on_takes_itself_off_a_shared_volume_and_the_last_one_ends_it(
    world: Any, service: Callable[..., InferenceService], settings: Settings, live: Callable[..., Any]
) -> None:
    there = world().pod().answered()
    old = service(model={"uri": "hf://org/older"})
    other = replace(old, name="other", uid="uid-2")
    shared = live(manifests.volume_claim(old, settings, manifests.volume_claim(other, settings)))
    there.claims.append(shared)
    [left] = there.plan().actions
    assert isinstance(left, Apply)
    assert left.manifest == manifests.volume_claim(other, settings)
    kept = live(manifests.volume_claim(replace(old, cache=replace(old.cache, retain=60)), settings, shared))
    there.claims[-1] = kept
    assert there.plan().actions == ()  # its time begins now, and retention.py ends it
    there.claims[-1] = live(manifests.volume_claim(old, settings))
    assert [(type(action), action.name) for action in there.plan().actions] == [(Delete, shared["metadata"]["name"])]


def test_the_status_is_the_same_for_the_same_situation(world: Any) -> None:
    there = world().pod().answered()
    first = there.status()
    there.service, there.answer = replace(there.service, status=first), None
    again = status.from_plan(there.service, there.observed(), there.plan(), NOW + timedelta(hours=1))
    assert again == first
    assert first["observedGeneration"] == 1
    assert (first["replicas"], first["readyReplicas"], first["updatedReplicas"]) == (1, 1, 1)
    assert first["model"]["shortRevision"] == "0123456"
    assert first["revisions"] == {"current": "new", "answered": "new", "rolledOut": "new", "generation": 1}


def test_the_status_tells_how_much_memory_each_part_takes(world: Any, model: FetchedModel) -> None:
    there = world(resources={"gpus": 1, "gpuProducts": ["NVIDIA-L40S"]}, runtime={"contextLength": 12288})
    known = replace(model, bytes=17 * 2**30, layers=24, kv_heads=6, head_dim=96, max_context=40960)
    known = replace(known, weights=told_weights(known.bytes, ["auto"]))
    told = model_status(known, there.service.status["model"]["source"])
    there.service = replace(there.service, status={"model": told})
    fit = there.status()["fit"]
    kv = 2 * 24 * 6 * 96 * 2 * 12288 / 2**30
    assert (fit["weightsGiB"], fit["kvGiB"], fit["contextLength"]) == (17.0, round(kv, 1), 12288)
    assert fit["requiredGiB"] == pytest.approx((17 + kv + fit["workspaceGiB"]) / 0.9, abs=0.06)
    assert (fit["verdict"], fit["gpuProduct"], fit["gpuGiB"]) == ("Fits", "NVIDIA-L40S", 45.0)


def test_the_status_tells_how_far_the_fetch_is_and_for_how_long_still(
    service: Callable[..., InferenceService], settings: Settings, live: Callable[..., Object]
) -> None:
    built = service()
    claim = live(manifests.volume_claim(built, settings))
    job = live(manifests.prefetch_job(built, settings, claim["metadata"]["uid"], 1))
    before = Observed(children={("PersistentVolumeClaim", claim["metadata"]["name"]): claim}, jobs=(job,))

    def cache(progress: Progress | None) -> Object:
        observed = replace(before, progress=progress)
        found = status.from_plan(built, observed, make_plan(built, observed, settings, NOW), NOW)["cache"]
        return {key: found.get(key) for key in ("progress", "bytesDone", "bytesTotal", "etaSeconds")}

    told = {"progress": "27%", "bytesDone": 41, "bytesTotal": 150, "etaSeconds": 77}
    assert cache(Progress("download", 41, 150, 77)) == told
    assert cache(Progress("verify", 150, 150, 0)) == told | {"progress": "99%", "bytesDone": 150, "etaSeconds": 0}
    assert cache(None) == {"progress": "0%", "bytesDone": None, "bytesTotal": None, "etaSeconds": None}


def test_a_transition_moves_the_time_of_its_condition_alone() -> None:
    before = status.conditions({}, [Condition("A", "True", "r", "m"), Condition("B", "True", "r", "m")], 1, NOW)
    later = NOW + timedelta(minutes=5)
    wanted = [Condition("A", "False", "r", "m"), Condition("B", "True", "r2", "m2")]
    after = {c["type"]: c for c in status.conditions({"conditions": before}, wanted, 2, later)}
    assert after["A"]["lastTransitionTime"] == "2026-01-01T12:05:00Z"
    assert after["B"]["lastTransitionTime"] == "2026-01-01T12:00:00Z"
    assert (after["B"]["reason"], after["B"]["observedGeneration"]) == ("r2", 2)


def test_a_refused_spec_says_of_the_pods_what_they_are_now(world: Any) -> None:
    earlier = world().pod().answered().status()
    finding = Finding("SpecInvalid", "spec.x: no", stalled=True)
    refused = status.refused(earlier, 5, finding, Rollout(total=2, ready=1), NOW)
    by_type = {item["type"]: item for item in refused["conditions"]}
    assert (by_type["Ready"]["status"], by_type["Stalled"]["status"]) == ("False", "True")
    assert by_type["Servable"]["status"] == "True"
    assert refused["observedGeneration"] == 5
    assert refused["model"] == earlier["model"]
    assert (refused["replicas"], refused["readyReplicas"]) == (2, 1)
    assert by_type["EndpointReady"]["status"] == "True"
    gone = status.refused(refused, 5, finding, Rollout(), NOW)
    by_type = {item["type"]: item for item in gone["conditions"]}
    assert (by_type["Servable"]["status"], by_type["Servable"]["message"]) == ("False", "spec.x: no")
    assert (by_type["EndpointReady"]["status"], by_type["EndpointReady"]["reason"]) == ("False", "NoPodReady")
    assert gone["readyReplicas"] == 0


def test_a_gpu_of_the_cluster_that_is_too_small_is_said_and_blocks_nothing(world: Any) -> None:
    there = world(resources={"gpus": 1}).pod().answered()
    plan = there.plan()
    assert (plan.asks_gpu, plan.asks_more) == (True, True)
    there.gpu = Gpu("Tesla-T4", 15.0)
    there.weights(60 * 10**9)
    plan = there.plan()
    assert plan.asks_gpu is False
    assert (condition(plan, "Fits").status, condition(plan, "Fits").reason) == ("False", "TooLarge")
    # Another number of bytes is another time to start: the Deployment is written, not withheld.
    assert [action.manifest["kind"] for action in plan.actions if isinstance(action, Apply)] == ["Deployment"]
    fit = there.status()["fit"]
    assert (fit["gpuProduct"], fit["gpuGiB"], fit["workspaceGiB"]) == ("Tesla-T4", 15.0, 2.0)
    there.gpu = None
    there.service = replace(there.service, status=there.status() | {"fit": fit})
    assert there.plan().asks_gpu is False  # once for each generation
