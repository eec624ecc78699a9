"""TLS on the server's port, with a certificate that is renewed while it runs."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path

import httpx
import pytest
from api_server import make_state, serve, wait_until
from fake_engine import FakeEngine

from stoker_runtime.config import EngineConfig, ServerConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.serve.tls import keep_fresh, tls_context

FILES = Path(__file__).parent / "tls"
TRUST = ssl.create_default_context(cafile=str(FILES / "ca.pem"))


def config(folder: Path, **more: object) -> ServerConfig:
    """A server's configuration with the certificate of `folder`."""
    settings = {"ssl_certfile": str(folder / "server.pem"), "ssl_keyfile": str(folder / "server.key"), **more}
    return ServerConfig(EngineConfig("m"), **settings).validate()  # type: ignore[arg-type]


def copy(name: str, folder: Path) -> None:
    for suffix in ("key", "pem"):
        shutil.copy(FILES / f"{name}.{suffix}", folder / f"server.{suffix}")


def serial(url: str) -> int:
    """The serial number of the certificate that the server shows."""
    pem = ssl.get_server_certificate(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    der = ssl.PEM_cert_to_DER_cert(pem)
    # version [0] {2}, then the serial number as an INTEGER of one byte
    at = der.index(b"\xa0\x03\x02\x01\x02") + 5
    assert der[at : at + 2] == b"\x02\x01"
    return der[at + 2]


def test_https_and_renewal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    copy("server", tmp_path)
    settings = config(tmp_path)
    context = tls_context(settings)
    assert context is not None
    engine = FakeEngine()
    for running in serve(make_state(engine), engine, context):
        fresh = asyncio.run_coroutine_threadsafe(keep_fresh(context, settings, 0.02), running.loop)
        with httpx.Client(verify=TRUST) as client:
            body = {"prompt": "hi", "stream": True}
            assert client.post(f"{running.url}/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        assert serial(running.url) == 1
        copy("renewed", tmp_path)
        assert wait_until(lambda url=running.url: serial(url) == 2)
        (tmp_path / "server.key").write_text("no key")
        assert wait_until(lambda: "What was loaded stays" in caplog.text)
        assert serial(running.url) == 2
        fresh.cancel()


def test_clients_must_show_a_certificate(tmp_path: Path) -> None:
    copy("server", tmp_path)
    context = tls_context(config(tmp_path, ssl_ca_certs=str(FILES / "ca.pem"), ssl_cert_reqs=2))
    assert context is not None
    engine = FakeEngine()
    for running in serve(make_state(engine), engine, context):
        with httpx.Client(verify=TRUST) as client, pytest.raises(httpx.TransportError):
            client.get(f"{running.url}/health")
        known = ssl.create_default_context(cafile=str(FILES / "ca.pem"))
        known.load_cert_chain(FILES / "client.pem", FILES / "client.key")
        with httpx.Client(verify=known) as client:
            assert client.get(f"{running.url}/health").status_code == 200


def test_probes_need_no_certificate_and_other_authorities_hold_at_once(tmp_path: Path) -> None:
    """As in a pod: the kubelet shows none. Who came by a certificate of an authority that is gone is shut out."""
    copy("server", tmp_path)
    shutil.copy(FILES / "ca.pem", tmp_path / "clients.pem")
    more = {"ssl_ca_certs": str(tmp_path / "clients.pem"), "ssl_cert_reqs": 2, "ssl_probes_without_cert": True}
    settings = config(tmp_path, **more)
    context = tls_context(settings)
    assert context is not None
    known = ssl.create_default_context(cafile=str(FILES / "ca.pem"))
    known.load_cert_chain(FILES / "client.pem", FILES / "client.key")
    engine = FakeEngine()
    for running in serve(make_state(engine, **more, ssl_certfile="c"), engine, context):
        fresh = asyncio.run_coroutine_threadsafe(keep_fresh(context, settings, 0.02), running.loop)
        with httpx.Client(base_url=running.url, verify=TRUST) as nobody:
            assert {nobody.get(path).status_code for path in ("/health", "/ready", "/metrics", "/load")} == {200}
            for path in ("/v1/models", "/docs", "/nothing", "//health", "/health/"):
                assert nobody.get(path).status_code == 403
            refused = nobody.post("/v1/completions", json={"prompt": "x" * 100_000})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "certificate_required")
        with httpx.Client(base_url=running.url, verify=known) as client:
            assert client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
            assert client.get("/v1/models").status_code == 200
        shutil.copy(FILES / "server.pem", tmp_path / "clients.pem")

        def shut_out(url: str = running.url) -> bool:
            try:
                return httpx.get(f"{url}/v1/models", verify=known).status_code != 200
            except httpx.TransportError:
                return True

        assert wait_until(shut_out)
        assert httpx.get(f"{running.url}/health", verify=TRUST).status_code == 200
        fresh.cancel()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ssl_certfile": "/nonexistent"}, "/nonexistent"),
        ({"ssl_keyfile": str(FILES / "renewed.key")}, "cannot be loaded"),
        ({"ssl_ca_certs": "/nonexistent"}, "--ssl-ca-certs /nonexistent"),
        ({"ssl_ciphers": "none-of-these"}, "--ssl-ciphers"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, settings: dict[str, str], says: str) -> None:
    copy("server", tmp_path)
    with pytest.raises(ConfigError, match=says):
        tls_context(config(tmp_path, **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"ssl_keyfile": "k"},
        {"ssl_cert_reqs": 1},
        {"ssl_certfile": "c", "ssl_cert_reqs": 2},
        {"ssl_certfile": "c", "ssl_probes_without_cert": True},
    ],
)
def test_half_a_configuration(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="ssl_"):
        ServerConfig(EngineConfig("m"), **settings).validate()  # type: ignore[arg-type]


def test_no_certificate_means_no_tls() -> None:
    assert tls_context(ServerConfig(EngineConfig("m"))) is None
