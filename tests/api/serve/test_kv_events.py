"""What a router compares: the token ids that a server renders of a prompt are those that its KV events tell of."""

from __future__ import annotations

import json
import random
import socket
import sys
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from api_server import CLIENT, wait_until
from server_process import FRESH, ServerProcess

SEED = random.SystemRandom().getrandbits(32)
TOPIC = "kv@10.1.2.3:8000@org/tiny"


@pytest.fixture(scope="module")
def events() -> str:
    """Where the server publishes them."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"tcp://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(scope="module")
def server(events: str) -> Iterator[ServerProcess]:
    published = events.replace("127.0.0.1", "*")
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": published, "topic": TOPIC}
    sizes = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4")
    flags = ("--served-model-name", "org/tiny", *sizes, "--kv-events-config", json.dumps(config))
    started = ServerProcess([sys.executable, "-m", "stoker_cli", "serve", "shape:tiny"], *flags)
    try:
        assert wait_until(lambda: "ready in" in started.log, 180), started.log
        yield started
    finally:
        started.close()


@pytest.fixture
def subscriber(events: str) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    made = context.socket(zmq.SUB)
    made.setsockopt(zmq.SUBSCRIBE, b"kv@")
    made.connect(events)
    yield made
    made.close(0)
    context.term()


def test_what_is_rendered_is_what_is_told(server: ServerProcess, subscriber: zmq.Socket[bytes]) -> None:
    source = random.Random(SEED)
    asked: list[list[int]] = []

    def told() -> bool:
        """Another prompt, for the first may have gone before the subscription was there."""
        words = [source.choice(["heron", "steam", "glass", "salt"]) for _ in range(60)]
        body = {"model": "org/tiny", "prompt": f"{source.getrandbits(60)} {' '.join(words)}", "max_tokens": 1}
        [rendered] = CLIENT.post(f"{server.url}/v1/completions/render", json=body, headers=FRESH).json()
        asked.append(rendered["token_ids"])
        assert CLIENT.post(f"{server.url}/v1/completions", json=body, headers=FRESH).status_code == 200
        return bool(subscriber.poll(500))

    assert wait_until(told, 30), f"nothing was told (seed {SEED})"
    topic, _, batch = subscriber.recv_multipart()
    assert topic.decode() == TOPIC
    _, [stored, *_], _ = msgspec.msgpack.decode(batch)
    name, hashes, parent, tokens, size, *_ = stored
    assert (name, parent, len(tokens)) == ("BlockStored", None, len(hashes) * size)
    assert len(tokens) >= 16
    assert any(tokens == ids[: len(tokens)] for ids in asked), f"seed {SEED}"
