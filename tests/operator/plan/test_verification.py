"""plan/verification.py: when a scheduled verification begins, what it finds, and what follows while pods serve."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stoker_operator import manifests
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Apply, Delete
from stoker_operator.plan.cache import CachePlan, plan_cache
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

Build = Callable[..., InferenceService]
Object = dict[str, Any]
NOW = datetime(2031, 5, 3, 7, 8, 9, tzinfo=UTC)
EVERY = 4000
ROT = {"reason": "ChecksumMismatch", "message": "sha256-abab/m.gguf has other bytes than those published."}


def stamp(seconds_ago: float) -> str:
    return (NOW - timedelta(seconds=seconds_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


class World:
    """A published model, what became of its Jobs, and what the status remembers."""

    def __init__(self, service: InferenceService, model: FetchedModel, live: Callable[..., Object]) -> None:
        self.model, self.live = model, live
        claim = service.cache.existing_claim or service.in_place
        made = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": manifests.claim_name(service)},
        }
        self.claim = live(made if claim else manifests.volume_claim(service, Settings()))
        self.uid = self.claim["metadata"]["uid"]
        source = manifests.source_id(service, self.uid)
        known = {"resolvedRevision": "c0ffee", "digest": model.digest, "bytes": model.bytes}
        cached = {"type": "ModelCached", "status": "True", "lastTransitionTime": stamp(2 * EVERY)}
        self.status: Object = {
            "model": known | {"path": model.path, "serve": model.serve, "source": source},
            "cache": {"source": source, "attempt": 3},
            "conditions": [cached],
        }
        self.service = service
        self.jobs: list[Object] = []
        self.verify_pods: list[Object] = []
        self.fetch_pods: list[Object] = []

    def verified(self, seconds_ago: float) -> World:
        self.status["cache"]["verifiedTime"] = stamp(seconds_ago)
        return self

    def verification(self, made: float, *, ended: str = "", at: float = 0, report: Object | None = None) -> World:
        """A verification that began so long ago, and ended with a condition."""
        begun = NOW - timedelta(seconds=made)
        job = self.live(manifests.verify_job(self.service, Settings(), self.model, self.uid, begun))
        job["metadata"]["creationTimestamp"] = stamp(made)
        if ended:
            job["status"] = {"conditions": [{"type": ended, "status": "True", "lastTransitionTime": stamp(at)}]}
        self.jobs.append(job)
        containers = [{"name": "verify", "state": {"terminated": {"exitCode": 3, "message": json.dumps(report)}}}]
        owners = [{"uid": job["metadata"]["uid"]}]
        head = {"name": "v", "labels": job["metadata"]["labels"], "ownerReferences": owners}
        self.verify_pods.append({"metadata": head, "status": {"containerStatuses": containers if report else []}})
        return self

    def repair(self, attempt: int, *, ended: str = "", at: float = 0) -> World:
        """A prefetch with --repair."""
        job = self.live(manifests.prefetch_job(self.service, Settings(), self.uid, attempt, repair=True))
        if ended:
            job["status"] = {"conditions": [{"type": ended, "status": "True", "lastTransitionTime": stamp(at)}]}
        self.jobs.append(job)
        return self

    def plan(self, **spec: Any) -> CachePlan:
        observed = Observed(
            children={("PersistentVolumeClaim", self.claim["metadata"]["name"]): self.claim},
            jobs=tuple(self.jobs),
            verify_pods=tuple(self.verify_pods),
            fetch_pods=tuple(self.fetch_pods),
        )
        return plan_cache(replace(self.service, status=self.status, **spec), observed, Settings(), NOW)


@pytest.fixture
def world(service: Build, model: FetchedModel, live: Callable[..., Object]) -> Callable[..., World]:
    def build(**cache: Any) -> World:
        fields = {"verify": "Scheduled", "verifyEvery": f"{EVERY}s"} | cache
        return World(service(cache=fields), model, live)

    return build


def jobs(plan: CachePlan) -> list[str]:
    """The Jobs that are made, by what they are called."""
    made = [action.manifest for action in plan.actions if isinstance(action, Apply) and action.create]
    return [job["metadata"]["name"].split("-")[1] for job in made if job["kind"] == "Job"]


def deleted(plan: CachePlan) -> list[str]:
    return [action.name for action in plan.actions if isinstance(action, Delete)]


def said(plan: CachePlan, kind: str = "CacheVerified") -> tuple[str, str, str]:
    [found] = [item for item in plan.conditions() if item.type == kind]
    return found.status, found.reason, found.message


def test_nothing_is_verified_that_nobody_asks_for(world: Callable[..., World]) -> None:
    assert jobs(world().plan()) == ["verify"]
    quiet = world().verified(10)
    plan = quiet.plan(cache=replace(quiet.service.cache, verify="OnDownload"))
    assert not plan.actions
    assert plan.verify_after is None
    assert all(item.type != "CacheVerified" for item in plan.conditions())
    assert plan.verified == stamp(10), "what is known is not forgotten"


def test_the_first_begins_an_interval_after_the_fetch(world: Callable[..., World]) -> None:
    there = world()
    there.status["conditions"][0]["lastTransitionTime"] = stamp(EVERY - 60)
    plan = there.plan()
    assert jobs(plan) == []
    assert plan.verify_after is not None
    assert 60 <= plan.verify_after <= 60 + EVERY // 10
    assert said(plan)[:2] == ("Unknown", "NotYet")
    there.status["conditions"][0]["lastTransitionTime"] = stamp(EVERY + EVERY // 10 + 1)
    assert jobs(there.plan()) == ["verify"]


def test_services_do_not_begin_together(service: Build, model: FetchedModel, live: Callable[..., Object]) -> None:
    cache = {"verify": "Scheduled", "verifyEvery": "24h"}
    due = {World(service(f"s{n}", cache=cache), model, live).verified(0).plan().verify_after for n in range(40)}
    assert len(due) > 30
    assert all(86400 <= time <= 95040 for time in due if time is not None)


def test_what_was_verified_is_said_and_verified_again(world: Callable[..., World]) -> None:
    there = world().verification(100, ended="Complete", at=40)
    plan = there.plan()
    assert jobs(plan) == []
    assert plan.verified == stamp(40)
    assert said(plan)[:2] == ("True", "Verified")
    assert stamp(40) in said(plan)[2]
    assert plan.verify_after is not None
    assert EVERY - 100 <= plan.verify_after <= EVERY - 100 + EVERY // 10
    assert plan.model is not None
    assert plan.rot is None


def test_one_runs_at_a_time(world: Callable[..., World]) -> None:
    plan = world().verified(3 * EVERY).verification(5).plan()
    assert (jobs(plan), deleted(plan)) == ([], [])
    assert "hashes every file" in said(plan)[2]


def test_one_that_would_be_made_otherwise_is_replaced(world: Callable[..., World]) -> None:
    there = world().verification(900)
    image = replace(there.service.runtime, image="registry/other:3")
    plan = there.plan(runtime=image)
    assert jobs(plan) == ["verify"]
    assert deleted(plan) == [there.jobs[0]["metadata"]["name"]]
    [made] = [action.manifest for action in plan.actions if isinstance(action, Apply)]
    assert made["metadata"]["name"] != there.jobs[0]["metadata"]["name"], "the old one is still on its way out"


def test_rot_is_mended_while_the_pods_serve(world: Callable[..., World]) -> None:
    there = world().verified(EVERY).verification(100, ended="Failed", at=7, report=ROT)
    plan = there.plan()
    assert plan.model is not None, "the pods are left alone"
    assert plan.finding is None
    assert plan.rot is not None
    assert (plan.rot.reason, plan.rot.stalled) == ("CacheCorrupt", False)
    assert "m.gguf has other bytes" in plan.rot.message
    assert f"started after {stamp(EVERY)}" in plan.rot.message
    assert jobs(plan) == ["fetch"]
    [job] = [action.manifest for action in plan.actions if isinstance(action, Apply)]
    assert manifests.is_repair(job)
    assert said(plan)[:2] == said(plan, "ModelCached")[:2] == ("False", "CacheCorrupt")
    assert said(plan, "ModelResolved")[0] == "True"
    assert plan.verify_after is None


def test_while_it_is_mended_no_second_repair_and_no_verification(world: Callable[..., World]) -> None:
    there = world().verified(9 * EVERY).verification(100, ended="Failed", at=7, report=ROT).repair(4)
    plan = there.plan()
    assert jobs(plan) == []
    assert plan.rot is not None
    assert plan.model is not None


def test_a_repair_that_fails_is_tried_again_and_rot_stays(world: Callable[..., World]) -> None:
    there = world().verification(900, ended="Failed", at=800, report=ROT).repair(4, ended="Failed", at=700)
    plan = there.plan()
    assert jobs(plan) == ["fetch"]
    assert plan.rot is not None
    assert plan.attempt == 5


def test_a_repair_hashes_everything_and_ends_the_rot(world: Callable[..., World]) -> None:
    there = world().verification(100, ended="Failed", at=70, report=ROT).repair(4, ended="Complete", at=20)
    plan = there.plan()
    assert plan.rot is None
    assert plan.verified == stamp(20)
    assert said(plan)[:2] == ("True", "Verified")
    assert said(plan, "ModelCached")[0] == "True"
    assert jobs(plan) == []


@pytest.mark.parametrize("report", [None, {"reason": "Interrupted", "message": "Stopped."}], ids=str)
def test_no_verdict_is_no_rot(world: Callable[..., World], report: Object | None) -> None:
    there = world().verified(2 * EVERY).verification(100, ended="Failed", at=30, report=report)
    plan = there.plan()
    assert plan.rot is None
    assert jobs(plan) == []
    assert said(plan)[:2] == ("Unknown", "NoVerdict")
    assert plan.verify_after == 600 - 100
    there = world().verified(2 * EVERY).verification(601, ended="Failed", at=30, report=report)
    assert jobs(there.plan()) == ["verify"]


def test_an_api_server_whose_clock_is_behind_makes_no_loop(world: Callable[..., World]) -> None:
    there = world().verification(100, ended="Complete", at=100 * EVERY)
    assert jobs(there.plan()) == []
    assert said(there.plan())[:2] == ("True", "Verified")


def test_only_the_newest_is_kept(world: Callable[..., World]) -> None:
    there = world().verification(9000, ended="Complete", at=8000).verification(100, ended="Complete", at=30)
    assert deleted(there.plan()) == [there.jobs[0]["metadata"]["name"]]


def test_the_jobs_go_with_the_wish(world: Callable[..., World]) -> None:
    there = world().verification(100).verification(50, ended="Complete", at=3)
    plan = there.plan(cache=replace(there.service.cache, verify="Always"))
    assert len(deleted(plan)) == 2


def test_weights_of_the_users_own_are_not_mended(
    service: Build, model: FetchedModel, live: Callable[..., Object]
) -> None:
    cache = {"verify": "Scheduled", "verifyEvery": f"{EVERY}s"}
    there = World(service(model={"uri": "pvc://weights/a"}, cache=cache), model, live)
    there.verification(100, ended="Failed", at=9, report={"reason": "ChecksumMismatch", "message": "holds another."})
    plan = there.plan()
    assert jobs(plan) == []
    assert plan.rot is not None
    assert plan.rot.stalled
    assert f"kubectl delete job {there.jobs[0]['metadata']['name']}" in plan.rot.message
    assert plan.verify_after is not None
    there.jobs.clear()
    assert jobs(there.plan()) == ["verify"], "at once, when its Job is deleted"


def test_rot_of_an_engine_pod_is_an_outage_as_before(
    world: Callable[..., World], service: Build, model: FetchedModel
) -> None:
    """What a pod's own check finds keeps that pod from running: the older way goes first."""
    there = world().verification(100, ended="Failed", at=70, report=ROT)
    terminated = {"exitCode": 3, "message": json.dumps(ROT), "finishedAt": stamp(5)}
    pod = {"metadata": {"name": "e"}, "status": {"initContainerStatuses": [verify_state(terminated)]}}
    observed = Observed(
        children={("PersistentVolumeClaim", there.claim["metadata"]["name"]): there.claim},
        jobs=tuple(there.jobs),
        verify_pods=tuple(there.verify_pods),
        engine_pods=(pod,),
    )
    plan = plan_cache(replace(there.service, status=there.status), observed, Settings(), NOW)
    assert plan.model is None
    assert plan.finding is not None
    assert plan.finding.reason == "CacheCorrupt"


def verify_state(terminated: Mapping[str, Any]) -> Object:
    return {"name": "verify", "state": {"terminated": dict(terminated)}}
