"""The files of `stoker up`: what is read and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker_operator.local.manifest import ManifestError, load, runnable

SERVICE = """
apiVersion: stoker.dev/v1alpha1
kind: InferenceService
metadata: {name: demo}
spec:
  model: {uri: "hf://org/model"}
  resources: {gpus: 0}
"""
SECRET = """
apiVersion: v1
kind: Secret
metadata: {name: hub}
stringData: {token: hf_secret}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "x.yaml"
    path.write_text(text)
    return path


def test_a_service_with_its_secret(tmp_path: Path) -> None:
    found = load([write(tmp_path, f"{SERVICE}---{SECRET}---\n")])
    assert [service["metadata"]["name"] for service in found.services] == ["demo"]
    assert found.services[0]["metadata"]["namespace"] == "default"
    assert found.secrets == {"hub": {"token": "hf_secret"}}
    assert "hf_secret" not in repr(found)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (SERVICE.replace("gpus: 0", "gpu: 0"), "did you mean|gpus"),
        (SERVICE.replace("hf://org/model", "org/model"), r"spec\.model\.uri"),
        (SERVICE + "---" + SERVICE, "given twice"),
        (SECRET, "There is no InferenceService"),
        ("kind: Pod\nmetadata: {name: x}", "holds a Pod"),
        ("a: [", "is no YAML"),
        ("- a\n", "no Kubernetes object"),
    ],
)
def test_refuses(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ManifestError, match=says) as failure:
        load([write(tmp_path, text)])
    assert "x.yaml" in str(failure.value) or "given twice" in str(failure.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="No such file"):
        load([tmp_path / "none.yaml"])


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ("{gpus: 0}", "{claims: [{name: g, resourceClaimName: c}]}", "resources.claims"),
        ("{gpus: 0}", "{gpus: 0, nodes: 2}\n  parallelism: {tensor: 4}", "resources.nodes of more than 1"),
        ("{gpus: 0}", "{gpus: 0}\n  model: {uri: 'file:///m', adapters: []}", "model.adapters"),
        ("{gpus: 0}", "{gpus: 0}\n  model: {uri: 'oci://r.io/m'}\n  cache: {mode: Image}", "cache.mode: Image"),
        (
            "{gpus: 0}",
            "{gpus: 0}\n  endpoint: {inferencePool: {endpointPickerRef: {name: e}, kvEvents: {}}}",
            "inferencePool.kvEvents",
        ),
        ("{gpus: 0}", "{gpus: 0}\n  podTemplate: {spec: {containers: [{name: p, image: x}]}}", "containers of its own"),
    ],
)
def test_what_only_a_cluster_can_run_is_refused(tmp_path: Path, was: str, now: str, says: str) -> None:
    runnable(load([write(tmp_path, SERVICE)]))
    with pytest.raises(ManifestError, match=says):
        runnable(load([write(tmp_path, SERVICE.replace(was, now))]))
