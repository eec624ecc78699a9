"""s3://, gs:// and az:// against a server that checks signatures: what arrives, in what order, and what goes on."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import pytest
from tests.runtime.fetch.conftest import QUICK
from tests.runtime.fetch.stores.conftest import PREFIX, RANGE, Fetch, Lent

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.fetch import prefetch
from stoker_runtime.fetch.by_name import DESCRIPTIONS, locate, located
from stoker_runtime.fetch.errors import BadRequest, ChecksumMismatch, FetchFailed, RevisionNotFound, TokenRejected
from stoker_runtime.fetch.order import Order, endpoint_for
from stoker_runtime.fetch.prefetch import serve_path
from stoker_runtime.fetch.source import Listing


def look_up(uri: str) -> Listing:
    order = Order(uri, Path("/nowhere"), endpoint=endpoint_for(uri, ""))
    return prefetch.look_up(order, patience=QUICK, stop=threading.Event(), say=lambda _: None)


SHARD = "model-00001-of-00002.safetensors"
WANTED = [
    "config.json",
    "deep er/é+%.json",
    SHARD,
    "model-00002-of-00002.safetensors",
    "nothing.json",
    "tokenizer.json",
]


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_prefix_is_fetched_and_the_second_time_nothing_is_asked(fetch: Fetch, store: Lent, scheme: str) -> None:
    # The first range comes last: bytes are put in order all the same.
    store.server.faults.first_waits_for = 6
    uri = f"{scheme}://{store.bucket}/{PREFIX}"
    published = fetch(uri=uri)
    assert sorted(published.manifest.files) == WANTED
    for name, entry in published.manifest.files.items():
        assert (published.folder / name).read_bytes() == store.content(name)
        assert entry.sha256 == hashlib.sha256(store.content(name)).hexdigest()
    starts = sorted(start for name, start in store.reads() if name == SHARD)
    assert starts == list(range(0, len(store.content(SHARD)), RANGE))
    store.server.log.clear()
    assert fetch(uri=uri) == published.__class__(published.folder, published.manifest, 0)
    assert store.server.log == []
    # What was replaced at the source is taken when it is asked for, under another revision.
    store.objects[f"{PREFIX}/tokenizer.json"] = b"[]"
    again = fetch(uri=uri, refresh=True)
    assert again.manifest.resolved_revision != published.manifest.resolved_revision
    assert (again.folder / "tokenizer.json").read_bytes() == b"[]"


def test_what_arrived_is_not_fetched_again(fetch: Fetch, store: Lent) -> None:
    store.server.faults.beyond = 3 * RANGE
    with pytest.raises(TokenRejected, match="AccessDenied"):
        fetch()
    store.server.log.clear()
    store.server.faults.beyond = 0
    published = fetch()
    assert (published.folder / SHARD).read_bytes() == store.content(SHARD)
    assert min(start for name, start in store.reads() if name == SHARD) == 3 * RANGE
    assert published.moved <= published.manifest.bytes - 3 * RANGE


def test_connections_that_break_and_servers_that_are_busy_are_survived(fetch: Fetch, store: Lent) -> None:
    store.server.faults.cuts, store.server.faults.refuse = 2, 2
    published = fetch()
    assert (published.folder / SHARD).read_bytes() == store.content(SHARD)
    assert (store.server.faults.cuts, store.server.faults.refuse) == (0, 0)


def test_bytes_of_two_versions_are_never_mixed(fetch: Fetch, store: Lent) -> None:
    newer = bytes(len(store.content(SHARD)))

    def replace() -> None:
        store.objects[f"{PREFIX}/{SHARD}"] = newer

    store.server.faults.listed = replace
    with pytest.raises(FetchFailed, match=f"{SHARD} changed while it was fetched"):
        fetch()
    assert (fetch().folder / SHARD).read_bytes() == newer


def test_what_is_looked_up_can_be_named_and_is_fetched_as_that_or_not_at_all(fetch: Fetch, store: Lent) -> None:
    uri = f"s3://{store.bucket}/{PREFIX}"
    first, said = look_up(uri), store.reads()
    assert (sorted(file.name for file in first.files), said) == (WANTED, [])
    store.objects[f"{PREFIX}/tokenizer.json"] = b"[1]"
    second = look_up(uri)
    assert second.revision != first.revision
    with pytest.raises(RevisionNotFound, match=f"{second.revision} by now"):
        fetch(revision=first.revision)
    published = fetch(revision=second.revision)
    assert published.manifest.resolved_revision == second.revision
    assert (published.folder / "tokenizer.json").read_bytes() == b"[1]"


def test_of_a_single_file_its_neighbours_do_not_count(store: Lent) -> None:
    store.objects.update({f"{PREFIX}/a-0000{n}-of-00002.gguf": b"part" for n in (1, 2)})
    uri = f"s3://{store.bucket}/{PREFIX}/a-00001-of-00002.gguf"
    first = look_up(uri).revision
    store.objects[f"{PREFIX}/other.gguf"] = b"another model"
    assert look_up(uri).revision == first
    store.objects[f"{PREFIX}/a-00002-of-00002.gguf"] = b"changed"
    assert look_up(uri).revision != first


def test_the_digests_of_a_manifest_beside_the_objects_are_held(fetch: Fetch, store: Lent, tmp_path: Path) -> None:
    published = fetch()
    manifest = (published.folder / "stoker-manifest.json").read_bytes()
    store.objects[f"{PREFIX}/stoker-manifest.json"] = manifest
    assert fetch(dest=tmp_path / "whole").manifest.digest == published.manifest.digest
    right = store.content(SHARD)
    store.objects[f"{PREFIX}/{SHARD}"] = right[:-1] + bytes([right[-1] ^ 1])
    with pytest.raises(ChecksumMismatch, match=hashlib.sha256(right).hexdigest()):
        fetch(dest=tmp_path / "flipped")
    store.objects[f"{PREFIX}/{SHARD}"] = right[:-1]
    with pytest.raises(ChecksumMismatch, match="promises 2000003"):
        fetch(dest=tmp_path / "short")
    store.objects[f"{PREFIX}/stoker-manifest.json"] = json.dumps({**json.loads(manifest), "digest": 1}).encode()[:-9]
    with pytest.raises(ChecksumMismatch, match=r"stoker-manifest\.json there is damaged"):
        fetch(dest=tmp_path / "damaged")


def test_one_gguf_comes_with_its_other_parts_and_one_of_several_has_to_be_named(fetch: Fetch, store: Lent) -> None:
    names = ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf", "y.gguf"]
    store.server.buckets[store.bucket] = {f"g/{name}": name.encode() for name in names} | {"top.gguf": b"top"}
    split = fetch(uri=f"s3://{store.bucket}/g/{names[0]}")
    assert sorted(split.manifest.files) == names[:2]
    assert serve_path(split).name == names[0]
    assert serve_path(fetch(uri=f"s3://{store.bucket}/top.gguf")).read_bytes() == b"top"
    with pytest.raises(Exception, match=f"name one as s3://{store.bucket}/g/FILE: "):
        fetch(uri=f"s3://{store.bucket}/g/")


def test_two_servers_may_have_a_bucket_of_one_name(fetch: Fetch, store: Lent) -> None:
    first = fetch(endpoint=store.server.url)
    store.objects[f"{PREFIX}/tokenizer.json"] = b"[1]"
    assert fetch(endpoint=store.server.url).folder == first.folder
    assert fetch(endpoint=store.server.url.replace("127.0.0.1", "localhost")).folder != first.folder


def test_a_server_takes_a_uri_in_the_place_of_a_path(store: Lent) -> None:
    uri, said = f"s3://{store.bucket}/{PREFIX}", []
    described = Path(locate(uri, only=DESCRIPTIONS, say=said.append))
    assert (described / "config.json").is_file()
    assert SHARD not in {name for name, _ in store.reads()}
    path = Path(locate(uri, say=said.append))
    assert (path / SHARD).read_bytes() == store.content(SHARD)
    assert said[-1] == f"{uri}: as published at {path}"
    store.server.log.clear()
    assert locate(uri) == locate(uri, only=DESCRIPTIONS) == str(path)
    assert store.server.log == []
    assert located(EngineConfig(model="shape:qwen3-0.6b", tokenizer=uri)).tokenizer == str(path)
    with pytest.raises(ConfigError, match="only a hub has revisions"):
        locate(uri, "main")
    with pytest.raises(ModelError, match="nothing lies there"):
        locate(f"{uri}-none")


@pytest.mark.parametrize("name", ["../up.json", "a/../../up.json", "/up.json", "a//up.json", "a\x7fup.json"])
def test_a_hostile_listing_is_refused_and_nothing_is_written(
    fetch: Fetch, store: Lent, tmp_path: Path, name: str
) -> None:
    store.objects[f"{PREFIX}/{name}"] = b"[]"
    with pytest.raises(BadRequest, match="names the file") as refused:
        fetch(allow=("*",))
    assert "up.json" in str(refused.value)
    assert str(refused.value).isprintable()
    assert not list(tmp_path.rglob("*up.json"))
    assert not list(tmp_path.rglob("config.json"))
