"""Which row of a step has which adapter: the state by sequence slot, and the plan that a forward pass gets.

Invariants: buffers are allocated once; plans are made on the device from rows that the step holds there anyway, so that
a captured graph is right for any adapters. Without a row that has one, nothing here runs.
Knows nothing of adapters' contents.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from stoker_kernels.lora import LoraPlan, gather_adapters, group_tokens
from stoker_runtime.adapters.memory import AdapterMemory
from stoker_runtime.config import EngineConfig
from stoker_runtime.models.inputs import AdapterInputs
from stoker_runtime.step.batch import SlotAssign


class AdapterStep:
    """The adapter slot of each sequence slot, on the host and on the device, and the buffers of plans."""

    def __init__(self, config: EngineConfig, memory: AdapterMemory, device: torch.device) -> None:
        longest = config.max_num_batched_tokens + config.max_num_seqs
        self._memory = memory
        self._of_slot = np.full(config.max_num_seqs, -1, dtype=np.int32)
        self._on_device = torch.full((config.max_num_seqs,), -1, dtype=torch.int32, device=device)
        self._tokens = torch.full((longest,), -1, dtype=torch.int32, device=device)
        self._rows = torch.full((longest,), -1, dtype=torch.int32, device=device)
        self._token_plan = LoraPlan.allocate(longest, memory.slots, device)
        self._row_plan = LoraPlan.allocate(longest, memory.slots, device, self._token_plan.turn)

    def assign(self, assigns: Iterable[SlotAssign]) -> bool:
        """Sequences took slots: note their adapters; whether the device has to be told (`values`)."""
        changed = False
        for assign in assigns:
            changed |= bool(self._of_slot[assign.slot] != assign.adapter)
            self._of_slot[assign.slot] = assign.adapter
        return changed

    @property
    def values(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """The adapter slot of each sequence slot, to be uploaded to `target`."""
        return self._of_slot

    @property
    def target(self) -> Tensor:
        """Where the device holds `values`."""
        return self._on_device

    def any(self, slots: Iterable[int]) -> bool:
        """Whether one of these sequence slots has an adapter."""
        return bool((self._of_slot[list(slots)] >= 0).any())

    def of_decode(self, row_slots: Tensor, query_start: Tensor) -> AdapterInputs:
        """For a step of one token a row: `row_slots [R]`, `query_start [R+1]` counting up."""
        rows = len(row_slots)
        gather_adapters(row_slots, query_start, self._on_device, self._rows[:rows], self._tokens[:rows])
        plan = self._plan(self._rows[:rows], self._row_plan)
        return AdapterInputs(self._memory.targets, plan, plan, self._memory.scratch, planned=True)

    def of_mixed(
        self, row_slots: Tensor, query_start: Tensor, tokens: int, extra: Tensor | None = None
    ) -> AdapterInputs:
        """For a ragged step of `tokens` tokens; its rows beyond attention are the rows' last tokens, then `extra`."""
        rows, total = len(row_slots), len(row_slots) + (0 if extra is None else len(extra))
        gather_adapters(row_slots, query_start, self._on_device, self._rows[:rows], self._tokens[:tokens])
        if extra is not None:
            self._rows[rows:total] = self._tokens[extra]
        by_token = self._plan(self._tokens[:tokens], self._token_plan)
        by_row = self._plan(self._rows[:total], self._row_plan)
        return AdapterInputs(self._memory.targets, by_token, by_row, self._memory.scratch, planned=True)

    def of_rows(self, rows: int) -> AdapterInputs:
        """For the output head over the first `rows` rows of the newest step, where its plan has more."""
        plan = self._plan(self._rows[:rows], self._row_plan)
        return AdapterInputs(self._memory.targets, plan, plan, self._memory.scratch)

    def of_sequence(self, slot: int, rows: int) -> AdapterInputs | None:
        """For the output head over `rows` rows of the sequence in `slot`; None where it has no adapter."""
        if self._of_slot[slot] < 0:
            return None
        self._rows[:rows] = int(self._of_slot[slot])
        return self.of_rows(rows)

    def _plan(self, adapters: Tensor, room: LoraPlan) -> LoraPlan:
        plan = room.of(adapters, self._memory.slots)
        group_tokens(adapters, self._memory.slots, plan)
        return plan
