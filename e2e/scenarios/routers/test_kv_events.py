"""Scenario: `endpoint.inferencePool.kvEvents`. A subscriber connects to each pod, as llm-d's router does, and hears of
the very tokens that this pod was asked, under a topic with its address; a pod that comes anew has a topic of its own.
"""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq
from e2e.cluster.backend import Given
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, eventually

PORT = 5657
NAME = "acme/heron"


class Follower:
    """A subscriber that knows the frames alone. `stored`: topic → the token ids of each beginning that was stored."""

    def __init__(self) -> None:
        self.stored: dict[str, list[list[int]]] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"kv@")

    def connect(self, address: str) -> None:
        """Follow a pod."""
        self._socket.connect(f"tcp://{address}:{PORT}")

    def listen(self) -> None:
        """Take what there is, until nothing came for half a second."""
        while self._socket.poll(500):
            topic, number, batch = self._socket.recv_multipart()
            assert len(number) == 8
            _, events, _ = msgpack.unpackb(batch)
            for event in events:
                if event[0] == "BlockStored" and event[2] is None:
                    _, hashes, _, tokens, size, *_ = event
                    assert len(tokens) == len(hashes) * size
                    self.stored.setdefault(topic.decode(), []).append(tokens)

    def close(self) -> None:
        """End it."""
        self._socket.close(0)
        self._context.term()


@pytest.fixture
def follower() -> Iterator[Follower]:
    made = Follower()
    yield made
    made.close()


def rendered(base: str, prompt: str) -> list[int]:
    """The token ids of a prompt, as a router asks for them."""
    body = json.dumps({"model": NAME, "prompt": prompt}).encode()
    request = urllib.request.Request(f"{base}/v1/completions/render", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        [found] = json.loads(answer.read())
    return [int(token) for token in found["token_ids"]]


def addresses(place: Kube) -> list[str]:
    return sorted(pod["status"]["podIP"] for pod in stoker.engine_pods(place, "model"))


def answers(pod: dict[str, Any]) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ()))


def hear(follower: Follower, address: str) -> None:
    """Until the pod tells of what it was asked. The first of it may have gone before the subscription was there."""
    base, topic, turns = f"http://{address}:8000", f"kv@{address}:8000@{NAME}", itertools.count()

    def told() -> bool:
        # Another first token each time: what begins with a cached page would be told as a continuation.
        prompt = f"{next(turns)} is the story of {address}: " + "once upon a time there was a heron " * 8
        stoker.ask(base, NAME, prompt=prompt)
        follower.listen()
        ids = rendered(base, prompt)
        return any(tokens == ids[: len(tokens)] for tokens in follower.stored.get(topic, ()))

    eventually(f"{topic} tells of what the pod was asked", told, 60)


def test_each_pod_tells_what_it_has_cached(place: Kube, given: Given, follower: Follower) -> None:
    if given.node is None:
        pytest.skip("the subscriber reaches pods from this machine: needs a node on it")
    pool: dict[str, Any] = {"endpointPickerRef": {"name": "model-epp"}, "kvEvents": {"port": PORT}}
    names = {"servedNames": [NAME, "model"]}
    place.apply(stoker.service("model", replicas=2, model=names, endpoint={"inferencePool": pool}))
    stoker.wait_ready(place, "model", 420)
    first = addresses(place)
    assert len(set(first)) == 2
    for address in first:
        follower.connect(address)
    for address in first:
        hear(follower, address)
    assert set(follower.stored) == {f"kv@{address}:8000@{NAME}" for address in first}

    gone = next(pod for pod in stoker.engine_pods(place, "model") if pod["status"]["podIP"] == first[0])
    place.kubectl("delete", "pod", gone["metadata"]["name"], "--wait=false")

    def replaced() -> list[str]:
        there = [pod["status"].get("podIP") for pod in stoker.engine_pods(place, "model") if answers(pod)]
        return [address for address in there if address not in first]

    [other] = eventually("a pod comes anew, with an address of its own", replaced, 180)
    follower.connect(other)
    hear(follower, other)
