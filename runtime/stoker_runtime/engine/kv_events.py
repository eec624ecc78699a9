"""Publishes what the prefix cache gained and lost over ZeroMQ, in vLLM's frames, for routers that look for a prefix.

A message is `[topic, sequence number, msgpack]`: 8 bytes big-endian, and `[time, [event, …], 0]` with events as arrays
in the order of vLLM's fields. A hash is the low 64 bits of a page's key, as vLLM publishes its own.
At the replay endpoint a request `[b"", first number]` is answered by `[b"", number, msgpack]` for each message that
is still there, and by the number -1 at the end.
Invariants: a step never waits for a subscriber. Numbers have no gap but where messages were lost, so a subscriber knows
and can ask again. What subscribers and replays need is done by one thread, which ends with `close`.
Knows nothing of how pages are cached.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import zmq

from stoker_runtime.errors import ConfigError
from stoker_runtime.kv_events_settings import KvEventsConfig
from stoker_runtime.kvcache.journal import CacheCleared, CacheEvent, CacheJournal, PagesCached
from stoker_runtime.request import Adapter, EngineStats

LINGER_MS = 500
JOIN_SECONDS = 5.0
MEDIUM = "GPU"
"""What vLLM calls the engine's own pages, on a CPU too; the host pool's are not told."""
END = (-1).to_bytes(8, "big", signed=True)
HASH_BYTES = 8

log = logging.getLogger(__name__)


class KvEventPublisher:
    """The sender of one engine's events. `publish` and `close` are called by the engine's thread."""

    def __init__(
        self,
        config: KvEventsConfig,
        journal: CacheJournal,
        adapters: Callable[[], Mapping[str, Adapter]],
    ) -> None:
        """`adapters` are those that are served, by name. Raises ConfigError for an endpoint that cannot be had."""
        self.messages = 0
        """How many there were, lost ones included: the next one's number."""
        self.lost = 0
        self._config = config
        self._journal = journal
        self._adapters = adapters
        self._names: dict[int, str] = {}
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._feed, taker = self._pair()
            out = self._open(zmq.PUB, "endpoint", config.endpoint, config.hwm)
            again = None
            if config.replay_endpoint:
                again = self._open(zmq.ROUTER, "replay_endpoint", config.replay_endpoint, config.buffer_steps + 1)
        except BaseException:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._send, args=(taker, out, again), name="kv-events", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Hand over what happened since the last call, as one message; nothing where nothing did."""
        events = self._journal.take()
        if not events:
            return
        batch = (time.time(), [self._spelled(event) for event in events], 0)
        number, self.messages = self.messages, self.messages + 1
        try:
            self._feed.send_multipart((number.to_bytes(8, "big"), msgpack.packb(batch)), flags=zmq.NOBLOCK)
        except zmq.Again:
            if not self.lost:
                log.warning("messages of KV events are lost: more than max_queue_size wait to be sent")
            self.lost += 1

    def count(self, stats: EngineStats) -> None:
        """Fill in what `stats` say of messages."""
        stats.kv_event_messages, stats.kv_event_messages_lost = self.messages, self.lost

    def close(self) -> None:
        """Send what waits and end the thread. Idempotent."""
        if self._thread.is_alive():
            self._feed.send(b"")
            self._thread.join(JOIN_SECONDS)
        self._close_sockets()

    def _pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """The two ends of the way to the thread."""
        feed, taker = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._sockets += [feed, taker]
        feed.setsockopt(zmq.SNDHWM, self._config.max_queue_size)
        taker.setsockopt(zmq.RCVHWM, 1)
        name = f"inproc://kv-events-{id(self)}"
        taker.bind(name)
        feed.connect(name)
        return feed, taker

    def _open(self, kind: int, field: str, endpoint: str, most: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.SNDHWM, most)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        # vLLM's rule: who names no host is found by others, who names one looks for it.
        binds = (
            kind == zmq.ROUTER or "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        )
        try:
            if binds:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            said = f"kv_events_config: {field} {endpoint!r} cannot be {'bound' if binds else 'connected to'}: {error}."
            raise ConfigError(said, param="kv_events_config") from error
        return socket

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def _spelled(self, event: CacheEvent) -> list[Any]:
        if isinstance(event, CacheCleared):
            return ["AllBlocksCleared"]
        if not isinstance(event, PagesCached):
            return ["BlockRemoved", [_hash(key) for key in event.keys], MEDIUM]
        name = self._name(event.adapter)
        return [
            "BlockStored",
            [_hash(key) for key in event.keys],
            None if event.parent is None else _hash(event.parent),
            event.tokens.tolist(),
            event.page_size,
            event.adapter or None,
            MEDIUM,
            name,
            [_extra(name, "" if event.parent or at else event.cache_salt) for at in range(len(event.keys))],
        ]

    def _name(self, adapter: int) -> str | None:
        """What clients call an adapter; one that was unloaded since keeps its name here."""
        if not adapter:
            return None
        if adapter not in self._names:
            self._names = {each.number: name for name, each in self._adapters().items()} | self._names
        return self._names.get(adapter, "")

    def _send(self, taker: zmq.Socket[bytes], out: zmq.Socket[bytes], again: zmq.Socket[bytes] | None) -> None:
        """The thread: messages to subscribers as they come, older ones to whoever asks."""
        topic = self._config.topic.encode()
        kept: deque[tuple[bytes, bytes]] = deque(maxlen=self._config.buffer_steps)
        poller = zmq.Poller()
        poller.register(taker, zmq.POLLIN)
        if again is not None:
            poller.register(again, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if taker in ready:
                frames = taker.recv_multipart()
                if len(frames) == 1:
                    return
                number, batch = frames
                out.send_multipart((topic, number, batch))
                kept.append((number, batch))
            if again is not None and again in ready:
                _replay(again, kept)


def _replay(socket: zmq.Socket[bytes], kept: deque[tuple[bytes, bytes]]) -> None:
    frames = socket.recv_multipart()
    if len(frames) != 3 or len(frames[2]) != 8:
        log.warning("a request for older KV events is disregarded: it has to be an empty frame and 8 bytes")
        return
    client, _, first = frames
    for number, batch in kept:
        if number >= first:
            socket.send_multipart((client, b"", number, batch))
    socket.send_multipart((client, b"", END, b""))


def _hash(key: bytes) -> int:
    return int.from_bytes(key[-HASH_BYTES:], "big")


def _extra(adapter: str | None, cache_salt: str) -> tuple[str, ...] | None:
    """What of a page's hash its tokens and its parent do not say."""
    return tuple(each for each in (adapter, cache_salt) if each) or None
