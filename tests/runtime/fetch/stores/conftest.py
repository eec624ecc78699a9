"""An object store over HTTP that checks signatures, and an environment that knows of no other."""

from __future__ import annotations

import base64
import os
import random
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from e2e.stores.server import ObjectStore
from tests.runtime.fetch.conftest import QUICK
from tests.serving import serving

from stoker_runtime.fetch.order import Order, endpoint_for
from stoker_runtime.fetch.prefetch import Prefetch, Published
from stoker_runtime.fetch.progress import Progress
from stoker_runtime.fetch.stores.source import Store

RANGE = 1 << 18
PREFIX = f"team-{secrets.token_hex(3)}/tiny+1"


@dataclass
class Lent:
    """A store with a model in the bucket `bucket` below PREFIX, and the secrets that let one in."""

    server: ObjectStore
    bucket: str
    access_key: str
    secret: str

    @property
    def objects(self) -> dict[str, bytes]:
        """What lies in the bucket."""
        return self.server.buckets[self.bucket]

    def content(self, name: str) -> bytes:
        """A file of the model."""
        return self.objects[f"{PREFIX}/{name}"]

    def reads(self) -> list[tuple[str, int]]:
        """(object's name, first byte) of each request for an object."""
        found = [(path, asked) for _, path, asked in self.server.log if asked]
        return [
            (unquote(path).rpartition("/")[2], int(asked.removeprefix("bytes=").partition("-")[0]))
            for path, asked in found
        ]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Lent]:
    """The store; the environment holds credentials for s3://."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "GCE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Store, "range_bytes", RANGE)
    server, noise = ObjectStore(), random.Random(11)
    lent = Lent(server, f"weights-{secrets.token_hex(2)}", "AK" + secrets.token_hex(6), secrets.token_urlsafe(24))
    shards = {f"model-0000{n}-of-00002.safetensors": noise.randbytes(size) for n, size in ((1, 2_000_003), (2, 70_001))}
    config = b'{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "max_position_embeddings": 512}'
    extra = {"config.json": config, "tokenizer.json": b"{}", "README.md": b"no model file", "onnx/m.json": b"{}"}
    extra |= {"deep er/é+%.json": b"[]", "nothing.json": b"", ".git/x.json": b"{}"}
    server.buckets = {lent.bucket: {f"{PREFIX}/{name}": content for name, content in (shards | extra).items()}}
    server.buckets[lent.bucket][f"{PREFIX}-other/model.safetensors"] = b"of a neighbour"
    server.access.keys = {lent.access_key: lent.secret}
    server.access.account = ("acct" + secrets.token_hex(3), base64.b64encode(secrets.token_bytes(32)).decode())
    server.access.token = secrets.token_urlsafe(20)
    server.page = 3
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", lent.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", lent.secret)
    monkeypatch.setenv("GOOGLE_BASE_URL", server.url)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", server.access.token)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{server.url}/{server.access.account[0]}")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", server.access.account[0])
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", server.access.account[1])
    with serving(server):
        yield lent


@pytest.fixture
def said() -> list[str]:
    """What the fetch told people."""
    return []


Fetch = Callable[..., Published]


@pytest.fixture
def fetch(store: Lent, tmp_path: Path, said: list[str]) -> Fetch:
    """Carry out an order for the store's model; keyword arguments change it."""

    def run(**changes: Any) -> Published:
        fields = {"uri": f"s3://{store.bucket}/{PREFIX}", "dest": tmp_path / "models", **changes}
        fields.setdefault("endpoint", endpoint_for(fields["uri"], ""))
        return Prefetch(Order(**fields), Progress(), threading.Event(), said.append, QUICK).run()

    return run
