"""The adapter behind a real kube-apiserver's aggregator, as the chart installs it; engines' pages are on loopback.

Knows nothing of what is scaled.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from stoker_operator.cluster.api import Cluster
from stoker_operator.manifests import workload
from stoker_operator.metrics_adapter.registration import NAME, Registration
from stoker_operator.metrics_adapter.server import Adapter
from stoker_operator.settings import Settings, from_arguments

ROOT = Path(__file__).resolve().parents[3]
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
    command += ["--namespace", namespace, "--set", "crds.install=false,image.repository=r/o,runtime.image=r/e:1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [item for item in yaml.safe_load_all(done.stdout) if item]


@pytest.fixture
async def release(
    namespace: str, chart: list[Object], control_plane: Path, ask: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[Cluster, Settings]]:  # fmt: skip
    """What the chart makes for the adapter, a connection with its rights alone, and what it tells the operator; the
    Service leads to loopback.
    """
    await ask("create", "namespace", "kube-system", check=False)
    rights = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "RoleBinding", "Role", "Secret")
    for home in {item["metadata"].get("namespace", namespace) for item in chart}:
        items = [item for item in chart if item["metadata"].get("namespace", namespace) == home]
        made: Object = {"apiVersion": "v1", "kind": "List", "items": [item for item in items if item["kind"] in rights]}
        await ask("apply", "-n", home, "-f", "-", stdin=made)
    config = yaml.safe_load(control_plane.read_text())
    config["users"][0]["user"] = {"token": (await ask("create", "token", "stoker")).strip()}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    cluster = await Cluster.connect()
    monkeypatch.setenv("KUBECONFIG", str(control_plane))
    [deployment] = [item for item in chart if item["kind"] == "Deployment"]
    told = from_arguments(deployment["spec"]["template"]["spec"]["containers"][0]["args"][1:], {})
    settings = replace(told, metrics_adapter_port=free_port(), http_host="127.0.0.1", identity="stoker-0")
    outside: Object = {"type": "ExternalName", "externalName": "localhost"}
    outside["ports"] = [{"port": settings.metrics_adapter_port}]
    head = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": settings.metrics_adapter_service}}
    await ask("apply", "-f", "-", stdin=head | {"spec": outside})
    yield cluster, settings
    everywhere = [item for item in chart if item["kind"].startswith("ClusterRole")]
    names = (f"{item['kind']}/{item['metadata']['name']}" for item in everywhere)
    await ask("delete", f"apiservice/{NAME}", *names, "--ignore-not-found")
    await cluster.close()


@pytest.fixture
async def adapter(release: tuple[Cluster, Settings], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Adapter]:
    """The adapter, started before there is a certificate, as a replica that does not lead may be."""
    monkeypatch.setattr("stoker_operator.metrics_adapter.server.FIRST_SECONDS", 0.05)
    serving = Adapter(*release)
    serving.start()
    yield serving
    await serving.close()
    # A TLS connection ends when both sides said so, for which the loop has to live.
    async with asyncio.timeout(30):
        while is_connected(release[1].metrics_adapter_port):
            await asyncio.sleep(0.05)


def is_connected(port: int) -> bool:
    """Whether a connection to a port of loopback has an open end here: established, or closed by the other side."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] in ("01", "08") for row in rows)


@pytest.fixture
async def registration(release: tuple[Cluster, Settings], adapter: Adapter) -> Registration:
    """The leader's part, done once: the certificate is made, and the API registered when the adapter serves."""
    assert not await Registration(*release, asyncio.Event()).once(), "it was registered before anybody served"
    await asyncio.wait_for(adapter.serving.wait(), 10)
    made = Registration(*release, adapter.serving)
    assert await made.once()
    return made


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
