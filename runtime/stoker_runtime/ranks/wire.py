"""A step as bytes: what the leader writes once and every rank reads.

Numbers of a batch are one array of int32; the parameters of new sequences and images, which are rare, are pickled
behind them. A decode of the same sequences as the step before says just that.

Invariants: a reader that has read every message since the first gives back exactly what was written. Torch-free.
Knows nothing of how bytes travel.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from stoker_runtime.parallel.adapter_order import AdapterOrder
from stoker_runtime.request import Image
from stoker_runtime.step.batch import Batch, PageUpdate, PrefillChunk

STEP, IDLE, STOP, ADAPTER = 1, 2, 3, 4
"""The first number of a message: run a batch; prepare something small; end; an adapter. Others are of `sleep.py`."""
SAME, GIVEN = 0, 1
PAIR_FIELDS = ("copies", "swap_outs", "swap_ins", "adapter_loads", "state_saves", "state_loads",
               "state_outs", "state_ins")  # fmt: skip


class Wire:
    """One end: a writer, or a reader."""

    def __init__(self) -> None:
        self._decodes: tuple[int, ...] = ()

    def encode(self, batch: Batch) -> bytes:
        """The message of a step."""
        numbers = array("i", (STEP, *split_number(batch.step)))
        if batch.decodes == self._decodes:
            numbers.append(SAME)
        else:
            numbers.append(GIVEN)
            _put(numbers, batch.decodes)
            self._decodes = batch.decodes
        numbers.append(batch.drafts)
        _put(numbers, batch.draft_caps)
        for chunks in (batch.prefills, batch.catch_ups):
            numbers.append(len(chunks))
            for chunk in chunks:
                numbers.extend((chunk.slot, chunk.start, chunk.sample, chunk.shift))
                _put(numbers, chunk.token_ids)
                _put(numbers, chunk.targets)
        numbers.append(len(batch.page_updates))
        for update in batch.page_updates:
            numbers.extend((update.slot, update.start, update.table))
            _put(numbers, update.pages)
        for name in PAIR_FIELDS:
            _put(numbers, tuple(number for pair in getattr(batch, name) for number in pair))
        images = tuple((at, chunk.images) for at, chunk in enumerate(batch.prefills) if chunk.images)
        rest = pickle.dumps((batch.assigns, images), protocol=5) if batch.assigns or images else b""
        return array("i", (len(numbers),)).tobytes() + numbers.tobytes() + rest

    def decode(self, message: bytes) -> Batch | AdapterOrder | int:
        """The batch of a step, what to do with an adapter, or the number of another command."""
        count = array("i", message[:4])[0]
        end = 4 + 4 * count
        numbers = iter(array("i", message[4:end]))
        kind = next(numbers)
        if kind == ADAPTER:
            order: AdapterOrder = pickle.loads(message[end:])
            return order
        if kind != STEP:
            return kind
        step = next(numbers) + (next(numbers) << 31)
        if next(numbers) == GIVEN:
            self._decodes = _take(numbers)
        drafts, caps = next(numbers), _take(numbers)
        prefills, catch_ups = _chunks(numbers), _chunks(numbers)
        updates = tuple(_update(numbers) for _ in range(next(numbers)))
        pairs: dict[str, Any] = {name: _pairs(_take(numbers)) for name in PAIR_FIELDS}
        assigns, images = pickle.loads(message[end:]) if len(message) > end else ((), ())
        prefills = _with_images(prefills, images)
        return Batch(
            step,
            self._decodes,
            prefills,
            assigns,
            updates,
            drafts=drafts,
            draft_caps=caps,
            catch_ups=catch_ups,
            **pairs,
        )


def command(kind: int) -> bytes:
    """The message of a command without a batch."""
    return array("i", (1, kind)).tobytes()


def adapter_message(order: AdapterOrder) -> bytes:
    """The message of an order about an adapter."""
    return command(ADAPTER) + pickle.dumps(order, protocol=5)


def split_number(number: int) -> tuple[int, int]:
    """A number of up to 62 bits in two of 31."""
    return number & 0x7FFFFFFF, number >> 31


def _update(numbers: Iterator[int]) -> PageUpdate:
    slot, start, table = next(numbers), next(numbers), next(numbers)
    return PageUpdate(slot, start, _take(numbers), table)


def _put(numbers: array[int], values: tuple[int, ...]) -> None:
    numbers.append(len(values))
    numbers.extend(values)


def _take(numbers: Iterator[int]) -> tuple[int, ...]:
    return tuple(islice(numbers, next(numbers)))


def _chunks(numbers: Iterator[int]) -> tuple[PrefillChunk, ...]:
    return tuple(
        PrefillChunk(slot, start, _take(numbers), bool(sample), _take(numbers), shift=shift)
        for slot, start, sample, shift in (_four(numbers) for _ in range(next(numbers)))
    )


def _four(numbers: Iterator[int]) -> tuple[int, int, int, int]:
    return next(numbers), next(numbers), next(numbers), next(numbers)


def _with_images(
    chunks: tuple[PrefillChunk, ...], images: tuple[tuple[int, tuple[Image, ...]], ...]
) -> tuple[PrefillChunk, ...]:
    """The chunks with the images of those that have any, which are named by their places."""
    if not images:
        return chunks
    shown = dict(images)
    return tuple(replace(chunk, images=shown.get(at, ())) for at, chunk in enumerate(chunks))


def _pairs(values: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(values[::2], values[1::2], strict=True))
