"""plan/follow: what becomes of a new commit of a followed revision, step by step, as statuses and Jobs tell it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from typing import Any

import pytest

from stoker_operator import manifests
from stoker_operator.manifests.identity import COMPONENT
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Apply, Delete
from stoker_operator.plan.plan import Plan, make_plan
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService, model_status, parse
from stoker_operator.status import status

Object = dict[str, Any]
EVERY = 700
SETTINGS = Settings(follow_seconds=EVERY)
FIRST = token_hex(20)


class World:
    """A followed model that is published and serves, on a clock; Jobs end as the test says."""

    def __init__(
        self, raw: Callable[..., Object], live: Callable[..., Object], uri: str, policy: str, mode: str
    ) -> None:
        self.raw = raw("demo", model={"uri": uri, "updatePolicy": policy}, cache={"mode": mode})
        self.live, self.now = live, datetime(2027, 3, 4, 5, 6, 7, tzinfo=UTC)
        self.model = FetchedModel(FIRST, "sha256:aa", 10**9, "sha256-aa", "sha256-aa")
        self.claims: dict[str, Object] = {}
        self.jobs: list[Object] = []
        self.pods: list[Object] = []
        volume = "Image" if mode == "Image" else self._claim(self.service)["metadata"]["uid"]
        known = model_status(self.model, manifests.source_id(self.service, volume))
        self.raw["status"] = {"model": known, "conditions": [self._ready("True", "Serving")]}

    @property
    def service(self) -> InferenceService:
        return parse(self.raw)

    def _ready(self, state: str, reason: str) -> Object:
        at = self.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"type": "Ready", "status": state, "reason": reason, "message": "", "lastTransitionTime": at}

    def _claim(self, service: InferenceService) -> Object:
        made = self.live(manifests.volume_claim(service, SETTINGS))
        return self.claims.setdefault(made["metadata"]["name"], made)

    def plan(self) -> Plan:
        """One reconcile: what it makes is there afterwards, what it deletes is gone, and its status is written."""
        children = {("PersistentVolumeClaim", name): claim for name, claim in self.claims.items()}
        pods = {kind: tuple(p for p in self.pods if p["component"] == kind) for kind in ("fetch", "lookup")}
        observed = Observed(
            children=children, claims=tuple(self.claims.values()), jobs=tuple(self.jobs),
            fetch_pods=pods["fetch"], lookup_pods=pods["lookup"],
        )  # fmt: skip
        service = self.service
        found = make_plan(service, observed, SETTINGS, self.now)
        for action in found.actions:
            if isinstance(action, Delete):
                self.jobs = [job for job in self.jobs if job["metadata"]["name"] != action.name]
                self.claims.pop(action.name, None)
            elif action.manifest["kind"] == "Job":
                made = self.live(action.manifest)
                made["metadata"]["creationTimestamp"] = self.now.isoformat()
                self.jobs.append(made)
            elif action.manifest["kind"] == "PersistentVolumeClaim":
                self.claims.setdefault(action.manifest["metadata"]["name"], self.live(action.manifest))
        # A user of the status reads it as the API server keeps it, Ready apart: there are no pods here.
        kept = [self._ready("True", "Serving")]
        self.raw["status"] = status.from_plan(service, observed, found, self.now)
        kept += [item for item in self.raw["status"]["conditions"] if item["type"] != "Ready"]
        self.raw["status"]["conditions"] = kept
        return found

    def settle(self) -> Plan:
        """Reconciles until nothing is left to do about Jobs and volumes."""
        for _ in range(9):
            before = [job["metadata"]["name"] for job in self.jobs], sorted(self.claims)
            found = self.plan()
            if before == ([job["metadata"]["name"] for job in self.jobs], sorted(self.claims)):
                return found
        raise AssertionError("it never settles")

    def of(self, component: str) -> list[Object]:
        """The Jobs that run."""
        mine = [job for job in self.jobs if job["metadata"]["labels"][COMPONENT] == component]
        return [job for job in mine if "status" not in job]

    def end(self, component: str, report: Mapping[str, Any]) -> None:
        """The Job that was made last ends with this report."""
        job = self.of(component)[-1]
        kind = "Failed" if "reason" in report else "Complete"
        at = self.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        job["status"] = {"conditions": [{"type": kind, "status": "True", "lastTransitionTime": at}]}
        ended = {"exitCode": 1 if kind == "Failed" else 0, "message": json.dumps(report)}
        head = {"name": "p", "labels": job["metadata"]["labels"], "ownerReferences": [{"uid": job["metadata"]["uid"]}]}
        states = [{"name": component, "state": {"terminated": ended}}]
        self.pods.append({"component": component, "metadata": head, "status": {"containerStatuses": states}})

    def wait(self) -> float:
        """Lets time pass until a look-up begins; returns how many intervals that took."""
        began = self.now
        while not self.of("lookup"):
            assert self.now - began < timedelta(seconds=EVERY * 20), "nobody looks"
            self.now += timedelta(seconds=EVERY / 8)
            self.settle()
        return (self.now - began).total_seconds() / EVERY

    def look(self, commit: str) -> Plan:
        """An interval passes, and the look-up that follows finds this."""
        self.wait()
        self.now += timedelta(seconds=5)
        self.end("lookup", {"resolvedRevision": commit, "digest": "", "bytes": 1, "path": "", "serve": ""})
        return self.settle()

    def fetched(self, commit: str) -> Plan:
        self.end("fetch", vars_of(replace(self.model, resolved_revision=commit, digest=f"sha256:{commit}")))
        return self.settle()


def vars_of(model: FetchedModel) -> Object:
    return {
        "resolvedRevision": model.resolved_revision, "digest": model.digest, "bytes": model.bytes,
        "path": model.path, "serve": model.serve,
    }  # fmt: skip


@pytest.fixture
def follow(raw: Callable[..., Object], live: Callable[..., Object]) -> Callable[..., World]:
    def build(uri: str = "hf://org/model", policy: str = "Follow", mode: str = "Auto") -> World:
        return World(raw, live, uri, policy, mode)

    return build


def test_a_tag_that_moves_is_a_rollout_of_another_image(follow: Callable[..., World]) -> None:
    world, second = follow("oci://r.example/m:latest", mode="Image"), f"sha256:{token_hex(32)}"
    world.settle()
    world.wait()
    [look] = world.of("lookup")
    assert "--resolve-image" in look["spec"]["template"]["spec"]["containers"][0]["args"]
    world.look(second)
    [job] = world.of("fetch")
    words = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert words[words.index("--revision") + 1] == second
    assert world.claims == {}
    world.end("fetch", {"resolvedRevision": second, "digest": second, "bytes": 9, "path": "", "serve": ""})
    [made] = engine(world.plan())
    [image] = [item["image"] for item in made["spec"]["template"]["spec"]["volumes"] if "image" in item]
    assert image["reference"] == f"r.example/m@{second}"
    assert following(world) == ("True", "UpToDate")


def following(world: World) -> tuple[str, str]:
    found = next(item for item in world.raw["status"]["conditions"] if item["type"] == "Following")
    return found["status"], found["reason"]


def engine(plan: Plan) -> list[Object]:
    return [a.manifest for a in plan.actions if isinstance(a, Apply) and a.manifest["kind"] == "Deployment"]


def test_a_commit_is_fetched_beside_the_one_that_serves_and_then_takes_its_place(follow: Any) -> None:
    world, second = follow(), token_hex(20)
    world.settle()
    assert following(world) == ("True", "UpToDate")
    assert world.look(FIRST).cache.model == world.model
    assert not world.of("fetch")
    [served] = world.claims

    plan = world.look(second)
    [job] = world.of("fetch")
    arguments = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[arguments.index("--revision") + 1] == second
    assert following(world) == ("True", "NewCommit")
    assert world.raw["status"]["follow"]["found"] == second
    assert world.raw["status"]["model"]["resolvedRevision"] == FIRST, "what serves"
    [template] = engine(plan)
    assert served in json.dumps(template), "the Deployment stays as it is"

    plan = world.fetched(second)
    assert following(world) == ("True", "UpToDate")
    assert world.raw["status"]["model"]["resolvedRevision"] == second
    remembered = world.raw["status"]["follow"]
    assert (remembered["commit"], remembered["revision"]) == (second, "main")
    assert "found" not in remembered
    [template] = engine(plan)
    assert served not in json.dumps(template)
    assert manifests.claim_name(world.service) in json.dumps(template)
    assert world.look(second).cache.model is not None
    assert not world.of("fetch")


def test_a_hub_that_is_down_touches_nothing_and_is_asked_more_rarely(follow: Any) -> None:
    world = follow()
    world.settle()
    pauses = []
    for _ in range(6):
        pauses.append(world.wait())
        world.end("lookup", {"reason": "HubUnreachable", "message": "no connection in time."})
        plan = world.settle()
        assert following(world) == ("False", "HubUnreachable")
        assert plan.cache.model == world.model
        assert len(engine(plan)) == 1
    for pause, wanted in zip(pauses, [1, 1, 2, 4, 8, 8], strict=True):
        assert wanted <= pause <= wanted + 0.23, "up to a tenth of an interval later, in steps of an eighth"
    assert len(world.jobs) == 1, "one Job is kept, of the last look"


def test_a_commit_that_cannot_be_fetched_gives_way_to_the_next_one(follow: Any) -> None:
    world, broken, good = follow(), token_hex(20), token_hex(20)
    world.settle()
    world.look(broken)
    world.end("fetch", {"reason": "VolumeFull", "message": "The volume is too small."})
    plan = world.settle()
    assert following(world) == ("False", "VolumeFull")
    assert plan.cache.model == world.model
    world.look(good)
    assert world.raw["status"]["follow"]["found"] == good
    world.fetched(good)
    assert world.raw["status"]["model"]["resolvedRevision"] == good


def test_while_one_is_fetched_or_rolled_out_another_one_waits(follow: Any) -> None:
    world, second = follow(), token_hex(20)
    world.settle()
    world.look(second)
    world.now += timedelta(seconds=3 * EVERY)
    [job] = world.of("fetch")
    runs = {"component": "fetch", "metadata": {"name": "p", "labels": job["metadata"]["labels"]}}
    world.pods.append(runs | {"status": {"phase": "Running"}})
    world.settle()
    assert not world.of("lookup"), "a branch that is busy must not keep a fetch from ending"
    world.raw["status"]["conditions"][0] = world._ready("False", "PodsStarting")
    world.end("fetch", vars_of(replace(world.model, resolved_revision=second)))
    world.plan()
    assert world.raw["status"]["model"]["resolvedRevision"] == FIRST
    world.settle()  # Ready by now
    assert world.raw["status"]["model"]["resolvedRevision"] == second


def test_what_lies_in_a_store_counts_once_it_has_stayed(follow: Any) -> None:
    world, half, whole = follow("s3://bucket/prefix"), token_hex(20), token_hex(20)
    world.settle()
    for state in (half, whole):
        world.look(state)
        assert "found" not in world.raw["status"]["follow"]
        assert not world.of("fetch")
    world.look(whole)
    assert world.raw["status"]["follow"]["found"] == whole


def test_a_branch_that_goes_back_takes_the_commit_back(follow: Any) -> None:
    world, second = follow(), token_hex(20)
    world.settle()
    world.look(second)
    world.end("fetch", {"reason": "HubUnreachable", "message": "gone"})
    world.settle()
    world.look(FIRST)
    assert following(world) == ("True", "UpToDate")
    assert "found" not in world.raw["status"]["follow"]


def test_back_from_follow_what_serves_stays_and_another_source_begins_anew(follow: Any) -> None:
    world, second = follow(), token_hex(20)
    world.settle()
    world.look(second)
    world.fetched(second)
    world.raw["spec"]["model"]["updatePolicy"] = "Pinned"
    plan = world.settle()
    assert plan.cache.model is not None
    assert plan.cache.model.resolved_revision == second
    assert not [job for job in world.jobs if job["metadata"]["labels"][COMPONENT] == "lookup"]
    world.now += timedelta(days=3)
    world.settle()
    assert not world.of("lookup")
    world.raw["spec"]["model"]["revision"] = "dev"
    assert world.service.model.revision == "dev"


def test_a_pinned_service_is_never_looked_up(follow: Any) -> None:
    world = follow(policy="Pinned")
    world.settle()
    world.now += timedelta(days=9)
    world.settle()
    assert not world.of("lookup")
    assert "follow" not in world.raw["status"]
