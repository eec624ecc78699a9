"""A batch is the same on every rank that reads it."""

from __future__ import annotations

import random

import pytest

from stoker_runtime.parallel.adapter_order import Act, AdapterOrder
from stoker_runtime.ranks.wire import IDLE, STOP, Wire, adapter_message, command
from stoker_runtime.request import SamplingParams
from stoker_runtime.step.batch import Batch, PageUpdate, PrefillChunk, SlotAssign

LARGEST = 2**31 - 1


class Some:
    """Random parts of batches."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def number(self) -> int:
        return self._rng.choice([0, 1, LARGEST, self._rng.randrange(LARGEST)])

    def numbers(self) -> tuple[int, ...]:
        return tuple(self.number() for _ in range(self._rng.randrange(6)))

    def pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple((self.number(), self.number()) for _ in range(self._rng.randrange(3)))

    def chunk(self) -> PrefillChunk:
        sample = self._rng.random() < 0.5
        return PrefillChunk(self.number(), self.number(), self.numbers(), sample, self.numbers())

    def assign(self) -> SlotAssign:
        params = SamplingParams(max_tokens=self._rng.randrange(1, 99), temperature=self._rng.random())
        seed = self._rng.getrandbits(64)
        return SlotAssign(self.number(), params, seed, self.numbers(), self.numbers(), self.number())

    def batch(self) -> Batch:
        return Batch(
            self._rng.getrandbits(self._rng.choice([8, 31, 40])),
            self._rng.choice([(), (3,), (1, 2, 5), self.numbers()]),
            tuple(self.chunk() for _ in range(self._rng.randrange(3))),
            tuple(self.assign() for _ in range(self._rng.randrange(3))),
            tuple(PageUpdate(self.number(), self.number(), self.numbers()) for _ in range(self._rng.randrange(3))),
            self.pairs(),
            self.pairs(),
            self.pairs(),
            self.pairs(),
            self._rng.randrange(9),
            self.numbers(),
            tuple(self.chunk() for _ in range(self._rng.randrange(3))),
            self.pairs(),
            self.pairs(),
            self.pairs(),
            self.pairs(),
        )


@pytest.mark.parametrize("seed", [random.getrandbits(32) for _ in range(3)], ids=["one", "two", "three"])
def test_what_is_read_is_what_was_written(seed: int) -> None:
    writer, reader, some = Wire(), Wire(), Some(seed)
    for _ in range(200):
        batch = some.batch()
        assert reader.decode(writer.encode(batch)) == batch, seed


def test_commands_are_no_batches() -> None:
    assert [Wire().decode(command(kind)) for kind in (IDLE, STOP)] == [IDLE, STOP]
    orders = [AdapterOrder(act, at * 7, f"/adapters/ä {at}") for at, act in enumerate(Act)]
    assert [Wire().decode(adapter_message(order)) for order in orders] == orders


def test_a_decode_of_the_same_sequences_is_short_however_many_they_are() -> None:
    writer = Wire()
    first = writer.encode(Batch(1, tuple(range(500))))
    assert len(writer.encode(Batch(2, tuple(range(500))))) < 80 < len(first)
