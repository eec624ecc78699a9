"""oci:// against a registry that others wrote (crane's), where it is built; `rig.py build crane` builds it."""

from __future__ import annotations

import re
import secrets
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.cluster.binaries import find
from e2e.registry.push import push
from tests.runtime.fetch.conftest import QUICK

from stoker_runtime.fetch import cli
from stoker_runtime.fetch.errors import ModelNotFound
from stoker_runtime.fetch.order import Order
from stoker_runtime.fetch.prefetch import Prefetch, look_into_image, look_up
from stoker_runtime.fetch.progress import Progress

NAME = f"team-{secrets.token_hex(2)}/tiny"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """HOST:PORT of a registry, empty."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-login"))
    crane = find("crane")
    if crane is None:
        pytest.skip("crane is not built: e2e/cluster/rig.py build crane")
    command = [str(crane), "registry", "serve", "--address=127.0.0.1:0"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout is not None
    try:
        told = ""
        for line in running.stdout:
            told += line
            if match := re.search(r"port (\d+)", line):
                yield f"127.0.0.1:{match[1]}"
                return
        pytest.fail(f"the registry ended: {told}")
    finally:
        running.terminate()
        running.communicate(timeout=60)


def test_an_artifact_comes_whole_and_its_tag_is_followed(registry: str, tmp_path: Path) -> None:
    files = {"model.safetensors": secrets.token_bytes(3_000_001), "config.json": b'{"num_hidden_layers": 2}'}
    order = Order(f"oci://{registry}/{NAME}:v1", tmp_path / "models")

    def now() -> str:
        return look_up(order, patience=QUICK, stop=threading.Event(), say=lambda _: None).revision

    def fetch(revision: str) -> Path:
        made = Order(order.uri, order.dest, revision)
        published = Prefetch(made, Progress(), threading.Event(), lambda _: None, QUICK).run()
        assert published.manifest.resolved_revision == revision
        return published.folder

    with pytest.raises(ModelNotFound, match="check name and tag"):
        now()
    first = push(f"http://{registry}", NAME, "v1", files)
    assert now() == first
    second = push(f"http://{registry}", NAME, "v1", files | {"config.json": b'{"num_hidden_layers": 3}'})
    assert now() == second != first
    for digest, layers in ((first, b"2"), (second, b"3")):
        folder = fetch(digest)
        assert layers in (folder / "config.json").read_bytes()
        assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_an_image_that_crane_pushed_tells_of_its_model(registry: str, tmp_path: Path) -> None:
    source, image = tmp_path / "source", tmp_path / "image"
    source.mkdir()
    (source / "model.safetensors").write_bytes(secrets.token_bytes(70_003))
    (source / "config.json").write_text('{"num_hidden_layers": 5}')
    arguments = [f"file://{source}", "--dest", str(tmp_path / "models"), "--image", str(image)]
    assert cli.main(arguments) == 0
    place = f"{registry}/{NAME}:mounted"
    pushed = subprocess.run([str(find("crane")), "push", image, place], capture_output=True, text=True, check=True)
    order = Order(f"oci://{place}", tmp_path / "models")
    found = look_into_image(order, patience=QUICK, stop=threading.Event(), say=lambda _: None)
    assert found.digest in pushed.stdout + pushed.stderr
    assert found.bytes == 70_003 + len((source / "config.json").read_bytes())
