"""The body of a step on the device: gather by slot → forward → logits → sample → scatter back.

A step with constrained rows (mode `MASKED`) ends at its logits; `choose` is its second half, run once masks are there.

Invariants: reads and writes buffers that are allocated once; it neither waits for the device nor depends on values
there, so a CUDA graph may capture it for a padded shape. Padded rows and tokens change nothing.
Knows nothing of batches, uploads or read-back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from stoker_kernels.attention import attention_workspace
from stoker_kernels.ragged import prepare_ragged
from stoker_kernels.recurrence import DraftRows
from stoker_kernels.slots import commit_tokens, prepare_decode
from stoker_runtime.adapters.step import AdapterStep
from stoker_runtime.config import EngineConfig
from stoker_runtime.executor.arena import kept_by_layer, state_arena
from stoker_runtime.executor.drafts.head import HeadDrafter
from stoker_runtime.executor.drafts.model import Drafter
from stoker_runtime.executor.drafts.speculation import SpeculationState
from stoker_runtime.executor.graphs.step_shape import StepShape
from stoker_runtime.executor.images.show import ImageSteps
from stoker_runtime.executor.prefix.steps import SharedSteps
from stoker_runtime.executor.resolve import sampled_rows
from stoker_runtime.executor.state import RaggedBuffers, Staging, allocate_slots, allocate_tables
from stoker_runtime.executor.states.drafted import DraftedStates
from stoker_runtime.executor.step_tapes import StepTapes
from stoker_runtime.executor.windows.layout import kv_layout
from stoker_runtime.executor.windows.tables import NearTables
from stoker_runtime.models.attention_plan import AttentionPlanner
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.models.inputs import AdapterInputs, ForwardInputs
from stoker_runtime.sampling.modes import MASKED
from stoker_runtime.sampling.sampler import Sampler
from stoker_runtime.step.batch import Batch


class StepBody:
    """Buffers of the largest step, and three bodies: pure decode, decode with drafts, ragged with prefill chunks."""

    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        arena: torch.Tensor,
        device: torch.device,
        make_sampler: Callable[[int, int, torch.device], Sampler] = Sampler,
        adapters: AdapterStep | None = None,
        drafter: Drafter | None = None,
        images: ImageSteps | None = None,
    ) -> None:
        """`adapters`: None where the engine serves none; `drafter`: None where no model drafts; `images`: None for a
        model that sees none.
        """
        spec = decoder.spec
        rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
        self.decoder = decoder
        self.adapters, self.images = adapters, images
        self.page_size = config.page_size
        self.states = state_arena(rows + config.num_state_snapshots, spec, decoder.dtype, device)
        self._drafted: DraftedStates | None = None
        if self.states and config.drafting is not None:
            self._drafted = DraftedStates(config, spec, decoder.dtype, self.states)
        self.kept = self.states + (self._drafted.tensors if self._drafted else ())
        layout = kv_layout(config, spec)
        self.kv = kept_by_layer(spec, [arena[place] for _, place in layout.places], self.kept)
        self.page_tables = allocate_tables(layout.tables, rows, -(-config.max_model_len // config.page_size), device)
        self.slots = allocate_slots(rows, self.page_tables[0])
        self.ragged = RaggedBuffers.allocate(rows, tokens, device)
        self.sampler = make_sampler(rows, spec.vocab, device)
        self.row_slots = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.ring = torch.zeros(rows, dtype=torch.int32, device=device)
        # One for all steps: each is done with it before the next one writes it, and graphs keep no memory of their own.
        most = sampled_rows(config)
        scored = decoder.weights.logits_dtype(decoder.dtype) if config.ranks == 1 else decoder.dtype
        self._logits = torch.empty((most, spec.vocab), dtype=scored, device=device)
        workspace = attention_workspace(most, spec.heads, spec.attended_dim, device)
        table, kv_dtype = self.slots.page_table, arena.dtype
        self._planner = AttentionPlanner(spec, decoder.dtype, kv_dtype, table, config.max_model_len, workspace)
        self.sharing = SharedSteps(config, spec, (decoder.dtype, kv_dtype), device, Staging(1, device).upload)
        self.near: NearTables | None = None
        if layout.sight is not None:
            dtypes, tables = (decoder.dtype, kv_dtype), self.page_tables[1:]
            self.near = NearTables(layout, spec, dtypes, tables, tokens, config.max_model_len, workspace)
        self._arange = torch.arange(most + 1, dtype=torch.int32, device=device)
        drafting = config.drafting
        self.speculation = SpeculationState(config, drafting, device, drafter) if drafting is not None else None
        self._head = drafter if isinstance(drafter, HeadDrafter) else None
        self._parted = config.tensor_parallel_size > 1
        self._ones = torch.ones(rows, dtype=torch.int32, device=device)
        self.tapes = StepTapes(device, enabled=not config.enforce_eager and config.ranks == 1 and self._head is None)

    def logits_room(self, rows: int) -> torch.Tensor:
        """New memory for the logits of `rows` rows, in the type of the steps' own."""
        return self._logits.new_empty((rows, self._logits.shape[1]))

    def wanted(self, shape: StepShape, slots: Sequence[int]) -> StepShape:
        """`shape` as the sampled `slots` want it: log-probabilities take all logits in one place."""
        parted = self._parted and not shape.whole
        return replace(shape, scored=True) if parted and self.sampler.logprob_slots(slots) else shape

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Let steps run the layers that launch all there is to launch, and no others: for a rehearsal."""
        decoder, kv = self.decoder, self.kv
        layers = decoder.unlike_layers()
        self.decoder, self.kv = decoder.of_layers(layers), [kv[index] for index in layers]
        try:
            with nullcontext() if self.near is None else self.near.few_layers(layers):
                yield
        finally:
            self.decoder, self.kv = decoder, kv

    def __call__(self, shape: StepShape) -> torch.Tensor:
        """Run the step whose description lies in `row_slots` or `ragged.packed`.

        Returns its logits `[rows, V]`, or this rank's part, which the next step overwrites.
        """
        if shape.drafts:
            return self.verify(shape)
        if shape.prefills == 0:
            return self.decode(shape)
        return self.mixed(shape, shape.tokens)[0]

    def decode(self, shape: StepShape) -> torch.Tensor:
        """One token for each row of `row_slots`."""
        rows = shape.rows
        row_slots, out = self.row_slots[:rows], self.ragged.outputs(rows, rows)
        prepare_decode(
            row_slots,
            self.slots.last_token,
            self.slots.position,
            self.slots.page_table,
            self.page_size,
            ids_out=out.ids,
            positions_out=out.positions,
            slot_mapping_out=out.slot_mapping,
            seq_lens_out=out.seq_lens,
        )
        starts = self._arange[: rows + 1]
        prefix = self.sharing.space if shape.shared else None
        meta = self._planner.plan(
            row_slots, starts, out.seq_lens, decodes=rows, tokens=rows, max_query_len=1, prefix=prefix
        )
        adapters = None
        if shape.adapters and self.adapters is not None:
            adapters = self.adapters.of_decode(row_slots, starts)
        rotation = None if self.images is None else self.images.rotation(row_slots, out.positions)
        inputs = ForwardInputs(out.ids, out.positions, out.slot_mapping, meta, None, adapters, rotation=rotation)
        if self.near is not None:
            inputs = replace(inputs, pages=self.near.of_decode(row_slots, self.slots, self.page_size, out, meta))
        logits = self._scored(inputs, shape)
        if shape.mode != MASKED:
            self.choose(shape, logits)
        return logits

    def verify(self, shape: StepShape) -> torch.Tensor:
        """The last token of each row of `row_slots`, and what is drafted behind it, as rows that decode one token each.

        Returns their logits `[(drafts + 1) · rows, V]`, or this rank's part, all last tokens first.
        """
        assert self.speculation is not None, "a step verifies drafts where nothing is drafted"
        wide, row_slots = shape.total_tokens, self.row_slots[: shape.rows]
        out = self.speculation.propose(
            row_slots, shape.drafts, self.slots, self.page_size, self.sampler, shape.mode
        )
        starts = self._arange[: wide + 1]
        meta = self._planner.plan(
            out.slots, starts, out.seq_lens, decodes=wide, tokens=wide, max_query_len=1, fresh=shape.drafts + 1
        )
        adapters = None
        if shape.adapters and self.adapters is not None:
            adapters = self.adapters.of_decode(out.slots, starts)
        drafts = DraftRows(row_slots, out.seq_lens, shape.drafts + 1) if self._drafted is not None else None
        rotation = None if self.images is None else self.images.rotation(out.slots, out.positions)
        inputs = ForwardInputs(
            out.ids, out.positions, out.slot_mapping, meta, None, adapters, drafts=drafts, rotation=rotation
        )
        logits = self._scored(inputs, shape)
        if self._head is not None:
            self._head.settle(out, self.slots)
        if shape.mode != MASKED:
            self.choose(shape, logits)
        return logits

    def mixed(
        self,
        shape: StepShape,
        max_query_len: int,
        extra_rows: torch.Tensor | None = None,
        showing: Batch | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decodes and prefill chunks together; `max_query_len` bounds the chunks. `showing`: a step that has images.

        Returns the logits of the rows' last tokens `[rows, V]`, or this rank's part, and the hidden states of
        `extra_rows` (tokens).
        """
        rows, tokens = shape.rows, shape.total_tokens
        packed, out = self.ragged.rows(rows, tokens), self.ragged.outputs(rows, tokens)
        prepare_ragged(packed, self.slots, self.page_size, shape.decodes, out)
        meta = self._planner.plan(
            packed.row_slots, packed.query_start, out.seq_lens,
            decodes=shape.decodes, tokens=tokens, max_query_len=max_query_len,
        )  # fmt: skip
        wanted = out.logits_rows if extra_rows is None else torch.cat((out.logits_rows, extra_rows))
        adapters = None
        if shape.adapters and self.adapters is not None:
            adapters = self.adapters.of_mixed(packed.row_slots, packed.query_start, tokens, extra_rows)
        rotation, shown, spans = None, None, None
        if self.images is not None:
            rotation = self.images.rotation_of_rows(packed.row_slots, packed.query_start, out.positions)
            if showing is not None:
                rotation = self.images.rotation_among_images(showing, rotation, self.decoder.rotary_table)
                shown, spans = self.images.shown(showing), self.images.spans(showing)
        inputs = ForwardInputs(
            out.ids, out.positions, out.slot_mapping, meta, wanted, adapters,
            rotation=rotation, images=shown, spans=spans,
        )  # fmt: skip
        if self.near is not None:
            inputs = replace(inputs, pages=self.near.of_mixed(packed, self.slots, self.page_size, out, meta))
        hidden = self._forward(inputs)
        if adapters is not None and self.adapters is not None and extra_rows is not None:
            adapters = self.adapters.of_rows(rows)
        logits = self._logits_of(hidden[:rows], shape, adapters)
        if shape.mode != MASKED:
            self.choose(shape, logits)
        return logits, hidden[rows:]

    def _scored(self, inputs: ForwardInputs, shape: StepShape) -> torch.Tensor:
        """The logits of all tokens."""
        return self.tapes.run(inputs, lambda: self._logits_of(self._forward(inputs), shape, inputs.adapters))

    def _logits_of(self, hidden: torch.Tensor, shape: StepShape, adapters: AdapterInputs | None) -> torch.Tensor:
        """The logits of `hidden [S, H]`, or this rank's part, in the memory that rests."""
        make = self.decoder.logits if shape.whole else self.decoder.own_logits
        return make(hidden, self._logits[: len(hidden)], adapters)

    def _forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """The model's pass; a head that drafts from its states keeps them."""
        if self._head is None:
            return self.decoder.forward(inputs, self.kv)
        return self._head.run_model(self.decoder, inputs, self.kv)

    def catch_up(self, shape: StepShape, longest: int) -> None:
        """Have the draft model compute the chunks that `ragged.packed` describes; none has more than `longest`."""
        assert self.speculation is not None, "nothing is drafted"
        assert self.speculation.drafter is not None, "no model drafts"
        rows, tokens = shape.rows, shape.total_tokens
        out = self.ragged.outputs(rows, tokens)
        self.speculation.drafter.catch_up(self.ragged.rows(rows, tokens), self.slots, longest, out)

    def choose(self, shape: StepShape, logits: torch.Tensor) -> None:
        """Sample a token for each row of the step that gave `logits`, with drafts several; scatter it to its slot."""
        rows, tokens, slots = shape.rows, shape.total_tokens, self.slots
        sampler = self.sampler if shape.whole else self.sampler.of_part
        if shape.drafts and self.speculation is not None:
            row_slots = self.row_slots[:rows]
            self.speculation.choose(logits, row_slots, shape.drafts, slots, sampler, shape.mode)
            if self._drafted is not None:
                self._drafted.settle(row_slots, self.speculation.results(rows, shape.drafts)[:, 0])
            return
        if shape.prefills == 0:
            row_slots, advance = self.row_slots[:rows], self._ones[:rows]
            sampled_slots, positions = row_slots, self.ragged.positions[:rows]
        else:
            out = self.ragged.outputs(rows, tokens)
            row_slots, advance = self.ragged.rows(rows, tokens).row_slots, out.advance
            # Rows that end within their prompt sample nothing: a token of theirs must not count for penalties.
            sampled_slots = self.ragged.sampled_slots(rows, tokens)
            positions = out.positions.index_select(0, out.logits_rows)
        sampled = sampler(logits, sampled_slots, positions, shape.mode)
        commit_tokens(row_slots, sampled, slots.position, slots.last_token, self.ring[:rows], advance)
        if self.speculation is not None:
            self.speculation.record(sampled_slots, slots)

    def quiesce(self, shape: StepShape) -> None:
        """Make a run of `shape` harmless: every row is padding."""
        if shape.prefills == 0:
            self.row_slots.fill_(-1)
            return
        rows = self.ragged.rows(shape.rows, shape.total_tokens)
        rows.row_slots.fill_(-1)
        self.ragged.sampled_slots(shape.rows, shape.total_tokens).fill_(-1)
        rows.query_start.copy_(self._arange[: shape.rows + 1].clamp(max=shape.decodes))
