"""fetch/bundle.py: a model in one file, there and back, and what a bundle may not do."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.fetch.test_prefetch import CHOSEN, SHARD

from stoker_runtime.fetch import cli
from stoker_runtime.fetch.bundle import Bundle, write_bundle
from stoker_runtime.fetch.errors import BadRequest, ChecksumMismatch, FetchError, Interrupted
from stoker_runtime.fetch.prefetch import Published
from stoker_runtime.fetch.progress import Progress

Fetch = Callable[..., Published]


def bundled(published: Published, file: Path) -> Path:
    write_bundle(published.folder, published.manifest, file, Progress(), threading.Event())
    return file


def test_what_comes_out_is_what_went_in(fetch: Fetch, hub: Any, tmp_path: Path) -> None:
    published = fetch()
    file = bundled(published, tmp_path / "carry" / "m.tar")
    assert [item.name for item in file.parent.iterdir()] == ["m.tar"]
    hub.log.clear()
    copy = fetch(uri=f"file://{file}", dest=tmp_path / "over there")
    assert hub.log == []
    assert copy.manifest.digest == published.manifest.digest
    assert copy.manifest.resolved_revision == published.manifest.resolved_revision
    for name in CHOSEN:
        assert (copy.folder / name).read_bytes() == (published.folder / name).read_bytes()
    again = bundled(published, tmp_path / "again.tar")
    assert again.read_bytes() == file.read_bytes()


def test_every_file_comes_along_whatever_a_fetch_would_choose(fetch: Fetch, tmp_path: Path) -> None:
    published = fetch(allow=("consolidated*", "README.md", "onnx/*"))
    copy = fetch(uri=f"file://{bundled(published, tmp_path / 'm.tar')}", dest=tmp_path / "there")
    assert set(copy.manifest.files) == {"consolidated.safetensors", "README.md", "onnx/model.json"}


def test_unpacking_goes_on_where_it_was(fetch: Fetch, tmp_path: Path) -> None:
    file = bundled(fetch(), tmp_path / "m.tar")
    stop, there = threading.Event(), tmp_path / "there"

    class Stopping(Progress):
        def moved(self, count: int) -> None:
            super().moved(count)
            if self.snapshot()["bytesDone"] > 1 << 20:  # type: ignore[operator]
                stop.set()

    with pytest.raises(Interrupted):
        fetch(uri=f"file://{file}", dest=there, stop=stop, progress=Stopping(), parallel=1)
    left = sum(item.stat().st_size for item in there.rglob("*") if item.is_file())
    assert left > 1 << 20
    rest = fetch(uri=f"file://{file}", dest=there)
    assert 0 < rest.moved <= rest.manifest.bytes - (1 << 20)


def test_a_bundle_of_damaged_files_is_not_made(fetch: Fetch, tmp_path: Path) -> None:
    published = fetch()
    with open(published.folder / SHARD, "r+b") as stream:
        stream.seek(12345)
        stream.write(b"rot")
    with pytest.raises(ChecksumMismatch, match=SHARD):
        bundled(published, tmp_path / "m.tar")
    assert not list(tmp_path.glob("*.tar*"))
    assert not list(tmp_path.glob(".m.tar*"))


def test_a_byte_that_changed_on_the_way_is_found(fetch: Fetch, tmp_path: Path) -> None:
    file = bundled(fetch(), tmp_path / "m.tar")
    with open(file, "r+b") as stream:
        stream.seek(-2_000_000, io.SEEK_END)
        stream.write(b"?!")
    with pytest.raises(FetchError, match="sha256"):
        fetch(uri=f"file://{file}", dest=tmp_path / "there")
    assert not list((tmp_path / "there").glob("sha256-*"))


def test_half_a_bundle_is_named_as_that(fetch: Fetch, tmp_path: Path) -> None:
    file = bundled(fetch(), tmp_path / "m.tar")
    whole = file.read_bytes()
    for length in (100, 5000, len(whole) // 2, len(whole) - 600_000):
        file.write_bytes(whole[:length])
        with pytest.raises(BadRequest, match=r"bundle|cut short"):
            Bundle(file, "file:///m.tar").listing("")


@pytest.mark.parametrize(
    "extra",
    [
        tarfile.TarInfo("../outside"),
        tarfile.TarInfo("unnamed"),
        tarfile.TarInfo("config.json"),
    ],
    ids=lambda info: info.name,
)
def test_what_the_manifest_does_not_name_is_refused(fetch: Fetch, tmp_path: Path, extra: tarfile.TarInfo) -> None:
    file = bundled(fetch(), tmp_path / "m.tar")
    with tarfile.open(file, "a") as tar:
        tar.addfile(extra)
    with pytest.raises(BadRequest, match="not as its manifest says"):
        Bundle(file, "file:///m.tar").listing("")


def test_links_and_other_archives_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.tar"
    document = {
        "uri": "x",
        "resolvedRevision": "",
        "digest": "sha256:00",
        "files": {"a": {"sha256": "0" * 64, "bytes": 1}},
    }
    with tarfile.open(file, "w") as tar:
        head = json.dumps(document).encode()
        info = tarfile.TarInfo("stoker-manifest.json")
        info.size = len(head)
        tar.addfile(info, io.BytesIO(head))
        link = tarfile.TarInfo("a")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(BadRequest, match="add up"):
        Bundle(file, "file:///m.tar").listing("")
    with tarfile.open(file, "w") as tar:
        tar.addfile(link)
    with pytest.raises(BadRequest, match="--bundle FILE"):
        Bundle(file, "file:///m.tar").listing("")


def test_on_the_command_line(fetch: Fetch, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.tar"
    assert cli.main([f"file://{model}", "--dest", str(tmp_path / "a"), "--bundle", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}\n"
    assert cli.main([f"file://{file}", "--dest", str(tmp_path / "b")]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert (folder / SHARD).read_bytes() == (model / SHARD).read_bytes()
    assert cli.main(["--in-place", f"file://{file}"]) == 3
    assert "cache.mode PVC" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["hf://a/b", "--bundle", str(tmp_path / "m.zip")])
