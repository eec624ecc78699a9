"""manifests/groups: a golden file of a service whose replicas span nodes, and what no golden file is trusted with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stoker_operator import manifests
from stoker_operator.manifests.host_memory import host_memory
from stoker_operator.plan.fit import assess
from stoker_operator.plan.rollout import first_variant
from stoker_operator.plugin.render import render
from stoker_operator.settings import Settings
from stoker_operator.spec.quantity import GIB
from stoker_operator.spec.service import FetchedModel, InferenceService
from stoker_operator.spec.weights import told_weights

Build = Callable[..., InferenceService]
Object = dict[str, Any]
SPEC: Object = {
    "replicas": 2,
    "resources": {"gpus": 4, "nodes": 3, "cpu": "9", "memory": "64Gi"},
    "parallelism": {"tensor": 4, "pipeline": 3},
    "runtime": {"shmSize": "5Gi", "args": ["--seed", "7"]},
    "placement": {"queueName": "big"},
    "endpoint": {"auth": {"apiKeysSecretRef": {"name": "keys"}}},
    "podTemplate": {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "containers": [
                {"name": "engine", "resources": {"limits": {"rdma/hca": "1"}}},
                {"name": "side", "image": "s"},
            ]
        },
    },
}


def groups(service: InferenceService, settings: Settings, model: FetchedModel) -> Object:
    return manifests.workload_manifest(service, settings, model, first_variant(service))


def templates(item: Object) -> Iterator[Object]:
    yield from (item["spec"]["leaderWorkerTemplate"][role] for role in ("leaderTemplate", "workerTemplate"))


def engine(template: Object) -> Object:
    return next(item for item in template["spec"]["containers"] if item["name"] == "engine")


def selects(chosen: Object, labels: Object) -> bool:
    """Whether a label selector of Kubernetes selects these labels."""
    plain = chosen.get("matchLabels", {}).items() <= labels.items()
    return plain and all(labels.get(item["key"]) in item["values"] for item in chosen.get("matchExpressions", ()))


def test_golden(service: Build, settings: Settings, model: FetchedModel, golden: Any) -> None:
    built = service(**SPEC)
    around = [
        manifests.group_service(built),
        manifests.group_secret(built),
        manifests.disruption_budget(built, grouped=True),
        manifests.network_policy(built, grouped=True),
    ]
    golden("groups", [*around, groups(built, settings, model)])


def test_both_roles_run_one_command_line_and_the_secret_is_a_variable(
    service: Build, settings: Settings, model: FetchedModel
) -> None:
    leader, worker = (engine(each) for each in templates(groups(service(**SPEC), settings, model)))
    assert leader["args"] == worker["args"]
    told = dict(zip(leader["args"], leader["args"][1:], strict=False))
    assert (told["--nnodes"], told["--node-rank"]) == ("$(LWS_GROUP_SIZE)", "$(LWS_WORKER_INDEX)")
    assert told["--master-addr"] == "$(LWS_LEADER_ADDRESS)"
    for container in (leader, worker):
        [secret] = [item for item in container["env"] if item["name"] == "STOKER_NODE_SECRET"]
        assert secret == {
            "name": "STOKER_NODE_SECRET",
            "valueFrom": {"secretKeyRef": {"name": "demo-nodes", "key": "secret"}},
        }
    assert not {"data", "stringData"} & manifests.group_secret(service(**SPEC)).keys()


def test_nobody_is_led_to_a_worker(service: Build, settings: Settings, model: FetchedModel) -> None:
    built = service(**SPEC)
    leader, worker = (each["metadata"]["labels"] for each in templates(groups(built, settings, model)))
    for front in (manifests.web_service(built), manifests.metrics_service(built)):
        assert front["spec"]["selector"].items() <= leader.items()
        assert not front["spec"]["selector"].items() <= worker.items()
    assert selects(manifests.pod_monitor(built)["spec"]["selector"], leader)
    assert not selects(manifests.pod_monitor(built)["spec"]["selector"], worker)
    for whole in (
        manifests.disruption_budget(built, grouped=True)["spec"]["selector"],
        manifests.network_policy(built, grouped=True)["spec"]["podSelector"],
    ):
        assert selects(whole, leader)
        assert selects(whole, worker)


def test_a_worker_waits_without_being_restarted(service: Build, settings: Settings, model: FetchedModel) -> None:
    """It is alive while it waits for its leader, and the leader may wait for it as long as it is told to."""
    leader, worker = templates(groups(service(**SPEC), settings, model))
    assert engine(worker)["startupProbe"]["httpGet"]["path"] == "/health"
    assert engine(worker)["readinessProbe"]["httpGet"]["path"] == "/ready"
    told = dict(zip(engine(leader)["args"], engine(leader)["args"][1:], strict=False))
    assert engine(leader)["startupProbe"]["failureThreshold"] > int(told["--node-join-seconds"])
    grace = [each["spec"]["terminationGracePeriodSeconds"] for each in (leader, worker)]
    assert grace[0] == grace[1], "a worker is needed until the leader has drained"


def test_each_pod_has_its_own_shared_memory_and_devices(
    service: Build, settings: Settings, model: FetchedModel
) -> None:
    for template in templates(groups(service(**SPEC), settings, model)):
        shm = next(volume for volume in template["spec"]["volumes"] if volume["name"] == "shm")
        assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "5Gi"}
        limits = engine(template)["resources"]["limits"]
        assert (limits["nvidia.com/gpu"], limits["memory"], limits["rdma/hca"]) == ("4", "64Gi", "1")
        assert "side" in {item["name"] for item in template["spec"]["containers"]}


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 6), (3, 12), (1, 4)])
def test_a_pod_takes_its_share_of_memory_and_threads(
    service: Build, settings: Settings, model: FetchedModel, nodes: int, ranks: int
) -> None:
    args = ["--swap-space", "3"]
    spec = {"resources": {"gpus": 0, "nodes": nodes, "cpu": "24"}, "parallelism": {"pipeline": ranks}}
    built = service(**spec, runtime={"args": args})
    found = host_memory(built, model)
    assert found is not None
    assert found.pool == 3 * ranks / nodes
    assert found.weights == pytest.approx(model.bytes / GIB / nodes)
    template = manifests.revision_template(built, settings, model)
    [threads] = [item for item in engine(template)["env"] if item["name"] == "OMP_NUM_THREADS"]
    assert int(threads["value"]) == 24 // (ranks // nodes)


def test_the_fit_is_one_of_each_rank(service: Build) -> None:
    """The sum of a GPU is that of as many GPUs in one pod."""
    told = told_weights(300 * 10**9, ["auto"])
    large = FetchedModel("c", "d", 300, "p", "p", layers=60, kv_heads=8, head_dim=128, max_context=4096, weights=told)
    products = ["NVIDIA-H100-80GB-HBM3"]
    apart = service(
        resources={"gpus": 4, "nodes": 2, "gpuProducts": products}, parallelism={"tensor": 4, "pipeline": 2}
    )
    together = service(resources={"gpus": 8, "gpuProducts": products}, parallelism={"tensor": 4, "pipeline": 2})
    one, other = assess(apart, large), assess(together, large)
    assert one is not None
    assert other is not None
    assert (one.required_gib, one.verdict) == (other.required_gib, "Fits")
    assert "on each of 8 GPUs of 2 nodes" in one.message


def test_a_revision_says_which_workload_it_is(service: Build, settings: Settings, model: FetchedModel) -> None:
    """Its key, its size and its going back do not depend on the spec of the day."""
    spanning, single = service(**SPEC), service()
    template = manifests.revision_template(spanning, settings, model)
    variant = manifests.Variant(1, 0, 1, template)
    again = manifests.workload_manifest(single, settings, model, variant)
    assert (again["kind"], again["spec"]["leaderWorkerTemplate"]["size"]) == ("LeaderWorkerSet", 3)
    wider = service(**SPEC | {"resources": SPEC["resources"] | {"gpus": 2, "nodes": 6}})
    key = manifests.template_key(manifests.revision_template(wider, settings, model))
    assert key != manifests.template_key(template)
    assert {each["metadata"]["labels"]["stoker.dev/template"] for each in templates(again)} == {
        manifests.template_key(template)
    }


def test_render_shows_the_groups_and_no_secret(service: Build, settings: Settings, model: FetchedModel) -> None:
    written = render(service(**SPEC), settings, model)
    names = {(item["kind"], item["metadata"]["name"]) for item in written}
    assert {("LeaderWorkerSet", "demo-nodes"), ("Service", "demo-nodes"), ("Service", "demo")} <= names
    assert not {"Deployment", "Secret"} & {kind for kind, _ in names}


def test_held_groups_stay_as_they_run(service: Build, settings: Settings, model: FetchedModel, live: Any) -> None:
    built = service(**SPEC)
    running = live(groups(built, settings, model))
    held = manifests.held_workload(
        service(**SPEC | {"runtime": {"args": ["--seed", "8"]}}), running, manifests.Variant(7, 0, 1)
    )
    assert held["spec"]["replicas"] == 7
    assert json.dumps(held["spec"]["leaderWorkerTemplate"], sort_keys=True) == json.dumps(
        running["spec"]["leaderWorkerTemplate"], sort_keys=True
    )
    assert manifests.live_template_key(held) == manifests.live_template_key(running)
