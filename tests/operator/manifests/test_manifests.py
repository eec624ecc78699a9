"""manifests/: golden files of whole services, and the invariants that no golden file should be trusted with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from stoker_operator import manifests
from stoker_operator.manifests.identity import stamped
from stoker_operator.plan.rollout import first_variant
from stoker_operator.settings import Settings
from stoker_operator.spec.pod_template import OUR_CONTAINERS
from stoker_operator.spec.service import FetchedModel, InferenceService
from stoker_runtime.settings.parse import parse as parse_serve

Build = Callable[..., InferenceService]


def deployment(service: InferenceService, settings: Settings, model: FetchedModel) -> dict[str, Any]:
    return manifests.deployment(service, settings, model, first_variant(service))


DEPLOYMENT = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "demo"}}
EVERYTHING: dict[str, Any] = {
    "replicas": 3,
    "model": {
        "uri": "hf://org/model",
        "revision": "v1.0",
        "servedNames": ["big", "big-alias"],
        "secretRef": {"name": "hub-token"},
        "endpoint": "http://hub.local",
        "files": {"allow": ["*.safetensors", "*.json"], "ignore": ["*.bin"]},
        "sha256": {"a.safetensors": "ab" * 32},
        "quantization": "FP8",
        "kvCacheDtype": "FP8",
        "updatePolicy": "Follow",
    },
    "runtime": {
        "image": "registry.example/runtime:1",
        "args": ["--dtype", "bfloat16"],
        "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
        "envFrom": [{"prefix": "P_", "configMapRef": {"name": "c"}}],
        "contextLength": 8192,
        "maxConcurrency": 64,
        "shmSize": "2Gi",
    },
    "parallelism": {"tensor": 3, "pipeline": 2, "expert": True},
    "resources": {
        "gpus": 6,
        "gpuProducts": ["NVIDIA-L40S"],
        "cpu": "4",
        "memory": "32Gi",
        "ephemeralStorage": "20Gi",
    },
    "placement": {
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
        "schedulerName": "volcano",
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
                }
            },
            "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []},
        },
        "topologySpread": [{"topologyKey": "zone"}],
        "queueName": "team-a",
    },
    "cache": {
        "pvc": {"storageClassName": "fast", "size": "80Gi", "accessMode": "ReadWriteMany"},
        "verify": "Always",
        "retain": "24h",
    },
    "disruption": {"maxUnavailable": 2, "protectStartup": True},
    "podTemplate": {
        "metadata": {"labels": {"team": "a"}, "annotations": {"sidecar.example/inject": "true"}},
        "spec": {
            "imagePullSecrets": [{"name": "registry"}],
            "securityContext": {"runAsUser": 4711},
            "volumes": [{"name": "scratch", "emptyDir": {}}],
            "containers": [
                {
                    "name": "engine",
                    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                    "resources": {"limits": {"rdma/hca": "1"}},
                },
                {"name": "proxy", "image": "registry.example/proxy:2", "securityContext": {"runAsUser": 77}},
            ],
            "initContainers": [{"name": "first", "image": "registry.example/first:1"}],
        },
    },
    "drain": {"preStop": "20s", "timeout": "300s"},
    "endpoint": {
        "port": 80,
        "rateLimit": {"requestsPerMinute": 90, "tokensPerMinute": 40000},
        "podTLS": {"secretName": "demo-tls", "clientCASecretName": "callers"},
    },
    "observability": {"otlpEndpoint": "https://traces.example/v1/traces"},
}


def all_of(service: InferenceService, settings: Settings, model: FetchedModel) -> list[dict[str, Any]]:
    return [
        manifests.service_account(service),
        manifests.web_service(service),
        manifests.metrics_service(service),
        manifests.disruption_budget(service),
        manifests.network_policy(service),
        manifests.volume_claim(service, settings),
        manifests.prefetch_job(service, settings, "uid-volume", 1),
        deployment(service, settings, model),
    ]


def test_the_smallest_service(service: Build, settings: Settings, model: FetchedModel, golden: Any) -> None:
    golden("smallest", all_of(service(), settings, model))


def test_every_field(service: Build, settings: Settings, model: FetchedModel, golden: Any) -> None:
    golden("everything", all_of(service(**EVERYTHING), settings, model))


@pytest.mark.parametrize("mode", ["Node", "None"])
def test_without_a_shared_volume(
    service: Build, settings: Settings, model: FetchedModel, golden: Any, mode: str
) -> None:
    built = service(cache={"mode": mode, "pvc": {"size": "7Gi"}}, model={"uri": "pvc://claim/dir"})
    settings = replace(settings, node_cache_class="copies")
    made = [manifests.prefetch_job(built, settings, mode, 1), deployment(built, settings, model)]
    if mode == "Node":
        made.append(manifests.fill_job(built, settings, model, "node-3", 1, datetime(2026, 1, 1, tzinfo=UTC)))
    golden(f"cache-{mode.lower()}", [*made, manifests.network_policy(built)])


def test_an_image_is_mounted_by_its_digest(service: Build, settings: Settings, golden: Any) -> None:
    model = {"uri": "oci://r.example:5000/team/qwen:v2", "secretRef": {"name": "login"}, "endpoint": "http://mirror"}
    cache = {"mode": "Image", "image": {"path": "deep/m.gguf", "pullPolicy": "Always"}}
    built = service(cache=cache, model=model, podTemplate={"spec": {"imagePullSecrets": [{"name": "runtime"}]}})
    found = FetchedModel("sha256:0a", "sha256:0a", 3 * 10**9, "", "elsewhere")
    made = [manifests.prefetch_job(built, settings, "Image", 1), deployment(built, settings, found)]
    golden("cache-image", [*made, manifests.network_policy(built)])


@pytest.mark.parametrize("at", ["", ":v2", f"@sha256:{'c0' * 32}", f":v2@sha256:{'c0' * 32}"])
def test_whatever_names_an_image_the_pods_have_its_digest(service: Build, settings: Settings, at: str) -> None:
    built = service(model={"uri": f"oci://127.0.0.1:5123/a/b-c{at}"}, cache={"mode": "Image"})
    found = FetchedModel(f"sha256:{'1d' * 32}", f"sha256:{'1d' * 32}", 7, "", "m.gguf")
    pod = deployment(built, settings, found)["spec"]["template"]["spec"]
    [image] = [volume["image"] for volume in pod["volumes"] if "image" in volume]
    assert image == {"reference": f"127.0.0.1:5123/a/b-c@sha256:{'1d' * 32}", "pullPolicy": "IfNotPresent"}
    assert pod["containers"][0]["args"][1] == "/models/m.gguf"
    assert pod["initContainers"] == []


@pytest.mark.parametrize(
    ("url", "port"), [("http://c.ns:4319", 4319), ("https://c/v1/traces", 443), ("http://c", 80), ("", 0)]
)
def test_pods_reach_their_collector_of_traces_and_nothing_else(service: Build, url: str, port: int) -> None:
    policy = manifests.network_policy(service(observability={"otlpEndpoint": url}))
    reached = [each["port"] for rule in policy["spec"]["egress"] for each in rule["ports"]]
    assert reached == ([53, 53, 5353, 5353, port] if port else [])


def test_adapters(service: Build, settings: Settings, model: FetchedModel, golden: Any) -> None:
    adapters = [{"name": "sql", "uri": "hf://o/sql", "revision": "v2"}, {"name": "law", "uri": "pvc://laws/dir"}]
    built = service(model={"uri": "hf://org/model", "secretRef": {"name": "hub"}, "adapters": adapters})
    listed = [manifests.Listed("sql", "sha256-5a", "sha256:5a")]
    jobs = [
        manifests.prefetch_job(manifests.as_model(built, each), settings, "uid-volume", 1)
        for each in built.model.adapters or ()
    ]
    golden("adapters", [manifests.adapter_list(built, listed), *jobs, deployment(built, settings, model)])


def test_an_ingress_speaks_tls_to_pods_that_do(service: Build) -> None:
    built = service(endpoint={"podTLS": {"secretName": "c"}, "ingress": {"host": "a.b"}})
    assert built.endpoint.ingress is not None
    front = manifests.ingress(built, built.endpoint.ingress)
    assert front["metadata"]["annotations"]["nginx.ingress.kubernetes.io/backend-protocol"] == "HTTPS"
    assert (manifests.public_url(built), manifests.service_url(built)) == (
        "http://a.b/v1",
        "https://demo.default.svc:8000/v1",
    )
    assert manifests.web_service(built)["spec"]["ports"][0]["appProtocol"] == "https"
    assert "stoker.dev/models" not in manifests.web_service(built)["metadata"]["annotations"], "a gateway speaks HTTP"
    monitor = manifests.pod_monitor(built)["spec"]["podMetricsEndpoints"][0]
    assert (monitor["scheme"], monitor["tlsConfig"]) == ("https", {"insecureSkipVerify": True})


def test_kv_pages_in_host_memory(service: Build, settings: Settings, model: FetchedModel, golden: Any) -> None:
    built = service(resources={"gpus": 1, "cpu": "4"}, runtime={"args": ["--swap-space", "16"], "shmSize": "2Gi"})
    golden("host-memory", [deployment(built, settings, model)])


@pytest.mark.parametrize(
    ("resources", "env", "threads"),
    [
        ({"gpus": 0, "cpu": "7"}, [], ["7"]),
        ({"gpus": 0, "cpu": "2900m"}, [], ["2"]),
        ({"gpus": 0, "cpu": "300m"}, [], ["1"]),
        ({"gpus": 0}, [], []),
        ({"gpus": 1, "cpu": "7"}, [], []),
        ({"gpus": 0, "cpu": "7"}, [{"name": "OMP_NUM_THREADS", "value": "5"}], ["5"]),
    ],
)
def test_threads_of_an_engine_are_the_cores_it_asks_for(
    service: Build,
    settings: Settings,
    model: FetchedModel,
    resources: dict[str, Any],
    env: list[dict[str, str]],
    threads: list[str],
) -> None:
    pod = deployment(service(resources=resources, runtime={"env": env}), settings, model)["spec"]["template"]["spec"]
    assert [each["value"] for each in pod["containers"][0]["env"] if each["name"] == "OMP_NUM_THREADS"] == threads


def test_a_claim_as_source(service: Build, settings: Settings, golden: Any) -> None:
    built = service(model={"uri": "pvc://weights/llama/7b"}, cache={"mode": "PVC"})
    golden("pvc-source", [manifests.prefetch_job(built, settings, "uid-volume", 2, repair=True)])


def test_a_claim_is_served_where_it_lies(service: Build, settings: Settings, model: FetchedModel, golden: Any) -> None:
    built = service(model={"uri": "pvc://weights/llama/7b"})
    there = replace(model, path="llama/7b", serve="llama/7b/m.gguf")
    golden("in-place", [manifests.prefetch_job(built, settings, "v", 1), deployment(built, settings, there)])
    assert (manifests.claim_name(built), manifests.owns_claim(built)) == ("weights", False)


def test_the_root_of_a_claim_is_served(service: Build, settings: Settings, model: FetchedModel) -> None:
    built = service(model={"uri": "pvc://weights"})
    pod = deployment(built, settings, replace(model, path="", serve=""))["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"][:2] == ["serve", "/models"]
    assert pod["initContainers"] == []


def test_a_claim_of_ones_own_as_cache(service: Build, settings: Settings, model: FetchedModel) -> None:
    built = service(cache={"pvc": {"existingClaim": "mine"}})
    pod = deployment(built, settings, model)["spec"]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "mine"}
    assert manifests.owns_claim(built) is False
    fetch = manifests.prefetch_job(built, settings, "v", 1)["spec"]["template"]["spec"]
    assert fetch["volumes"][0]["persistentVolumeClaim"] == {"claimName": "mine"}
    assert "readOnly" not in fetch["containers"][0]["volumeMounts"][0]


def test_a_dashboard(service: Build, golden: Any) -> None:
    found = manifests.dashboard(service())
    [text] = found["data"].values()
    golden("dashboard", [json.loads(text)])
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert len(text) < 30_000  # a thousand of them are kept in etcd
    uids = {json.loads(next(iter(manifests.dashboard(service(n))["data"].values())))["uid"] for n in ("a", "b")}
    assert len(uids) == 2
    sleeps = json.loads(next(iter(manifests.dashboard(service("nap", autoscaling=SLEEPS))["data"].values())))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in sleeps["panels"]]
    assert len(set(places)) == len(places) == len(json.loads(text)["panels"]) + 5
    golden("dashboard-of-a-sleeper", sleeps["panels"][-5:])
    tried = service("heron", canary={"weight": 7, "runtime": {"args": ["--seed", "3"]}}, model=ADAPTED)
    [text] = manifests.dashboard(tried)["data"].values()
    golden("dashboard-of-a-canary", json.loads(text)["panels"][-7:])
    assert len(text) < 30_000
    assert not re.search("PODS|TRIAL|SERVICE", text)
    assert not re.fullmatch("heron-[a-z0-9]+-[a-z0-9]+", "heron-canary-7f-x2"), "both sides would be one"


ADAPTED: dict[str, Any] = {"uri": "hf://a/b", "adapters": [{"name": "sql", "uri": "hf://a/lora"}]}
SLEEPS: dict[str, Any] = {"min": 0, "max": 3, "scaleToZero": {"maxWait": "5m"}}


def containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    pod = manifest["spec"]["template"]["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]


@pytest.mark.parametrize("spec", [{}, EVERYTHING], ids=["smallest", "everything"])
def test_every_pod_meets_the_restricted_profile(
    service: Build, settings: Settings, model: FetchedModel, spec: dict[str, Any]
) -> None:
    for manifest in all_of(service(**spec), settings, model)[-2:]:
        pod = manifest["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(manifest):
            profile = {"allowPrivilegeEscalation": False, "runAsNonRoot": True, "capabilities": {"drop": ["ALL"]}}
            if container["name"] in OUR_CONTAINERS:
                assert container["securityContext"] == profile | {"readOnlyRootFilesystem": True}
            assert profile.items() <= container["securityContext"].items()


def test_no_pod_names_a_user_where_each_namespace_has_its_own(service: Build, model: FetchedModel) -> None:
    built, settings = service(), Settings(fixed_user=False)
    made = [manifests.prefetch_job(built, settings, "v", 1), manifests.engine_template(built, settings, model)]
    for pod in (made[0]["spec"]["template"]["spec"], made[1]["spec"]):
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & pod["securityContext"].keys()
        assert pod["securityContext"]["runAsNonRoot"] is True


def test_a_token_is_never_on_a_command_line(service: Build, settings: Settings) -> None:
    job = manifests.prefetch_job(service(**EVERYTHING), settings, "v", 1)
    [fetch] = containers(job)
    [token] = [item for item in fetch["env"] if item["name"] == "HF_TOKEN"]
    assert token == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub-token", "key": "token"}}}
    assert not any("token" in argument.lower() for argument in fetch["args"])
    scope = service(model={"uri": "modelscope://a/b", "secretRef": {"name": "t", "key": "sdk"}})
    [fetch] = containers(manifests.prefetch_job(scope, settings, "v", 1))
    assert [item["name"] for item in fetch["env"]] == ["HOME", "MODELSCOPE_API_TOKEN"]
    assert fetch["env"][1]["valueFrom"] == {"secretKeyRef": {"name": "t", "key": "sdk"}}


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_store_is_asked_with_a_whole_secret_and_under_an_identity(
    service: Build, settings: Settings, model: FetchedModel, scheme: str
) -> None:
    source = {"uri": f"{scheme}://weights/team/x", "secretRef": {"name": "keys"}, "serviceAccountName": "reader"}
    built = service(model=source | {"endpoint": "https://minio.internal:9000"})
    template = manifests.prefetch_job(built, settings, "v", 1)["spec"]["template"]
    pod, [fetch] = template["spec"], template["spec"]["containers"]
    assert fetch["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert [item["name"] for item in fetch["env"]] == ["HOME"]
    assert fetch["args"][fetch["args"].index("--endpoint") + 1] == "https://minio.internal:9000"
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("reader", False)
    assert ("azure.workload.identity/use" in template["metadata"]["labels"]) == (scheme == "az")
    # Who fetched has no part in what serves.
    engine = deployment(built, settings, model)["spec"]["template"]
    assert engine["spec"]["serviceAccountName"] == built.name
    assert "azure.workload.identity/use" not in engine["metadata"]["labels"]
    assert not any("envFrom" in container for container in engine["spec"]["containers"])


def test_a_registry_is_asked_with_the_login_of_a_secret(service: Build, settings: Settings) -> None:
    built = service(model={"uri": "oci://registry/team/m:v1", "secretRef": {"name": "login"}})
    pod = manifests.prefetch_job(built, settings, "v", 1)["spec"]["template"]["spec"]
    [fetch] = pod["containers"]
    items = [{"key": ".dockerconfigjson", "path": "config.json"}]
    assert {"name": "login", "secret": {"secretName": "login", "items": items}} in pod["volumes"]
    [folder] = [item["mountPath"] for item in fetch["volumeMounts"] if item["name"] == "login"]
    assert {"name": "DOCKER_CONFIG", "value": folder} in fetch["env"]
    assert "envFrom" not in fetch
    public = manifests.prefetch_job(service(model={"uri": "oci://registry/team/m:v1"}), settings, "v", 1)
    assert "login" not in json.dumps(public["spec"]["template"]["spec"])


def test_grace_covers_the_whole_drain(service: Build, settings: Settings, model: FetchedModel) -> None:
    built = service(drain={"preStop": "30s", "timeout": "10m"})
    pod = deployment(built, settings, model)["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 630
    assert pod["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 30}}}


def test_gpu_requests_equal_limits(service: Build, settings: Settings, model: FetchedModel) -> None:
    built = service(resources={"gpus": 1, "gpuResource": "nvidia.com/mig-3g.40gb"})
    engine = deployment(built, settings, model)["spec"]["template"]["spec"]["containers"][0]
    assert engine["resources"]["requests"]["nvidia.com/mig-3g.40gb"] == "1"
    assert engine["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": "1"}


@pytest.mark.parametrize(
    "endpoint",
    [
        {"ingress": {"className": "nginx", "host": "llm.example.com"}, "tls": {"secretName": "llm-tls"}},
        {
            "httpRoute": {"parentRefs": [{"name": "gw", "namespace": "infra"}], "hostnames": ["llm.example.com"]},
            "port": 80,
        },
        {
            "httpRoute": {"parentRefs": [{"name": "gw"}]},
            "inferencePool": {"endpointPickerRef": {"name": "demo-epp"}},
        },
    ],
    ids=["ingress", "http-route", "inference-pool"],
)
def test_the_edge(service: Build, golden: Any, endpoint: dict[str, Any], request: pytest.FixtureRequest) -> None:
    built = service(endpoint=endpoint)
    if built.endpoint.ingress is not None:
        golden("ingress", [manifests.ingress(built, built.endpoint.ingress), manifests.network_policy(built)])
    if built.endpoint.inference_pool is not None:
        assert built.endpoint.http_route is not None
        route = manifests.http_route(built, built.endpoint.http_route, pool=True)
        golden("inference-pool", [manifests.inference_pool(built, built.endpoint.inference_pool), route])
    elif built.endpoint.http_route is not None:
        golden("http-route", [manifests.http_route(built, built.endpoint.http_route, pool=False)])


def test_what_prometheus_is_told(service: Build, golden: Any) -> None:
    golden("monitoring", [manifests.pod_monitor(service()), manifests.prometheus_rule(service())])
    golden("alerts-of-a-sleeper", [manifests.prometheus_rule(service(autoscaling=SLEEPS))])
    tried = service(canary={"weight": 7, "runtime": {"args": ["--seed", "3"]}}, model=ADAPTED)
    golden("alerts-of-a-canary", [manifests.prometheus_rule(tried)])
    suspended = manifests.prometheus_rule(service(suspend=True))
    assert "StokerNoPodAnswers" not in str(suspended)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ({}, "http://demo.default.svc:8000/v1"),
        ({"port": 80}, "http://demo.default.svc:80/v1"),
        ({"ingress": {"host": "a.b"}}, "http://a.b/v1"),
        ({"ingress": {"host": "a.b"}, "tls": {"secretName": "t"}}, "https://a.b/v1"),
        ({"httpRoute": {"parentRefs": [{"name": "g"}]}}, "http://demo.default.svc:8000/v1"),
        ({"httpRoute": {"parentRefs": [{"name": "g"}], "hostnames": ["a.b"]}}, "http://a.b/v1"),
        ({"httpRoute": {"parentRefs": [{"name": "g", "port": 443}], "hostnames": ["a.b"]}}, "https://a.b/v1"),
        (
            {"httpRoute": {"parentRefs": [{"name": "g", "sectionName": "https-main"}], "hostnames": ["a.b"]}},
            "https://a.b/v1",
        ),
    ],
)
def test_the_url(service: Build, endpoint: dict[str, Any], url: str) -> None:
    assert manifests.public_url(service(endpoint=endpoint)) == url


def test_api_keys_are_a_mounted_file(service: Build, settings: Settings, model: FetchedModel) -> None:
    built = service(endpoint={"auth": {"apiKeysSecretRef": {"name": "keys", "key": "k"}}})
    pod = deployment(built, settings, model)["spec"]["template"]["spec"]
    engine = pod["containers"][0]
    place = engine["args"].index("--api-key-file")
    assert engine["args"][place + 1] == "/etc/stoker/api-keys/keys"
    [volume] = [item for item in pod["volumes"] if item["name"] == "api-keys"]
    assert volume["secret"] == {"secretName": "keys", "items": [{"key": "k", "path": "keys"}], "defaultMode": 0o440}
    assert {"name": "api-keys", "mountPath": "/etc/stoker/api-keys", "readOnly": True} in engine["volumeMounts"]
    assert "api-keys" not in str(pod["initContainers"])


def test_the_startup_budget_grows_with_the_weights(service: Build, settings: Settings, model: FetchedModel) -> None:
    def budget(count: int) -> int:
        sized = deployment(service(), settings, replace(model, bytes=count))
        probe = sized["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
        return int(probe["failureThreshold"]) * int(probe["periodSeconds"])

    assert budget(140 * 10**9) - budget(0) == 1400  # at 100 MB/s


@pytest.mark.parametrize(
    ("rollout", "gpus", "strategy"),
    [
        ({}, 1, {"maxSurge": 0, "maxUnavailable": 1}),
        ({}, 0, {"maxSurge": 1, "maxUnavailable": 0}),
        ({"strategy": "RollingUpdate"}, 0, {"maxSurge": 0, "maxUnavailable": 1}),
        ({"strategy": "RollingUpdate", "maxSurge": 2, "maxUnavailable": 0}, 1, {"maxSurge": 2, "maxUnavailable": 0}),
        ({"strategy": "Recreate"}, 1, None),
    ],
)
def test_strategies(
    service: Build,
    settings: Settings,
    model: FetchedModel,
    rollout: dict[str, Any],
    gpus: int,
    strategy: dict[str, int] | None,
) -> None:
    spec = deployment(service(rollout=rollout, resources={"gpus": gpus}), settings, model)["spec"]
    assert spec["strategy"].get("rollingUpdate") == strategy


def test_a_deadline_and_a_pause(service: Build, settings: Settings, model: FetchedModel) -> None:
    spec = deployment(service(rollout={"progressDeadline": "90s", "paused": True}), settings, model)["spec"]
    assert (spec["progressDeadlineSeconds"], spec["paused"]) == (90, True)


@pytest.mark.parametrize("engine", ["HPA", "KEDA"])
def test_autoscalers(service: Build, golden: Any, engine: str) -> None:
    built = service(
        suspend=engine == "KEDA",
        autoscaling={
            "engine": engine,
            "min": 2,
            "max": 8,
            "targets": {"kvPercent": 85},
            "scaleUp": {"stabilization": "30s", "maxPods": 4, "period": "2m"},
        },
    )
    assert built.autoscaling is not None
    if engine == "HPA":
        golden("hpa", [manifests.pod_autoscaler(built, built.autoscaling, DEPLOYMENT)])
    else:
        golden("keda", [manifests.scaled_object(built, built.autoscaling, DEPLOYMENT, "http://prometheus:9090")])


def test_the_stamp_covers_everything_but_itself() -> None:
    bare = {"kind": "X", "metadata": {"name": "a"}, "spec": {"b": 1}}
    first = stamped(bare)
    assert stamped(bare) == first
    assert manifests.applied_hash(stamped(bare | {"spec": {"b": 2}})) != manifests.applied_hash(first)


def test_ranks_on_a_cpu_share_the_cores_of_their_pod(service: Build, settings: Settings, model: FetchedModel) -> None:
    built = service(resources={"gpus": 0, "cpu": "7"}, parallelism={"tensor": 3})
    [engine] = deployment(built, settings, model)["spec"]["template"]["spec"]["containers"]
    assert {"name": "OMP_NUM_THREADS", "value": "2"} in engine["env"]
    assert parse_serve(engine["args"][1:], {}).engine.ranks == 3
    built = service(resources={"gpus": 0, "cpu": "7"}, parallelism={"data": 3})
    [engine] = deployment(built, settings, model)["spec"]["template"]["spec"]["containers"]
    assert {"name": "OMP_NUM_THREADS", "value": "2"} in engine["env"]
    assert parse_serve(engine["args"][1:], {}).engine.all_ranks == 3
