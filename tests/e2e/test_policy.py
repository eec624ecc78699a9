"""e2e/cluster/policy.py: who reaches whom, by the rules alone."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
from e2e.cluster.policy import TABLE, Unsupported, rules

from stoker_operator.manifests.edge import network_policy
from stoker_operator.spec.service import parse

Object = dict[str, Any]
NAMESPACES = [{"metadata": {"name": name, "labels": {"name": name}}} for name in ("a", "b")]


def pod(name: str, namespace: str, address: str, **labels: str) -> Object:
    ports = [{"name": "http", "containerPort": 8000}]
    meta = {"name": name, "namespace": namespace, "labels": labels}
    return {"metadata": meta, "spec": {"containers": [{"ports": ports}]}, "status": {"podIP": address}}


def policy(namespace: str, **spec: Any) -> Object:
    return {"metadata": {"name": "p", "namespace": namespace}, "spec": spec}


PODS = [pod("engine", "a", "10.0.0.1", app="x"), pod("other", "a", "10.0.0.2"), pod("client", "b", "10.0.0.3", c="1")]


def lines(*policies: Object) -> list[str]:
    return [line.strip() for line in rules(policies, PODS, NAMESPACES).splitlines()]


def test_nobody_is_isolated_without_a_policy() -> None:
    assert not any("jump" in line for line in lines())


def test_one_port_in_and_nothing_out() -> None:
    selected = {"matchLabels": {"app": "x"}}
    ways = {"policyTypes": ["Ingress", "Egress"], "ingress": [{"ports": [{"port": 8000}]}], "egress": []}
    found = lines(policy("a", podSelector=selected, **ways))
    assert [line for line in found if "jump" in line] == [
        "ip daddr 10.0.0.1 jump ingress-0",
        "ip saddr 10.0.0.1 jump egress-0",
    ]
    start = found.index("chain ingress-0 {")
    assert found[start + 1 : start + 4] == ["tcp dport 8000 return", "drop", "}"]
    start = found.index("chain egress-0 {")
    assert found[start + 1 : start + 3] == ["drop", "}"]


def test_peers_of_another_namespace_and_ports_by_name() -> None:
    peer = {"namespaceSelector": {"matchLabels": {"name": "b"}}, "podSelector": {"matchLabels": {"c": "1"}}}
    found = lines(policy("a", podSelector={}, ingress=[{"from": [peer], "ports": [{"port": "http"}]}]))
    assert found.count("ip saddr 10.0.0.3 tcp dport 8000 return") == 2, "both pods of the namespace are selected"
    assert not any("10.0.0.1 tcp" in line for line in found)


@pytest.mark.parametrize(
    ("expression", "selected"),
    [
        ({"key": "app", "operator": "In", "values": ["w", "x"]}, ["10.0.0.1"]),
        ({"key": "app", "operator": "In", "values": ["w"]}, []),
        ({"key": "app", "operator": "NotIn", "values": ["x", "y"]}, ["10.0.0.2"]),
        ({"key": "app", "operator": "Exists"}, ["10.0.0.1"]),
        ({"key": "app", "operator": "DoesNotExist"}, ["10.0.0.2"]),
    ],
)
def test_pods_are_chosen_by_expressions(expression: Object, selected: list[str]) -> None:
    found = lines(policy("a", podSelector={"matchExpressions": [expression]}))
    assert [line.split()[2] for line in found if "jump" in line] == selected


@pytest.mark.parametrize("component", ["engine", "canary", "fetch"])
def test_a_services_own_policy_is_translated(component: str) -> None:
    spec = {"model": {"uri": "hf://org/model"}, "resources": {"gpus": 0}}
    head = {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceService"}
    service = parse(head | {"metadata": {"name": "demo", "namespace": "a", "uid": "u", "generation": 1}, "spec": spec})
    chosen = pod("pod", "a", "10.0.0.9", **{"app.kubernetes.io/component": component})
    chosen["metadata"]["labels"] |= {"app.kubernetes.io/managed-by": "stoker", "app.kubernetes.io/instance": "demo"}
    found = rules([network_policy(service)], [*PODS, chosen], NAMESPACES)
    assert ("ip saddr 10.0.0.9 jump" in found) == (component != "fetch"), "answers clients, and so is isolated"


@pytest.mark.parametrize(
    ("labels", "let_in"), [({"role": "epp"}, ["10.0.0.4"]), ({}, ["10.0.0.1", "10.0.0.2", "10.0.0.4"])]
)
def test_events_are_for_the_picker_or_for_its_namespace(labels: dict[str, str], let_in: list[str]) -> None:
    pool = {"endpointPickerRef": {"name": "epp"}, "kvEvents": {"port": 5601, "pickerLabels": labels}}
    spec = {"model": {"uri": "hf://org/model"}, "resources": {"gpus": 0}, "endpoint": {"inferencePool": pool}}
    head = {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceService"}
    service = parse(head | {"metadata": {"name": "demo", "namespace": "a", "uid": "u", "generation": 1}, "spec": spec})
    chosen = pod("pod", "a", "10.0.0.9", **{"app.kubernetes.io/component": "engine"})
    chosen["metadata"]["labels"] |= {"app.kubernetes.io/managed-by": "stoker", "app.kubernetes.io/instance": "demo"}
    pickers = [pod("epp", "a", "10.0.0.4", role="epp"), pod("epp", "b", "10.0.0.5", role="epp")]
    found = rules([network_policy(service)], [*PODS, *pickers, chosen], NAMESPACES).splitlines()
    ways = [line.split() for line in found if line.endswith("tcp dport 5601 return")]
    assert sorted({way[2] for way in ways} - {"10.0.0.9"}) == let_in
    assert [line.strip() for line in found].count("tcp dport 8000 return") == 1, "the API is everyone's"


def test_what_is_not_translated_is_refused() -> None:
    with pytest.raises(Unsupported, match="matchFields"):
        lines(policy("a", podSelector={"matchFields": []}))
    with pytest.raises(Unsupported, match="Gt"):
        lines(policy("a", podSelector={"matchExpressions": [{"key": "app", "operator": "Gt", "values": ["1"]}]}))


@pytest.mark.skipif(shutil.which("nft") is None, reason="no nft here")
def test_nft_takes_the_table() -> None:
    block = {"ipBlock": {"cidr": "192.0.2.0/24"}}
    out = [{"to": [block], "ports": [{"port": 1, "endPort": 9}]}]
    text = rules([policy("a", podSelector={}, policyTypes=["Egress"], egress=out)], PODS, NAMESPACES)
    done = subprocess.run(["nft", "--check", "-f", "-"], input=text, text=True, capture_output=True)
    if "Operation not permitted" in done.stderr:
        pytest.skip("no right to ask the kernel")
    assert done.returncode == 0, done.stderr
    assert TABLE in text
