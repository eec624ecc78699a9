"""A whole order against a real hub: first run, second run, faults, repair, two fetchers at once."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stoker_runtime.fetch.errors import (
    BadRequest,
    ChecksumMismatch,
    FetchFailed,
    HubUnreachable,
    Interrupted,
    ModelNotFound,
    NotPublished,
    RevisionNotFound,
    TokenRejected,
    VolumeFull,
)
from stoker_runtime.fetch.prefetch import Published, serve_path
from stoker_runtime.fetch.progress import Progress
from stoker_runtime.fetch.verify import verify_only
from stoker_runtime.fetch.volume import Volume

Fetch = Callable[..., Published]
SHARD = "model-00001-of-00002.safetensors"
CHOSEN = ["config.json", SHARD, "model-00002-of-00002.safetensors", "tokenizer.json"]


def downloads(hub: Any) -> list[str]:
    """Names of the files that were asked for, in order."""
    return [entry["path"].rsplit("/", 1)[1] for entry in hub.log if "/resolve/" in entry["path"]]


def verify(folder: Path, digest: str = "", *, full: bool = False) -> None:
    verify_only(folder, digest, full=full, progress=Progress(), stop=threading.Event())


def test_publishes_the_default_choice_with_digests(fetch: Fetch, hub: Any, model: Path, tmp_path: Path) -> None:
    published = fetch()
    assert sorted(published.manifest.files) == CHOSEN
    assert published.folder.parent == tmp_path / "models"
    assert published.folder.name == published.manifest.digest.replace(":", "-")
    for name in CHOSEN:
        assert (published.folder / name).read_bytes() == (model / name).read_bytes()
    document = json.loads((published.folder / "stoker-manifest.json").read_text())
    assert document["uri"] == "hf://acme/tiny"
    assert document["resolvedRevision"] == hub.find("acme/tiny", "main").commit()
    assert document["bytes"] == sum((model / name).stat().st_size for name in CHOSEN)
    assert not list((tmp_path / "models").glob(".partial-*"))


def test_second_run_takes_no_network(fetch: Fetch, hub: Any) -> None:
    first = fetch()
    hub.log.clear()
    second = fetch()
    assert hub.log == []
    assert second.folder == first.folder
    assert second.moved == 0


def test_the_commit_is_answered_without_network_after_the_branch_was_fetched(fetch: Fetch, hub: Any) -> None:
    first = fetch(revision="main")
    hub.log.clear()
    assert fetch(revision=first.manifest.resolved_revision).folder == first.folder
    assert hub.log == []


def test_refresh_sees_a_branch_that_moved_and_keeps_the_old_folder(fetch: Fetch, model: Path) -> None:
    first = fetch()
    (model / "config.json").write_text('{"changed": true}')
    assert fetch().folder == first.folder
    second = fetch(refresh=True)
    assert second.folder != first.folder
    verify(first.folder, full=True)
    verify(second.folder, full=True)


@pytest.mark.parametrize("by", ["main", "COMMIT"])
def test_a_commit_that_is_there_is_not_fetched_again_by_another_name(fetch: Fetch, hub: Any, by: str) -> None:
    """Nor where a branch is looked up anew and has not moved."""
    commit = hub.find("acme/tiny", "main").commit()
    first = fetch(revision=by.replace("COMMIT", commit))
    hub.log.clear()
    second = fetch(revision="main", refresh=True)
    assert (second.folder, second.moved, downloads(hub)) == (first.folder, 0, [])
    assert second.manifest.resolved_revision == commit
    (first.folder / "config.json").write_text("{}")
    assert fetch(revision="main", refresh=True).moved
    verify(first.folder, full=True)


def test_another_revision_with_the_same_bytes_shares_the_folder(fetch: Fetch, hub: Any, model: Path) -> None:
    first = fetch()
    hub.add("acme/tiny@copy", model)
    assert fetch(revision="copy").folder == first.folder
    verify(first.folder)


@pytest.mark.parametrize("cut_after", [1, 100_000, 2_000_000])
def test_resumes_after_the_connection_is_cut(fetch: Fetch, hub: Any, model: Path, cut_after: int) -> None:
    hub.faults.cut_after, hub.faults.cut_times = cut_after, 2
    published = fetch(parallel=1)
    assert (published.folder / SHARD).read_bytes() == (model / SHARD).read_bytes()
    ranges = [entry["range"] for entry in hub.log if entry["range"]]
    assert f"bytes={cut_after}-" in ranges


def test_a_later_run_resumes_what_an_earlier_one_left(fetch: Fetch, hub: Any) -> None:
    stop = threading.Event()

    class StopsHalfWay(Progress):
        def moved(self, count: int) -> None:
            super().moved(count)
            if self.snapshot()["bytesDone"] > 500_000:  # more than all the small files
                stop.set()

    hub.faults.bytes_per_second = 2_000_000
    with pytest.raises(Interrupted):
        fetch(stop=stop, progress=StopsHalfWay())
    hub.faults.bytes_per_second = 0
    hub.log.clear()
    published = fetch()
    resumed = [entry["range"] for entry in hub.log if SHARD in entry["path"]]
    assert len(resumed) == 1
    assert resumed[0].startswith("bytes=")
    assert published.moved < published.manifest.bytes
    verify(published.folder, full=True)


def test_a_server_without_ranges_starts_again(fetch: Fetch, hub: Any) -> None:
    hub.faults.cut_after, hub.faults.cut_times, hub.faults.ignore_ranges = 1_000_000, 1, True
    verify(fetch(parallel=1).folder, full=True)


def test_wrong_bytes_once_are_fetched_again(fetch: Fetch, hub: Any) -> None:
    hub.faults.corrupt_times = 1
    published = fetch(parallel=1)
    verify(published.folder, full=True)
    assert len(downloads(hub)) == len(CHOSEN) + 1


def test_wrong_bytes_every_time_are_an_error_and_nothing_is_published(fetch: Fetch, hub: Any, tmp_path: Path) -> None:
    hub.faults.corrupt_times = -1
    with pytest.raises(ChecksumMismatch, match="arrived with"):
        fetch()
    assert not list((tmp_path / "models").glob("sha256-*"))


@pytest.mark.parametrize("name", ["config.json", SHARD])
def test_a_flipped_byte_is_found_and_only_that_file_is_fetched_again(
    fetch: Fetch, hub: Any, said: list[str], name: str
) -> None:
    published = fetch()
    path = published.folder / name
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    # The worst case: size and time are as they were, so only a full check can see it.
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    verify(published.folder)
    with pytest.raises(ChecksumMismatch, match=name):
        verify(published.folder, full=True)
    hub.log.clear()
    assert fetch(repair=True).folder == published.folder
    assert downloads(hub) == [name]
    assert any(name in text for text in said)
    verify(published.folder, published.manifest.digest, full=True)


def test_a_missing_or_short_file_is_found_by_a_plain_second_run(fetch: Fetch, hub: Any) -> None:
    published = fetch()
    (published.folder / "config.json").unlink()
    os.truncate(published.folder / SHARD, 1000)
    with pytest.raises(ChecksumMismatch, match="1 more"):
        verify(published.folder)
    hub.log.clear()
    fetch()
    assert sorted(downloads(hub)) == ["config.json", SHARD]
    verify(published.folder, full=True)


def test_a_damaged_manifest_is_no_published_model(fetch: Fetch) -> None:
    published = fetch()
    manifest = published.folder / "stoker-manifest.json"
    manifest.write_text(manifest.read_text().replace('"bytes": 2', '"bytes": 3').replace("sha256:", "sha256:0"))
    with pytest.raises(ChecksumMismatch, match="damaged"):
        verify(published.folder)
    fetch()
    verify(published.folder, full=True)


def test_verify_only_names_what_is_not_there(tmp_path: Path, fetch: Fetch) -> None:
    with pytest.raises(NotPublished, match="no published model"):
        verify(tmp_path)
    with pytest.raises(NotPublished, match="not sha256:aa"):
        verify(fetch().folder, "sha256:aa")


def test_token_reaches_the_hub_and_not_the_other_origin(fetch: Fetch, hub: Any) -> None:
    hub.token, hub.redirect = "hf_right", True
    fetch(token="hf_right")
    through_cdn = [entry for entry in hub.log if entry["path"].startswith("/cdn/")]
    assert through_cdn
    assert not any(entry["authorized"] for entry in through_cdn)
    assert all(entry["authorized"] for entry in hub.log if not entry["path"].startswith("/cdn/"))


@pytest.mark.parametrize(("token", "says"), [("hf_wrong", "rejected the token"), ("", "needs a token")])
def test_a_wrong_or_missing_token_says_so_and_keeps_it_secret(fetch: Fetch, hub: Any, token: str, says: str) -> None:
    hub.token = "hf_right"
    with pytest.raises(TokenRejected, match=says) as failure:
        fetch(token=token)
    assert "hf_" not in failure.value.message


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"revision": "v9"}, RevisionNotFound, "no revision 'v9'"),
        ({"uri": "hf://acme/other"}, ModelNotFound, "no repository 'acme/other'"),
        ({"uri": "hf://acme/tiny/none.gguf"}, ModelNotFound, "no file 'none.gguf'"),
        ({"allow": ("*.bin",)}, BadRequest, "no file is left"),
        ({"sha256": {"nope.json": "0" * 64}}, BadRequest, "nope.json"),
        ({"sha256": {SHARD: "0" * 64}}, ChecksumMismatch, "the order asks for 000"),
        ({"endpoint": "ftp://hub"}, BadRequest, "http"),
        ({"uri": "file:///no/such/folder"}, ModelNotFound, "/no/such/folder"),
    ],
)
def test_an_impossible_order_names_itself(
    fetch: Fetch, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        fetch(**changes)


def test_a_hub_that_is_down_is_unreachable_and_one_that_recovers_is_waited_for(
    fetch: Fetch, hub: Any, said: list[str]
) -> None:
    with pytest.raises(HubUnreachable, match=r"cannot be reached: \w[^\[]*\w\.$"):
        fetch(endpoint="http://127.0.0.1:9")
    hub.faults.status, hub.faults.status_times = 503, 2
    fetch()
    assert any("503" in text for text in said)
    hub.faults.status, hub.faults.status_times = 500, -1
    with pytest.raises(FetchFailed, match="500"):
        fetch(refresh=True)


def test_two_fetchers_on_one_volume_download_once(fetch: Fetch, hub: Any, said: list[str]) -> None:
    hub.faults.bytes_per_second = 8_000_000
    with ThreadPoolExecutor(2) as pool:
        folders = {future.result().folder for future in [pool.submit(fetch), pool.submit(fetch)]}
    assert len(folders) == 1
    assert sorted(downloads(hub)) == CHOSEN
    assert any("waiting for it" in text for text in said)


def test_tree_pages_are_followed(fetch: Fetch, hub: Any) -> None:
    hub.page = 2
    assert sorted(fetch().manifest.files) == CHOSEN


def test_progress_ends_at_all_bytes(fetch: Fetch) -> None:
    progress = Progress()
    seen: list[dict[str, int | str]] = []
    original = progress.moved

    def moved(count: int) -> None:
        original(count)
        seen.append(progress.snapshot())

    progress.moved = moved  # type: ignore[method-assign]
    published = fetch(progress=progress)
    assert seen[-1]["bytesDone"] == seen[-1]["bytesTotal"] == published.manifest.bytes
    assert progress.snapshot()["phase"] == "publish"


def test_single_gguf_is_served_as_a_file(fetch: Fetch, model: Path) -> None:
    (model / "tiny-q4.gguf").write_bytes(b"GGUF" + bytes(100))
    published = fetch(uri="hf://acme/tiny/tiny-q4.gguf")
    assert list(published.manifest.files) == ["tiny-q4.gguf"]
    assert serve_path(published) == published.folder / "tiny-q4.gguf"
    whole = fetch()
    assert serve_path(whole) == whole.folder


def test_a_folder_is_copied_and_copied_again_when_it_changed(fetch: Fetch, model: Path) -> None:
    uri = f"file://{model}"
    first = fetch(uri=uri)
    assert first.manifest.resolved_revision == first.manifest.digest
    assert fetch(uri=uri).moved == 0
    (model / "config.json").write_text('{"now": "another"}')
    second = fetch(uri=uri)
    assert second.folder != first.folder
    assert (second.folder / "config.json").read_text() == '{"now": "another"}'


def test_a_claim_is_read_below_the_mount_root(fetch: Fetch, model: Path) -> None:
    published = fetch(uri=f"pvc://{model.name}/", mount_root=model.parent)
    assert sorted(published.manifest.files) == CHOSEN
    single = fetch(uri=f"pvc://{model.name}/config.json", mount_root=model.parent)
    assert list(single.manifest.files) == ["config.json"]


def test_a_web_file_is_fetched_resumed_and_pinned(fetch: Fetch, hub: Any, model: Path) -> None:
    uri = f"{hub.url}/acme/tiny/resolve/main/{SHARD}"
    hub.faults.cut_after, hub.faults.cut_times = 500_000, 1
    published = fetch(uri=uri)
    assert (published.folder / SHARD).read_bytes() == (model / SHARD).read_bytes()
    hub.log.clear()
    assert fetch(uri=uri).moved == 0
    assert hub.log == []
    with pytest.raises(ChecksumMismatch):
        fetch(uri=uri, sha256={SHARD: "f" * 64})


def test_a_volume_that_others_fill_meanwhile_is_full_and_publishes_nothing(
    fetch: Fetch, small_volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There was room when it was checked.
    monkeypatch.setattr(Volume, "require", lambda self, count: None)
    with pytest.raises(VolumeFull, match="became full"):
        fetch(dest=small_volume)
    assert not list(small_volume.glob("sha256-*"))


def test_a_web_server_gets_the_token_only_when_told_to(fetch: Fetch, hub: Any) -> None:
    uri = f"{hub.url}/acme/tiny/resolve/main/config.json"
    fetch(uri=uri, token="hf_mine")
    assert not any(entry["authorized"] for entry in hub.log)
    hub.token = "hf_mine"
    fetch(uri=uri, token="hf_mine", send_token=True, refresh=True)


def test_two_sources_of_the_same_bytes_at_once_share_one_folder(fetch: Fetch, hub: Any, model: Path) -> None:
    hub.add("acme/twin", model)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(fetch), pool.submit(fetch, uri="hf://acme/twin")]
        folders = {future.result().folder for future in runs}
    assert len(folders) == 1
    verify(folders.pop(), full=True)


def test_a_digest_that_is_there_already_takes_no_source(fetch: Fetch, hub: Any, tmp_path: Path) -> None:
    first = fetch()
    hub.log.clear()
    copy = fetch(uri=f"file://{tmp_path}/nowhere", digest=first.manifest.digest)
    assert (copy.folder, copy.moved, hub.log) == (first.folder, 0, [])
    (first.folder / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound):
        fetch(uri=f"file://{tmp_path}/nowhere", digest=first.manifest.digest)


def test_a_source_that_has_another_digest_by_now_is_refused(fetch: Fetch, model: Path) -> None:
    first = fetch()
    (model / "config.json").write_text('{"changed": true}')
    assert fetch(digest=first.manifest.digest).moved == 0
    second = fetch(refresh=True)
    with pytest.raises(ChecksumMismatch, match="now, not"):
        fetch(digest="sha256:" + "0" * 64)
    assert fetch(digest=first.manifest.digest).folder == first.folder != second.folder


def test_more_bytes_than_are_allowed_are_not_fetched(fetch: Fetch, hub: Any, model: Path) -> None:
    total = sum((model / name).stat().st_size for name in CHOSEN)
    with pytest.raises(VolumeFull, match="there is room for"):
        fetch(most_bytes=total - 1)
    assert downloads(hub) == []
    assert fetch(most_bytes=total).manifest.bytes == total


def test_the_same_files_under_another_name_are_not_fetched_again(
    fetch: Fetch, hub: Any, model: Path, tmp_path: Path
) -> None:
    """Where the source tells every file's digest before they are fetched, as a hub does of large ones."""
    shards = ("*.safetensors",)
    first = fetch(allow=shards)
    hub.add("other/name", model)
    hub.log.clear()
    second = fetch(uri="hf://other/name", allow=shards)
    assert (second.folder, second.moved, downloads(hub)) == (first.folder, 0, [])
    hub.log.clear()
    assert fetch(uri="hf://other/name", allow=shards).folder == first.folder
    assert hub.log == []
