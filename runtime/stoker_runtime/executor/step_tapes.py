"""Passes of the model on a CPU as tapes: what a step of one shape calls is noted down once, and called again at once.

A small model's step is dispatch for a third: hundreds of kernels, each a few microseconds of Python. A tape calls them
all from C (`stoker_kernels.launch.compiled`).
Invariants: a tape is replayed for inputs that lie where those lay that it was recorded with, which the key says; the
memory that tapes keep is bounded. A pass that computes by anything but C kernels is run as it is, every time.
Knows nothing of what a pass computes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

import torch

from stoker_kernels.launch.compiled import Tape
from stoker_runtime.models.inputs import ForwardInputs

# What all tapes keep: a step of 8 tokens of SmolLM2-135M in fp32 keeps 8.4 MiB.
MOST_BYTES = 64 << 20
_log = logging.getLogger(__name__)
Key = tuple[int, ...]


class StepTapes:
    """Runs passes; from a shape's second one on by its tape."""

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self._enabled = enabled and device.type == "cpu"
        self._tapes: OrderedDict[Key, tuple[Tape, torch.Tensor]] = OrderedDict()  # the one of longest ago first
        self._seen: Key = ()

    @property
    def recorded(self) -> int:
        """How many tapes there are."""
        return len(self._tapes)

    def run(self, inputs: ForwardInputs, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `run` returns, a view of a buffer that rests, for these inputs."""
        if not self._enabled or inputs.logits_rows is not None or inputs.adapters is not None or inputs.pages:
            return run()
        key = _key(inputs)
        found = self._tapes.get(key)
        if found is not None:
            self._tapes.move_to_end(key)
            tape, result = found
            tape.replay()
            return result
        if key != self._seen:  # many shapes come once
            self._seen = key
            return run()
        tape = Tape()
        result = tape.record(run)
        if tape.refusal is not None:
            _log.debug("steps are not replayed on this CPU: %s is among them", tape.refusal)
            self._enabled = False
        elif tape.bytes <= MOST_BYTES:
            self._keep(key, tape, result)
        return result

    def _keep(self, key: Key, tape: Tape, result: torch.Tensor) -> None:
        self._tapes[key] = tape, result
        while sum(each.bytes for each, _ in self._tapes.values()) > MOST_BYTES:
            self._tapes.popitem(last=False)

    def clear(self) -> None:
        """Drop every tape: what they read is about to move."""
        self._tapes.clear()


def _key(inputs: ForwardInputs) -> Key:
    """Where the inputs of a pass lie, and how many tokens it has."""
    meta = inputs.attention
    where = (inputs.ids, inputs.positions, inputs.slot_mapping, meta.page_table, meta.seq_slots, meta.seq_lens)
    return (len(inputs.ids), meta.num_decodes, *(each.data_ptr() for each in where))
