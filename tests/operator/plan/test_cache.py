"""plan/cache.py: the life of a model cache, step by step, from what was observed to what is done next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.plan.cache_world import NOW, REPORT, World, stamp

from stoker_operator import manifests
from stoker_operator.observe.snapshot import Observed, Progress
from stoker_operator.plan.actions import Apply, Delete
from stoker_operator.plan.cache import CachePlan, _why_fetch, plan_cache
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

Build = Callable[..., InferenceService]
Object = dict[str, Any]


@pytest.fixture
def world(service: Build, live: Callable[..., Object]) -> World:
    return World(service(), live)


def remembering(world: World, **status: Any) -> World:
    """The same world, with a status that remembers the model."""
    source = manifests.source_id(world.service, world.claim["metadata"]["uid"])
    cached = {"type": "ModelCached", "status": "True", "lastTransitionTime": stamp(3600)}
    remembered = {
        "model": REPORT | {"source": source},
        "cache": {"source": source, "attempt": 1},
        "conditions": [cached],
    }
    world.service = replace(world.service, status=remembered | status)
    return world


def applied(plan: CachePlan) -> list[tuple[str, str]]:
    return [(a.manifest["kind"], a.manifest["metadata"]["name"]) for a in plan.actions if isinstance(a, Apply)]


def reason(plan: CachePlan) -> str:
    assert plan.finding is not None
    assert plan.model is None
    return plan.finding.reason


def test_first_the_volume(service: Build) -> None:
    plan = plan_cache(service(), Observed(), Settings(), NOW)
    assert applied(plan) == [("PersistentVolumeClaim", manifests.claim_name(service()))]
    assert reason(plan) == "CreatingVolume"


def test_then_the_job(world: World) -> None:
    plan = world.plan()
    [(kind, name)] = applied(plan)
    assert kind == "Job"
    assert name.endswith("-1")
    assert plan.attempt == 1
    assert plan.actions[0].reason == "hf://org/model at main is not on the volume yet"


def test_only_a_hub_has_revisions_to_tell_of(service: Build) -> None:
    wanted = service(model={"uri": "https://files.example/model.gguf"})
    assert _why_fetch(wanted, None, None, failed=False) == "https://files.example/model.gguf is not on the volume yet"


def test_a_volume_that_is_going_is_left_alone(world: World) -> None:
    world.claim["metadata"]["deletionTimestamp"] = stamp(1)
    plan = world.plan()
    assert plan.actions == ()
    assert reason(plan) == "VolumeTerminating"
    # Pods of Jobs, finished ones too, keep Kubernetes from taking it away.
    plan = world.job(1, ended="Failed").job(2, ended="Complete").plan()
    assert [(type(action), action.name[-2:]) for action in plan.actions] == [(Delete, "-1"), (Delete, "-2")]  # type: ignore[union-attr]
    for job in world.jobs:
        job["metadata"]["deletionTimestamp"] = stamp(0)
    assert world.plan().actions == ()
    world.engine_pods.append({"metadata": {"name": "evicted-7"}, "status": {"phase": "Failed"}})
    plan = world.plan()
    assert plan.finding is not None
    assert "kubectl delete pod evicted-7" in plan.finding.message


@pytest.mark.parametrize("ended", ["", "Failed"])
def test_a_job_that_would_be_made_otherwise_now_is_replaced_at_once(world: World, ended: str) -> None:
    world.job(3, ended=ended, seconds_ago=1)
    assert world.plan().actions == ()
    world.service = replace(world.service, runtime=replace(world.service.runtime, image="registry/runtime:9"))
    plan = world.plan()
    assert [a.name[-2:] for a in plan.actions if isinstance(a, Delete)] == ([] if ended else ["-3"])
    assert [name[-2:] for _, name in applied(plan)] == ["-4"]
    assert plan.finding is not None
    name = world.jobs[0]["metadata"]["name"]
    assert f"another containers[name=fetch].image than Job {name} had" in plan.finding.message
    world.jobs[0]["metadata"]["deletionTimestamp"] = stamp(0)
    assert world.job(4).plan().actions == ()  # the old one is on its way out, the new one is what is wanted


def test_what_is_published_is_not_fetched_again_for_another_image(world: World) -> None:
    world.job(ended="Complete").pod(REPORT)
    world.service = replace(world.service, runtime=replace(world.service.runtime, image="registry/runtime:9"))
    assert world.plan().actions == ()
    assert world.plan().model is not None


def test_a_node_selector_that_was_taken_back_is_a_change_too(service: Build, live: Any) -> None:
    there = World(service(placement={"nodeSelector": {"disk": "fast"}}), live).job()
    there.service = service()
    assert [name[-2:] for _, name in applied(there.plan())] == ["-2"]
    del there.jobs[0]["metadata"]["annotations"]["stoker.dev/template"]  # as an operator before made it
    assert there.plan().actions == ()
    there.service = replace(there.service, runtime=replace(there.service.runtime, image="registry/runtime:9"))
    assert [name[-2:] for _, name in applied(there.plan())] == ["-2"]


def test_a_full_volume_that_cannot_grow_has_a_way_out(world: World) -> None:
    world.job(ended="Failed").pod({"reason": "VolumeFull", "message": "no space"}, code=3, phase="Failed")
    plan = world.plan()
    assert plan.finding is not None
    assert f"kubectl delete pvc {plan.claim};" in plan.finding.message
    world.service = replace(world.service, cache=replace(world.service.cache, size="4Ti"))
    [grow] = world.plan().actions
    assert isinstance(grow, Apply)
    assert f"kubectl delete pvc {plan.claim};" in grow.if_refused


def test_while_it_runs_its_progress_is_told(world: World) -> None:
    world.job().pod()
    world.progress = Progress("download", 5 * 10**8, 10**9, 30)
    plan = world.plan()
    assert plan.actions == ()
    assert plan.finding is not None
    assert plan.finding.message.endswith("download, 500.0 MB of 1.0 GB, about 30 s to go.")
    assert plan.requeue_after == 5


def test_a_report_makes_the_model_known(world: World) -> None:
    plan = world.job(ended="Complete").pod(REPORT).plan()
    assert plan.model == FetchedModel("c0ffee", "sha256:aa", 10**9, "sha256-aa", "sha256-aa")
    assert plan.actions == ()
    assert plan.requeue_after is None


def test_the_status_remembers_when_the_job_is_gone(world: World) -> None:
    plan = remembering(world).plan()
    assert plan.model is not None
    assert plan.actions == ()


def test_a_status_of_another_volume_is_not_believed(world: World) -> None:
    remembering(world).claim["metadata"]["uid"] = "a-new-volume"
    plan = world.plan()
    assert plan.model is None
    assert [kind for kind, _ in applied(plan)] == ["Job"]
    assert plan.attempt == 1


def test_a_report_that_is_lost_is_asked_for_again(world: World) -> None:
    plan = world.job(ended="Complete").plan()
    assert [name[-2:] for _, name in applied(plan)] == ["-2"]
    assert plan.actions[0].reason == "the report of the attempt before is lost"


def test_a_report_whose_pod_is_still_seen_running_is_waited_for(world: World) -> None:
    plan = world.job(ended="Complete").pod(phase="Running").plan()
    assert applied(plan) == []
    assert plan.requeue_after is not None


FAILURES = [
    ("TokenRejected", 3, True, "spec.model.secretRef"),
    ("RevisionNotFound", 3, True, "spec.model.revision"),
    ("ModelNotFound", 3, True, "spec.model.uri"),
    ("VolumeFull", 3, True, "spec.cache.pvc.size"),
    ("HubUnreachable", 1, False, "hub says no"),
    ("ChecksumMismatch", 1, False, "hub says no"),
]


@pytest.mark.parametrize(("why", "code", "stalled", "advice"), FAILURES)
def test_a_failure_is_told_and_tried_again_later(world: World, why: str, code: int, stalled: bool, advice: str) -> None:
    failure = {"reason": why, "message": "hub says no"}
    plan = world.job(ended="Failed", seconds_ago=10).pod(failure, code=code, phase="Failed").plan()
    assert plan.actions == ()
    assert plan.finding is not None
    assert (plan.finding.reason, plan.finding.stalled) == (why, stalled)
    assert advice in plan.finding.message
    assert "Next try at 12:00:20 UTC; to try now: kubectl delete job demo-fetch-" in plan.finding.message
    assert plan.requeue_after == 20
    later = world.plan(NOW + timedelta(seconds=20))
    assert [name[-2:] for _, name in applied(later)] == ["-2"]


def test_a_store_that_refuses_is_a_matter_of_keys_or_of_an_identity(
    service: Callable[..., InferenceService], live: Callable[..., Object]
) -> None:
    world = World(service(model={"uri": "gs://weights/x"}), live)
    failure = {"reason": "TokenRejected", "message": "gs://weights/x: refused access (403)."}
    plan = world.job(ended="Failed", seconds_ago=10).pod(failure, code=3, phase="Failed").plan()
    assert plan.finding is not None
    assert "spec.model.serviceAccountName" in plan.finding.message


def test_an_api_server_whose_clock_is_behind_makes_no_loop(world: World) -> None:
    world.job(9, ended="Failed", seconds_ago=5000).pod({"reason": "HubUnreachable", "message": "m"}, code=1)
    world.jobs[0]["metadata"]["annotations"]["stoker.dev/begun"] = stamp(7)
    plan = world.plan()
    assert ([kind for kind, _ in applied(plan)], plan.requeue_after) == ([], 593)


@pytest.mark.parametrize(("attempt", "delay"), [(1, 30), (2, 60), (3, 120), (6, 600), (40, 600)])
def test_the_delay_doubles_up_to_ten_minutes(world: World, attempt: int, delay: int) -> None:
    world.job(attempt, ended="Failed", seconds_ago=delay - 1).pod({"reason": "HubUnreachable", "message": "m"}, code=1)
    assert world.plan().actions == ()
    assert len(applied(world.plan(NOW + timedelta(seconds=1)))) == 1


def test_a_failed_job_that_somebody_deleted_is_tried_at_once(world: World) -> None:
    source = manifests.source_id(world.service, world.claim["metadata"]["uid"])
    world.service = replace(world.service, status={"cache": {"source": source, "attempt": 3}})
    assert [name[-2:] for _, name in applied(world.plan())] == ["-4"]


def test_older_attempts_are_cleared_away(world: World) -> None:
    plan = world.job(1, ended="Failed").job(2).plan()
    [deleted] = [action for action in plan.actions if isinstance(action, Delete)]
    assert deleted.name.endswith("-1")


def test_a_pod_that_cannot_start_is_told(world: World) -> None:
    status = {"name": "fetch", "state": {"waiting": {"reason": "CreateContainerConfigError"}}}
    status["state"]["waiting"]["message"] = 'secret "t" not found'  # type: ignore[index]
    plan = world.job().pod(phase="Pending", containerStatuses=[status]).plan()
    assert reason(plan) == "ReferenceMissing"


@pytest.mark.parametrize(("age", "expected"), [(5, "Fetching"), (60, "Unschedulable")])
def test_a_volume_that_was_just_asked_for_is_given_time(world: World, age: float, expected: str) -> None:
    unplaced = {"type": "PodScheduled", "status": "False", "message": "unbound immediate PersistentVolumeClaims"}
    there = world.job().pod(phase="Pending", conditions=[unplaced])
    there.jobs[-1]["metadata"]["creationTimestamp"] = stamp(age)
    assert reason(there.plan()) == expected


@pytest.mark.parametrize(("age", "expected"), [(5, "Fetching"), (60, "PodRefused")])
def test_a_job_whose_pod_a_quota_refuses_is_told(world: World, age: float, expected: str) -> None:
    world.job().jobs[0]["metadata"]["creationTimestamp"] = stamp(age)
    plan = world.plan()
    assert reason(plan) == expected
    assert plan.finding is not None
    assert ("kubectl describe job" in plan.finding.message) is (expected == "PodRefused")


RESOLVING, DOWNLOADING = Progress("resolve", 0, 0, 0), Progress("download", 10**8, 10**9, 9)
TRIES: dict[str, tuple[str, Progress | None, bool, str, str]] = {
    # name: (why the pod before failed, what the next one says, whether it repairs, the reason, what the message says)
    "nothing new yet": ("HubUnreachable", None, False, "HubUnreachable", "timed out. Job demo-fetch-"),
    "not there yet": ("HubUnreachable", RESOLVING, False, "HubUnreachable", "tries again by itself."),
    "it goes on": ("HubUnreachable", DOWNLOADING, False, "Fetching", "download, 100.0 MB of 1.0 GB"),
    "it is over": ("TokenRejected", None, False, "Fetching", "gives up: timed out."),
    "a repair": ("HubUnreachable", None, True, "CacheCorrupt", "tries again by itself."),
    "a repair goes on": ("Interrupted", DOWNLOADING, True, "CacheCorrupt", "fetches again what changed in the cache"),
}


@pytest.mark.parametrize("case", TRIES.values(), ids=TRIES)
def test_a_try_that_failed_is_told_until_the_next_one_gets_further(
    world: World, case: tuple[str, Progress | None, bool, str, str]
) -> None:
    why, progress, repairs, expected, says = case
    world.job(repair=repairs).pod({"reason": why, "message": "timed out"}, code=1, phase="Failed")
    world.progress = progress
    plan = world.plan()
    assert plan.finding is not None
    assert (plan.finding.reason, plan.finding.stalled) == (expected, False)
    assert says in plan.finding.message


def test_a_corrupt_cache_is_repaired(world: World) -> None:
    plan = remembering(world).broken(seconds_ago=5).plan()
    assert reason(plan) == "CacheCorrupt"
    [job] = [action.manifest for action in plan.actions if isinstance(action, Apply)]
    assert "--repair" in job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "m.gguf differs" in plan.actions[0].reason
    assert plan.resolved is not None


def test_a_repaired_cache_is_believed_again(world: World) -> None:
    remembering(world).broken(seconds_ago=60).job(2, ended="Complete", seconds_ago=30).pod(REPORT)
    plan = world.plan()
    assert plan.model is not None
    assert plan.actions == ()


def test_conditions_tell_of_both_steps(world: World) -> None:
    before = {c.type: (c.status, c.reason) for c in world.plan().conditions()}
    after = {c.type: c.status for c in world.job(ended="Complete").pod(REPORT).plan().conditions()}
    assert before == {"ModelResolved": ("False", "Fetching"), "ModelCached": ("False", "Fetching")}
    assert after == {"ModelResolved": "True", "ModelCached": "True"}


def test_a_model_that_lies_on_a_claim_is_hashed_there_and_copied_nowhere(service: Build, live: Any) -> None:
    there = World(service(model={"uri": "pvc://weights/llama"}), live)
    there.claim = {"metadata": {"name": "weights", "uid": "uid-weights"}, "spec": {}}
    plan = there.plan()
    [(kind, name)] = applied(plan)
    assert (kind, plan.claim, plan.source) == ("Job", "weights", manifests.source_id(there.service, "uid-weights"))
    assert "served where it lies" in plan.actions[0].reason
    assert name.endswith("-1")
    there.job(ended="Complete").pod(REPORT | {"path": "llama", "serve": "llama/m.gguf"}, phase="Succeeded")
    plan = there.plan()
    assert plan.model is not None
    assert (plan.model.serve, plan.actions) == ("llama/m.gguf", ())
    assert plan.conditions()[1].reason == "InPlace"
    there.broken(seconds_ago=0)  # with verify: Always, its files were changed: they are hashed again
    assert applied(there.plan())[0][0] == "Job"


def test_an_image_is_looked_up_once_and_no_volume_is_made(service: Build, live: Any) -> None:
    there = World(service(model={"uri": "oci://r.example/team/m:v1"}, cache={"mode": "Image"}), live)
    plan = there.plan()
    [(kind, _)] = applied(plan)
    assert (kind, plan.claim) == ("Job", "")
    assert plan.actions[0].reason == "oci://r.example/team/m:v1 was not looked up yet"
    there.claim = {"metadata": {"name": "none", "uid": "Image"}}  # what stands for a volume in names
    there.job(ended="Complete").pod(REPORT | {"digest": "sha256:ab", "path": "", "serve": ""}, phase="Succeeded")
    plan = there.plan()
    assert plan.model is not None
    assert (plan.model.digest, plan.actions) == ("sha256:ab", ())
    assert "sha256:ab is the image that was looked up" in plan.conditions()[1].message


def test_what_is_no_image_is_said_with_the_runtimes_own_words(service: Build, live: Any) -> None:
    there = World(service(model={"uri": "oci://r.example/team/m:v1"}, cache={"mode": "Image"}), live)
    there.claim = {"metadata": {"name": "none", "uid": "Image"}}
    words = "oci://r.example/team/m:v1 is an artifact of files and no image"
    there.job(ended="Failed").pod({"reason": "BadRequest", "message": words}, code=3, phase="Failed")
    finding = there.plan().finding
    assert finding is not None
    assert (finding.reason, finding.stalled) == ("BadRequest", True)
    assert words in finding.message


@pytest.mark.parametrize(
    ("spec", "claim", "field"),
    [
        ({"model": {"uri": "pvc://weights/llama"}}, "weights", "spec.model.uri"),
        ({"cache": {"pvc": {"existingClaim": "mine"}}}, "mine", "spec.cache.pvc.existingClaim"),
    ],
)
def test_a_claim_of_ones_own_that_is_missing_is_named(service: Build, spec: Object, claim: str, field: str) -> None:
    plan = plan_cache(service(**spec), Observed(), Settings(), NOW)
    assert plan.actions == ()
    assert plan.finding is not None
    assert (plan.finding.reason, plan.finding.stalled) == ("VolumeMissing", True)
    assert claim in plan.finding.message
    assert field in plan.finding.message
    assert plan.requeue_after == 15


def test_a_claim_of_ones_own_is_filled_and_never_written_to(service: Build, live: Any) -> None:
    there = World(service(cache={"pvc": {"existingClaim": "mine"}}), live)
    there.claim = {"metadata": {"name": "mine", "uid": "uid-mine"}, "spec": {}}
    [(kind, _)] = applied(there.plan())
    assert kind == "Job"
    there.claim["metadata"]["deletionTimestamp"] = "t"
    plan = there.plan()
    assert plan.finding is not None
    assert (plan.actions, plan.finding.reason) == ((), "VolumeTerminating")


@pytest.mark.parametrize(("eta", "seconds"), [(None, 10), (0, 5), (60, 5), (300, 15), (36000, 30)])
def test_progress_is_looked_at_the_more_often_the_nearer_the_end_is(
    world: World, eta: int | None, seconds: float
) -> None:
    world.job().pod()
    world.progress = None if eta is None else Progress("download", 1, 100, eta)
    assert world.plan().requeue_after == seconds
