"""Fixtures of the operator's tests: raw manifests, observed objects, and a real API server with real controllers."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.cluster import INFERENCE_SERVICE, Cluster
from stoker_operator.pod_http import PodClient
from stoker_operator.reconcile import Reconciler
from stoker_operator.settings import Settings
from stoker_operator.spec import FetchedModel, InferenceService, parse

ROOT = Path(__file__).resolve().parents[2]
CRD = ROOT / "crds" / "stoker.dev_inferenceservices.yaml"
CONTROLLERS = (
    "deployment-controller",
    "replicaset-controller",
    "job-controller",
    "garbage-collector-controller",
    "persistentvolumeclaim-protection-controller",
)
MODEL = FetchedModel(
    "0123456789abcdef0123456789abcdef01234567", "sha256:" + "ab" * 32, 98_362_432, "sha256-abab", "sha256-abab/m.gguf"
)


def raw_service(name: str = "demo", /, **spec: Any) -> dict[str, Any]:
    """The smallest InferenceService, with `spec` fields replaced (None removes one)."""
    body: dict[str, Any] = {"model": {"uri": "hf://org/model"}, "resources": {"gpus": 0}} | spec
    return {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": "default", "uid": "uid-1", "generation": 1},
        "spec": {key: value for key, value in body.items() if value is not None},
    }


@pytest.fixture
def raw() -> Callable[..., dict[str, Any]]:
    return raw_service


@pytest.fixture
def service() -> Callable[..., InferenceService]:
    """Builds a parsed service; `status=` gives it an earlier status."""

    def build(name: str = "demo", /, *, status: Mapping[str, Any] | None = None, **spec: Any) -> InferenceService:
        return replace(parse(raw_service(name, **spec)), status=status or {})

    return build


@pytest.fixture
def model() -> FetchedModel:
    return MODEL


@pytest.fixture
def settings() -> Settings:
    return Settings()


@pytest.fixture
def live() -> Callable[..., dict[str, Any]]:
    """A manifest as the API server would hand it back: with a uid, defaults and server-side fields."""

    def make(manifest: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        stored = copy.deepcopy(dict(manifest))
        stored["metadata"] |= {"uid": f"uid-{stored['metadata']['name']}", "generation": 1, "resourceVersion": "7"}
        return stored | more

    return make


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A kubeconfig of a real kube-apiserver, with the controllers that turn Deployments and Jobs into pods."""
    from e2e.cluster import apiserver

    running = apiserver.start(tmp_path_factory.mktemp("control-plane"), controllers=CONTROLLERS)
    try:
        environment = os.environ | {"KUBECONFIG": str(running.kubeconfig)}
        _kubectl(environment, "apply", "-f", str(CRD))
        _kubectl(environment, "wait", "--for=condition=Established", "crd/inferenceservices.stoker.dev")
        yield running.kubeconfig
    finally:
        running.stop()


def _kubectl(environment: Mapping[str, str], *arguments: str, stdin: str = "", check: bool = True) -> str:
    from e2e.cluster.binaries import ensure

    binary = ensure(["kubectl"])["kubectl"]
    done = subprocess.run(
        [str(binary), *arguments], env=environment, input=stdin, capture_output=True, text=True, timeout=60, check=False
    )
    if check and done.returncode:
        raise AssertionError(f"kubectl {' '.join(arguments)}: {done.stderr}")
    return done.stdout if check else done.stdout + done.stderr


@pytest.fixture
def namespace(control_plane: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A fresh namespace, deleted afterwards; KUBECONFIG points at the control plane."""
    monkeypatch.setenv("KUBECONFIG", str(control_plane))
    name = f"test-{uuid.uuid4().hex[:8]}"
    _kubectl(os.environ, "create", "namespace", name)
    yield name
    _kubectl(os.environ, "delete", "namespace", name, "--wait=false")


@pytest.fixture
def kubectl(namespace: str) -> Callable[..., str]:
    """Run kubectl in the test's namespace; a mapping in place of `stdin` is sent as JSON. `check=False`: stderr too."""

    def run(*arguments: str, stdin: Any = "", check: bool = True) -> str:
        text = stdin if isinstance(stdin, str) else json.dumps(stdin)
        return _kubectl(os.environ, "--namespace", namespace, *arguments, stdin=text, check=check)

    return run


@pytest.fixture
async def cluster(namespace: str) -> AsyncIterator[Cluster]:
    connection = await Cluster.connect()
    yield connection
    await connection.close()


@pytest.fixture
def reconciler(cluster: Cluster) -> Reconciler:
    return Reconciler(cluster, PodClient(2.0), Settings())


@pytest.fixture
def create(cluster: Cluster, namespace: str) -> Callable[..., Any]:
    """Create an InferenceService in the test's namespace."""

    async def make(name: str = "demo", /, **spec: Any) -> dict[str, Any]:
        body = raw_service(name, **spec)
        body["metadata"] = {"name": name, "namespace": namespace}
        return await cluster.create(INFERENCE_SERVICE, body)

    return make


@pytest.fixture
def golden() -> Callable[[str, list[dict[str, Any]]], None]:
    """Compare manifests with tests/operator/golden/NAME.yaml; STOKER_UPDATE_GOLDEN=1 writes them."""

    def compare(name: str, manifests: list[dict[str, Any]]) -> None:
        path = Path(__file__).parent / "golden" / f"{name}.yaml"
        text = yaml.safe_dump_all(json.loads(json.dumps(manifests)), sort_keys=True, width=120)
        if os.environ.get("STOKER_UPDATE_GOLDEN"):
            path.write_text(text)
        assert path.read_text() == text

    return compare


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Wait until `check()` (sync or async) returns something true, and return that."""

    async def wait(check: Callable[[], Any], seconds: float = 20.0) -> Any:
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            found = check()
            found = await found if asyncio.iscoroutine(found) else found
            if found:
                return found
            assert asyncio.get_running_loop().time() < deadline, f"not within {seconds} s"
            await asyncio.sleep(0.1)

    return wait


@pytest.fixture
def operator_command() -> list[str]:
    return [sys.executable, "-m", "stoker_operator"]
