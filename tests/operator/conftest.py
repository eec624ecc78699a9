"""Fixtures of the operator's tests: raw manifests, observed objects, and a real API server with real controllers."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator import manifests
from stoker_operator.cluster.api import Cluster
from stoker_operator.cluster.kinds import INFERENCE_SERVICE
from stoker_operator.manifests.revision import Record
from stoker_operator.observe.capacity import Room
from stoker_operator.observe.gpu import Gpu
from stoker_operator.observe.pod_http import PodClient
from stoker_operator.observe.rollout import read
from stoker_operator.observe.snapshot import Answer, Beside, Idle, Observed
from stoker_operator.plan.plan import Plan, make_plan
from stoker_operator.plan.rollout import first_variant
from stoker_operator.reconcile import Reconciler
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService, model_status, parse
from stoker_operator.spec.weights import told_weights, weights_status
from stoker_operator.status import status

Object = dict[str, Any]
NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
ROOT = Path(__file__).resolve().parents[2]
CRD = ROOT / "crds" / "stoker.dev_inferenceservices.yaml"
CONTROLLERS = (
    "deployment-controller",
    "replicaset-controller",
    "statefulset-controller",
    "job-controller",
    "garbage-collector-controller",
    "persistentvolumeclaim-protection-controller",
    "horizontal-pod-autoscaler-controller",
    "clusterrole-aggregation-controller",
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


class World:
    """A service whose children are all in place, with `pods` of revision "new"."""

    def __init__(self, service: InferenceService, model: FetchedModel, live: Callable[..., Object]) -> None:
        self.settings = Settings()
        self.model, self.live = model, live
        claim = live(manifests.volume_claim(service, self.settings))
        source = manifests.source_id(service, claim["metadata"]["uid"])
        self.service = replace(service, status={"model": model_status(model, source)})
        variant = first_variant(service)
        if service.autoscaling is not None:
            variant = replace(variant, replicas=None)
        built = [
            manifests.service_account(service),
            manifests.web_service(service),
            manifests.metrics_service(service),
            manifests.disruption_budget(service),
            manifests.network_policy(service),
            manifests.deployment(service, self.settings, model, variant),
        ]
        self.children = {(item["kind"], item["metadata"]["name"]): live(item) for item in built}
        self.children["PersistentVolumeClaim", claim["metadata"]["name"]] = claim
        deployment = self.children["Deployment", service.name]
        deployment["metadata"]["annotations"] |= {"deployment.kubernetes.io/revision": "1"}
        deployment["spec"].setdefault("replicas", 1)
        deployment["status"] = {"observedGeneration": 1}
        self.claims = [claim]
        self.pods: list[Object] = []
        self.jobs: list[Object] = []
        self.answer: Answer | None = None
        self.revisions: list[Object] = []
        self.current, self.number = "new", 1
        self.served: frozenset[str] = frozenset()
        self.without: frozenset[str] = frozenset()
        self.metrics_api = ""
        self.turn: bool | None = None
        self.ahead: tuple[str, ...] = ()
        self.room: Room | None = None
        self.silent: frozenset[str] = frozenset()
        self.warnings: dict[str, str] = {}
        self.unmounted: dict[str, str] = {}
        self.load: int | None = None
        self.gpu: Gpu | None = None
        self.idle: Idle | None = None
        self.activators: tuple[str, ...] = ()
        self.port = 0
        self.beside = Beside()
        self.record("new", 1, served=True)

    def weights(self, size: int) -> World:
        """The model was reported to have so many bytes, of files and of weights."""
        told = {"bytes": size, "shape": {"weights": weights_status(told_weights(size, ["auto"]))}}
        self.service = replace(self.service, status={"model": self.service.status["model"] | told})
        return self

    def pod(self, template: str = "new", *, ready: bool = True, **pod_status: Any) -> World:
        labels = {"pod-template-hash": template, "app.kubernetes.io/component": "engine"}
        conditions = [{"type": "Ready", "status": str(ready)}, {"type": "PodScheduled", "status": "True"}]
        name = f"p{len(self.pods)}"
        found = {"phase": "Running", "conditions": conditions} | pod_status
        if any((each["type"], each["status"]) == ("PodScheduled", "False") for each in found["conditions"]):
            found["phase"] = "Pending"
        live = self.children["Deployment", self.service.name]["spec"]["template"]["spec"]
        spec = {key: live[key] for key in live if key != "volumes"}
        spec |= {"nodeName": "n1"} if found["phase"] == "Running" else {}
        metadata = {"name": name, "uid": f"uid-{name}", "labels": labels}
        self.pods.append({"metadata": metadata, "spec": spec, "status": found})
        return self

    def answered(self, error: str = "") -> World:
        self.answer = Answer("p0", "new", error)
        return self

    def observed(self) -> Observed:
        deployment = self.children.get(("Deployment", self.service.name))
        uid = deployment["metadata"]["uid"] if deployment else ""
        annotations = {"deployment.kubernetes.io/revision": str(self.number)}
        labels = {"pod-template-hash": self.current}
        sets = [{"metadata": {"ownerReferences": [{"uid": uid}], "annotations": annotations, "labels": labels}}]
        return Observed(
            children=self.children,
            claims=tuple(self.claims),
            engine_pods=tuple(self.pods),
            jobs=tuple(self.jobs),
            rollout=read(deployment, sets, self.pods, self._floor(), self.silent),
            silent=self.silent,
            warnings=self.warnings,
            unmounted=self.unmounted,
            revisions=tuple(self.revisions),
            served=self.served,
            without=self.without,
            metrics_api=self.metrics_api,
            turn=self.turn,
            ahead=self.ahead,
            room=self.room,
            load=self.load,
            gpu=self.gpu,
            idle=self.idle,
            activators=self.activators,
            port=self.port,
            answer=self.answer,
            canary=self.beside,
        )

    def _floor(self) -> int | None:
        scaling = self.service.autoscaling
        return scaling.floor if scaling is not None and scaling.ours else None

    def record(
        self, template_hash: str, number: int, *, key: str = "", served: bool = False, failed: str = ""
    ) -> World:
        """Add the record of a revision: of the template that is wanted now, or of another one, named by `key`."""
        template = manifests.revision_template(self.service, self.settings, self.model)
        if key:
            template["metadata"] = {"labels": {"was": key}}
        record = Record(template_hash, manifests.template_key(template), number, template, served, failed)
        self.revisions.append(self.live(manifests.record_manifest(self.service, record)))
        return self

    def plan(self) -> Plan:
        return make_plan(manifests.as_served(self.service), self.observed(), self.settings, NOW)

    def status(self) -> dict[str, Any]:
        return status.from_plan(self.service, self.observed(), self.plan(), NOW)


@pytest.fixture
def world(service: Callable[..., InferenceService], model: FetchedModel, live: Callable[..., Object]) -> Any:
    def build(**spec: Any) -> World:
        return World(service(**spec), model, live)

    return build


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A kubeconfig of a real kube-apiserver, with the controllers that turn Deployments and Jobs into pods."""
    from e2e.cluster import apiserver

    folder = tmp_path_factory.mktemp("control-plane")
    fast = ["--horizontal-pod-autoscaler-sync-period=1s", "--kube-api-qps=500", "--kube-api-burst=1000"]
    running = apiserver.start(folder, controllers=CONTROLLERS, controller_flags=fast, front_proxy=True)
    try:
        environment = os.environ | {"KUBECONFIG": str(running.kubeconfig)}
        _kubectl(environment, "apply", "-f", str(CRD))
        # `kubectl wait` fails at once while an object has no conditions at all.
        wait = ("wait", "--for=condition=Established", "--timeout=60s", "crd/inferenceservices.stoker.dev")
        while "condition met" not in (said := _kubectl(environment, *wait, check=False)):
            assert "accessor error" in said, said
            time.sleep(0.1)
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
def groups_defined(control_plane: Path, kubectl: Callable[..., str]) -> Iterator[None]:
    """The kind, for one test: it would change what the others see."""
    from e2e.cluster.crds import definitions

    name = "crd/leaderworkersets.leaderworkerset.x-k8s.io"

    for file in definitions("groups"):
        kubectl("create", "-f", str(file))
    while "condition met" not in kubectl("wait", "--for=condition=Established", name, check=False):
        pass
    yield
    kubectl("delete", name, "--wait=true")


@pytest.fixture
def published(control_plane: Path, tmp_path: Path) -> Iterator[None]:
    """The groups' own controller at work, where it is built and the API server is of this machine."""
    from e2e.cluster import groups
    from e2e.cluster.binaries import find
    from e2e.cluster.processes import Processes

    if find(groups.BINARY) is None:
        pytest.skip(f"LeaderWorkerSet's controller is not built: python e2e/cluster/rig.py build {groups.BINARY}")
    if not control_plane.with_name("kube-apiserver.log").exists():
        pytest.skip("an API server elsewhere cannot ask a controller on this machine")
    publisher = groups.Publisher(tmp_path, control_plane, Processes(tmp_path / "processes.json", tmp_path))
    try:
        publisher.install()
        yield
    finally:
        publisher.remove()


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
    """Compare manifests with tests/operator/manifests/golden/NAME.yaml; STOKER_UPDATE_GOLDEN=1 writes them."""

    def compare(name: str, manifests: list[dict[str, Any]]) -> None:
        path = Path(__file__).parent / "manifests" / "golden" / f"{name}.yaml"
        text = yaml.safe_dump_all(json.loads(json.dumps(manifests)), sort_keys=True, width=120)
        if os.environ.get("STOKER_UPDATE_GOLDEN"):
            path.write_text(text)
        assert path.read_text() == text

    return compare


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Wait until `check()` (sync or async) returns something true, and return that."""

    async def wait(check: Callable[[], Any], seconds: float = 60.0) -> Any:
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
