"""manifests/kv_events.py: what a service has that publishes KV events, and what others have of it: nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stoker_operator import manifests
from stoker_operator.plan.rollout import first_variant
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

Build = Callable[..., InferenceService]
Object = dict[str, Any]
GROUP: Object = {"resources": {"gpus": 3, "nodes": 2}, "parallelism": {"tensor": 3, "pipeline": 2}}


def pool(**events: Any) -> Object:
    return {"inferencePool": {"endpointPickerRef": {"name": "epp"}, "kvEvents": events}}


def engines(workload: Object) -> Iterator[Object]:
    """The engine's container of each pod template."""
    spec = workload["spec"]
    for template in spec.get("leaderWorkerTemplate", {"template": spec.get("template")}).values():
        if isinstance(template, dict):
            yield from (item for item in template["spec"]["containers"] if item["name"] == "engine")


def test_golden(service: Build, settings: Settings, model: FetchedModel, golden: Any) -> None:
    names = {"uri": "hf://org/model", "servedNames": ["org/model", "alias"]}
    built = service(endpoint=pool(port=5601, pickerLabels={"app": "demo-epp"}), model=names)
    wanted = built.endpoint.inference_pool
    assert wanted is not None
    made = [manifests.network_policy(built), manifests.inference_pool(built, wanted)]
    golden("kv-events", [*made, manifests.deployment(built, settings, model, first_variant(built))])


@pytest.mark.parametrize("spec", [{}, GROUP], ids=["pod", "group"])
def test_a_pool_alone_publishes_nothing(
    service: Build, settings: Settings, model: FetchedModel, spec: Object
) -> None:
    endpoint = {"inferencePool": {"endpointPickerRef": {"name": "epp"}}}
    without, alone, publishing = (
        manifests.revision_template(service(**spec, endpoint=each), settings, model)
        for each in ({}, endpoint, pool())
    )
    assert manifests.template_key(alone) == manifests.template_key(without), "no rollout of who does not ask for it"
    assert "POD_IP" not in json.dumps(alone)
    assert manifests.template_key(publishing) != manifests.template_key(alone), "a rollout of who does"
    policies = [manifests.network_policy(service(**spec, endpoint=each)) for each in ({}, endpoint)]
    assert policies[0] == policies[1]


def test_every_change_is_a_rollout_but_who_may_read(service: Build, settings: Settings, model: FetchedModel) -> None:
    templates = [
        manifests.revision_template(service(endpoint=pool(**events)), settings, model)
        for events in ({}, {"port": 5557}, {"pickerLabels": {"a": "b"}}, {"port": 6001})
    ]
    keys = [manifests.template_key(each) for each in templates]
    assert keys[0] == keys[1] == keys[2] != keys[3]
    built = [service(endpoint=pool(**events)) for events in ({}, {"pickerLabels": {"a": "b"}})]
    assert [manifests.network_policy(each)["spec"]["ingress"][1]["from"] for each in built] == [
        [{"podSelector": {}}],
        [{"podSelector": {"matchLabels": {"a": "b"}}}],
    ]


def test_all_pods_of_a_group_run_one_command_line(service: Build, settings: Settings, model: FetchedModel) -> None:
    built = service(**GROUP, endpoint=pool(port=7117))
    leader, worker = engines(manifests.workload_manifest(built, settings, model, first_variant(built)))
    assert leader["args"] == worker["args"]
    for each in (leader, worker):
        assert {port["name"]: port["containerPort"] for port in each["ports"]} == {"http": 8000, "kv-events": 7117}
        [address] = [item for item in each["env"] if item["name"] == "POD_IP"]
        assert address["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    api, events, others = manifests.network_policy(built, grouped=True)["spec"]["ingress"]
    assert ("from" in api, [port["port"] for port in events["ports"]], "ports" in others) == (False, [7117], False)


def test_a_canary_publishes_as_the_stable_pods_do(service: Build, settings: Settings, model: FetchedModel) -> None:
    built = service(endpoint=pool(), canary={"weight": 9, "runtime": {"args": ["--seed", "3"]}})
    stable = manifests.deployment(built, settings, model, first_variant(built))
    tried = manifests.canary_deployment(built, settings, model, 1)
    said = [next(iter(engines(each)))["args"] for each in (stable, tried)]
    topics = [json.loads(args[args.index("--kv-events-config") + 1])["topic"] for args in said]
    assert topics == ["kv@$(POD_IP):8000@demo"] * 2
