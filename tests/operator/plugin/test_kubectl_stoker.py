"""`kubectl stoker` as people type it: a real kubectl finds the plugin, a real API server answers, reconciles go on.

There is no node: logs come from a kubelet's HTTPS server on loopback, which the API server asks as it asks any other.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.operator.plugin.conftest import Plugin
from tests.operator.reconcile.kubelet import UNSCHEDULED, Node

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]


async def test_status_follows_a_service_to_an_answer(
    stoker: Plugin, create: Callable[..., Any], look: Callable[..., Any], node: Node, engine: list[Object]
) -> None:
    await create("demo", placement=UNSCHEDULED)
    await look("Fetching")
    fetching = stoker("status", "demo").stdout
    assert "not ready: Fetching" in fetching
    assert "to do      wait; the message tells how far it is" in fetching
    assert "[-] cached" in fetching
    await node.fetch_all()
    await look("RollingOut")
    await node.run_all(1)
    await look("Serving")
    ready = stoker("status", "demo").stdout
    assert "/demo  Ready" in ready
    assert "[+] ready" in ready
    assert "hf://org/model at main = c0ffee012345, 98.4 MB" in ready
    assert "LAST EVENTS" in ready
    assert "Serving: 1 of 1 pods" in ready
    [row] = stoker("status").stdout.splitlines()[1:]
    assert row.split()[:4] == ["demo", "True", "Serving", "1/1"]


async def test_rollback_makes_the_spec_say_what_ran(
    stoker: Plugin,
    serve: Callable[..., Any],
    look: Callable[..., Any],
    node: Node,
    kubectl: Callable[..., str],
    cluster: Cluster,
    namespace: str,
) -> None:
    await serve("demo", runtime={"contextLength": 1234})
    assert "there is no other revision that served" in stoker("rollback", "demo").stderr
    patch = '{"spec": {"runtime": {"contextLength": 4321}, "suspend": false}}'
    kubectl("patch", "infsvc", "demo", "--type=merge", "-p", patch)
    await look("RollingOut")
    await node.run_all(2)
    await look("Serving")
    listed = stoker("rollback", "demo", "--list").stdout.splitlines()
    assert len(listed) == 3
    assert "(runs)" in listed[2]
    done = stoker("rollback", "demo")
    assert done.returncode == 0, done.stderr
    found = await cluster.get(kinds.INFERENCE_SERVICE, namespace, "demo")
    assert found is not None
    assert found["spec"]["runtime"]["contextLength"] == 1234
    assert found["metadata"]["generation"] == 3


def certificate(folder: Path) -> ssl.SSLContext:
    """A key that nobody vouches for, as a kubelet makes itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubelet")])
    now = datetime.now(UTC)
    built = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    built = built.serial_number(7).not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    signed = built.sign(key, hashes.SHA256())
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "kubelet.pem").write_bytes(signed.public_bytes(encoding) + private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "kubelet.pem")
    return context


@pytest.fixture
async def kubelet(tmp_path: Path) -> AsyncIterator[tuple[int, list[str]]]:
    """A kubelet's logs: (its port, what was asked of it)."""
    asked: list[str] = []

    async def logs(request: web.Request) -> web.Response:
        asked.append(f"{request.match_info['container']}?{request.query_string}")
        return web.Response(text='starting\n"GET /health HTTP/1.1" 200\nout of luck\n')

    app = web.Application()
    app.add_routes([web.get("/containerLogs/{namespace}/{pod}/{container}", logs)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=certificate(tmp_path)).start()
    yield runner.addresses[0][1], asked
    await runner.cleanup()


async def test_logs_are_those_of_the_container_that_crashed(
    stoker: Plugin,
    serve: Callable[..., Any],
    look: Callable[..., Any],
    node: Node,
    kubectl: Callable[..., str],
    kubelet: tuple[int, list[str]],
    namespace: str,
) -> None:
    port, asked = kubelet
    machine = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": namespace}}
    kubectl("create", "-f", "-", stdin=machine)
    addresses = [{"type": "InternalIP", "address": "127.0.0.1"}]
    status = {"addresses": addresses, "daemonEndpoints": {"kubeletEndpoint": {"Port": port}}}
    kubectl("patch", "node", namespace, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
    await serve("demo")
    [pod] = await node.pods("engine")
    node.bind(pod, namespace)
    ended = {"exitCode": 1, "startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:01Z"}
    container = {"name": "engine", "image": "i", "imageID": "", "ready": False, "restartCount": 3}
    container |= {"lastState": {"terminated": ended}, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    node.patch(pod, {"conditions": [{"type": "Ready", "status": "False"}], "containerStatuses": [container]})
    await look("CrashLoop")
    done = await asyncio.to_thread(stoker, "logs", "demo", "--tail", "7")
    assert done.stdout == "starting\nout of luck\n"
    assert "container engine before its last restart" in done.stderr
    assert asked == ["engine?previous=true&tailLines=7"]
    kubectl("delete", "node", namespace)


async def test_completion_offers_services_by_kubectls_own_way(
    stoker: Plugin, create: Callable[..., Any], namespace: str
) -> None:
    await create("lama")
    await create("other")
    assert "status" in stoker("stoker", "sta", verb="__complete").stdout.splitlines()
    offered = stoker("stoker", "status", f"--namespace={namespace}", "l", verb="__complete").stdout.splitlines()
    assert offered == ["lama", ":4"]


async def test_what_kubectl_refuses_is_said_in_its_own_words(stoker: Plugin) -> None:
    done = stoker("status", "absent")
    assert done.returncode == 1
    assert done.stderr == (
        'kubectl stoker status: Error from server (NotFound): inferenceservices.stoker.dev "absent" not found\n'
    )


async def test_chat_says_why_there_is_no_way(stoker: Plugin, create: Callable[..., Any]) -> None:
    await create("demo")
    done = stoker("chat", "demo", "Hello")
    assert done.returncode == 1
    assert 'services "demo" not found' in done.stderr
