"""The adapter behind a real kube-apiserver's aggregator, with the chart's own certificate and rights; and a real
HorizontalPodAutoscaler controller that scales a real Deployment by it. The pods' part is played on loopback.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from stoker_operator import manifests
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.manifests import workload
from stoker_operator.metrics_adapter.server import Adapter
from stoker_operator.plan.rollout import first_variant
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

pytestmark = pytest.mark.apiserver
ROOT = Path(__file__).resolve().parents[3]
API = "/apis/custom.metrics.k8s.io/v1beta2"
Object = dict[str, Any]


@pytest.fixture
def ask(kubectl: Callable[..., str]) -> Callable[..., Any]:
    """kubectl in a thread: the adapter answers on this very event loop while the API server asks it."""

    async def run(*arguments: str, **options: Any) -> str:
        return await asyncio.to_thread(kubectl, *arguments, **options)

    return run


@pytest.fixture
def chart(namespace: str) -> list[Object]:
    """The chart as it is installed in this namespace."""
    from e2e.cluster.binaries import ensure

    command = [str(ensure(["helm"])["helm"]), "template", "stoker", str(ROOT / "charts" / "stoker")]
    command += ["--namespace", namespace, "--set", "crds.install=false"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [item for item in yaml.safe_load_all(done.stdout) if item]


@pytest.fixture
async def adapter(
    namespace: str, chart: list[Object], control_plane: Path, ask: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Adapter]:  # fmt: skip
    """The adapter with the chart's rights, registered as the chart registers it; the Service leads to loopback."""
    [secret] = [item for item in chart if item["kind"] == "Secret"]
    for name, value in secret["data"].items():
        (tmp_path / name).write_bytes(base64.b64decode(value))
    await ask("create", "namespace", "kube-system", check=False)
    rights = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "RoleBinding", "Role")
    for item in (item for item in chart if item["kind"] in rights):
        await ask("apply", "-n", item["metadata"].get("namespace", namespace), "-f", "-", stdin=item)
    config = yaml.safe_load(control_plane.read_text())
    config["users"][0]["user"] = {"token": (await ask("create", "token", "stoker")).strip()}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    cluster = await Cluster.connect()
    monkeypatch.setenv("KUBECONFIG", str(control_plane))
    port = free_port()
    settings = Settings(metrics_adapter_port=port, metrics_adapter_tls=str(tmp_path), http_host="127.0.0.1")
    serving = Adapter(cluster, settings)
    await serving.start()
    [registered] = [item for item in chart if item["kind"] == "APIService"]
    registered["spec"]["service"]["port"] = port
    outside = {"type": "ExternalName", "externalName": "localhost"}
    name = registered["spec"]["service"]["name"]
    await ask(
        "apply",
        "-f",
        "-",
        stdin={"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}} | {"spec": outside},
    )
    await ask("apply", "-f", "-", stdin=registered)
    yield serving
    await ask("delete", "apiservice", "v1beta2.custom.metrics.k8s.io", "--ignore-not-found")
    for item in (item for item in chart if item["kind"].startswith("ClusterRole")):
        await ask("delete", item["kind"], item["metadata"]["name"])
    await serving.close()
    await cluster.close()


def free_port() -> int:
    from e2e.cluster.apiserver import free_ports

    return free_ports(1)[0]


@pytest.fixture
async def engines(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dict[str, float]]:
    """What every engine says of itself on /metrics; change it to change their load."""
    load = {"waiting": 0.0, "running": 0.0}

    async def page(_: web.Request) -> web.Response:
        lines = [f"vllm:num_requests_{key} {value}" for key, value in load.items()]
        types = [f"# TYPE vllm:num_requests_{key} gauge" for key in load]
        return web.Response(text="\n".join(line for pair in zip(types, lines, strict=True) for line in pair) + "\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", page)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(workload, "PORT", runner.addresses[0][1])
    monkeypatch.setattr("stoker_operator.metrics_adapter.scrape.FRESH_SECONDS", 0.0)
    yield load
    await runner.cleanup()


@pytest.fixture
async def scaled(
    namespace: str,
    service: Callable[..., InferenceService],
    model: FetchedModel,
    cluster: Cluster,
    ask: Callable[..., Any],
    engines: dict[str, float],
    adapter: Adapter,
    eventually: Callable[..., Any],
) -> Callable[[], Any]:
    """A Deployment and its autoscaler as the operator makes them; returns how many pods the Deployment wants."""
    fast = {"stabilization": "0s", "maxPods": 2, "period": "1s"}
    built = service(
        "demo",
        autoscaling={"min": 1, "max": 3, "scaleUp": fast, "scaleDown": fast},
        placement={"schedulerName": "nobody"},
    )
    assert built.autoscaling is not None
    for manifest in (
        manifests.service_account(built),
        manifests.deployment(built, Settings(), model, first_variant(built)),
        manifests.pod_autoscaler(built, built.autoscaling),
    ):
        manifest["metadata"] = {k: v for k, v in manifest["metadata"].items() if k != "ownerReferences"}
        manifest["metadata"]["namespace"] = namespace
        await cluster.apply(kinds.BY_NAME[manifest["kind"]], manifest)

    async def desired() -> int:
        for pod in await cluster.list_all(kinds.POD, namespace):
            status = {"phase": "Running", "podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
            if pod["status"].get("phase") != "Running":
                meta = {"name": pod["metadata"]["name"], "namespace": namespace}
                manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": status}
                await cluster.apply(kinds.POD, manifest, subresource="status")
        deployment = await cluster.get(kinds.DEPLOYMENT, namespace, "demo")
        assert deployment is not None
        return int(deployment["spec"]["replicas"])

    return desired


async def test_the_api_server_serves_the_engines_gauges(
    scaled: Callable[[], Any],
    engines: dict[str, float],
    ask: Callable[..., Any],
    namespace: str,
    eventually: Callable[..., Any],
) -> None:
    engines["waiting"] = 7.0

    async def values() -> list[Object]:
        await scaled()
        path = f"{API}/namespaces/{namespace}/pods/*/vllm:num_requests_waiting"
        answer = await ask("get", "--raw", path, check=False)
        found: list[Object] = json.loads(answer)["items"] if answer.startswith("{") else []
        return found

    [item, *_] = await eventually(values)
    assert item["value"] == "7000m"
    available = await ask("get", "apiservice", "v1beta2.custom.metrics.k8s.io", "-o", "json")
    [condition] = json.loads(available)["status"]["conditions"]
    assert (condition["type"], condition["status"]) == ("Available", "True")
    assert "pods/vllm:num_requests_waiting" in await ask("get", "--raw", API)
    groups = json.loads(await ask("get", "--raw", "/apis"))["groups"]
    assert "custom.metrics.k8s.io" in [group["name"] for group in groups]
    # A user whom the API server would not let read them is refused.
    refused = await ask("get", "--raw", f"{API}/namespaces/{namespace}/pods/*/vllm:x", "--as=eve", check=False)
    assert "orbidden" in refused


async def test_the_real_autoscaler_follows_the_queue(
    scaled: Callable[[], Any], engines: dict[str, float], ask: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    async def active() -> bool:
        await scaled()
        hpa = json.loads(await ask("get", "hpa", "demo", "-o", "json"))
        conditions = {item["type"]: item for item in hpa["status"].get("conditions", [])}
        return bool(conditions.get("ScalingActive", {}).get("status") == "True")

    await eventually(active, 40)
    engines["waiting"] = 50.0

    async def at(count: int) -> bool:
        return bool(await scaled() == count)

    await eventually(lambda: at(3), 30)  # never above max, whatever the queue
    engines["waiting"] = 0.0
    await eventually(lambda: at(1), 30)


async def test_a_client_that_is_not_the_api_server_learns_nothing(adapter: Adapter) -> None:
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    url = f"https://127.0.0.1:{adapter.port}"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as session:
        for path in (API, f"{API}/namespaces/default/pods/*/vllm:num_requests_waiting"):
            async with session.get(url + path, headers={"X-Remote-User": "system:admin"}) as answer:
                assert answer.status == 401
                assert (await answer.json())["kind"] == "Status"
        async with session.get(f"{url}/healthz") as answer:
            assert answer.status == 200
