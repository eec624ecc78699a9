"""KV events against a subscriber that knows vLLM's frames alone: msgspec decodes them, as vLLM's own subscribers do."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import zmq
from tests.runtime.engine.uniform_executor import UniformExecutor
from tests.runtime.engine.uniform_sleeper import UniformSleeper

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.core import make_loop, open_events
from stoker_runtime.engine.engine import AsyncEngine
from stoker_runtime.engine.kv_events import KvEventPublisher
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import CapacityError, ConfigError, RequestError
from stoker_runtime.kv_events_settings import KvEventsConfig
from stoker_runtime.kvcache.journal import CacheJournal, PagesCached
from stoker_runtime.request import Adapter, EngineStats, Request, SamplingParams

PATIENCE_MS = 30_000
SEED = random.SystemRandom().getrandbits(32)


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """As vLLM declares it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """As vLLM declares it."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    """As vLLM declares it."""


class KVEventBatch(msgspec.Struct, array_like=True):
    """As vLLM declares it."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class Follower:
    """A router: subscribes, fills gaps from the replay socket, and keeps what is cached."""

    def __init__(self, told: KvEventsConfig) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe(told.topic)
        self.socket.connect(told.endpoint.replace("*", "127.0.0.1"))
        self.again = self.context.socket(zmq.DEALER)
        self.again.connect(str(told.replay_endpoint))
        self.topics: set[bytes] = set()
        self.next = 0
        self.stored: dict[int, BlockStored] = {}
        self.child: dict[tuple[int | None, tuple[int, ...], tuple[str, ...]], int] = {}
        self.cleared = 0

    def close(self) -> None:
        self.socket.close(0)
        self.again.close(0)
        self.context.term()

    def follow(self, messages: int) -> None:
        """Take everything in until so many messages are known."""
        while self.next < messages:
            if not self.socket.poll(200):
                self.replay()
                continue
            topic, number, payload = self.socket.recv_multipart()
            self.topics.add(topic)
            found = int.from_bytes(number, "big")
            if found > self.next:
                self.replay()
            if found == self.next:
                self.take(payload)

    def replay(self) -> None:
        self.again.send_multipart((b"", self.next.to_bytes(8, "big")))
        while True:
            assert self.again.poll(PATIENCE_MS), "no replay"
            _, number, payload = self.again.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                return
            if int.from_bytes(number, "big") == self.next:
                self.take(payload)

    def take(self, payload: bytes) -> None:
        self.next += 1
        batch = DECODER.decode(payload)
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            match event:
                case BlockStored():
                    self.store(event)
                case BlockRemoved():
                    assert event.medium == "GPU"
                    for block in event.block_hashes:
                        del self.stored[block]
                case AllBlocksCleared():
                    self.stored.clear()
                    self.cleared += 1

    def store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert event.extra_keys is not None
        for at, block in enumerate(event.block_hashes):
            assert block not in self.stored, "stored twice"
            tokens = tuple(event.token_ids[at * size : (at + 1) * size])
            self.stored[block] = event
            self.child[parent, tokens, tuple(event.extra_keys[at] or ())] = block
            parent = block

    def cached(self, prompt: tuple[int, ...], size: int, salt: str) -> int:
        """Tokens of a prompt that a router would expect to be cached, by tokens alone."""
        parent: int | None = None
        for at in range(len(prompt) // size):
            extra = (salt,) if salt and not at else ()
            found = self.child.get((parent, prompt[at * size : (at + 1) * size], extra))
            if found is None or found not in self.stored:
                return at * size
            parent = found
        return len(prompt) // size * size


@contextmanager
def followed(loop: StepLoop, config: EngineConfig) -> Iterator[tuple[KvEventPublisher, Follower]]:
    events = open_events(loop, config)
    assert events is not None
    assert config.kv_events_config is not None
    follower = Follower(config.kv_events_config)
    try:
        yield events, follower
    finally:
        follower.close()
        events.close()


@pytest.fixture
def place() -> Iterator[str]:
    """A folder for sockets: pytest's own have longer names than a socket may."""
    with TemporaryDirectory(dir="/tmp") as folder:
        yield folder


def events_config(place: str, topic: str = "kv@pod@model", **settings: Any) -> KvEventsConfig:
    return KvEventsConfig(True, "zmq", f"ipc://{place}/events", f"ipc://{place}/replay", topic=topic, **settings)


@pytest.mark.parametrize("host_pages", [0, 8])
def test_a_router_knows_what_is_cached(host_pages: int, place: str) -> None:
    """Random traffic, evictions, aborts, failures: the follower's set is the prefix cache's, and its guess is right."""
    rng = random.Random(SEED + host_pages)
    size = rng.choice([2, 4, 8])
    executor = UniformExecutor(
        num_pages=24, page_size=size, max_num_seqs=4, max_model_len=64, max_num_batched_tokens=16, vocab_size=8,
        host_pages=host_pages,
    )  # fmt: skip
    config = EngineConfig("uniform", kv_events_config=events_config(place))
    loop = StepLoop(executor, config)
    prefixes = [tuple(rng.randrange(8) for _ in range(24)) for _ in range(6)]
    guesses = 0
    with followed(loop, config) as (events, follower):
        for turn in range(60):
            for _ in range(rng.randint(1, 5)):
                ask(loop, executor, rng, prefixes, f"{turn}-{rng.getrandbits(40)}")
            while loop.has_work:
                loop.step()
                events.publish()
            if turn % 20 == 19:
                loop.fail(RuntimeError("a step failed"))
            events.publish()
            follower.follow(events.messages)
            index = loop.scheduler._placement.pages.index
            assert index is not None
            assert set(follower.stored) == {int.from_bytes(key[-8:], "big") for key in index._page_of}, f"seed {SEED}"
            if host_pages:
                continue  # what the host holds is not told
            prompt, salt = (*rng.choice(prefixes)[: rng.randint(2, 24)], rng.randrange(8)), rng.choice(["", "", "s"])
            prompt = prompt if len(prompt) % size else prompt[:-1]
            guess = follower.cached(prompt, size, salt)
            sequence = loop.add(Request(f"guess{turn}", prompt, SamplingParams(max_tokens=1, seed=turn), 0.0, 0, salt))
            executor.prompts[turn] = prompt
            while loop.has_work:
                loop.step()
            assert sequence.cached_tokens == guess, f"seed {SEED}"
            guesses += guess > 0
        assert follower.cleared == 3
        while not follower.topics:
            # All that came so far came as replays: the subscription was not there yet.
            ask(loop, executor, rng, prefixes, f"more-{rng.getrandbits(40)}")
            while loop.has_work:
                loop.step()
                events.publish()
            follower.follow(events.messages)
        assert follower.topics == {b"kv@pod@model"}
        assert events.lost == 0
        assert host_pages or guesses > 5, f"seed {SEED} never hit the cache"


def ask(
    loop: StepLoop, executor: UniformExecutor, rng: random.Random, prefixes: list[tuple[int, ...]], name: str
) -> None:
    prompt = rng.choice(prefixes)[: rng.randint(1, 24)] + tuple(rng.randrange(8) for _ in range(rng.randint(0, 9)))
    seed = rng.getrandbits(40)
    executor.prompts[seed] = prompt
    params = SamplingParams(max_tokens=rng.randint(1, 20), seed=seed, ignore_eos=True)
    try:
        sequence = loop.add(Request(name, prompt, params, 0.0, 0, rng.choice(["", "", "s"]), session=rng.choice("ab")))
    except (RequestError, CapacityError):
        return
    if rng.random() < 0.1:
        loop.step()
        loop.abort(sequence)


def test_one_that_sleeps_has_nothing_cached(place: str, tmp_path: Path) -> None:
    rng, sleeper = random.Random(SEED), UniformSleeper(tmp_path)
    executor = UniformExecutor(num_pages=24, page_size=4, max_model_len=64, vocab_size=8, sleeper=sleeper)
    sleeper.pages = executor.kv
    config = EngineConfig("uniform", kv_events_config=events_config(place))
    loop = StepLoop(executor, config)
    prefixes = [tuple(rng.randrange(8) for _ in range(24))]

    def work(name: str) -> None:
        loop.add(Request(name, prefixes[0], SamplingParams(max_tokens=3, seed=5), 0.0))
        executor.prompts[5] = prefixes[0]
        while loop.has_work:
            loop.step()

    with followed(loop, config) as (events, follower):
        work("before")
        events.publish()
        loop.sleeper.now(lambda told: loop.sleeper.sleep(rng.choice([1, 2]), told))
        events.publish()
        follower.follow(events.messages)
        assert follower.child, "something was stored before"
        assert follower.cleared == 1
        assert not follower.stored
        loop.sleeper.now(lambda told: loop.sleeper.wake((), told))
        work("after")
        events.publish()
        follower.follow(events.messages)
        assert len(follower.stored) == 6
    loop.sleeper.close()


def test_adapters_and_salts_are_told(place: str) -> None:
    config, journal = events_config(place, topic=""), CacheJournal()
    served = {"poet": Adapter(7, "poet", "/a")}
    events = KvEventPublisher(config, journal, lambda: served)
    follower = Follower(config)
    try:
        journal.cached(PagesCached((b"a" * 16, b"b" * 16), None, array("i", [1, 2, 3, 4]), 2, 7, "salt"))
        events.publish()
        served.clear()
        journal.cached(PagesCached((b"c" * 16,), b"b" * 16, array("i", [5, 6]), 2, 7, "salt"))
        events.publish()
        events.publish()
        follower.follow(2)
        first, second = (follower.stored[int.from_bytes(each * 8, "big")] for each in (b"a", b"c"))
        assert (first.lora_id, first.lora_name, first.extra_keys) == (7, "poet", [["poet", "salt"], ["poet"]])
        # Unloaded since, and still what its pages were computed with.
        assert (second.lora_name, second.extra_keys) == ("poet", [["poet"]])
        assert second.parent_block_hash == int.from_bytes(b"b" * 8, "big")
    finally:
        follower.close()
        events.close()


class Stalled(KvEventPublisher):
    """Sends nothing until it is let."""

    gate = threading.Event()

    def _send(self, *sockets: Any) -> None:
        self.gate.wait()
        super()._send(*sockets)


def replayed(again: zmq.Socket[bytes]) -> list[int]:
    """The numbers of all messages that are kept."""
    again.send_multipart((b"", (0).to_bytes(8, "big")))
    numbers: list[int] = []
    while not numbers or numbers[-1] != -1:
        assert again.poll(PATIENCE_MS)
        numbers.append(int.from_bytes(again.recv_multipart()[1], "big", signed=True))
    return numbers[:-1]


def test_what_is_lost_leaves_a_gap(place: str) -> None:
    """Nobody takes messages away: the engine goes on, counts what is lost, and numbers show it."""
    config, journal = events_config(place, max_queue_size=4), CacheJournal()
    Stalled.gate.clear()
    events = Stalled(config, journal, dict)
    for at in range(40):
        journal.cached(PagesCached((bytes([at]) * 16,), None, array("i", [at]), 1))
        events.publish()
    stats = EngineStats()
    events.count(stats)
    assert stats.kv_event_messages == 40
    assert 20 < stats.kv_event_messages_lost < 40
    Stalled.gate.set()
    asking = zmq.Context()
    again = asking.socket(zmq.DEALER)
    again.connect(str(config.replay_endpoint))
    numbers: list[int] = []
    # Asked again while the sender still takes away what waited.
    while len(numbers) < 40 - stats.kv_event_messages_lost:
        numbers = replayed(again)
    assert numbers == list(range(40 - stats.kv_event_messages_lost))
    again.close(0)
    asking.term()
    events.close()
    assert not events._thread.is_alive()


def test_endpoints_that_cannot_be_had_are_named() -> None:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    executor = UniformExecutor(num_pages=4, page_size=4, max_num_seqs=2, max_model_len=16, max_num_batched_tokens=8)
    for told in (
        KvEventsConfig(True, endpoint="tcp://*:nowhere"),
        KvEventsConfig(True, endpoint="inproc://x", replay_endpoint=f"tcp://127.0.0.1:{taken.getsockname()[1]}"),
    ):
        config = EngineConfig("uniform", kv_events_config=told)
        with pytest.raises(ConfigError, match=r"kv_events_config: (replay_)?endpoint '.*' cannot be bound"):
            open_events(make_loop(executor, config), config)
    taken.close()
    with pytest.raises(ConfigError, match="needs enable_prefix_caching"):
        EngineConfig("m", enable_prefix_caching=False, kv_events_config=KvEventsConfig(True)).validate()
    for off in (None, KvEventsConfig(), KvEventsConfig(True, "null")):
        config = EngineConfig("uniform", kv_events_config=off)
        loop = make_loop(executor, config)
        assert open_events(loop, config) is None
        assert isinstance(loop, StepLoop)
        assert loop.journal is None, "a journal that nobody takes grows"


async def test_the_engine_process_publishes() -> None:
    command = (sys.executable, str(Path(__file__).parent / "uniform_core.py"), "ok")
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], two.getsockname()[1]
    assert KvEventsConfig(True).endpoint == "tcp://*:5557", "where routers look, unless they are told"
    told = KvEventsConfig(True, "", f"tcp://*:{ports[0]}", f"tcp://*:{ports[1]}", topic="kv@10.0.0.7@m")
    engine = await AsyncEngine.start(EngineConfig("uniform", kv_events_config=told), command=command)
    async with engine:
        stream = engine.submit([Request("a", tuple(range(40)), SamplingParams(max_tokens=2, seed=1))])
        while all(output.finish is None for output in await stream.next()):
            pass
        follower = Follower(replace(told, replay_endpoint=f"tcp://127.0.0.1:{ports[1]}"))
        follower.follow(1)
        follower.close()
        [event] = {id(event): event for event in follower.stored.values()}.values()
        assert event.token_ids == list(range(32))
        assert (event.block_size, event.parent_block_hash, event.lora_name) == (16, None, None)
        async with asyncio.timeout(60):
            while engine.stats().kv_event_messages == 0:
                await asyncio.sleep(0.01)
