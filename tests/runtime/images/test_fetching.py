"""Images by URL: hosts, redirects, bounds, and what never stands in a message."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from stoker_runtime.errors import RequestError
from stoker_runtime.images import fetching, source
from stoker_runtime.images.fetching import Budget, Fetcher
from stoker_runtime.images.source import ImageSource, read_data_url

FIELD = "messages[1].content[0].image_url.url"
SECRET = "s3cr3t"
BODY = bytes(range(256)) * 40


class Answers(BaseHTTPRequestHandler):
    """Says what its path asks for."""

    asked: list[str]
    sent: list[str]

    def do_GET(self) -> None:
        kind = self.path.split("?")[0]
        type(self).asked.append(kind)
        type(self).sent += self.headers.keys()
        port = self.server.server_address[1]
        places = {
            "/away": f"http://elsewhere.invalid/x?{SECRET}",
            "/here": "/file",
            "/named": f"http://localhost:{port}/file",
            "/loop": "/loop",
            "/local": "file:///etc/passwd",
        }
        if kind in places:
            self.send_response(302)
            self.send_header("location", places[kind])
            self.send_header("content-length", "0")
            self.end_headers()
        elif kind == "/missing":
            self.send_error(404)
        elif kind == "/hang":
            threading.Event().wait(3)
        else:
            self.send_response(200)
            if kind == "/zipped":
                self.send_header("content-encoding", "gzip")
            self.send_header("set-cookie", "who=me; Path=/")
            self.send_header("content-length", str(len(BODY)))
            self.end_headers()
            self.wfile.write(BODY)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def origin(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    Answers.asked, Answers.sent = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(url: str, *domains: str, budget: Budget | None = None) -> bytes:
    async def run() -> bytes:
        fetcher = Fetcher(domains)
        try:
            return await fetcher.fetch(ImageSource(url, FIELD), budget or Budget())
        finally:
            if fetcher._client is not None:
                await fetcher._client.aclose()

    return asyncio.run(run())


def refused(url: str, *domains: str, budget: Budget | None = None) -> str:
    with pytest.raises(RequestError) as wrong:
        fetch(url, *domains, budget=budget)
    assert wrong.value.param == FIELD
    assert FIELD in wrong.value.message
    assert SECRET not in wrong.value.message
    return wrong.value.message


def test_a_host_that_is_allowed(origin: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert fetch(f"{origin}/file?{SECRET}", "other.example", "127.0.0.1") == BODY
    assert SECRET not in caplog.text
    assert fetch(f"{origin}/here", "127.0.0.1") == BODY
    assert fetch(f"{origin}/named", "127.0.0.1", "LOCALHOST") == BODY


async def test_nothing_of_one_caller_goes_along_for_another(origin: str) -> None:
    fetcher = Fetcher(("127.0.0.1",))
    for _ in range(2):
        both = [fetcher.fetch(ImageSource(f"{origin}/file", FIELD), Budget()) for _ in range(2)]
        assert await asyncio.gather(*both) == [BODY] * 2
    assert "cookie" not in {name.lower() for name in Answers.sent}
    assert fetcher._client is not None
    await fetcher._client.aclose()


def test_hosts_that_are_not(origin: str) -> None:
    assert "--allowed-media-domains" in refused(f"{origin}/file?{SECRET}")
    assert "Send it as a data: URL" in refused(f"{origin}/file")
    assert "none of the hosts" in refused(f"{origin}/file", "27.0.0.1")
    assert "is on localhost" in refused(f"http://127.0.0.1:{SECRET}@localhost/", "127.0.0.1")
    assert Answers.asked == []


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http:///x", "127.0.0.1/x", "http://[::1"])
def test_what_is_no_address(url: str) -> None:
    assert "URL" in refused(url, "127.0.0.1", "")


def test_redirects(origin: str) -> None:
    assert "elsewhere.invalid, which is none" in refused(f"{origin}/away", "127.0.0.1")
    assert "is on localhost, which is none" in refused(f"{origin}/named", "127.0.0.1")
    assert "must be a data: URL, or one of http" in refused(f"{origin}/local", "127.0.0.1")
    assert "more than 5 times" in refused(f"{origin}/loop", "127.0.0.1")
    assert Answers.asked.count("/loop") == 6


def test_bounds(origin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_BYTES", len(BODY))
    budget = Budget(len(BODY) + 1)
    assert fetch(f"{origin}/file", "127.0.0.1", budget=budget) == BODY
    assert "one too many" in refused(f"{origin}/file", "127.0.0.1", budget=budget)
    monkeypatch.setattr(source, "MAX_BYTES", len(BODY) - 1)
    assert "larger than" in refused(f"{origin}/file", "127.0.0.1")
    assert "answers 404" in refused(f"{origin}/missing", "127.0.0.1")
    assert "compressed" in refused(f"{origin}/zipped", "127.0.0.1")
    monkeypatch.setattr(fetching, "SECONDS", 0.2)
    assert "did not send it within 0.2 s" in refused(f"{origin}/hang?{SECRET}", "127.0.0.1")
    assert "cannot be asked for it: ConnectError" in refused("http://127.0.0.1:1/x", "127.0.0.1")


def test_data_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    text = base64.b64encode(BODY).decode()

    def read(url: str) -> bytes:
        return read_data_url(ImageSource(url, FIELD))

    assert read(f"data:image/png;base64,{text}") == BODY
    assert read(f"DATA:;BASE64,{text[:80]}\n{text[80:]}") == BODY
    assert read(f"data:image/png;name=a;base64,{text.replace('+', '%2B').replace('=', '%3D')}") == BODY
    for url, says in (
        (f"data:image/png,{SECRET}", "of the form"),
        (f"data:image/png;base64{SECRET}", "of the form"),
        (f"data:image/png;base64,{SECRET}!", "not valid base64"),
        ("data:image/png;base64,é", "not valid base64"),
    ):
        with pytest.raises(RequestError, match=says) as wrong:
            read(url)
        assert wrong.value.param == FIELD
        assert SECRET not in wrong.value.message
    monkeypatch.setattr(source, "MAX_BYTES", len(BODY) - 1)
    with pytest.raises(RequestError, match="larger than"):
        read(f"data:image/png;base64,{text}")
