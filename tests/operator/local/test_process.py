"""Containers as processes: command, ports, paths, environment. Pure."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker_operator import manifests
from stoker_operator.local.process import Machine, ReferenceMissing, map_container, plain_values
from stoker_operator.plan.rollout import first_variant
from stoker_operator.settings import Settings

LOGS = Path("/logs/pod")


def machine(**changes: Any) -> Machine:
    fields: dict[str, Any] = {
        "folders": {"models": Path("/data/volumes/default/models-1"), "tmp": Path("/data/scratch/demo/tmp")},
        "ports": {8000: 40001, 8081: 40002},
        "secrets": {},
        "config_maps": {},
        "host_environment": {"PATH": "/bin", "STOKER_PORT": "1", "HF_ENDPOINT": "http://hub"},
        "gpus": (),
        "logs": LOGS,
    }
    return Machine(**{**fields, **changes})


def test_the_engine_container_of_the_real_manifest(service: Any, model: Any) -> None:
    built = manifests.deployment(service("demo"), Settings(), model, first_variant(service("demo")))
    container = built["spec"]["template"]["spec"]["containers"][0]
    mapped = map_container(container, machine(gpus=(1, 3)))
    assert mapped.command[:4] == (sys.executable, "-m", "stoker_cli", "serve")
    words = list(mapped.command)
    assert words[4] == f"/data/volumes/default/models-1/{model.serve}"
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--port") + 1] == "40001"
    assert mapped.environment["HOME"] == "/data/scratch/demo/tmp"
    assert mapped.environment["TRITON_CACHE_DIR"] == "/data/scratch/demo/tmp/triton"
    assert mapped.environment["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert mapped.environment["HF_ENDPOINT"] == "http://hub"
    assert "STOKER_PORT" not in mapped.environment


def test_the_prefetch_container_of_the_real_manifest(service: Any) -> None:
    built = manifests.prefetch_job(service("demo"), Settings(), "uid", 1)
    mapped = map_container(built["spec"]["template"]["spec"]["containers"][0], machine())
    words = list(mapped.command)
    assert words[words.index("--dest") + 1] == "/data/volumes/default/models-1"
    assert words[words.index("--progress-port") + 1 :][:3] == ["40002", "--progress-host", "127.0.0.1"]
    assert words[words.index("--termination-log") + 1] == str(LOGS / "fetch.termination")
    assert mapped.termination_log == LOGS / "fetch.termination"


def test_a_claim_as_source_is_mapped_behind_its_scheme() -> None:
    container = {
        "name": "fetch",
        "command": ["stoker"],
        "args": ["fetch", "--uri", "file:///source/m", "--allow", "/sourcery/x"],
        "volumeMounts": [{"name": "source", "mountPath": "/source"}],
    }
    mapped = map_container(container, machine(folders={"source": Path("/data/claim")}))
    assert mapped.command[5:] == ("file:///data/claim/m", "--allow", "/sourcery/x")


def secret_container(kind: str = "secretKeyRef") -> dict[str, Any]:
    reference = {"name": "hub", "key": "token"}
    return {"name": "fetch", "command": ["stoker"], "env": [{"name": "HF_TOKEN", "valueFrom": {kind: reference}}]}


def test_a_secret_reaches_the_environment_only() -> None:
    mapped = map_container(secret_container(), machine(secrets={"hub": {"token": "hf_secret"}}))
    assert mapped.environment["HF_TOKEN"] == "hf_secret"
    assert not any("hf_secret" in word for word in mapped.command)


def test_without_the_secret_the_persons_own_token_is_used() -> None:
    mapped = map_container(secret_container(), machine(host_environment={"HF_TOKEN": "hf_mine"}))
    assert mapped.environment["HF_TOKEN"] == "hf_mine"


def whole(kind: str, **more: Any) -> dict[str, Any]:
    return {"name": "engine", "command": ["stoker"], "envFrom": [{kind: {"name": "all"} | more, "prefix": "P_"}]}


def test_whole_secrets_and_config_maps_come_under_their_prefix() -> None:
    values = {"all": {"A": "1"}}
    assert map_container(whole("secretRef"), machine(secrets=values)).environment["P_A"] == "1"
    assert map_container(whole("configMapRef"), machine(config_maps=values)).environment["P_A"] == "1"
    assert "P_A" not in map_container(whole("configMapRef", optional=True), machine()).environment


@pytest.mark.parametrize(
    ("container", "changes", "says"),
    [
        (whole("secretRef"), {}, 'secret "all" not found'),
        (secret_container(), {}, 'secret "hub" not found'),
        (secret_container(), {"secrets": {"hub": {}}}, "couldn't find key token in Secret default/hub"),
        (secret_container("configMapKeyRef"), {}, 'configmap "hub" not found'),
    ],
)
def test_a_missing_reference_is_named_as_the_kubelet_names_it(
    container: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ReferenceMissing, match=says):
        map_container(container, machine(**changes))


def test_values_of_secrets_and_config_maps() -> None:
    secret = {"kind": "Secret", "data": {"a": base64.b64encode(b"1").decode()}, "stringData": {"b": "2"}}
    assert plain_values(secret) == {"a": "1", "b": "2"}
    assert plain_values({"kind": "ConfigMap", "data": {"a": "1"}}) == {"a": "1"}
