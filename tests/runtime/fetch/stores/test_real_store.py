"""s3:// against a store that others wrote (versitygw), where it is built; `rig.py build versitygw` builds it."""

from __future__ import annotations

import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.cluster.binaries import find
from obstore.store import S3Store
from tests.runtime.fetch.conftest import QUICK

from stoker_runtime.fetch.errors import RevisionNotFound, TokenRejected
from stoker_runtime.fetch.order import Order
from stoker_runtime.fetch.prefetch import Prefetch, look_up
from stoker_runtime.fetch.progress import Progress

BUCKET = f"weights-{secrets.token_hex(2)}"
ACCESS, SECRET = f"AK{secrets.token_hex(6)}", secrets.token_hex(20)


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store with one bucket, whose keys the environment holds."""
    gateway = find("versitygw")
    if gateway is None:
        pytest.skip("versitygw is not built: e2e/cluster/rig.py build versitygw")
    (tmp_path / "data" / BUCKET).mkdir(parents=True)
    (tmp_path / "meta").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(gateway), f"--access={ACCESS}", f"--secret={SECRET}", f"--port=127.0.0.1:{port}", "--quiet"]
    command += ["posix", f"--sidecar={tmp_path / 'meta'}", str(tmp_path / "data")]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    for name, value in {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET, "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    try:
        deadline = time.monotonic() + 60
        while True:
            assert running.poll() is None, "the store ended"
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "the store does not answer"
                time.sleep(0.05)
        yield url
    finally:
        running.terminate()
        running.wait(60)


def test_weights_come_whole_a_state_is_what_it_was_and_a_wrong_key_is_said(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3Store(BUCKET, endpoint=endpoint, region="us-east-1", client_options={"allow_http": True})
    content = secrets.token_bytes(20_000_003)
    store.put("team/x/model.safetensors", content)
    store.put("team/x/config.json", b'{"num_hidden_layers": 2}')
    uri = f"s3://{BUCKET}/team/x"

    def fetch(revision: str = "") -> Path:
        order = Order(uri, tmp_path / "models", revision, endpoint=endpoint)
        return Prefetch(order, Progress(), threading.Event(), lambda _: None, QUICK).run().folder

    def now() -> str:
        order = Order(uri, tmp_path / "models", endpoint=endpoint)
        return look_up(order, patience=QUICK, stop=threading.Event(), say=lambda _: None).revision

    first = now()
    assert (fetch(first) / "model.safetensors").read_bytes() == content
    store.put("team/x/config.json", b'{"num_hidden_layers": 3}')
    second = now()
    assert second != first
    assert b"3" in (fetch(second) / "config.json").read_bytes()
    store.put("team/x/config.json", b'{"num_hidden_layers": 4}')
    monkeypatch.setattr("stoker_runtime.fetch.volume.Volume.recall", lambda *_: None)
    with pytest.raises(RevisionNotFound, match="by now"):
        fetch(second)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET}x")
    with pytest.raises(TokenRejected) as caught:
        now()
    assert SECRET not in str(caught.value)
