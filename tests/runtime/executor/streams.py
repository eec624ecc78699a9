"""Streams and events of a device that runs whatever it may, in any order that they allow.

What is launched waits in the queue of its stream. `run` picks streams by chance, so an order that no event forces does
happen. A wait binds to the event's last record at the time of the call, as on the real device; waits at the line in
`forgotten` are left out.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stoker_kernels import pages
from stoker_runtime.executor import page_swap


class Record:
    """One recording of an event."""

    def __init__(self) -> None:
        self.reached = False


class Event:
    """Knows its last recording."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.last: Record | None = None

    def record(self, stream: Stream) -> None:
        record = self.last = Record()
        stream.queue.append((None, lambda: setattr(record, "reached", True)))


class Stream:
    """A queue of (record to wait for, work)."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.queue: deque[tuple[Record | None, Callable[[], Any]]] = deque()
        device.streams.append(self)

    @property
    def is_able(self) -> bool:
        """Whether the first piece of work may run."""
        return bool(self.queue) and (self.queue[0][0] is None or self.queue[0][0].reached)

    def wait_event(self, event: Event) -> None:
        line = sys._getframe(1).f_lineno
        self.device.waits.add(line)
        if event.last is not None and line != self.device.forgotten:
            self.queue.append((event.last, lambda: None))


class Memory:
    """A tensor whose copies happen when their stream comes to them."""

    def __init__(self, device: Device, data: torch.Tensor) -> None:
        self.machine, self.data = device, data
        self.shape, self.dtype, self.device = data.shape, data.dtype, data.device

    def __getitem__(self, at: Any) -> Memory:
        return Memory(self.machine, self.data[at])

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Memory]:
        return (self[at] for at in range(len(self)))

    def copy_(self, source: Memory, non_blocking: bool) -> None:
        assert non_blocking, "the host would wait"
        self.machine.launch(lambda: self.data.copy_(source.data))


class Device:
    """All streams; `steps` is that of the steps."""

    def __init__(self, seed: int, forgotten: int = 0) -> None:
        self.random = random.Random(seed)
        self.forgotten = forgotten
        self.waits: set[int] = set()
        self.streams: list[Stream] = []
        self.steps = self.current = Stream(self)

    def launch(self, work: Callable[[], Any]) -> None:
        self.current.queue.append((None, work))

    def run(self, most: int | None = None) -> None:
        """Run `most` pieces of work, or all."""
        while most is None or most > 0:
            able = [each for each in self.streams if each.is_able]
            if not able:
                assert not any(each.queue for each in self.streams), "streams wait for each other"
                return
            # Long runs of one stream, so that each is far ahead of the others at times.
            stream = self.random.choice(able)
            for _ in range(self.random.choice([1, 1, 20])):
                if stream.is_able:
                    stream.queue.popleft()[1]()
            most = None if most is None else most - 1

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of torch in `page_swap`."""

        def copy_pages(source: Memory, target: Memory, pairs: torch.Tensor) -> None:
            self.launch(lambda: pages.copy_pages(source.data, target.data, pairs))

        cuda = SimpleNamespace(
            Stream=lambda device: Stream(self),
            Event=lambda: Event(self),
            current_stream=lambda: self.steps,
            stream=self.on,
            synchronize=lambda device: self.run(),
        )

        def zeros(shape: Any, **kind: Any) -> Memory:
            return Memory(self, torch.zeros(shape, **kind))

        names = SimpleNamespace(cuda=cuda, zeros=zeros, tensor=torch.tensor, int32=torch.int32)
        monkeypatch.setattr(page_swap, "torch", names)
        monkeypatch.setattr(page_swap, "copy_pages", copy_pages)
