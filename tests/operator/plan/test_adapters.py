"""adapters.py: from a spec's adapters to Jobs, to the list that pods follow, to what the status says of each."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.operator.conftest import NOW, World, raw_service

from stoker_operator import manifests
from stoker_operator.gateway.models import read_backends
from stoker_operator.observe.snapshot import AdapterReport, Observed
from stoker_operator.plan.actions import Apply, Delete
from stoker_operator.plan.plan import Plan, make_plan
from stoker_operator.spec.service import parse
from stoker_operator.status import status

Object = dict[str, Any]


class Scene:
    """A service that serves: plans are carried out, Jobs end as told, pods say what they are told."""

    def __init__(self, world: Any, *adapters: Object, **spec: Any) -> None:
        self.spec = spec
        self.there: World = world(**self._spec(adapters)).pod().answered()
        self.fetch_pods: list[Object] = []
        self.said: dict[str, tuple[AdapterReport, ...]] = {"p0": ()}
        self.now = NOW

    def _spec(self, adapters: tuple[Object, ...]) -> Object:
        model = {"uri": "hf://org/model", "adapters": list(adapters)} | self.spec.get("model", {})
        return self.spec | {"model": model}

    def ask(self, *adapters: Object) -> None:
        """Another list of adapters in the spec."""
        asked = parse(raw_service("demo", **self._spec(adapters)))
        self.there.service = replace(asked, status=self.there.service.status, generation=2)

    def observed(self) -> Observed:
        return replace(self.there.observed(), fetch_pods=tuple(self.fetch_pods), adapters=self.said)

    def step(self) -> Plan:
        plan = make_plan(self.there.service, self.observed(), self.there.settings, self.now)
        for action in plan.actions:
            if isinstance(action, Apply):
                live = self.there.live(action.manifest)
                kind, name = live["kind"], live["metadata"]["name"]
                if kind == "Job":
                    self.there.jobs = [job for job in self.there.jobs if job["metadata"]["name"] != name] + [live]
                else:
                    self.there.children[kind, name] = live
            elif isinstance(action, Delete):
                self.there.jobs = [job for job in self.there.jobs if job["metadata"]["name"] != action.name]
                self.there.children.pop((action.kind, action.name), None)
        written = status.from_plan(self.there.service, self.observed(), plan, self.now)
        self.there.service = replace(self.there.service, status=written)
        return plan

    def job(self, uri: str) -> Object:
        found = [job for job in self.there.jobs if uri in _arguments(job) and not (job.get("status") or {})]
        assert len(found) == 1, found
        return found[0]

    def ends(self, uri: str, *, failed: str = "", digest: str = "") -> None:
        job = self.job(uri)
        kind = "Failed" if failed else "Complete"
        stamp = self.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        job["status"] = {"conditions": [{"type": kind, "status": "True", "lastTransitionTime": stamp}]}
        place = {"path": f"sha256-{digest}", "serve": f"sha256-{digest}", "digest": f"sha256:{digest}", "bytes": 77}
        report = (
            {"reason": failed, "message": f"{uri} failed"} if failed else {"resolvedRevision": f"c-{digest}"} | place
        )
        ended = {"terminated": {"exitCode": 3 if failed else 0, "message": json.dumps(report)}}
        meta = {"name": f"pod-{job['metadata']['name']}", "labels": job["metadata"]["labels"]}
        containers = [{"name": "fetch", "state": ended}]
        self.fetch_pods.append({"metadata": meta, "status": {"phase": "Failed", "containerStatuses": containers}})

    def listed(self) -> dict[str, str]:
        found = manifests.read_list(self.there.children.get(("ConfigMap", "demo-adapters")))
        return {name: each.digest for name, each in found.items()}

    def follow(self, pod: str = "p0", **refused: str) -> None:
        """A pod has seen the list as it is."""
        self.said[pod] = tuple(
            AdapterReport(name, digest, "refused", *refused[name].split(": ", 1))
            if name in refused
            else AdapterReport(name, digest, "loaded")
            for name, digest in self.listed().items()
        )

    def states(self) -> dict[str, tuple[str, int]]:
        return {each["name"]: (each["state"], each["pods"]) for each in self.there.service.status["adapters"]}

    def condition(self, wanted: str = "AdaptersReady") -> Object:
        [found] = [each for each in self.there.service.status["conditions"] if each["type"] == wanted]
        return dict(found)


def _arguments(job: Object) -> list[str]:
    return list(job["spec"]["template"]["spec"]["containers"][0]["args"])


def adapter(name: str, uri: str = "", **more: str) -> Object:
    return {"name": name, "uri": uri or f"hf://o/{name}"} | more


def served(world: Any, *names: str) -> Scene:
    """A scene in which adapters are served."""
    scene = Scene(world, *map(adapter, names))
    scene.step()
    for name in names:
        scene.ends(f"hf://o/{name}", digest=name)
    scene.step()
    scene.follow()
    scene.step()
    assert set(scene.states().values()) == {("Loaded", 1)}
    return scene


def test_from_the_spec_into_the_pods_without_a_rollout(world: Any) -> None:
    scene = Scene(world)
    assert scene.step().actions[0].event == (
        "Created",
        "Created ConfigMap demo-adapters: it names the adapters that pods serve.",
    )
    template = scene.there.children["Deployment", "demo"]["spec"]["template"]
    assert scene.condition()["status"] == "True"
    scene.ask(adapter("sql", revision="v9"), adapter("law", "s3://bucket/law"))
    plan = scene.step()
    assert {type(action).__name__ for action in plan.actions} == {"Apply"}
    assert {action.manifest["kind"] for action in plan.actions if isinstance(action, Apply)} == {"Job", "Service"}
    front = scene.there.children["Service", "demo"]
    front["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    assert read_backends([front], [])[0].models == ("demo", "sql", "law"), "a gateway sends requests by their names"
    assert scene.states() == {"sql": ("Fetching", 0), "law": ("Fetching", 0)}
    assert scene.condition("Ready")["status"] == "True"
    scene.ends("hf://o/sql", digest="5a")
    assert scene.step().requeue_after is not None
    assert scene.listed() == {"sql": "sha256:5a"}
    assert scene.states()["sql"] == ("Loading", 0)
    scene.follow()
    scene.ends("s3://bucket/law", digest="1a")
    scene.step()
    assert scene.states() == {"sql": ("Loaded", 1), "law": ("Loading", 0)}
    assert scene.condition()["reason"] == "AdaptersLoading"
    scene.follow()
    scene.step()
    assert scene.condition() | {"lastTransitionTime": ""} == {
        "type": "AdaptersReady", "status": "True", "reason": "AdaptersServed", "observedGeneration": 2,
        "message": "2 adapters served by every pod.", "lastTransitionTime": "",
    }  # fmt: skip
    assert scene.step().actions == (), "and a second look writes nothing"
    assert scene.there.children["Deployment", "demo"]["spec"]["template"] == template
    scene.fetch_pods.clear()
    scene.there.jobs.clear()
    assert scene.step().actions == (), "what is published is known when its Jobs are gone"


def test_one_that_goes_is_not_listed_any_more(world: Any) -> None:
    scene = served(world, "sql", "law")
    scene.ask(adapter("law"))
    scene.step()
    assert scene.listed() == {"law": "sha256:law"}
    assert [job for job in scene.there.jobs if "hf://o/sql" in _arguments(job)] == [], "its Job goes, too"
    assert scene.condition("Ready")["status"] == "True"


def test_another_revision_takes_the_place_of_the_one_before_once_it_is_published(world: Any) -> None:
    scene = served(world, "sql")
    scene.ask(adapter("sql", revision="v2"))
    scene.step()
    assert scene.listed() == {"sql": "sha256:sql"}, "it is served as it was until then"
    scene.ends("hf://o/sql", failed="RevisionNotFound")
    scene.step()
    assert scene.listed() == {"sql": "sha256:sql"}
    assert scene.states()["sql"][0] == "FetchFailed"
    assert "Check spec.model.adapters[name=sql].revision." in scene.condition()["message"]
    scene.ask(adapter("sql", revision="v3"))
    scene.step()
    scene.ends("hf://o/sql", digest="v3")
    scene.step()
    assert scene.listed() == {"sql": "sha256:v3"}
    assert scene.states()["sql"] == ("Loading", 0), "a pod that serves the one before does not count"


def test_a_bad_one_is_said_of_itself_and_of_nothing_else(world: Any) -> None:
    scene = served(world, "sql")
    scene.ask(adapter("sql"), adapter("bad"), adapter("lost"))
    scene.step()
    scene.ends("hf://o/bad", digest="bad")
    scene.ends("hf://o/lost", failed="ModelNotFound")
    scene.step()
    scene.follow(bad="NotServed: f: its rank is 99, and this server has room for 16; raise --max-lora-rank.")
    scene.step()
    assert scene.states() == {"sql": ("Loaded", 1), "bad": ("Refused", 0), "lost": ("FetchFailed", 0)}
    found = scene.condition()
    assert (found["status"], found["reason"]) == ("False", "AdapterRefused")
    assert "its rank is 99" in found["message"]
    assert "spec.runtime.args [--max-lora-rank, RANK]" in found["message"]
    assert "1 more adapter with trouble." in found["message"]
    ready = {name: scene.condition(name)["status"] for name in ("Ready", "Servable", "Degraded", "Stalled")}
    assert ready == {"Ready": "True", "Servable": "True", "Degraded": "False", "Stalled": "False"}


@pytest.mark.parametrize("reason", ["ChecksumMismatch", "NotPublished"])
def test_what_a_pod_finds_broken_is_fetched_again_once(world: Any, reason: str) -> None:
    scene = served(world, "sql")
    scene.now += timedelta(minutes=5)
    scene.follow(sql=f"{reason}: adapter_model.safetensors has other bytes than those published")
    scene.step()
    assert "--repair" in _arguments(scene.job("hf://o/sql"))
    assert scene.listed() == {"sql": "sha256:sql"}
    scene.ends("hf://o/sql", digest="sql")
    scene.step()
    assert all(job.get("status") for job in scene.there.jobs), "the pod is given time to look again"
    scene.now += timedelta(minutes=3)
    scene.step()
    assert scene.job("hf://o/sql"), "which it did, and found the same"


def test_so_many_are_fetched_at_a_time(world: Any) -> None:
    names = [f"a{index}" for index in range(11)]
    scene = Scene(world, *map(adapter, names))
    rounds = []
    for _ in range(4):
        scene.step()
        running = [
            name
            for name in names
            if any(f"hf://o/{name}" in _arguments(job) and not job.get("status") for job in scene.there.jobs)
        ]
        rounds.append(len(running))
        for name in running:
            scene.ends(f"hf://o/{name}", digest=name)
    assert rounds == [4, 4, 3, 0]
    assert len(scene.listed()) == 11


def test_every_ready_pod_of_the_revision_counts_and_no_other(world: Any) -> None:
    scene = served(world, "sql")
    scene.there.pod().pod("old").pod(ready=False)
    scene.follow("p2")
    scene.step()
    assert scene.states() == {"sql": ("Loading", 1)}
    assert "1 of 2 ready pods" in scene.there.service.status["adapters"][0]["message"]
    scene.follow("p1")
    scene.step()
    assert scene.states() == {"sql": ("Loaded", 2)}


def test_without_any_the_list_goes_when_the_pods_that_follow_it_have(world: Any) -> None:
    scene = served(world, "sql")
    scene.spec = {"model": {"uri": "hf://org/model"}}
    asked = parse(raw_service("demo", **scene.spec))
    scene.there.service = replace(asked, status=scene.there.service.status, generation=2)
    scene.step()
    assert scene.listed(), "the Deployment is only now told"
    assert "adapters" not in scene.there.service.status
    there = scene.there.children["Deployment", "demo"]
    there["metadata"]["annotations"] |= {"deployment.kubernetes.io/revision": "1"}
    there |= {"status": {"observedGeneration": 1}}
    there["spec"].setdefault("replicas", 1)
    scene.step()
    assert ("ConfigMap", "demo-adapters") not in scene.there.children


@pytest.mark.parametrize(
    ("weights", "uri", "env"),
    [
        ({"uri": "hf://org/model", "secretRef": {"name": "hub"}}, "hf://o/l", {"HOME", "HF_TOKEN"}),
        ({"uri": "hf://org/model", "secretRef": {"name": "hub"}}, "oci://r.io/l", {"HOME"}),
        ({"uri": "hf://org/model", "secretRef": {"name": "hub"}}, "s3://buck/l", {"HOME"}),
        ({"uri": "s3://buck/m", "secretRef": {"name": "keys"}}, "s3://other/l", {"HOME", "keys"}),
        ({"uri": "s3://buck/m", "secretRef": {"name": "keys"}}, "hf://o/l", {"HOME"}),
    ],
)
def test_a_secret_goes_to_sources_of_its_own_kind_alone(world: Any, weights: Object, uri: str, env: set[str]) -> None:
    scene = Scene(world, adapter("sql", uri), model=weights)
    scene.step()
    [container] = scene.job(uri)["spec"]["template"]["spec"]["containers"]
    given = {each["name"] for each in container["env"]}
    assert given | {each["secretRef"]["name"] for each in container.get("envFrom", ())} == env


def test_a_list_that_somebody_else_wrote_is_written_again(world: Any) -> None:
    scene = served(world, "sql")
    there = scene.there.children["ConfigMap", "demo-adapters"]
    there["data"]["adapters.json"] = random.choice(['{"adapters": [3]}', "no JSON", '["x"]', "{}"])
    scene.step()
    assert scene.listed() == {"sql": "sha256:sql"}


def test_where_the_chart_gave_no_right_to_lists_nothing_is_tried(world: Any) -> None:
    scene = Scene(world, adapter("sql"))
    scene.there.without = frozenset({"AdapterList"})
    plan = make_plan(scene.there.service, scene.observed(), scene.there.settings, NOW)
    [found] = [each for each in plan.conditions if each.type == "AdaptersReady"]
    assert (found.status, found.reason) == ("False", "FeatureOff")
    assert "features.adapters" in found.message
    assert plan.adapters.listing == plan.adapters.fetching == ()


def test_who_stands_still_is_looked_at_rarely(world: Any) -> None:
    scene = served(world, "sql")
    scene.said["p0"] = ()
    looks = []
    scene.step()
    began = datetime.fromisoformat(scene.condition()["lastTransitionTime"])
    for minutes in (0, 5, 60):
        scene.now = began + timedelta(minutes=minutes)
        looks.append(scene.step().requeue_after)
    assert looks == [5.0, 15.0, 60.0]
