"""KEDA as its publisher has it, and the Prometheus that it asks: definitions, and processes of this machine.

    1. a certificate for what KEDA's processes tell each other and the API server
    2. the definitions                     4. KEDA's operator, then its metrics server
    3. Prometheus, which finds the pods    5. the API of external metrics, led to that server

Invariants: what is the publisher's comes out of its Go module; processes are the administrator's, so that of the roles
only the one stands here by which the API server's own controller reads metrics. `remove` takes all away.
Knows nothing of Stoker but the label of its pods and the name of their port.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from e2e.cluster.apiserver import free_ports, self_signed
from e2e.cluster.binaries import ensure
from e2e.cluster.crds import definitions
from e2e.cluster.layout import NODE_ADDRESS
from e2e.cluster.node import run
from e2e.cluster.processes import Processes

NAMESPACE, SERVICE = "keda", "keda-metrics-apiserver"
API = "v1beta1.external.metrics.k8s.io"
OPERATOR, ADAPTER, PROMETHEUS = "keda-operator", "keda-adapter", "prometheus"
PROMETHEUS_URL = f"http://{NODE_ADDRESS}:9090"
_READY_SECONDS = 120.0
_SCRAPE = "1s"
Object = dict[str, Any]


class Publisher:
    """Brings KEDA and a Prometheus to a cluster whose API server is a process of this machine, and takes them away.

    Making one builds them, which takes many minutes for the first time. Raises BuildError.
    """

    def __init__(self, folder: Path, kubeconfig: Path, processes: Processes) -> None:
        self._folder, self._kubeconfig, self._processes = folder, kubeconfig, processes
        self._binaries = ensure([OPERATOR, ADAPTER, PROMETHEUS, "kubectl"])

    def install(self) -> None:
        """Return once metrics can be asked for. Raises StartError."""
        names = f"IP:127.0.0.1,IP:{NODE_ADDRESS},DNS:{SERVICE}.{NAMESPACE}.svc"
        certificate = self_signed(self._folder, NAMESPACE, names)
        (self._folder / "ca.crt").write_bytes(certificate.read_bytes())
        for file in (*definitions("keda"), *definitions("keda-beside")):
            self._kubectl("create", "-f", str(file))
        self._start_prometheus()
        metrics, probes, asked, secure, own = free_ports(5)
        environment = {
            "KUBECONFIG": str(self._kubeconfig), "POD_NAMESPACE": NAMESPACE, "WATCH_NAMESPACE": "",
            "KEDA_CLUSTER_OBJECT_NAMESPACE": NAMESPACE,
        }  # fmt: skip
        operator = (
            f"--metrics-bind-address=127.0.0.1:{metrics}", f"--health-probe-bind-address=127.0.0.1:{probes}",
            f"--metrics-service-bind-address=127.0.0.1:{asked}", f"--cert-dir={self._folder}",
        )  # fmt: skip
        self._start(OPERATOR, operator, environment, f"http://127.0.0.1:{probes}/readyz")
        adapter = (
            f"--bind-address={NODE_ADDRESS}", f"--secure-port={secure}", f"--port={own}",
            f"--metrics-service-address=127.0.0.1:{asked}", f"--cert-dir={self._folder}",
            f"--tls-cert-file={certificate}", f"--tls-private-key-file={self._folder / 'tls.key'}",
            *(f"--{kind}-kubeconfig={self._kubeconfig}" for kind in ("lister", "authentication", "authorization")),
        )  # fmt: skip
        self._start(ADAPTER, adapter, environment, f"http://127.0.0.1:{own}/metrics")
        self._kubectl("create", "-f", "-", text=listed(leads_to(secure, certificate.read_bytes())))
        self._kubectl("wait", "--for=condition=Available", f"--timeout={_READY_SECONDS:.0f}s", f"apiservice/{API}")

    def remove(self) -> None:
        """Take away what `install` brought, however far it came. Raises StartError."""
        # First of all: nothing is asked for that nobody serves.
        self._kubectl("delete", "-f", "-", "--ignore-not-found", text=listed(leads_to(1, b"")))
        for file in (*definitions("keda"), *definitions("keda-beside")):
            # Objects of these go with them, whose finalizers the operator takes off.
            self._kubectl("delete", "-f", str(file), "--ignore-not-found", "--timeout=60s")
        for name in (ADAPTER, OPERATOR, PROMETHEUS):
            self._processes.stop(name)

    def _start(self, name: str, flags: tuple[str, ...], environment: dict[str, str], url: str) -> None:
        self._processes.start(name, [str(self._binaries[name]), *flags], environment)
        self._processes.wait(name, lambda: _answers(url), _READY_SECONDS)

    def _start_prometheus(self) -> None:
        settings = self._folder / "prometheus.yml"
        settings.write_text(yaml.safe_dump(scraping(self._kubeconfig)))
        flags = (
            f"--config.file={settings}", f"--storage.tsdb.path={self._folder / 'series'}",
            f"--web.listen-address={PROMETHEUS_URL.removeprefix('http://')}",
        )  # fmt: skip
        self._start(PROMETHEUS, flags, {}, f"{PROMETHEUS_URL}/-/ready")

    def _kubectl(self, *arguments: str, text: str | None = None) -> None:
        run([str(self._binaries["kubectl"]), f"--kubeconfig={self._kubeconfig}", *arguments], text)


def scraping(kubeconfig: Path) -> Object:
    """Prometheus' configuration: the pods of Stoker, each by its port called http."""
    pod = "__meta_kubernetes_pod"
    kept = (
        (f"{pod}_label_app_kubernetes_io_managed_by", "stoker"), (f"{pod}_container_port_name", "http"),
    )  # fmt: skip
    rules: list[Object] = [{"action": "keep", "source_labels": [label], "regex": value} for label, value in kept]
    named = (("__meta_kubernetes_namespace", "namespace"), (f"{pod}_name", "pod"))
    rules += [{"source_labels": [source], "target_label": target} for source, target in named]
    found = {"role": "pod", "kubeconfig_file": str(kubeconfig)}
    job = {"job_name": "pods", "kubernetes_sd_configs": [found], "relabel_configs": rules}
    return {"global": {"scrape_interval": _SCRAPE, "scrape_timeout": _SCRAPE}, "scrape_configs": [job]}


def leads_to(port: int, authority: bytes) -> list[Object]:
    """What leads the API of external metrics to the metrics server at `port` of this machine, and lets the controller
    of HorizontalPodAutoscalers read it.
    """
    here = {"name": SERVICE, "namespace": NAMESPACE}
    slice_labels = {"kubernetes.io/service-name": SERVICE}
    group, rbac = API.partition(".")[2], "rbac.authorization.k8s.io"
    reader = "keda-external-metrics-reader"
    api = {
        "service": here, "group": group, "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100,
        "caBundle": base64.b64encode(authority).decode(),
    }  # fmt: skip
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "Service", "metadata": here, "spec": {"ports": [{"port": 443}]}},
        {
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": {**here, "labels": slice_labels},
            "addressType": "IPv4", "endpoints": [{"addresses": [NODE_ADDRESS]}], "ports": [{"port": port}],
        },
        {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": API}, "spec": api},
        {
            "apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": {"name": reader},
            "rules": [{"apiGroups": [group], "resources": ["*"], "verbs": ["get", "list"]}],
        },
        {
            "apiVersion": f"{rbac}/v1", "kind": "ClusterRoleBinding", "metadata": {"name": reader},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": reader},
            "subjects": [
                {"kind": "ServiceAccount", "name": "horizontal-pod-autoscaler", "namespace": "kube-system"}
            ],
        },
    ]  # fmt: skip


def listed(items: list[Object]) -> str:
    """Objects as kubectl reads them."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
