"""The CRD on a real API server: every rule good and bad, and defaults that the parser shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.cluster.kinds import INFERENCE_SERVICE
from stoker_operator.spec.service import parse

pytestmark = pytest.mark.apiserver
HERE = Path(__file__).parent
EXAMPLES = sorted((HERE.parents[1] / "crds" / "examples").glob("*.yaml"))
BAD = yaml.safe_load((HERE / "bad_specs.yaml").read_text())
GOOD: list[dict[str, Any]] = [
    {},
    {"suspend": True, "replicas": 0},
    {"model": {"uri": "https://host/dir/m.gguf", "secretRef": {"name": "t"}, "sha256": {"m.gguf": "0" * 64}}},
    {"model": {"uri": "file:///models/m.gguf"}},
    {"model": {"uri": "pvc://claim/a/b", "files": {"allow": ["*.gguf"]}}},
    {"model": {"uri": "pvc://claim"}},
    {"model": {"uri": "hf://org/name/dir/m.gguf"}},
    {"model": {"uri": "hf://a/b", "endpoint": "http://hub:80", "revision": "refs/pr/1", "servedNames": ["org/x:1"]}},
    {"resources": {"gpus": 1, "gpuProducts": ["NVIDIA-L4"], "gpuResource": "nvidia.com/mig-1g.5gb"}},
    {"resources": {"gpus": 0, "cpu": 4, "memory": "1.5Gi"}},
    {"resources": {"gpus": 6}, "parallelism": {"tensor": 2, "pipeline": 3}},
    {"resources": {"gpus": 0}, "parallelism": {"tensor": 4}},
    {"resources": {"gpus": 3}, "parallelism": {"data": 3}},
    {"resources": {"gpus": 12}, "parallelism": {"tensor": 2, "pipeline": 2, "data": 3, "expert": True}},
    {"resources": {"gpus": 0}, "parallelism": {"data": 7}, "canary": {"weight": 9, "runtime": {"args": ["--seed=3"]}}},
    {"resources": {"claims": [{"name": "g", "resourceClaimName": "a"}]}, "parallelism": {"tensor": 5, "data": 3}},
    {"resources": {"gpus": 3, "nodes": 5}, "parallelism": {"tensor": 3, "pipeline": 5}},
    {"resources": {"gpus": 7, "nodes": 2}, "parallelism": {"tensor": 14}},
    {"resources": {"gpus": 0, "nodes": 3}, "parallelism": {"tensor": 2, "pipeline": 6}},
    {"resources": {"gpus": 1, "nodes": 1}},
    {
        "resources": {"claims": [{"name": "g", "resourceClaimTemplateName": "a"}], "nodes": 4},
        "parallelism": {"pipeline": 4},
    },
    {"resources": {"claims": [{"name": "g", "resourceClaimName": "a"}]}, "parallelism": {"tensor": 8}},
    {"resources": {"gpus": 0, "memory": "600Mi"}, "runtime": {"shmSize": "512Mi"}},
    {"runtime": {"args": ["--dtype", "bfloat16", "--no_access_log"], "env": [{"name": "A", "value": ""}]}},
    {"runtime": {"image": "r/newer:2", "args": ["--portable", "x"], "env": [{"name": "STOKER_NEW", "value": "1"}]}},
    {"runtime": {"env": [{"name": "STOKER_API_KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}},
    {"model": {"uri": "hf://a/b", "revision": "v2", "updatePolicy": "Follow"}},
    {"model": {"uri": "modelscope://a/b-1.5/c.gguf", "revision": "v1", "secretRef": {"name": "t", "key": "k"}}},
    {"model": {"uri": "gs://bucket/x", "updatePolicy": "Follow"}, "cache": {"pvc": {"size": "9Gi"}}},
    {"autoscaling": {"max": 4}},
    {"autoscaling": {"engine": "External", "max": 4}, "replicas": 3},
    {"autoscaling": {"min": 2, "max": 2, "targets": {"queued": 0}, "scaleDown": {"maxPods": 3, "period": "30m"}}},
    {
        "autoscaling": {
            "min": 0,
            "max": 7,
            "scaleToZero": {
                "schedule": [
                    {"start": "*/20 07-9,23 1-31/2 jan-MAR mon-fri", "end": "5/15 18 * 12 0,7", "min": 7},
                    {"start": "0 0 29 2 *", "end": "0 6 * * *", "timezone": "America/Argentina/Buenos_Aires"},
                ]
            },
        }
    },
    {"rollout": {"autoRollback": False, "progressDeadline": "1h"}},
    {"rollout": {"strategy": "RollingUpdate", "maxSurge": 1, "maxUnavailable": 0}},
    {"endpoint": {"ingress": {"host": "*.a.b"}, "tls": {"secretName": "t"}, "networkPolicy": False}},
    {"endpoint": {"httpRoute": {"parentRefs": [{"name": "gw", "port": 443}], "hostnames": ["a.b"]}}},
    {"endpoint": {"inferencePool": {"endpointPickerRef": {"name": "picker", "port": 19, "failureMode": "FailOpen"}}}},
    {
        "endpoint": {
            "httpRoute": {"parentRefs": [{"name": "gw"}]},
            "inferencePool": {"endpointPickerRef": {"name": "epp"}},
        },
        "autoscaling": {"min": 1, "max": 2},
    },
    {"endpoint": {"inferencePool": {"endpointPickerRef": {"name": "epp"}, "kvEvents": {}}}},
    {
        "endpoint": {
            "inferencePool": {
                "endpointPickerRef": {"name": "epp"},
                "kvEvents": {"port": 7117, "pickerLabels": {"app": "epp", "example.com/team": ""}},
            }
        },
        "runtime": {"args": ["--runner", "generate"], "env": [{"name": "MY_POD_IP", "value": "x"}]},
    },
    {"runtime": {"args": ["--kv-events-config", "{}"], "env": [{"name": "POD_IP", "value": "x"}]}},
    {"endpoint": {"port": 80}},
    {"endpoint": {"auth": {"apiKeysSecretRef": {"name": "keys"}}}, "observability": {"rules": "Off"}},
    {"endpoint": {"rateLimit": {"requestsPerMinute": 7}}},
    {"endpoint": {"podTLS": {"secretName": "c.d", "clientCASecretName": "ca"}}},
    {"endpoint": {"podTLS": {"secretName": "c"}, "ingress": {"host": "a.b"}}},
    {"endpoint": {"rateLimit": {"tokensPerMinute": 1_000_000_000}}, "observability": {"otlpEndpoint": "http://c:4317"}},
    {"observability": {"otlpEndpoint": ""}, "runtime": {"args": ["--otlp-traces-endpoint=https://c/v1/traces"]}},
    {"drain": {"preStop": "0s", "timeout": "24h"}},
    {"model": {"uri": "hf://a/b", "quantization": "FP8", "kvCacheDtype": "FP8"}},
    {"model": {"uri": "hf://a/b", "quantization": "ModelOpt"}},
    {"model": {"uri": "hf://a/b", "quantization": "MXFP4"}},
    {"model": {"uri": "hf://a/b:Q4_K_M", "quantization": "GGUF"}},
    {"model": {"uri": "hf://a/b", "quantization": "Q4K"}},
    {
        "runtime": {
            "envFrom": [{"secretRef": {"name": "s", "optional": True}}, {"prefix": "A_", "configMapRef": {"name": "c"}}]
        }
    },
    {"model": {"uri": "pvc://claim/dir"}, "cache": {"verify": "Always"}},
    {"model": {"uri": "pvc://claim/dir"}, "cache": {"mode": "PVC", "retain": "24h", "pvc": {"size": "5Gi"}}},
    {"cache": {"pvc": {"existingClaim": "mine"}}},
    {"model": {"uri": "hf://a/b", "adapters": []}, "runtime": {"args": ["--max-loras", "7"]}},
    {"model": {"uri": "hf://a/b", "adapters": [{"name": f"team/{i}", "uri": "hf://o/l"} for i in range(64)]}},
    {
        "model": {
            "uri": "pvc://claim/m",
            "servedNames": ["base"],
            "adapters": [{"name": "sql:2", "uri": "oci://r.io/l:1"}, {"name": "x", "uri": "pvc://other/dir"}],
        },
        "cache": {"mode": "PVC"},
    },
    {"cache": {"retain": "8760h"}},
    {"cache": {"verify": "Scheduled"}},
    {"cache": {"verify": "Scheduled", "verifyEvery": "90m", "pvc": {"accessMode": "ReadWriteMany"}}},
    {"model": {"uri": "pvc://claim/dir"}, "cache": {"verify": "Scheduled", "verifyEvery": "8760h"}},
    {"model": {"uri": "s3://a.bucket-9/team/x/m.gguf", "secretRef": {"name": "keys"}, "endpoint": "http://minio:9000"}},
    {"model": {"uri": f"oci://reg.io:5000/team/m_1:v2@sha256:{'0a' * 32}", "secretRef": {"name": "login"}}},
    {"model": {"uri": "oci://reg.io/m", "endpoint": "http://mirror:5000", "files": {"allow": ["*.gguf"]}}},
    {"model": {"uri": "az://$web", "serviceAccountName": "reader.of-models", "files": {"allow": ["*"]}}},
    {"canary": {"weight": 99, "model": {"revision": "refs/pr/3"}, "tolerance": {"errors": 0}}},
    {"canary": {"steps": [1, 7, 60], "window": "90m", "requests": 9, "model": {"uri": "s3://bucket/m"}}},
    {"canary": {"weight": 3, "runtime": {"image": "r/n:2", "args": ["--new"], "env": [{"name": "A", "value": ""}]}}},
    {"rollout": {"waitForIdle": "10m"}, "disruption": {"maxUnavailable": 3, "protectStartup": True}},
    {
        "placement": {
            "affinity": {"nodeAffinity": {"x": [1]}},
            "topologySpread": [{"topologyKey": "zone"}],
            "queueName": "q",
        }
    },
    {"resources": {"claims": [{"name": "gpu", "resourceClaimTemplateName": "one-h100", "request": "gpu"}]}},
    {"resources": {"claims": [{"name": "g", "resourceClaimName": "c"}], "gpuProducts": ["NVIDIA-L4"]}},
    {"placement": {"topologySpread": []}},
    {"cache": {"mode": "Node", "prewarm": True, "verify": "Always", "pvc": {"size": "33Gi"}}},
    {
        "model": {"uri": "oci://r.io:5000/team/m:v1@sha256:" + "9f" * 32, "secretRef": {"name": "login"}},
        "cache": {"mode": "Image", "image": {"path": "models/m_7b/q4.gguf", "pullPolicy": "Never"}},
    },
    {
        "model": {"uri": "oci://r.io/m", "endpoint": "http://mirror:5000", "updatePolicy": "Follow"},
        "cache": {"mode": "Image"},
    },
    {"model": {"uri": "pvc://claim/dir"}, "cache": {"mode": "None", "pvc": {"size": "5Gi", "storageClassName": ""}}},
    {
        "podTemplate": {
            "spec": {
                "securityContext": {"runAsUser": 4711, "fsGroup": 4712, "supplementalGroups": [8]},
                "volumes": [
                    {"name": "v", "emptyDir": {"sizeLimit": "1Gi"}},
                    {"name": "s", "secret": {"secretName": "x"}},
                    {"name": "i", "image": {"reference": "r.io/tools:1"}},
                ],
                "containers": [
                    {
                        "name": "engine",
                        "volumeMounts": [{"name": "v", "mountPath": "/scratch"}],
                        "resources": {"limits": {"rdma/hca": "1"}},
                    },
                    {
                        "name": "proxy",
                        "image": "proxy:1",
                        "args": ["--port=1"],
                        "env": [{"name": "A", "value": "b"}],
                        "ports": [{"containerPort": 9}],
                        "volumeMounts": [{"name": "models", "mountPath": "/m", "readOnly": True}],
                        "securityContext": {"runAsUser": 7, "capabilities": {"add": ["NET_BIND_SERVICE"]}},
                        "readinessProbe": {"tcpSocket": {"port": 9}},
                    },
                ],
                "initContainers": [{"name": "first", "image": "x:1", "restartPolicy": "Always"}],
            }
        }
    },
    {"podTemplate": {"metadata": {"labels": {"team": "a"}, "annotations": {"a/b": "c"}}}},
    {"podTemplate": {"spec": {"imagePullSecrets": [{"name": "registry"}]}}, "observability": {"dashboard": "Off"}},
    {"placement": {"tolerations": [{"operator": "Exists"}], "nodeSelector": {"a/b": "c"}, "schedulerName": "x"}},
]


def named(body: dict[str, Any], namespace: str) -> dict[str, Any]:
    return body | {"metadata": {"name": body["metadata"]["name"], "namespace": namespace}}


@pytest.mark.parametrize("case", [case for case in BAD if not case.get("strict")], ids=lambda case: case["parser"])
async def test_a_bad_spec_is_refused(
    cluster: Cluster, namespace: str, raw: Callable[..., dict[str, Any]], case: dict[str, Any]
) -> None:
    with pytest.raises(ApiError) as caught:
        await cluster.create(INFERENCE_SERVICE, named(raw("demo", **case["change"]), namespace))
    assert caught.value.status == 422
    field = next(iter(case["change"]))
    assert f"spec.{field}" in caught.value.message or "spec: Invalid" in caught.value.message


def test_an_unknown_field_is_refused(kubectl: Callable[..., str], raw: Callable[..., dict[str, Any]]) -> None:
    body = raw("demo", model={"uri": "hf://a/b", "revison": "x"}) | {"metadata": {"name": "demo"}}
    answer = kubectl("create", "--validate=strict", "-f", "-", stdin=body, check=False)
    assert 'unknown field "spec.model.revison"' in answer


@pytest.mark.parametrize("name", ["1demo", "a" * 41, "de.mo"])
async def test_a_name_no_child_could_bear_is_refused(
    cluster: Cluster, namespace: str, raw: Callable[..., dict[str, Any]], name: str
) -> None:
    with pytest.raises(ApiError, match=r"metadata\.name must start with a letter"):
        await cluster.create(INFERENCE_SERVICE, named(raw(name), namespace))


@pytest.mark.parametrize("name", ["default", "kubernetes", "llama-metrics"])
async def test_a_name_that_clashes_is_refused_before_anything_is_made(
    cluster: Cluster, namespace: str, raw: Callable[..., dict[str, Any]], name: str
) -> None:
    with pytest.raises(ApiError, match=r"metadata\.name must not be default or kubernetes"):
        await cluster.create(INFERENCE_SERVICE, named(raw(name), namespace))
    assert await cluster.create(INFERENCE_SERVICE, named(raw(f"{name}-x"), namespace))


@pytest.mark.parametrize("spec", GOOD, ids=str)
async def test_a_good_spec_means_the_same_with_and_without_an_api_server(
    cluster: Cluster, namespace: str, raw: Callable[..., dict[str, Any]], spec: dict[str, Any]
) -> None:
    body = named(raw("demo", **spec), namespace)
    stored = await cluster.create(INFERENCE_SERVICE, body)
    assert replace(parse(stored), uid="", generation=1) == parse(body)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_valid(kubectl: Callable[..., str], example: Path) -> None:
    assert "created" in kubectl("create", "--validate=strict", "-f", str(example))
