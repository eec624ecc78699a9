"""What a fetch writes stays in its folder, whatever a server, a listing or another user of the volume does."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker_runtime.fetch.errors import BadRequest, ChecksumMismatch, FetchError, FetchFailed
from stoker_runtime.fetch.prefetch import Published
from stoker_runtime.fetch.reference import relative_path

Fetch = Callable[..., Published]
Serve = Callable[[Callable[[str, socket.socket], None]], str]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file with its bytes."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def one_file(request: str, connection: socket.socket) -> None:
    """Answer anything with the same five bytes."""
    body = b"" if request.startswith("HEAD") else b"evil\n"
    connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 5\r\nConnection: close\r\n\r\n' + body)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("slash", ["%2f", "%252f", "%252F", "%25252f", "%5c"])
@pytest.mark.parametrize("dots", ["..", "%2e%2e", "%252e%252e"])
def test_an_encoded_address_overwrites_nothing(
    fetch: Fetch, serve: Serve, tmp_path: Path, dots: str, slash: str, depth: int
) -> None:
    victim = fetch()
    before = tree(victim.folder)
    up = f"{dots}{slash}" * depth
    name = f"{up}{victim.folder.name}{slash}config.json" if depth < 3 else f"{up}outside"
    try:
        published = fetch(uri=f"{serve(one_file)}/files/{name}")
    except BadRequest:
        pass
    else:
        assert [path.parent for path in published.folder.iterdir()] == [published.folder] * 2
        assert published.folder.parent == tmp_path / "models"
    assert tree(victim.folder) == before
    assert not list(tmp_path.rglob("outside"))


@pytest.mark.parametrize(
    "name",
    [
        "../up",
        "a/../../up",
        "/etc/up",
        "a\0b",
        "a\nb",
        "a\x7fb",
        "\ud800",
        "..",
        "a/./b",
        "c" * 300,
        ".stoker-manifest.json",
    ],
)
def test_a_hostile_listing_is_refused_and_nothing_is_written(
    fetch: Fetch, serve: Serve, tmp_path: Path, name: str
) -> None:
    commit = "5" * 40

    def answer(request: str, connection: socket.socket) -> None:
        entry = {"type": "file", "path": name, "size": 5, "oid": "0" * 40}
        document: Any = [entry] if "/tree/" in request else {"id": "a/b", "sha": commit}
        body = json.dumps(document).encode()
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    with pytest.raises(BadRequest, match="names the file"):
        fetch(uri="hf://a/b", endpoint=serve(answer), allow=("*",))
    assert not list(tmp_path.rglob("up"))
    with pytest.raises(BadRequest):
        relative_path(name, "x")


def links(where: str, models: Path, outside: Path, key: str) -> None:
    """Put a link of another user's in the way."""
    if where == "work folder":
        (models / f".partial-{key}").symlink_to(outside)
    elif where == "lock":
        (models / f".lock-{key}").symlink_to(outside / "made")
    elif where == "orders":
        for path in (models / ".orders").iterdir():
            path.unlink()
            path.with_suffix(".new").symlink_to(outside / "made")
    else:
        (models / f".partial-{key}").mkdir()
        for name in where.split():
            (models / f".partial-{key}" / name).symlink_to(outside / "made")


@pytest.mark.parametrize("where", ["work folder", "lock", "orders", "part"])
def test_links_on_the_volume_lead_nowhere(
    fetch: Fetch, model: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker_runtime.fetch.download import Downloader

    fetch()
    models, outside = tmp_path / "models", tmp_path / "outside"
    outside.mkdir()
    key = next(models.glob(".lock-*")).name.removeprefix(".lock-")
    if where in ("lock", "orders"):
        (models / f".lock-{key}").unlink()
    if where == "part":
        path = Downloader._path
        monkeypatch.setattr(Downloader, "_path", lambda self, file: path(self, file).with_name("part"))
    links(where, models, outside, key)
    (model / "config.json").write_text('{"another": "commit"}')
    if where == "orders":
        fetch(refresh=True)
    else:
        with pytest.raises(FetchFailed, match="symbolic link"):
            fetch(refresh=True, parallel=1)
    assert list(outside.iterdir()) == []


def test_a_link_within_a_published_folder_is_not_followed_by_a_repair(
    fetch: Fetch, model: Path, tmp_path: Path
) -> None:
    (model / "extra").mkdir()
    (model / "extra" / "more.json").write_text("{}")
    published = fetch()
    outside = tmp_path / "outside"
    outside.mkdir()
    (published.folder / "extra" / "more.json").unlink()
    (published.folder / "extra").rmdir()
    (published.folder / "extra").symlink_to(outside)
    with pytest.raises(FetchFailed, match="symbolic link"):
        fetch(repair=True)
    assert list(outside.iterdir()) == []


def test_a_note_or_a_manifest_that_points_elsewhere_is_no_answer(fetch: Fetch, tmp_path: Path) -> None:
    published = fetch()
    for note in (tmp_path / "models" / ".orders").iterdir():
        note.write_text("../repo\n\n")
    assert fetch().folder == published.folder
    manifest = published.folder / "stoker-manifest.json"
    document = json.loads(manifest.read_text())
    document["files"]["../../outside"] = document["files"].pop("config.json")
    manifest.write_text(json.dumps(document))
    from stoker_runtime.fetch import manifest as manifests

    with pytest.raises(ChecksumMismatch, match="damaged"):
        manifests.read(published.folder)


def test_every_way_out_is_a_fetch_error(fetch: Fetch) -> None:
    with pytest.raises(FetchError):
        fetch(uri="https://host/%00")
