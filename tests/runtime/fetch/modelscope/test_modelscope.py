"""modelscope:// repositories by the routes of ModelScope's API: what arrives, what goes on, who is let in."""

from __future__ import annotations

import json
import random
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.modelscope.server import ModelScope as Server
from tests.runtime.fetch.conftest import QUICK
from tests.serving import serving

from stoker_runtime.errors import ModelError
from stoker_runtime.fetch.by_name import DESCRIPTIONS, locate
from stoker_runtime.fetch.errors import (
    BadRequest,
    ChecksumMismatch,
    FetchError,
    FetchFailed,
    ModelNotFound,
    RevisionNotFound,
    TokenRejected,
)
from stoker_runtime.fetch.modelscope.answers import MAX_ENTRIES
from stoker_runtime.fetch.order import Order, endpoint_for
from stoker_runtime.fetch.prefetch import Prefetch, Published
from stoker_runtime.fetch.progress import Progress

REPO = f"team-{secrets.token_hex(2)}/Tiny-1.5"
SHARD = "model.safetensors"
Fetch = Callable[..., Published]


@pytest.fixture
def files() -> dict[str, bytes]:
    noise = random.Random(5)
    return {
        SHARD: noise.randbytes(900_001),
        "config.json": b'{"num_hidden_layers": 2}',
        "deep er/é+%&.json": b"[]",
        "README.md": b"no model file",
        "configuration.json": b'{"framework": "pytorch"}',
        ".gitattributes": b"x",
    }


@pytest.fixture
def modelscope(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, bytes]) -> Iterator[Server]:
    """A server with one repository, whose branch is master and whose tag is v1."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MODELSCOPE_API_TOKEN", raising=False)
    server = Server()
    server.repositories[REPO] = {"master": files, "v1": files | {"config.json": b'{"num_hidden_layers": 1}'}}
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.url)
    with serving(server):
        yield server


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def fetch(modelscope: Server, tmp_path: Path, said: list[str]) -> Fetch:
    def run(**changes: Any) -> Published:
        fields = {"uri": f"modelscope://{REPO}", "dest": tmp_path / "models", **changes}
        fields.setdefault("endpoint", endpoint_for(fields["uri"], ""))
        return Prefetch(Order(**fields), Progress(), threading.Event(), said.append, QUICK).run()

    return run


def test_a_repository_is_fetched_and_the_second_time_nothing_is_asked(
    fetch: Fetch, modelscope: Server, files: dict[str, bytes]
) -> None:
    published = fetch(revision="main")
    assert sorted(published.manifest.files) == ["config.json", "configuration.json", "deep er/é+%&.json", SHARD]
    for name in published.manifest.files:
        assert (published.folder / name).read_bytes() == files[name]
    modelscope.log.clear()
    assert fetch(revision="main").moved == 0
    assert modelscope.log == []
    tag = fetch(revision="v1")
    assert (tag.folder / "config.json").read_bytes() == b'{"num_hidden_layers": 1}'
    assert tag.manifest.resolved_revision != published.manifest.resolved_revision
    (published.folder / SHARD).write_bytes(b"rot")
    assert fetch(revision="main", repair=True).folder == published.folder
    assert (published.folder / SHARD).read_bytes() == files[SHARD]


def test_a_file_that_breaks_off_goes_on_where_it_was(fetch: Fetch, modelscope: Server, files: dict[str, bytes]) -> None:
    modelscope.cut_once = 300_000
    published = fetch()
    assert (published.folder / SHARD).read_bytes() == files[SHARD]
    ranges = [asked for path, asked in modelscope.log if path.startswith("/storage/") and asked]
    assert [0 < int(asked.removeprefix("bytes=").rstrip("-")) <= 300_000 for asked in ranges] == [True]


def test_a_branch_that_moves_meanwhile_is_not_mixed(fetch: Fetch, modelscope: Server, files: dict[str, bytes]) -> None:
    modelscope.moves_to = files | {SHARD: bytes(900_001)}
    with pytest.raises(ChecksumMismatch, match="arrived with sha256"):
        fetch()
    assert (fetch().folder / SHARD).read_bytes() == bytes(900_001)


def test_a_token_is_needed_goes_to_the_api_alone_and_stands_nowhere(
    fetch: Fetch, modelscope: Server, monkeypatch: pytest.MonkeyPatch, said: list[str], files: dict[str, bytes]
) -> None:
    modelscope.token = secrets.token_urlsafe(20)
    with pytest.raises(ModelNotFound, match="needs a token in MODELSCOPE_API_TOKEN"):
        fetch()
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "wrong-" + modelscope.token)
    with pytest.raises(ModelNotFound) as caught:
        fetch()
    assert modelscope.token not in f"{caught.value}{said}"
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", modelscope.token)
    published = fetch()
    assert (published.folder / SHARD).read_bytes() == files[SHARD], "storage refuses who shows the token"
    assert modelscope.token not in json.dumps([said, str(modelscope.log)])


def test_what_is_wrong_is_named(fetch: Fetch, modelscope: Server, serve: Callable[[Any], str]) -> None:
    with pytest.raises(RevisionNotFound, match="has no revision 'dev'"):
        fetch(revision="dev")
    with pytest.raises(ModelNotFound, match="There is no repository 'no/where'"):
        fetch(uri="modelscope://no/where")
    modelscope.repositories[REPO]["master"] = {f"{n}.json": b"" for n in range(MAX_ENTRIES)}
    with pytest.raises(FetchFailed, match="this repository has more"):
        fetch()

    def saying(status: str) -> str:
        head = f"HTTP/1.1 {status}\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}"
        return serve(lambda _, connection: connection.sendall(head.encode()))

    with pytest.raises(FetchFailed, match="is this address one"):
        fetch(endpoint=saying("200 OK"))
    with pytest.raises(TokenRejected, match="set MODELSCOPE_API_TOKEN"):
        fetch(endpoint=saying("403 No"))
    with pytest.raises(FetchError, match="without user"):
        fetch(endpoint="http://user:pass@host")


def test_a_server_takes_a_repository_in_the_place_of_a_path(modelscope: Server, files: dict[str, bytes]) -> None:
    path = Path(locate(f"modelscope://{REPO}", "v1", only=DESCRIPTIONS))
    assert (path / "config.json").read_bytes() == b'{"num_hidden_layers": 1}'
    assert not (path / SHARD).exists()
    whole = Path(locate(f"modelscope://{REPO}"))
    assert (whole / SHARD).read_bytes() == files[SHARD]
    with pytest.raises(ModelError, match="no revision 'dev'"):
        locate(f"modelscope://{REPO}", "dev")


@pytest.mark.parametrize(
    "name", ["../up.json", "a/../../up.json", "/etc/up.json", "a//up.json", "a\0up.json", "\ud800up.json", "u" * 300]
)
def test_a_hostile_listing_is_refused_and_nothing_is_written(
    fetch: Fetch, files: dict[str, bytes], tmp_path: Path, name: str
) -> None:
    files[name] = b"[]"
    with pytest.raises(BadRequest, match="names the file"):
        fetch(allow=("*",))
    assert not list(tmp_path.rglob("*up.json"))
    assert not list(tmp_path.rglob("config.json"))
