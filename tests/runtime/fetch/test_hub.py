"""The hub by way of huggingface_hub: Xet, the user's cache and variables, tokens, and what a hostile hub may do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants, get_session, hf_hub_download, set_client_factory, snapshot_download
from huggingface_hub.utils import _http

from stoker_runtime.fetch.errors import FetchFailed, HubUnreachable, Interrupted, ModelNotFound, TokenRejected
from stoker_runtime.fetch.prefetch import Published
from stoker_runtime.fetch.progress import Progress

Fetch = Callable[..., Published]
Serve = Callable[[Callable[[str, socket.socket], None]], str]
SHARD = "model-00001-of-00002.safetensors"


def files_asked(hub: Any) -> list[str]:
    return [entry["path"].rsplit("/", 1)[1] for entry in hub.log if "/resolve/" in entry["path"]]


@pytest.fixture
def xet(hub: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The large shard in a Xet store; gives its hash."""
    import hf_xet

    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet-cache"))
    hub.cas = f"local://{tmp_path / 'cas'}"
    commit = hf_xet.XetSession().new_upload_commit(endpoint=hub.cas)
    upload = commit.start_upload_file(str(model / SHARD))
    commit.wait_to_finish()
    found: str = upload.result().xet_info.hash
    repository = hub.find("acme/tiny", "main")
    hub.xet[repository.entries()[SHARD].sha256] = found
    return found


def test_xet_brings_the_bytes_and_they_are_verified(fetch: Fetch, hub: Any, model: Path, xet: str) -> None:
    hub.token = "hf_right"
    published = fetch(token="hf_right")
    assert (published.folder / SHARD).read_bytes() == (model / SHARD).read_bytes()
    assert SHARD not in files_asked(hub)
    assert [entry["path"] for entry in hub.log if "xet-read-token" in entry["path"]]


def test_xet_resumes_what_an_earlier_run_left(fetch: Fetch, hub: Any, model: Path, xet: str) -> None:
    stop = threading.Event()

    class StopsEarly(Progress):
        def moved(self, count: int) -> None:
            super().moved(count)
            stop.set()

    offered, hub.xet = hub.xet, {}
    with pytest.raises(Interrupted):
        fetch(stop=stop, progress=StopsEarly(), parallel=1, allow=("*00001-of*",))
    hub.xet = offered
    published = fetch(allow=("*00001-of*",))
    assert 0 < published.moved < published.manifest.bytes
    assert (published.folder / SHARD).read_bytes() == (model / SHARD).read_bytes()


def test_a_xet_store_that_is_gone_is_unreachable_and_can_be_passed_by(
    fetch: Fetch, hub: Any, xet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_BASE_DELAY", "10ms")
    hub.cas = "http://127.0.0.1:9"
    with pytest.raises(HubUnreachable, match=r"Xet's storage stopped after 0 B of 3\.0 MiB.*HF_HUB_DISABLE_XET=1"):
        fetch(allow=("*00001-of*",))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    assert fetch(allow=("*00001-of*",)).manifest.files


def test_a_model_of_the_users_cache_is_read_from_there(fetch: Fetch, hub: Any, hub_cache: Path) -> None:
    snapshot_download("acme/tiny", endpoint=hub.url, cache_dir=hub_cache)
    hub.log.clear()
    published = fetch()
    assert files_asked(hub) == []
    assert (published.folder / SHARD).read_bytes() == (hub_cache.parents[1] / "repo" / SHARD).read_bytes()
    assert not (published.folder / SHARD).is_symlink()


def test_a_damaged_cache_is_noticed_and_the_hub_asked(fetch: Fetch, hub: Any, model: Path, hub_cache: Path) -> None:
    path = Path(hf_hub_download("acme/tiny", SHARD, endpoint=hub.url, cache_dir=hub_cache))
    data = bytearray(path.read_bytes())
    data[77] ^= 4
    path.resolve().write_bytes(data)
    hub.log.clear()
    published = fetch()
    assert (published.folder / SHARD).read_bytes() == (model / SHARD).read_bytes()
    assert files_asked(hub).count(SHARD) == 1


def test_offline_takes_the_cache_or_says_what_is_missing(
    fetch: Fetch, hub: Any, hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot_download("acme/tiny", endpoint=hub.url, cache_dir=hub_cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.log.clear()
    with pytest.raises(HubUnreachable, match=r"HF_HUB_OFFLINE is set.*acme/other"):
        fetch(uri="hf://acme/other")
    assert (fetch().folder / "config.json").is_file()
    next(hub_cache.rglob("tokenizer.json")).unlink()
    assert not fetch(refresh=True).moved, "it is published, whatever the cache lacks"
    with pytest.raises(HubUnreachable, match="HF_HUB_OFFLINE"):
        fetch(dest=tmp_path / "others")
    assert hub.log == []


def test_a_gated_model_says_where_to_accept_its_terms(fetch: Fetch, hub: Any) -> None:
    hub.gated.add("acme/tiny")
    with pytest.raises(TokenRejected, match="needs a token: set HF_TOKEN; if it is gated, accept its terms there"):
        fetch()
    with pytest.raises(TokenRejected, match="The token has no access") as failure:
        fetch(token="hf_mine_alone")
    assert "hf_mine" not in failure.value.message


def test_the_login_is_for_the_hub_it_was_made_for(
    fetch: Fetch, hub: Any, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hub_cache.parent.mkdir(parents=True)
    (hub_cache.parent / "token").write_text("hf_login")
    hub.token = "hf_login"
    with pytest.raises(TokenRejected):
        fetch()
    assert not any(entry["authorized"] for entry in hub.log)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    assert fetch(endpoint="").manifest.files


def test_a_hub_cannot_send_the_token_elsewhere(fetch: Fetch, serve: Serve) -> None:
    """By the next page of a listing, or a redirect of the API: both would carry the token."""
    reached = []

    def elsewhere(request: str, connection: socket.socket) -> None:
        reached.append(request)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n[]")

    other = serve(elsewhere)

    def by_page(request: str, connection: socket.socket) -> None:
        body = b"[]" if "/tree/" in request else json.dumps({"id": "a/b", "sha": "5" * 40}).encode()
        link = f'Link: <{other}/api/models/a/b/tree/x>; rel="next"\r\n'.encode()
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nConnection: close\r\n%sContent-Length: %d\r\n\r\n" % (link, len(body)) + body
        )

    def by_redirect(request: str, connection: socket.socket) -> None:
        connection.sendall(f"HTTP/1.1 307 Go\r\nLocation: {other}/api\r\nContent-Length: 0\r\n\r\n".encode())

    for answer in (by_page, by_redirect):
        with pytest.raises(FetchFailed, match="leads to another host"):
            fetch(uri="hf://a/b", endpoint=serve(answer), token="hf_secret")
    assert reached == []


def test_a_listing_whose_pages_lead_in_a_circle_is_given_up(fetch: Fetch, serve: Serve) -> None:
    def answer(request: str, connection: socket.socket) -> None:
        body = b"[]" if "/tree/" in request else json.dumps({"id": "a/b", "sha": "5" * 40}).encode()
        host, port = connection.getsockname()
        link = f'Link: <http://{host}:{port}/api/models/a/b/tree/x>; rel="next"\r\n'
        head = f"HTTP/1.1 200 OK\r\nConnection: close\r\n{link}Content-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)

    with pytest.raises(FetchFailed, match="does not end"):
        fetch(uri="hf://a/b", endpoint=serve(answer))


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"null", b'{"sha": 5}', b'{"sha": "../../x"}', b'{"id": "a/b"}'])
def test_an_address_that_is_no_hub_says_so(fetch: Fetch, serve: Serve, body: bytes) -> None:
    def answer(request: str, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    with pytest.raises(FetchFailed, match=r"is this address a hub|names no commit"):
        fetch(uri="hf://a/b", endpoint=serve(answer))


def test_a_name_that_no_repository_has_is_the_callers_fault(fetch: Fetch) -> None:
    with pytest.raises(Exception, match="no name that a repository can have"):
        fetch(uri="hf://acme/ti--ny")


def test_nothing_but_the_model_is_asked_for_and_the_librarys_client_is_left_as_it_was(fetch: Fetch, hub: Any) -> None:
    made: list[httpx2.Client] = []

    def users() -> httpx2.Client:
        made.append(_http.default_client_factory())
        return made[-1]

    set_client_factory(users)
    try:
        fetch()
        assert made, "the user's own client, with their proxy and certificates, makes our requests"
        assert get_session() is made[-1]
        assert len(get_session().event_hooks["request"]) == 1
    finally:
        set_client_factory(_http.default_client_factory)
    assert {entry["path"].split("/")[1] for entry in hub.log} == {"api", "acme"}
    assert not any("harness" in entry["path"] for entry in hub.log)


@pytest.mark.parametrize("redirect", [False, True])
def test_the_librarys_own_downloads_work_with_the_hub_of_the_tests(
    hub: Any, hub_cache: Path, model: Path, redirect: bool
) -> None:
    hub.redirect, hub.page, hub.token = redirect, 2, "hf_right"
    found = Path(snapshot_download("acme/tiny", endpoint=hub.url, token="hf_right", cache_dir=hub_cache))
    for path in model.rglob("*"):
        if path.is_file():
            assert (found / path.relative_to(model)).read_bytes() == path.read_bytes()
    with pytest.raises(huggingface_hub.errors.RepositoryNotFoundError):
        snapshot_download("acme/none", endpoint=hub.url, token="hf_right", cache_dir=hub_cache)
    with pytest.raises(huggingface_hub.errors.RevisionNotFoundError):
        hf_hub_download("acme/tiny", SHARD, revision="v8", endpoint=hub.url, token="hf_right", cache_dir=hub_cache)


def test_a_repository_that_is_not_there_is_told_with_the_hub_that_was_asked(fetch: Fetch, hub: Any) -> None:
    with pytest.raises(ModelNotFound, match=rf"no repository 'acme/tinny' at {hub.url}"):
        fetch(uri="hf://acme/tinny")


def test_serving_a_folder_imports_no_hub(tmp_path: Path) -> None:
    code = "import sys, stoker_runtime.__main__, stoker_runtime.serve.server, stoker_runtime.fetch.prefetch;" + (
        "print([name for name in sys.modules if name.split('.')[0] in ('huggingface_hub', 'hf_xet', 'httpx2')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), check=True
    )
    assert done.stdout.strip() == "[]"
