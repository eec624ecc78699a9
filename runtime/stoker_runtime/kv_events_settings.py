"""Whether and where KV events are published: what is said of it at the start.

Invariants: plain data, torch-free. Knows nothing of events, nor of sockets (`engine/kv_events.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """Whether and where what the prefix cache gains and loses is published, in vLLM's words.

    `publisher` "zmq" or "null", "" for what `enable_kv_cache_events` says. `endpoint` is bound where it names no host
    (`tcp://*:5557`), and connected to else. At `replay_endpoint`, which is bound, the last `buffer_steps` messages can
    be asked for again. Beyond `max_queue_size` messages that wait to be sent, or `hwm` of a subscriber, some are lost.
    """

    enable_kv_cache_events: bool = False
    publisher: str = ""
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def publishes(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    def __str__(self) -> str:
        return json.dumps({each.name: getattr(self, each.name) for each in fields(self)})
