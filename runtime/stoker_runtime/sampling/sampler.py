"""Chooses the next token of each row on the device, from parameters that rest there by slot.

Invariants: which way a batch takes (one of `MODES`) depends on the parameters of its slots
alone, never on values on the device, so each way can be captured in a graph. A slot that is plainly greedy costs no
upload as long as the row that the device holds for it is plainly greedy too.
A batch with masked slots is `MASKED`: it needs the masks of its rows in `masks`, and nothing else is new in it.
Knows nothing of text, of grammars or of stop conditions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stoker_kernels.sampling import (
    FOREVER,
    SamplingState,
    SlotSampling,
    apply_slot_sampling,
    argmax,
    pack_slot_sampling,
    sample,
    typical_mask,
)
from stoker_runtime.sampling.masks import ALL, TokenMasks
from stoker_runtime.sampling.modes import ADJUST, GREEDY, MASKED, MODES, SAMPLE, TYPICAL
from stoker_runtime.step.batch import SlotAssign


class Sampler:
    """Per-slot sampling parameters and the five ways through them."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self.mode = GREEDY
        self.masks = TokenMasks(slots, vocab, device)
        self._device = device
        self._vocab = vocab
        self._state = SamplingState.allocate(slots, vocab, device)
        # What each slot needs, as an index into MODES; and whether the device's row says more than "greedy".
        self._needs = np.zeros(slots, dtype=np.int8)
        self._set = np.zeros(slots, dtype=bool)
        self._typical: set[int] = set()
        self._logprobs: dict[int, int] = {}
        self._prompt_logprobs: dict[int, int] = {}

    def assign(self, assigns: Sequence[SlotAssign]) -> None:
        """New sequences took these slots: one upload for all whose row on the device changes."""
        updates = []
        for assign in assigns:
            slot, params = assign.slot, assign.params
            update = slot_sampling(assign, self._vocab)
            need = ADJUST if update.adjusted else GREEDY if params.temperature == 0.0 else SAMPLE
            self._typical.discard(slot)
            if params.typical_p < 1.0 and params.temperature > 0.0:
                need = TYPICAL
                self._typical.add(slot)
            if params.masked:
                need = MASKED
            self._needs[slot] = MODES.index(need)
            if need != GREEDY or self._set[slot]:
                updates.append(update)
                self._set[slot] = need != GREEDY
            _put(self._logprobs, slot, params.logprobs)
            _put(self._prompt_logprobs, slot, params.prompt_logprobs)
        if updates:
            packed = torch.from_numpy(pack_slot_sampling(updates, self._vocab))
            apply_slot_sampling(packed.to(self._device, non_blocking=True), len(updates), self._state)

    def logprob_slots(self, slots: Sequence[int]) -> list[int]:
        """Indices into `slots` of those that want log-probabilities of their sampled tokens."""
        if not self._logprobs:
            return []
        return [index for index, slot in enumerate(slots) if slot in self._logprobs]

    def logprobs(self, slot: int) -> int:
        """How many alternatives the sequence in `slot` wants beside its sampled token."""
        return self._logprobs[slot]

    def prompt_logprobs(self, slot: int) -> int:
        """The same for its prompt tokens; 0 where none are wanted."""
        return self._prompt_logprobs.get(slot, 0)

    def mode_of(self, slots: Sequence[int]) -> str:
        """The way a batch of these slots takes: that of its most demanding member."""
        return MODES[int(self._needs[list(slots)].max(initial=0))]

    def select(self, slots: Sequence[int]) -> None:
        """Remember the way for the following steps of unchanged membership."""
        self.mode = self.mode_of(slots)

    def __call__(self, logits: Tensor, row_slots: Tensor, positions: Tensor, mode: str) -> Tensor:
        """Tokens `[R]` int32 for `logits [R, V]`; `positions [R]` is each row's last computed position."""
        if mode == GREEDY:
            return argmax(logits)
        bitmask = None
        if mode in (TYPICAL, MASKED):
            bitmask = self.masks.rows(len(logits))
            if mode == TYPICAL:
                bitmask.fill_(ALL)
            if self._typical:
                typical_mask(logits, self._state, row_slots, positions, bitmask)
        return sample(logits, self._state, row_slots, positions, adjust=mode not in (GREEDY, SAMPLE), bitmask=bitmask)

    def of_part(self, own: Tensor, row_slots: Tensor, positions: Tensor, mode: str) -> Tensor:
        """The same by all ranks, in a mode of `BY_ALL`, from what `Decoder.own_logits` gives."""
        return self(own, row_slots, positions, mode)

    def rehearse(self, logits: Tensor, row_slots: Tensor, positions: Tensor) -> None:
        """Take every way through at once, and set a slot, whatever the slots ask for: for a rehearsal."""
        argmax(logits)
        bitmask = self.masks.rows(len(logits))
        typical_mask(logits, self._state, row_slots, positions, bitmask)
        for adjust, mask in ((False, None), (True, None), (True, bitmask)):
            sample(logits, self._state, row_slots, positions, adjust=adjust, bitmask=mask)
        packed = torch.from_numpy(pack_slot_sampling([SlotSampling(0, temperature=1.0)], self._vocab))
        apply_slot_sampling(packed.to(self._device), 1, self._state)


def slot_sampling(assign: SlotAssign, vocab: int) -> SlotSampling:
    """What the device has to know of a sequence's parameters.

    Until `min_tokens` are out, the ids that would end the sequence are impossible, and so are bad tokens at any time.
    Under a mask that is for the mask to say, which knows when nothing else is left.
    """
    params = assign.params
    suppressed = () if params.masked else assign.stop_token_ids
    bad = () if params.masked else tuple((token, -math.inf) for token in params.bad_tokens)
    # Device words hold 32 bits; what is beyond the longest text and the vocabulary means the same as they do.
    first_free = min(assign.prompt_length + params.min_tokens - 1, FOREVER) if params.min_tokens else 0
    return SlotSampling(
        slot=assign.slot,
        temperature=params.temperature,
        top_k=params.top_k if params.top_k < vocab else 0,
        top_p=params.top_p,
        min_p=params.min_p,
        typical_p=params.typical_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        seed=assign.seed,
        bias=params.logit_bias + bad,
        suppressed=suppressed,
        suppress_until=first_free,
        prompt=assign.history[: assign.prompt_length],
        output=assign.history[assign.prompt_length :],
    )


def _put(table: dict[int, int], slot: int, value: int | None) -> None:
    """Set or clear one slot's entry; slots are reused."""
    if value is None:
        table.pop(slot, None)
    else:
        table[slot] = value
