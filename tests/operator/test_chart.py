"""charts/stoker, rendered by helm: the schema refuses typos, rights are least, the CRD is the CRD."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from stoker_operator.activator.settings import from_arguments as activator_arguments
from stoker_operator.cluster import kinds
from stoker_operator.gateway.settings import from_arguments as gateway_arguments
from stoker_operator.manifests.activation import PORTS
from stoker_operator.plan.actions import Delete
from stoker_operator.plan.canary.decide import plan_canary
from stoker_operator.settings import Settings, from_arguments

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "stoker"
IMAGES = "--set=image.repository=reg.example:5000/ops/stoker-operator,runtime.image=reg.example:5000/ml/engine:7"
Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def helm() -> str:
    from e2e.cluster.binaries import ensure

    return str(ensure(["helm"])["helm"])


@pytest.fixture
def render(helm: str) -> Render:
    def run(*arguments: str) -> list[dict[str, Any]]:
        command = [helm, "template", "stoker", str(CHART), "--namespace", "stoker-system", IMAGES, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise ValueError(done.stderr)
        return [item for item in yaml.safe_load_all(done.stdout) if item]

    return run


def of_kind(manifests: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in manifests if item["kind"] == kind]


def test_lint(helm: str) -> None:
    command = [helm, "lint", "--strict", str(CHART)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "values",
    [
        "replica=1",
        "image.repo=x",
        "replicas=0",
        "operator.logLevel=loud",
        "cache.size=big",
        "hub.endpoint=hub",
        "metricsAdapter.mode=Maybe",
        "features.ingres=false",
        "image.digest=sha256:123",
        "image.repository=registry/operator:tag",
        "runtime.image=registry/engine 1",
        "monitoring.kind=Prometheus",
        "rollout.parallel=many",
        "excludeNamespaces={Upper}",
        "nodeCache.folder=/",
        "extraEnv[0].nam=x",
    ],
)
def test_the_schema_refuses(render: Render, values: str) -> None:
    with pytest.raises(ValueError, match=values.partition("=")[0].rpartition(".")[2].partition("[")[0]):
        render("--set", values)


def test_the_chart_carries_the_crd(render: Render) -> None:
    source = (ROOT / "crds" / "stoker.dev_inferenceservices.yaml").read_text()
    assert (CHART / "files" / "stoker.dev_inferenceservices.yaml").read_text() == source
    [crd] = of_kind(render(), "CustomResourceDefinition")
    assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert crd == yaml.safe_load(source)
    assert not of_kind(render("--set", "crds.install=false"), "CustomResourceDefinition")


def test_the_arguments_are_settings(render: Render) -> None:
    [deployment] = of_kind(
        render("--set", "hub.endpoint=http://hub,cache.storageClassName=fast,watchNamespaces={a,b}"), "Deployment"
    )
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "operator"
    chosen = from_arguments(container["args"][1:], {"STOKER_IDENTITY": "pod-1"})
    assert (chosen.hub_endpoint, chosen.cache_storage_class, chosen.namespaces) == ("http://hub", "fast", ("a", "b"))
    assert (chosen.lease_namespace, chosen.runtime_image) == ("stoker-system", "reg.example:5000/ml/engine:7")
    assert (chosen.rollout_parallel, chosen.exclude_namespaces) == (1, ())
    assert told(render("--set", "rollout.parallel=7")).rollout_parallel == 7
    assert told(render("--set", "excludeNamespaces={kube-system,x}")).exclude_namespaces == ("kube-system", "x")
    assert deployment["spec"]["replicas"] == 2


def test_the_operators_pods_are_restricted(render: Render) -> None:
    [deployment] = of_kind(render(), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"livenessProbe", "readinessProbe", "resources"} <= pod["containers"][0].keys()


def own_rules(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rules of the roles that are bound to the operator."""
    bound = {
        (item["roleRef"]["kind"], item["roleRef"]["name"])
        for item in [*of_kind(manifests, "ClusterRoleBinding"), *of_kind(manifests, "RoleBinding")]
    }
    roles = [*of_kind(manifests, "ClusterRole"), *of_kind(manifests, "Role")]
    return [rule for role in roles if (role["kind"], role["metadata"]["name"]) in bound for rule in role["rules"]]


def test_watched_namespaces_need_no_right_elsewhere(render: Render) -> None:
    manifests = render("--set", "watchNamespaces={a,b}")
    assert not of_kind(manifests, "ClusterRoleBinding")
    assert {item["metadata"]["namespace"] for item in of_kind(manifests, "Role")} == {"stoker-system", "a", "b"}
    assert not of_kind(render("--set", "watchNamespaces={a,b},rbac.aggregate=false"), "ClusterRole")


def test_no_right_is_a_wildcard_and_one_secret_can_be_read(render: Render) -> None:
    for rule in own_rules(render("--set", "features.dashboards=true")):
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        assert not {"pods/log", "pods/exec"} & set(rule["resources"])
        made = rule["verbs"] == ["create"]
        assert "secrets" not in rule["resources"] or made or rule["resourceNames"] == ["stoker-metrics-api-cert"]
        assert "nodes" not in rule["resources"] or rule["verbs"] == ["list"]
        writes = {"create", "patch", "delete", "update"} & set(rule["verbs"])
        assert "apiservices" not in rule["resources"] or not writes or rule["resourceNames"]


def test_the_operator_may_end_what_it_made_for_a_canary(render: Render) -> None:
    there = [(kind, {"metadata": {"uid": "u"}}) for kind in (kinds.DEPLOYMENT, kinds.SERVICE)]
    observed: Any = SimpleNamespace(children={(kind.kind, "demo-canary"): item for kind, item in there})
    over: Any = SimpleNamespace(name="demo", canary=None)
    nothing: Any = None
    plan = plan_canary(over, observed, Settings(), nothing, datetime.now(UTC))
    gone = {each.kind for each in plan.ends if isinstance(each, Delete)}
    assert gone == {kind.kind for kind, _ in there}
    rights = {(name, verb) for rule in own_rules(render()) for name in rule["resources"] for verb in rule["verbs"]}
    for kind, _ in there:
        assert (kind.plural, "delete") in rights, f"a canary that is over would keep its {kind.kind}"


@pytest.mark.parametrize(
    ("feature", "resources"),
    [
        ("horizontalPodAutoscaler", {"horizontalpodautoscalers"}),
        ("keda", {"scaledobjects"}),
        ("ingress", {"ingresses"}),
        ("gatewayApi", {"httproutes"}),
        ("inferencePool", {"inferencepools"}),
        ("prometheusOperator", {"podmonitors", "prometheusrules"}),
        ("leaderWorkerSet", {"leaderworkersets"}),
        ("dashboards", {"configmaps"}),
        ("adapters", {"configmaps"}),
    ],
)
def test_a_right_goes_with_its_switch(render: Render, feature: str, resources: set[str]) -> None:
    def rights(manifests: list[dict[str, Any]]) -> set[str]:
        return {resource for rule in own_rules(manifests) for resource in rule["resources"]}

    # Two features share the right to ConfigMaps.
    other = {"dashboards": "adapters", "adapters": "dashboards"}.get(feature)
    alone = ("--set", f"features.{other}=false") if other else ()
    on, off = (render("--set", f"features.{feature}={value}", *alone) for value in ("true", "false"))
    assert rights(on) - rights(off) == resources
    assert set(told(on).without) < set(told(off).without)
    assert len(set(told(off).without) - set(told(on).without)) == len(resources)


def test_secrets_are_created_where_groups_are_and_no_more_than_theirs(render: Render) -> None:
    def creating(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rules = [rule for rule in own_rules(manifests) if "secrets" in rule["resources"]]
        return [rule for rule in rules if "create" in rule["verbs"]]

    assert [rule["verbs"] for rule in creating(render())] == [["create"]]
    assert not creating(render("--set=features.leaderWorkerSet=false"))
    policies = {item["metadata"]["name"]: item for item in of_kind(render(), "ValidatingAdmissionPolicy")}
    [rule] = policies["stoker-system-stoker-secrets"]["spec"]["validations"]
    assert "endsWith('-nodes')" in rule["expression"]
    assert "'Opaque'" in rule["expression"], "no token of an identity"


def test_dashboards_are_off_unless_they_are_asked_for(render: Render) -> None:
    assert told(render()).without == ("Dashboard",)
    policies = {item["metadata"]["name"]: item for item in of_kind(render(), "ValidatingAdmissionPolicy")}
    narrowed = {f"stoker-system-stoker-{name}" for name in ("config-maps", "secrets")}
    assert set(policies) == {"stoker-system-stoker-engine-flags", *narrowed}
    [rule] = policies["stoker-system-stoker-config-maps"]["spec"]["validations"]
    assert "-adapters" in rule["expression"]
    assert "-dashboard" not in rule["expression"]
    off = render("--set=admission.engineFlags=false,features.adapters=false,features.leaderWorkerSet=false")
    assert not of_kind(off, "ValidatingAdmissionPolicy")


def told(manifests: list[dict[str, Any]]) -> Settings:
    """What the operator is told."""
    [deployment] = of_kind(manifests, "Deployment")
    return from_arguments(deployment["spec"]["template"]["spec"]["containers"][0]["args"][1:], {})


def test_whoever_edits_a_namespace_edits_its_services(render: Render) -> None:
    roles = {item["metadata"]["name"]: item for item in of_kind(render(), "ClusterRole")}
    edit, view = roles["stoker-system-stoker-edit"], roles["stoker-system-stoker-view"]
    aggregated = "rbac.authorization.k8s.io/aggregate-to-"

    def into(role: dict[str, Any]) -> set[str]:
        return {key.removeprefix(aggregated) for key in role["metadata"]["labels"] if key.startswith(aggregated)}

    assert (into(edit), into(view)) == ({"admin", "edit"}, {"admin", "edit", "view"})
    assert {verb for rule in view["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    off = of_kind(render("--set", "rbac.aggregate=false"), "ClusterRole")
    assert not {"stoker-system-stoker-edit", "stoker-system-stoker-view"} & {item["metadata"]["name"] for item in off}


def test_the_metrics_api_is_left_to_the_operator(render: Render) -> None:
    manifests = render("--set", "prometheus.url=http://prom:9090")
    assert not of_kind(manifests, "APIService"), "without a backend it keeps Kubernetes from deleting namespaces"
    [secret] = of_kind(manifests, "Secret")
    assert "data" not in secret, "what is rendered anew each time changes each time"
    chosen = told(manifests)
    assert (chosen.metrics_adapter_port, chosen.metrics_adapter_mode) == (6443, "Auto")
    assert (chosen.metrics_adapter_secret, chosen.metrics_adapter_issuer) == (secret["metadata"]["name"], "operator")
    assert chosen.metrics_adapter_owner in {item["metadata"]["name"] for item in of_kind(manifests, "ClusterRole")}
    assert chosen.metrics_adapter_service in {item["metadata"]["name"] for item in of_kind(manifests, "Service")}
    assert chosen.prometheus_url == "http://prom:9090"


@pytest.mark.parametrize("values", ["replicas=2", "watchNamespaces={a,b},metricsAdapter.mode=On"])
def test_rendering_twice_is_the_same(render: Render, values: str) -> None:
    assert render("--set", values) == render("--set", values)


@pytest.mark.parametrize("values", ["metricsAdapter.mode=Off", "watchNamespaces={a}"])
def test_without_the_metrics_api_nothing_of_it_is_made(render: Render, values: str) -> None:
    manifests = render("--set", values)
    assert not of_kind(manifests, "Secret")
    assert "metrics-api" not in str(manifests)
    assert told(manifests).metrics_adapter_port == 0


@pytest.mark.parametrize(
    ("values", "secret"),
    [
        ("tls.secretName=mine", "mine"),
        ("tls.issuerRef.name=internal,metricsAdapter.tls.issuerRef.kind=Issuer", "stoker-metrics-api-cert"),
    ],
)
def test_a_certificate_of_somebody_elses(render: Render, values: str, secret: str) -> None:
    manifests = render("--set", f"metricsAdapter.{values}")
    assert not of_kind(manifests, "Secret")
    chosen = told(manifests)
    assert (chosen.metrics_adapter_secret, chosen.metrics_adapter_issuer) == (secret, "given")
    [rule] = [rule for rule in own_rules(manifests) if "secrets" in rule["resources"] and "get" in rule["verbs"]]
    assert (rule["resourceNames"], rule["verbs"]) == ([secret], ["get"])
    for made in of_kind(manifests, "Certificate"):
        assert made["spec"]["secretName"] == secret
        assert made["spec"]["dnsNames"] == ["stoker-metrics-api.stoker-system.svc"]
        assert made["spec"]["issuerRef"] == {"name": "internal", "kind": "Issuer"}
    assert len(of_kind(manifests, "Certificate")) == ("issuerRef" in values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (("image.repository=",), ["image.repository is empty", "docker build", "docker push", "--set"]),
        (("runtime.image=",), ["runtime.image is empty", "docker build", "images/runtime.Dockerfile"]),
        (
            ("image.repository=h:5/a/b", "runtime.image=h:5/a/b:2@sha256:" + "0" * 64),
            ["the operator's own image: it holds no engine"],
        ),
        (("image.repository=a/b", "runtime.image=a/b"), ["holds no engine"]),
        (("watchNamespaces={a}", "excludeNamespaces={b}"), ["excludeNamespaces is for where the whole cluster"]),
        (
            ("metricsAdapter.tls.secretName=a", "metricsAdapter.tls.issuerRef.name=b"),
            ["one of secretName and issuerRef"],
        ),
    ],
)
def test_what_cannot_work_is_refused(render: Render, values: tuple[str, ...], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        render(*(f"--set={value}" for value in values))
    for word in words:
        assert word in str(caught.value)


def test_the_images_are_named_by_tag_or_digest(render: Render) -> None:
    digest = "sha256:" + "3f" * 32

    def image(*values: str) -> str:
        [deployment] = of_kind(render(*(f"--set={value}" for value in values)), "Deployment")
        return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])

    assert image("image.tag=9.9") == "reg.example:5000/ops/stoker-operator:9.9"
    assert image("image.tag=9.9", f"image.digest={digest}") == f"reg.example:5000/ops/stoker-operator@{digest}"
    assert told(render(f"--set=runtime.image=r.io/e@{digest}")).runtime_image == f"r.io/e@{digest}"


def test_a_mirror_has_every_image(render: Render) -> None:
    """Each image of each pod of the chart, and the one that the operator gives to Jobs and engines."""
    on = "nodeCache.enabled=true,activator.enabled=true,gateway.enabled=true,gateway.envoy.image=quay.io/proxy/envoy:v"
    digest = "sha256:" + "9c" * 32
    for runtime, path in (
        ("r.example/ml/engine:7", "ml/engine:7"),
        ("engine:7", "engine:7"),
        (f"localhost/e@{digest}", f"e@{digest}"),
        ("team/e:7", "team/e:7"),
    ):
        manifests = render(f"--set={on},image.registry=mirror.example:81/all,runtime.image={runtime}")
        pods = [item["spec"]["template"]["spec"] for item in manifests if "template" in item.get("spec", {})]
        containers = [item for pod in pods for kind in ("initContainers", "containers") for item in pod.get(kind, ())]
        images = {container["image"] for container in containers}
        assert {name.rpartition("/")[2] for name in images} == {"stoker-operator:0.1.0", "envoy:v"}
        assert all(name.startswith(("mirror.example:81/all/ops/", "mirror.example:81/all/proxy/")) for name in images)
        arguments = [text for container in containers for text in container.get("args", ())]
        assert f"--runtime-image=mirror.example:81/all/{path}" in arguments


def test_openshift_gives_the_user(render: Render) -> None:
    def user(*arguments: str) -> tuple[object, bool]:
        manifests = render(*arguments)
        [deployment] = of_kind(manifests, "Deployment")
        return deployment["spec"]["template"]["spec"]["securityContext"].get("runAsUser"), told(manifests).fixed_user

    there = ("--api-versions", "security.openshift.io/v1")
    assert user() == user("--set=openshift=Off", *there) == (65532, True)
    assert user("--set=openshift=On") == user(*there) == (None, False)


def test_the_operators_own_metrics_and_policy(render: Render) -> None:
    for kind, port in (("PodMonitor", "http"), ("ServiceMonitor", "metrics")):
        manifests = render(f"--set=monitoring.kind={kind},monitoring.interval=7s,monitoring.labels.release=prom")
        [monitor] = of_kind(manifests, kind)
        [endpoint] = monitor["spec"]["podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"]
        assert endpoint == {"port": port, "interval": "7s"}
        assert monitor["metadata"]["labels"]["release"] == "prom"
        [deployment] = of_kind(manifests, "Deployment")
        chosen = monitor["spec"]["selector"]["matchLabels"]
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        services = [
            item for item in of_kind(manifests, "Service") if chosen.items() <= item["metadata"]["labels"].items()
        ]
        offered = [part for item in services for part in item["spec"]["ports"]]
        named = container["ports"] if kind == "PodMonitor" else offered
        assert [part["name"] for part in named].count(port) == 1
    [policy] = of_kind(render("--set=networkPolicy.enabled=true,networkPolicy.apiServerPorts={8443}"), "NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchLabels"] == deployment["spec"]["selector"]["matchLabels"]
    assert {"port": 8443, "protocol": "TCP"} in [part for rule in policy["spec"]["egress"] for part in rule["ports"]]


def test_the_operators_environment_and_disk(render: Render) -> None:
    manifests = render("--set=extraEnv[0].name=HTTPS_PROXY,extraEnv[0].value=http://proxy:1,podLabels.team=ml")
    [deployment] = of_kind(manifests, "Deployment")
    template = deployment["spec"]["template"]
    [container] = template["spec"]["containers"]
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:1"} in container["env"]
    assert template["metadata"]["labels"]["team"] == "ml"
    assert {"requests", "limits"} <= {
        key for key, value in container["resources"].items() if "ephemeral-storage" in value
    }


def test_the_schema_covers_every_value(helm: str) -> None:
    """Each value has an entry of its own, and each mapping of the chart's own refuses what it does not know."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    def walk(values: dict[str, Any], rules: dict[str, Any], path: str) -> None:
        assert rules.get("additionalProperties") is False, path
        for key, value in values.items():
            assert key in rules["properties"], f"{path}.{key}"
            rule = rules["properties"][key]
            rule = schema["definitions"][rule["$ref"].rpartition("/")[2]] if "$ref" in rule else rule
            assert {"type", "enum"} & rule.keys(), f"{path}.{key}"
            if isinstance(value, dict) and "properties" in rule:
                walk(value, rule, f"{path}.{key}")
        assert set(rules["properties"]) - {"global"} <= values.keys() or path.endswith("issuerRef"), path

    walk(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "values")


def test_a_single_replica_has_no_budget(render: Render) -> None:
    assert of_kind(render(), "PodDisruptionBudget")
    assert not of_kind(render("--set", "replicas=1"), "PodDisruptionBudget")


def test_the_activator_comes_with_its_switch_and_the_least_rights(render: Render) -> None:
    assert "activator" not in {item["metadata"]["name"].rpartition("-")[2] for item in render()}
    assert told(render()).activator_service == ""
    manifests = render("--set=activator.enabled=true,networkPolicy.enabled=true,monitoring.kind=PodMonitor")
    mine = [item for item in manifests if item["metadata"]["name"].startswith("stoker-activator")]
    kinds = {"ServiceAccount", "Service", "Deployment", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"}
    assert kinds <= {item["kind"] for item in mine}
    [operator, deployment] = sorted(of_kind(manifests, "Deployment"), key=lambda item: len(item["metadata"]["name"]))
    said = from_arguments(operator["spec"]["template"]["spec"]["containers"][0]["args"][1:], {})
    assert said.activator_service in {item["metadata"]["name"] for item in of_kind(mine, "Service")}
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert deployment["spec"]["replicas"] == 2
    assert container["args"][0] == "activator"
    process = activator_arguments(container["args"][1:], {})
    assert (process.held_mib, process.drain_seconds) == (256, 660)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["terminationGracePeriodSeconds"] > process.drain_seconds + process.leave_seconds
    [role] = [item for item in of_kind(manifests, "ClusterRole") if item["metadata"]["name"].endswith("-activator")]
    assert [(rule["resources"], rule["verbs"]) for rule in role["rules"]] == [
        (["endpointslices"], ["list", "watch"]),
        (["inferenceservices/status"], ["patch"]),
    ]
    [policy] = of_kind(mine, "NetworkPolicy")
    ports = [part for rule in policy["spec"]["ingress"] for part in rule["ports"]]
    assert {"port": PORTS.start, "endPort": PORTS.stop - 1, "protocol": "TCP"} in ports
    inside = render("--set=activator.enabled=true,watchNamespaces={a,b}")
    assert not of_kind(inside, "ClusterRoleBinding")
    assert {item["metadata"]["namespace"] for item in of_kind(inside, "Role")} == {"stoker-system", "a", "b"}


def test_the_gateway_comes_with_its_switch_and_the_least_rights(render: Render) -> None:
    assert "gateway" not in {item["metadata"]["name"].rpartition("-")[2] for item in render()}
    values = "apiKeysSecretRef.name=team,gateway.drainSeconds=91,gateway.rateLimit.requestsPerMinute=120000"
    manifests = render(f"--set=gateway.enabled=true,gateway.{values},networkPolicy.enabled=true")
    mine = [item for item in manifests if item["metadata"]["name"].startswith("stoker-gateway")]
    assert {item["kind"] for item in mine} >= {"ServiceAccount", "Service", "Deployment", "NetworkPolicy"}
    [deployment] = of_kind(mine, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    [prepare, envoy], [teller] = pod["initContainers"], pod["containers"]
    told_once, told_always = (gateway_arguments(each["args"][1:], {}) for each in (prepare, teller))
    assert told_once.prepare
    assert told_always.requests_per_minute == 120_000
    plain = replace(told_always, keys_file="", drain_seconds=600.0, requests_per_minute=0)
    assert replace(told_once, prepare=False) == plain
    assert envoy["args"][:2] == ["--config-path", f"{told_always.folder}/envoy.json"]
    assert {port["name"]: port["containerPort"] for port in envoy["ports"]} == {
        "http": told_always.port, "metrics": told_always.metrics_port,
    }  # fmt: skip
    assert pod["terminationGracePeriodSeconds"] > told_always.drain_seconds + told_always.leave_seconds
    [keys] = [mount["mountPath"] for mount in teller["volumeMounts"] if mount["name"] == "keys"]
    assert told_always.keys_file == f"{keys}/keys"
    assert all(each["securityContext"]["readOnlyRootFilesystem"] for each in (prepare, envoy, teller))
    [role] = [item for item in of_kind(manifests, "ClusterRole") if item["metadata"]["name"].endswith("-gateway")]
    rights = [(rule["resources"], rule["verbs"]) for rule in role["rules"]]
    assert rights == [(["services"], ["list", "watch"]), (["endpointslices"], ["list", "watch"])]


def test_a_gateway_serves_the_namespaces_that_it_is_given(render: Render) -> None:
    inside = render("--set=gateway.enabled=true,watchNamespaces={a,b},gateway.namespaces={b}")
    roles = [item for item in of_kind(inside, "Role") if item["metadata"]["name"] == "stoker-gateway"]
    assert [item["metadata"]["namespace"] for item in roles] == ["b"]
    [teller] = next(
        item["spec"]["template"]["spec"]["containers"]
        for item in of_kind(inside, "Deployment")
        if item["metadata"]["name"] == "stoker-gateway"
    )
    assert gateway_arguments(teller["args"][1:], {}).namespaces == ("b",)
    with pytest.raises(ValueError, match="b is not in watchNamespaces"):
        render("--set=gateway.enabled=true,watchNamespaces={a},gateway.namespaces={b}")
