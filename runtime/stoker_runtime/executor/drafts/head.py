"""A head that drafts from the model's own hidden states (EAGLE-3, MTP), on the device.

    every step      the model leaves its states, one a token, in pages of their own under its pages' numbers
    drafting, 0     the last two tokens of each row, each beside the state before it → draft 0, and a state for it
    drafting, 1 …   draft 0 beside that state                                        → draft 1, and a state for it
    verified        all tokens of the step once more, beside the states that the model has made of them

So keys and values are those of the model's states for all that was accepted, however many there were, and of the
head's own states never longer than a step. What a head lacks of a sequence, because steps went by without drafts, is
computed from the states that are kept (`catch_up`): prompts and plain steps run no more than what makes these.

Drafts are drawn as those of `model.py`, over the model's vocabulary: tokens without a row in the head are impossible.

Invariants: those of `Drafter`.
Knows nothing of batches, of what was accepted, and of penalties or grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stoker_kernels.drafts import VerifyOutputs
from stoker_kernels.ragged import RaggedOutputs, RaggedRows, SlotTensors
from stoker_runtime.executor.arena import zeroed
from stoker_runtime.executor.drafts.model import Drafter, first_rows
from stoker_runtime.executor.drafts.pairs import chunks_back, step_back
from stoker_runtime.executor.drafts.plan import DraftHead
from stoker_runtime.executor.resolve import sampled_rows
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.models.draft_heads.decoder import HeadDecoder, NextDecoder
from stoker_runtime.models.inputs import ForwardInputs, StateTaps
from stoker_runtime.step.batch import PrefillChunk


class HeadDrafter(Drafter):
    """The head, its KV pages, the states, and what its passes need besides."""

    decoder_kind: type[HeadDecoder] = HeadDecoder

    def __init__(
        self,
        model: DraftHead,
        weights: DecoderWeights,
        target: Decoder,
        pages: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`pages` are as many as those of `target`, the model."""
        config, spec = model.config, model.head
        self._head = self.decoder_kind(spec, weights, target, device, dtype, max_model_len=config.max_model_len)
        super().__init__(model, self._head, pages, device, dtype)
        rows, tokens = sampled_rows(config), config.max_num_batched_tokens
        # One page more than there are: what belongs to nobody goes there.
        states = zeroed((1, 1, pages + 1, 1, config.page_size, spec.hidden), dtype, device)
        self._states = states.view(-1, spec.hidden)
        self._nowhere = pages * config.page_size
        self._tapped = spec.taps
        self.state_pages = states[:, :, :pages]
        self._taken = torch.zeros((tokens, len(spec.taps) * spec.state), dtype=dtype, device=device)
        self._ids = None if model.ids is None else model.ids.to(device)
        self._logits.fill_(-torch.inf)
        self._few = torch.empty((rows, spec.drafted), dtype=dtype, device=device) if self._ids is not None else None
        ints = [torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(4)]
        slots, ids, positions, seq_lens = ints
        mapping = torch.zeros(rows, dtype=torch.int64, device=device)
        self._pairs = VerifyOutputs(slots, ids, positions, seq_lens, mapping)

    @property
    def arenas(self) -> tuple[Tensor, ...]:
        """Keys and values, and states."""
        return (self.arena, self.state_pages)

    def run_model(self, decoder: Decoder, inputs: ForwardInputs, kv: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """The model's own pass, as `Decoder.forward`; what the head reads of it is kept."""
        taps = StateTaps(self._tapped, self._taken[: len(inputs.ids)])
        hidden = decoder.forward(replace(inputs, taps=taps), kv)
        self._keep(self._head.fuse(taps.states), inputs.slot_mapping)
        return hidden

    def _keep(self, states: Tensor, slot_mapping: Tensor) -> None:
        """Keep states `[T, H]` at the places of their tokens `[T]` int64; below 0 is padding."""
        self._states.index_copy_(0, torch.where(slot_mapping < 0, self._nowhere, slot_mapping), states)

    def described(self, chunks: Sequence[PrefillChunk]) -> tuple[PrefillChunk, ...]:
        """Chunks as `catch_up` takes them."""
        return chunks_back(chunks)

    def settle(self, step: VerifyOutputs, slots: SlotTensors) -> None:
        """Once the model has run the rows of `step`, run them again beside the states that it made."""
        self._pass(step, slots, None, self._rows[:1])

    def catch_up(self, rows: RaggedRows, slots: SlotTensors, longest: int, out: RaggedOutputs) -> None:
        """As `Drafter.catch_up`, of chunks that `described` made."""
        inputs = self._describe(rows, slots, longest, out)
        self._head.forward_pairs(inputs, self._at(out.slot_mapping), self._kv)

    def _pass(
        self, step: VerifyOutputs, slots: SlotTensors, beside: Tensor | None, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """As `Drafter._pass`, beside states or, where there are none, those that are kept."""
        pairs = first_rows(self._pairs, len(step.ids))
        step_back(step, slots.page_table, self._page_size, out=pairs)
        meta = self._of_single_tokens(pairs, slots)
        states = self._at(pairs.slot_mapping) if beside is None else beside
        inputs = ForwardInputs(step.ids, pairs.positions, pairs.slot_mapping, meta, wanted)
        return self._head.forward_pairs(inputs, states, self._kv)

    def _at(self, slot_mapping: Tensor) -> Tensor:
        return self._states.index_select(0, slot_mapping.clamp_min(0))

    def _over_all(self, last: Tensor) -> Tensor:
        """Logits over the model's vocabulary."""
        everything = self._logits[: len(last)]
        if self._few is None or self._ids is None:
            return self._head.logits(last, everything)
        return everything.index_copy_(1, self._ids, self._head.logits(last, self._few[: len(last)]))


class NextDrafter(HeadDrafter):
    """A model's own layer for the token after the next: it reads the state that the model's output head reads, too."""

    decoder_kind = NextDecoder

    def run_model(self, decoder: Decoder, inputs: ForwardInputs, kv: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """As `HeadDrafter.run_model`; of the last layer all tokens go beyond attention."""
        hidden = decoder.forward(replace(inputs, logits_rows=None), kv)
        self._keep(hidden, inputs.slot_mapping)
        return hidden if inputs.logits_rows is None else hidden.index_select(0, inputs.logits_rows)
