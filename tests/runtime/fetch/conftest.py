"""A real hub over HTTP, a small model in it, and orders against it."""

from __future__ import annotations

import contextlib
import random
import socket
import socketserver
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.hub.server import Hub
from tests.serving import serving

from stoker_runtime.fetch.download import Patience
from stoker_runtime.fetch.order import Order
from stoker_runtime.fetch.prefetch import Prefetch, Published
from stoker_runtime.fetch.progress import Progress

REPO = "acme/tiny"
QUICK = Patience(failures=3, first_wait=0.02, longest_wait=0.05, base_seconds=20.0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A repository's folder: two shards, a small text file, a second layout and an export that nobody
    needs.
    """
    folder = tmp_path / "repo"
    (folder / "onnx").mkdir(parents=True)
    noise = random.Random(7)
    for name, size in (("model-00001-of-00002", 3 << 20), ("model-00002-of-00002", 1 << 20)):
        (folder / f"{name}.safetensors").write_bytes(noise.randbytes(size + 17))
    (folder / "consolidated.safetensors").write_bytes(b"the same again")
    (folder / "onnx" / "model.json").write_text("{}")
    (folder / "README.md").write_text("no model file")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    config = '{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "num_key_value_heads": 2, '
    (folder / "config.json").write_text(config + '"max_position_embeddings": 512}')
    return folder


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    server = Hub()
    server.add(REPO, model)
    with serving(server):
        yield server


Fetch = Callable[..., Published]


@pytest.fixture
def said() -> list[str]:
    """What the fetch told people."""
    return []


@pytest.fixture
def fetch(hub: Any, hub_cache: Path, tmp_path: Path, said: list[str]) -> Fetch:
    """Carry out an order; keyword arguments change it."""

    def run(**changes: Any) -> Published:
        fields = {"uri": f"hf://{REPO}", "dest": tmp_path / "models", "endpoint": hub.url, **changes}
        stop = fields.pop("stop", None) or threading.Event()
        progress = fields.pop("progress", None) or Progress()
        return Prefetch(Order(**fields), progress, stop, said.append, QUICK).run()

    return run


Answer = Callable[[str, socket.socket], None]
"""What a server does with a request: it gets its first line and the connection."""


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """Start web servers that answer as a function likes, byte for byte; gives their address."""
    running = contextlib.ExitStack()

    def start(answer: Answer) -> str:
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                head = b""
                while b"\r\n\r\n" not in head and (block := self.request.recv(65536)):
                    head += block
                with contextlib.suppress(OSError):
                    answer(head.decode("latin-1").partition("\r\n")[0], self.request)

        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        running.enter_context(serving(server))
        return f"http://127.0.0.1:{server.server_address[1]}"

    with running:
        yield start


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache of this test's own."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    return tmp_path / "hf" / "hub"


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB, smaller than the model."""
    place = tmp_path / "volume"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)
