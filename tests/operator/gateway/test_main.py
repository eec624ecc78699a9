"""main.py: the whole gateway, with a real API server that says who serves what, a real Envoy and a real client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from tests.operator.reconcile.test_sleep import endpoint_slice, own_address

from stoker_operator import manifests
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.gateway.keys import KeysError
from stoker_operator.gateway.main import Gateway, main
from stoker_operator.gateway.settings import GatewaySettings

pytestmark = pytest.mark.apiserver
KEY = "sk-of-the-team"
OURS = {"app.kubernetes.io/managed-by": "stoker"}


@pytest.fixture
async def gateway(
    proxy: Any, cluster: Cluster, namespace: str, settings: GatewaySettings, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY}\n")
    made = Gateway(cluster, replace(settings, namespaces=(namespace,), keys_file=str(keys)))
    stop = asyncio.Event()
    running = asyncio.create_task(made.run(stop))
    yield made
    stop.set()
    await asyncio.wait_for(running, 60)


async def test_what_the_cluster_serves_is_what_clients_get(
    gateway: Gateway,
    proxy: Any,
    engines: Callable[..., Any],
    service: Callable[..., Any],
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
    settings: GatewaySettings,
) -> None:
    address = own_address()
    one, two = await engines(2, address)
    for name, engine in (("egret", one), ("heron", two)):
        front = manifests.web_service(replace(service(name), namespace=namespace))
        del front["metadata"]["ownerReferences"]
        kubectl("create", "-f", "-", stdin=json.dumps(front))
        slice_ = endpoint_slice(f"{name}-1", name, address, engine.port, **OURS)
        kubectl("create", "-f", "-", stdin=json.dumps(slice_))
    client = proxy.client(KEY)

    async def listed() -> list[str]:
        try:
            return [each.id for each in (await client.models.list()).data]
        except openai.APIConnectionError:
            return []

    async def ask(model: str) -> str:
        said = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
        return str(said.choices[0].message.content)

    async def lists(*names: str) -> None:
        async def told() -> bool:
            return await listed() == list(names)

        await eventually(told)

    await lists("egret", "heron")
    assert [await ask("egret"), await ask("heron")] == [str(one.port), str(two.port)]
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{gateway.health_port}/metrics") as answer:
            assert "stoker_gateway_models 2.0" in await answer.text()
        async with session.get(f"http://127.0.0.1:{settings.metrics_port}/stats/prometheus") as answer:
            assert 'envoy_cluster_name="' + namespace in await answer.text()
    found = await cluster.get(kinds.SERVICE, namespace, "heron")
    assert found is not None
    await cluster.delete(kinds.SERVICE, namespace, "heron", found["metadata"]["uid"])
    await lists("egret")
    with pytest.raises(openai.NotFoundError):
        await ask("heron")
    one.held.clear()
    under_way = asyncio.create_task(ask("egret"))
    await eventually(lambda: len(one.got) == 2)
    one.held.set()
    assert await under_way == str(one.port)


async def test_without_its_keys_it_opens_to_nobody(cluster: Cluster, tmp_path: Path) -> None:
    settings = GatewaySettings(folder=str(tmp_path), keys_file=str(tmp_path / "missing"), http_port=0)
    with pytest.raises(KeysError):
        await Gateway(cluster, settings).run(asyncio.Event())
    assert list(tmp_path.iterdir()) == []


def test_what_envoy_needs_is_there_before_it_starts_and_stays_what_it_was(tmp_path: Path) -> None:
    command = ["--prepare=true", f"--folder={tmp_path}"]
    assert main(command) == 0
    assert {each.name for each in tmp_path.iterdir()} == {"envoy.json", "listeners.json", "clusters.json"}
    assert {each.stat().st_mode & 0o077 for each in tmp_path.iterdir()} == {0}
    (tmp_path / "clusters.json").write_text('{"resources": ["kept"]}')
    assert main(command) == 0
    assert "kept" in (tmp_path / "clusters.json").read_text()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--port=0", "port"),
        ("--admin-port=8080", "another one"),
        ("--folder=here", "absolute"),
        ("--body-mib=0", "body_mib"),
    ],
)
def test_a_bad_setting_is_named(given: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([given]) == 2
    assert named in capsys.readouterr().err
