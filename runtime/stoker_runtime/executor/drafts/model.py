"""A second model that drafts, on the device: a chain of passes whose tokens the first model verifies in the same step.

    0    the last two tokens of each row → draft 0
    1    draft 0                         → draft 1
    …

The chain is part of the verification's graph; no draft crosses to the host. What a row's draft model lacks of the
tokens before, because steps went by without drafts, is computed before: `catch_up`.

A draft is drawn from the draft model's distribution by the row's own temperature, seed and position, at the very point
at which the model's own token is drawn: where the two distributions agree the tokens do, too. It is verified as if it
were certain of itself, so the text is the one of plain decoding, whatever is drafted.

Invariants: allocated once; nothing waits for the device or depends on values there, so a CUDA graph may capture a
chain. Rows write to pages of their own, at positions below those that they may draft up to.
Knows nothing of batches, of what was accepted, and of penalties or grammars.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker_kernels.attention import AttentionMeta, attention_workspace
from stoker_kernels.drafts import VerifyOutputs, describe_draft
from stoker_kernels.ragged import RaggedOutputs, RaggedRows, SlotTensors, prepare_ragged
from stoker_runtime.executor.arena import kv_arena
from stoker_runtime.executor.drafts.plan import DraftModel
from stoker_runtime.executor.resolve import sampled_rows
from stoker_runtime.models.attention_plan import AttentionPlanner
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.models.inputs import ForwardInputs
from stoker_runtime.sampling.modes import GREEDY, SAMPLE
from stoker_runtime.sampling.sampler import Sampler
from stoker_runtime.step.batch import PrefillChunk


class Drafter:
    """The draft model, its KV pages and what its passes need besides."""

    def __init__(
        self, model: DraftModel, decoder: Decoder, pages: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`decoder` runs `model`; `pages` are as many as the first model's."""
        config, spec = model.config, model.spec
        self.model = model
        self.decoder = decoder
        self.arena = kv_arena(config, spec, pages, device)
        self._kv = [tuple(layer) for layer in self.arena]
        assert config.drafting is not None, "a model drafts where nothing is drafted"
        self._most = 1 + config.drafting.tokens  # rows that a sequence has in a pass
        self._page_size = config.page_size
        self._max_model_len = config.max_model_len
        rows = sampled_rows(config)
        self._logits = torch.empty((rows, spec.vocab), dtype=dtype, device=device)
        self._workspace = attention_workspace(rows, spec.heads, spec.attended_dim, device)
        self._arange = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(rows, dtype=torch.int64, device=device)
        # Where a chunk begins is written here: the slots' own positions are the first model's.
        self._starts = torch.zeros(config.max_num_seqs, dtype=torch.int32, device=device)
        self._planner: AttentionPlanner | None = None

    @property
    def arenas(self) -> tuple[Tensor, ...]:
        """All that it keeps by pages, whose numbers are the first model's."""
        return (self.arena,)

    def described(self, chunks: Sequence[PrefillChunk]) -> tuple[PrefillChunk, ...]:
        """Chunks of known tokens as `catch_up` takes them."""
        return tuple(chunks)

    def draft(
        self,
        row_slots: Tensor,
        caps: Tensor,
        slots: SlotTensors,
        history: Tensor,
        sampler: Sampler,
        mode: str,
        *,
        scratch: VerifyOutputs,
        out: Tensor,
    ) -> None:
        """Fill `out [k, R]` int32 with drafts, of each row up to its cap and −1 behind them.

        `scratch` are buffers of at least 2 · R rows that are free for now.
        """
        rows = len(row_slots)
        beside: Tensor | None = None
        for at, drafts in enumerate(out):
            step = first_rows(scratch, rows if at else 2 * rows)
            describe_draft(
                row_slots, caps, out, at, slots.position, history, slots.page_table, self._page_size, out=step
            )
            last, beside = self._pass(step, slots, beside, None if at else self._rows[:rows])
            # What else has a say in a token is left to the first model: penalties count nothing here.
            way = GREEDY if mode == GREEDY else SAMPLE
            drafts.copy_(sampler(self._over_all(last), row_slots, step.positions[:rows], way))
            drafts.masked_fill_(caps <= at, -1)

    def _pass(
        self, step: VerifyOutputs, slots: SlotTensors, beside: Tensor | None, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """One pass over the tokens of `step` → states of the `wanted` rows, and what the next pass runs `beside`."""
        meta = self._of_single_tokens(step, slots)
        inputs = ForwardInputs(step.ids, step.positions, step.slot_mapping, meta, wanted)
        return self.decoder.forward(inputs, self._kv), None

    def _over_all(self, last: Tensor) -> Tensor:
        """Logits over the model's vocabulary."""
        return self.decoder.logits(last, self._logits[: len(last)])

    def _of_single_tokens(self, step: VerifyOutputs, slots: SlotTensors) -> AttentionMeta:
        """What attention is told of rows of a token each."""
        wide = len(step.ids)
        return self._planned(slots).plan(
            step.slots, self._arange[: wide + 1], step.seq_lens, decodes=wide, tokens=wide, max_query_len=1,
            fresh=self._most,
        )  # fmt: skip

    def catch_up(self, rows: RaggedRows, slots: SlotTensors, longest: int, out: RaggedOutputs) -> None:
        """Compute chunks of known tokens, whose packed description is in `rows`; none has more than `longest`."""
        self.decoder.forward(self._describe(rows, slots, longest, out), self._kv)

    def _describe(self, rows: RaggedRows, slots: SlotTensors, longest: int, out: RaggedOutputs) -> ForwardInputs:
        state = SlotTensors(slots.last_token, self._starts, slots.page_table)
        prepare_ragged(rows, state, self._page_size, 0, out)
        meta = self._planned(slots).plan(
            rows.row_slots, rows.query_start, out.seq_lens, decodes=0, tokens=len(out.ids), max_query_len=longest
        )
        # Nobody reads what comes of it beyond keys and values: one row goes beyond the last layer's attention.
        return ForwardInputs(out.ids, out.positions, out.slot_mapping, meta, out.logits_rows[:1])

    def _planned(self, slots: SlotTensors) -> AttentionPlanner:
        if self._planner is None:
            spec, dtype = self.decoder.spec, self.decoder.dtype
            table, workspace = slots.page_table, self._workspace
            self._planner = AttentionPlanner(spec, dtype, self.arena.dtype, table, self._max_model_len, workspace)
        return self._planner


def first_rows(buffers: VerifyOutputs, wide: int) -> VerifyOutputs:
    """Views of the first `wide` rows."""
    return VerifyOutputs(
        buffers.slots[:wide], buffers.ids[:wide], buffers.positions[:wide], buffers.seq_lens[:wide],
        buffers.slot_mapping[:wide],
    )  # fmt: skip
