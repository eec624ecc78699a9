"""oci:// artifacts from a registry that asks for logins: what arrives, what goes on, who is let in, what is refused."""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e.registry.server import Registry
from tests.runtime.fetch.conftest import QUICK
from tests.runtime.fetch.registry.conftest import log_in

from stoker_runtime.fetch.by_name import DESCRIPTIONS, locate
from stoker_runtime.fetch.errors import BadRequest, ChecksumMismatch, FetchError, ModelNotFound, TokenRejected
from stoker_runtime.fetch.order import Order
from stoker_runtime.fetch.prefetch import Prefetch, Published
from stoker_runtime.fetch.progress import Progress

NAME = f"team-{secrets.token_hex(2)}/models/tiny"
SHARD = "model.safetensors"
Fetch = Callable[..., Published]


@pytest.fixture
def files() -> dict[str, bytes]:
    """A model, and a file that it does not need."""
    shard = random.Random(3).randbytes(2_000_003)
    return {SHARD: shard, "config.json": b'{"a": 1}', "deep/tokenizer.json": b"{}", "README.md": b"no model file"}


@pytest.fixture
def said() -> list[str]:
    """What the fetch told people."""
    return []


@pytest.fixture
def fetch(registry: Registry, tmp_path: Path, said: list[str]) -> Fetch:
    """Carry out an order; keyword arguments change it."""

    def run(tag: str = ":v1", **changes: Any) -> Published:
        fields = {"uri": f"oci://{registry.host}/{NAME}{tag}", "dest": tmp_path / "models", **changes}
        return Prefetch(Order(**fields), Progress(), threading.Event(), said.append, QUICK).run()

    return run


@pytest.mark.parametrize("basic", [False, True], ids=["bearer", "basic"])
def test_an_artifact_is_fetched_and_the_second_time_nothing_is_asked(
    fetch: Fetch, registry: Registry, files: dict[str, bytes], basic: bool
) -> None:
    registry.basic = basic
    digest = registry.push(NAME, "v1", files)
    published = fetch()
    assert published.manifest.resolved_revision == digest
    assert sorted(published.manifest.files) == ["config.json", "deep/tokenizer.json", SHARD]
    assert all((published.folder / name).read_bytes() == files[name] for name in published.manifest.files)
    registry.log.clear()
    assert fetch().folder == published.folder
    assert registry.log == []
    registry.push(NAME, "v1", files | {"config.json": b"{}"})
    assert fetch(f"@{digest}").folder == published.folder
    assert fetch(refresh=True).folder != published.folder
    # What is damaged comes from the manifest that was resolved, wherever the tag points by now.
    damaged = published.folder / "config.json"
    damaged.write_bytes(b'{"a": 2}')
    assert fetch(f"@{digest}", repair=True).moved
    assert damaged.read_bytes() == files["config.json"]


def test_a_layer_that_breaks_off_goes_on_where_it_was(
    fetch: Fetch, registry: Registry, files: dict[str, bytes]
) -> None:
    registry.push(NAME, "v1", {SHARD: files[SHARD]})
    registry.cut_once = 1_500_000
    assert (fetch().folder / SHARD).read_bytes() == files[SHARD]
    assert "bytes=1500000-" in {asked for _, asked in registry.log}


def test_other_bytes_than_the_digests_are_refused(fetch: Fetch, registry: Registry, files: dict[str, bytes]) -> None:
    digest = registry.push(NAME, "v1", files)
    for blob, content in registry.blobs.items():
        registry.blobs[blob] = content[:-1] + b"x"
    with pytest.raises(ChecksumMismatch, match="arrived with sha256"):
        fetch()
    registry.manifests[f"/v2/{NAME}/manifests/{digest}"] += b" "
    with pytest.raises(ChecksumMismatch, match=f"another manifest than {digest}"):
        fetch(f"@{digest}")


def test_layers_as_modelpack_names_them_below_an_index(fetch: Fetch, registry: Registry) -> None:
    notes = {"org.cncf.model.filepath": "m.gguf"}
    digest = registry.push(NAME, "one", {"x": b"weights"}, annotations=notes)
    registry.put(NAME, "v1", {"schemaVersion": 2, "manifests": [{"digest": digest, "size": 1}]})
    assert list(fetch().manifest.files) == ["m.gguf"]
    registry.put(NAME, "v2", {"schemaVersion": 2, "manifests": [{"digest": digest, "size": 1}] * 2})
    with pytest.raises(BadRequest, match="several manifests"):
        fetch(":v2")


@pytest.mark.parametrize(
    ("layer", "kind", "says"),
    [
        ({"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip"}, BadRequest, "in an archive"),
        ({"annotations": {}}, BadRequest, "no layer with a file's name; push the files as they are"),
        ({"annotations": {"org.opencontainers.image.title": "../../etc/x"}}, BadRequest, "no plain relative path"),
    ],
)
def test_what_is_no_model_of_files_is_refused(
    fetch: Fetch, registry: Registry, layer: dict[str, Any], kind: type[FetchError], says: str
) -> None:
    registry.push(NAME, "v1", {"config.json": b"{}"}, **layer)
    with pytest.raises(kind, match=says):
        fetch()


def test_a_refusal_says_where_a_login_is_taken_from(
    fetch: Fetch, registry: Registry, files: dict[str, bytes], tmp_path: Path, said: list[str]
) -> None:
    registry.push(NAME, "v1", files)
    with pytest.raises(ModelNotFound, match=":none does not exist"):
        fetch(":none")
    log_in(tmp_path, registry, "user", "wrong-password")
    with pytest.raises(TokenRejected, match=f"docker login {registry.host}") as failure:
        fetch()
    assert "wrong-password" not in failure.value.message + "".join(said)
    (tmp_path / "docker" / "config.json").write_text("{")
    with pytest.raises(BadRequest, match="is no configuration of logins"):
        fetch()


def test_a_server_takes_an_artifact_in_the_place_of_a_path(registry: Registry, files: dict[str, bytes]) -> None:
    registry.push(NAME, "v1", files)
    uri = f"oci://{registry.host}/{NAME}:v1"
    assert not (Path(locate(uri, only=DESCRIPTIONS)) / SHARD).exists()
    path = Path(locate(uri))
    assert (path / SHARD).read_bytes() == files[SHARD]
    registry.log.clear()
    assert locate(uri) == str(path)
    assert registry.log == []
