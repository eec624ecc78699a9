"""What verifying drafts needs on the device: the tokens of each slot, the description of the step, what it gave.

    1. propose: drafts from the slot's own tokens or by a second model, then k + 1 rows of one token a sequence
    2. (forward and logits, as of any decode)
    3. choose: a token for each row; drafts that are those tokens are accepted, position and last token move on

Invariants: allocated once; nothing waits for the device or depends on values there, so a CUDA graph may capture it.
Knows nothing of batches, and of who decides about caps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stoker_kernels.drafts import (
    HEADER,
    Matching,
    VerifyOutputs,
    accept_drafts,
    expand_drafts,
    follow_drafts,
    match_drafts,
    record_tokens,
)
from stoker_kernels.ragged import SlotTensors
from stoker_runtime.config import EngineConfig
from stoker_runtime.drafts.settings import Drafting
from stoker_runtime.executor.drafts.model import Drafter
from stoker_runtime.sampling.modes import GREEDY
from stoker_runtime.sampling.sampler import Sampler
from stoker_runtime.step.batch import SlotAssign

Sample = Callable[[Tensor, Tensor, Tensor, str], Tensor]
"""A `Sampler`, or its `of_part`."""


class SpeculationState:
    """The buffers of verifications of up to `wide` rows of one token, and of `k` drafts each."""

    def __init__(
        self, config: EngineConfig, drafting: Drafting, device: torch.device, drafter: Drafter | None = None
    ) -> None:
        """`drafter` is the model that drafts, where one does."""
        slots, k = config.max_num_seqs, drafting.tokens
        self.wide = wide = drafting.verify_tokens(slots, config.max_num_batched_tokens)

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.drafter = drafter
        self.rules = Matching(drafting.least, drafting.match, drafting.factor, drafting.share)
        self.history = buffer(slots, config.max_model_len)
        self.caps = buffer(slots)
        self.ring = buffer(slots * (HEADER + k + 1))
        self.sampled = buffer(wide)
        self._drafts = buffer(slots * k)
        self._alive = (buffer(slots), buffer(slots))
        self._column_positions = buffer(slots)
        self._slots, self._ids = buffer(wide), buffer(wide)
        self._positions, self._seq_lens = buffer(wide), buffer(wide)
        self._slot_mapping = buffer(wide, dtype=torch.int64)

    @staticmethod
    def nbytes(config: EngineConfig) -> int:
        """Bytes that rest on the device; 0 where nothing is drafted."""
        drafting = config.drafting
        if drafting is None:
            return 0
        slots, k = config.max_num_seqs, drafting.tokens
        wide = drafting.verify_tokens(slots, config.max_num_batched_tokens)
        return 4 * slots * (config.max_model_len + 2 * k + HEADER + 5) + 28 * wide

    def assign(self, assigns: Sequence[SlotAssign]) -> None:
        """New sequences took these slots: what is known of their tokens."""
        pin = self.history.device.type == "cuda"
        for each in assigns:
            known = torch.tensor(each.history[: self.history.shape[1]], dtype=torch.int32)
            known = known.pin_memory() if pin else known
            self.history[each.slot, : len(known)].copy_(known, non_blocking=True)

    def record(self, row_slots: Tensor, slots: SlotTensors) -> None:
        """After a step of one token a row."""
        record_tokens(row_slots, slots.position, slots.last_token, self.history)

    def drafts(self, rows: int, k: int) -> Tensor:
        """`[k, rows]` drafts of a step."""
        return self._drafts[: k * rows].view(k, rows)

    def results(self, rows: int, k: int) -> Tensor:
        """`[rows, HEADER + k + 1]` what a step gave, for the host to read."""
        width = HEADER + k + 1
        return self.ring[: rows * width].view(rows, width)

    def outputs(self, wide: int) -> VerifyOutputs:
        """Views of the description of a step of `wide` rows of one token."""
        return VerifyOutputs(
            self._slots[:wide], self._ids[:wide], self._positions[:wide], self._seq_lens[:wide],
            self._slot_mapping[:wide],
        )  # fmt: skip

    def propose(
        self, row_slots: Tensor, k: int, slots: SlotTensors, page_size: int, sampler: Sampler, mode: str
    ) -> VerifyOutputs:
        """Draft up to `k` tokens for each row and describe the step that runs them."""
        rows = len(row_slots)
        drafts, out, caps = self.drafts(rows, k), self.outputs((k + 1) * rows), self.caps[:rows]
        if self.drafter is not None:
            self.drafter.draft(row_slots, caps, slots, self.history, sampler, mode, scratch=out, out=drafts)
        else:
            match_drafts(row_slots, caps, slots.position, self.history, self.rules, out=drafts)
        expand_drafts(row_slots, drafts, slots.last_token, slots.position, slots.page_table, page_size, out=out)
        return out

    def choose(
        self, logits: Tensor, row_slots: Tensor, k: int, slots: SlotTensors, sampler: Sample, mode: str
    ) -> None:
        """Sample each row's tokens from `logits [(k+1)·rows, V]`, or a rank's part, and take over those that count."""
        rows = len(row_slots)
        drafts, sampled = self.drafts(rows, k), self.sampled[: (k + 1) * rows].view(k + 1, rows)
        if mode == GREEDY:
            positions = self._positions[: (k + 1) * rows]
            sampled.view(-1).copy_(sampler(logits, self._slots[: (k + 1) * rows], positions, mode))
        else:
            self._sample_in_turn(logits, row_slots, sampled, drafts, sampler, mode)
        accept_drafts(
            row_slots, sampled, drafts, slots.position, slots.last_token, self.history, out=self.results(rows, k)
        )

    def _sample_in_turn(
        self, logits: Tensor, row_slots: Tensor, sampled: Tensor, drafts: Tensor, sampler: Sample, mode: str
    ) -> None:
        """One column after the other: penalties count the tokens before, and those alone that are accepted."""
        k, rows = drafts.shape
        alive, positions = row_slots, self._column_positions[:rows]
        # Kernels are compiled for tensors that begin at 16 bytes, which a column in the middle may not do.
        aligned = rows * logits.shape[1] * logits.element_size() % 16 == 0
        for column in range(k + 1):
            part = slice(column * rows, (column + 1) * rows)
            positions.copy_(self._positions[part])
            mine = logits[part] if aligned else logits[part].clone()
            sampled[column] = sampler(mine, alive, positions, mode)
            if column < k:
                following = self._alive[column % 2][:rows]
                follow_drafts(alive, sampled[column], drafts[column], out=following)
                alive = following
