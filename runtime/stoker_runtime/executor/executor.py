"""One rank: runs batches on one device. The only place where a scheduler's decision meets tensors.

Invariants: everything is allocated in `__init__`, nothing grows afterwards. `execute` launches and returns; the
tokens are on the host when `Launched.result()` returns. At most two steps are in flight, read in order. A decode step
whose membership did not change uploads nothing.
Knows nothing of requests, text or why a batch is what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from stoker_kernels.pages import copy_pages
from stoker_kernels.sampling import token_logprobs
from stoker_kernels.slots import apply_updates, pack_updates
from stoker_runtime.adapters.memory import AdapterMemory
from stoker_runtime.adapters.step import AdapterStep
from stoker_runtime.config import EngineConfig
from stoker_runtime.drafts.settings import DraftCosts
from stoker_runtime.executor.arena import kv_arena, upload
from stoker_runtime.executor.cuda_graphs import StepGraphs
from stoker_runtime.executor.device import hold
from stoker_runtime.executor.drafts.model import Drafter
from stoker_runtime.executor.graphs.spare_graphs import PREPARED_MODES
from stoker_runtime.executor.graphs.step_shape import StepShape, pack_ragged, prompt_targets, sampled_rows
from stoker_runtime.executor.host_memory import NO_HOST_POOL, HostPlan
from stoker_runtime.executor.images.show import ImageSteps
from stoker_runtime.executor.kernel_names import description, kernels_in_use
from stoker_runtime.executor.launched import Launched
from stoker_runtime.executor.page_swap import PageSwap, by_page, state_swaps
from stoker_runtime.executor.rehearsal import rehearse_steps
from stoker_runtime.executor.resolve import SCORED_ROWS, MemoryPlan, step_shapes, verify_tokens
from stoker_runtime.executor.sleep import DeviceSleep
from stoker_runtime.executor.state import STAGES, Staging
from stoker_runtime.executor.states.memory import StateCopies
from stoker_runtime.executor.step import StepBody
from stoker_runtime.executor.windows.layout import kv_layout
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.models.vision.tower import Tower
from stoker_runtime.sampling.logprobs import PendingLogprobs, PendingPromptLogprobs, to_host
from stoker_runtime.sampling.modes import GREEDY, MASKED
from stoker_runtime.sampling.sampler import Sampler
from stoker_runtime.step.batch import Batch
from stoker_runtime.step.result import MaskRows

# Page-table entries one upload carries; a step that maps more (long cached prefixes) takes several.
MAX_UPDATES = 16384


class Executor:
    """Implements the engine's `Executor` protocol for one device."""

    sleep_kind: type[DeviceSleep] = DeviceSleep

    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        plan: MemoryPlan,
        device: torch.device,
        host: HostPlan = NO_HOST_POOL,
        make_sampler: Callable[[int, int, torch.device], Sampler] = Sampler,
        adapters: AdapterMemory | None = None,
        drafter: Drafter | None = None,
        images: ImageSteps | None = None,
    ) -> None:
        spec = decoder.spec
        self.config = config
        self.decoder = decoder
        self.plan = plan
        self.device = device
        self.num_pages = plan.pages
        self.host_pages, self.host_page_tokens = host.pages, host.page_tokens
        self.host_states, self.host_state_tokens = host.states.count, host.states.tokens
        self.page_size = config.page_size
        self.max_num_seqs = config.max_num_seqs
        self.max_model_len = config.max_model_len
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.eos_token_ids, self.vocab_size = spec.eos_token_ids, spec.vocab
        self.drafting = config.drafting
        self.verify_tokens = verify_tokens(config)
        self.start_seconds: dict[str, float] = {}
        layout = kv_layout(config, spec)
        self.sight = layout.sight
        self.arena = kv_arena(config, spec, plan.pages, device, layout.depth)
        self.drafter = drafter
        self.sees, self.whole_images = images is not None, images is not None and images.whole
        arenas = (self.arena,) if drafter is None else (self.arena, *drafter.arenas)
        self._pages = [by_page(arena) for arena in arenas]  # a page is one of each
        held = [arena for arena in arenas if host.pages and arena.numel()]
        self._swaps = [PageSwap(arena, replace(host, page_bytes=arena[:, :, :1].nbytes)) for arena in held]
        self.adapters = adapters
        self.sleeper: DeviceSleep | None = None
        step = AdapterStep(config, adapters, device) if adapters is not None else None
        self.body = StepBody(config, decoder, self.arena, device, make_sampler, step, drafter, images)
        self._state_copies = StateCopies(self.body.states, state_swaps(self.body.states, host.states))
        self._decodes: tuple[int, ...] = ()
        self._adapted = False
        """Whether one of `_decodes` has an adapter."""
        self._updates = torch.zeros((MAX_UPDATES, 3), dtype=torch.int32, device=device)
        self._update_staging = Staging(self._updates.numel(), device)
        self._row_staging = Staging(self.max_num_seqs, device)
        self._adapter_staging = Staging(self.max_num_seqs, device)
        self._ragged_staging = Staging(self.body.ragged.packed.numel(), device)
        pin = device.type == "cuda"
        self._host_tokens = [torch.zeros(self.max_num_seqs, dtype=torch.int32, pin_memory=pin) for _ in range(STAGES)]
        if self.body.speculation is not None:
            self._host_runs = [torch.zeros_like(self.body.speculation.ring, device="cpu") for _ in range(STAGES)]
            self._host_runs = [run.pin_memory() if pin else run for run in self._host_runs]
            self._cap_staging = Staging(self.max_num_seqs, device)
        self._caps: tuple[int, ...] = ()
        self._shapes = step_shapes(config, spec)
        self.graphs = StepGraphs(self.body, device, plan.graphs, enabled=not config.enforce_eager)
        hold(plan.workspace, device)

    @property
    def keeps_states(self) -> bool:
        """Whether sequences have states beside their pages."""
        return self.decoder.spec.recurrent is not None

    @property
    def snapshots(self) -> int:
        """States that are kept of prefixes."""
        return self.config.num_state_snapshots if self.keeps_states else 0

    @property
    def tower(self) -> Tower | None:
        """What sees images on this rank."""
        seeing = self.body.images
        return seeing.encoder.tower if seeing is not None and seeing.encoder is not None else None

    @property
    def states(self) -> tuple[torch.Tensor, ...]:
        """The states of all slots and prefixes, and what lets a step take drafts back."""
        return self.body.kept

    @property
    def draft_costs(self) -> DraftCosts | None:
        """What passes of the draft model cost; None where no model drafts."""
        return None if self.drafter is None else self.drafter.model.costs(self.decoder.spec, self.config)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Launched:
        """Launch one step: upload what changed, run the forward pass, sample, start the read-back.

        A step with constrained slots is launched up to its logits; its `sample` launches the rest.
        """
        self._apply(batch)
        if not batch.prefills:
            return self._decode(batch)
        if self.body.images is not None:
            self.body.images.follow(batch.prefills)
        if any(chunk.targets for chunk in batch.prefills):
            return self._scored_prefill(batch)
        return self._mixed(batch)

    def _apply(self, batch: Batch) -> None:
        """Page moves and copies, new slots and page-table diffs; the diffs take one upload and one kernel."""
        if batch.swap_outs or batch.swap_ins:
            assert self.host_pages, "pages move to a host pool that there is not"
            for swap in self._swaps:
                swap.move(batch.swap_outs, batch.swap_ins)
        if batch.copies:
            for pages in self._pages:
                copy_pages(pages, pages, upload(batch.copies, self.device))
        self._state_copies.run(batch)
        for adapter, slot in batch.adapter_loads:
            assert self.adapters is not None, "an adapter is loaded where there is no room for any"
            self.adapters.load(adapter, slot)
        if batch.assigns:
            self.body.sampler.assign(batch.assigns)
            if self.body.adapters is not None and self.body.adapters.assign(batch.assigns):
                self._adapter_staging.upload(self.body.adapters.values, self.body.adapters.target)
            if self.body.speculation is not None:
                self.body.speculation.assign(batch.assigns)
            # The same slots may hold other sequences now: the next decode selects its way anew.
            self._decodes = ()
        if batch.page_updates:
            self.body.sharing.follow(batch)
            rows = self.max_num_seqs  # of a table: they lie behind one another
            changed = ((each.table * rows + each.slot, each.start, each.pages) for each in batch.page_updates)
            packed = pack_updates(changed)
            slots, tables = self.body.slots, self.body.page_tables.flatten(0, 1)
            for at in range(0, len(packed), MAX_UPDATES):
                part = packed[at : at + MAX_UPDATES]
                self._update_staging.upload(part.reshape(-1), self._updates.view(-1))
                apply_updates(self._updates[: len(part)], tables, slots.position, slots.last_token)

    def _decode(self, batch: Batch) -> Launched:
        count = len(batch.decodes)
        if batch.decodes != self._decodes:
            rows = np.full(self.max_num_seqs, -1, dtype=np.int32)
            rows[:count] = batch.decodes
            self._row_staging.upload(rows, self.body.row_slots)
            self._decodes = batch.decodes
            self.body.sampler.select(batch.decodes)
            self._adapted = self._has_adapters(batch.decodes)
        if batch.catch_ups:
            self._catch_up(batch)
        if batch.drafts:
            return self._verify(batch)
        shared, mode = self.body.sharing.keys(batch) > 0, self.body.sampler.mode
        shape = self.body.wanted(self._shapes.decode(count, mode, self._adapted, shared=shared), batch.decodes)
        return self._read_back(batch, shape, self.graphs.run(shape))

    def _catch_up(self, batch: Batch) -> None:
        """Have the draft model compute what it lacks, before it drafts."""
        assert self.drafter is not None, "a model that drafts is behind where none does"
        chunks = self.drafter.described(batch.catch_ups)
        if not chunks:
            return
        shape = StepShape(0, len(chunks), sum(len(chunk.token_ids) for chunk in chunks), GREEDY)
        described = Batch(batch.step, (), chunks)
        self._ragged_staging.upload(pack_ragged(described, shape), self.body.ragged.packed)
        self.body.catch_up(shape, max(len(chunk.token_ids) for chunk in chunks))

    def _verify(self, batch: Batch) -> Launched:
        """A decode with drafts; its rows are on the device already."""
        assert self.body.speculation is not None, "drafts are verified where nothing is drafted"
        if batch.draft_caps != self._caps:
            caps = np.zeros(self.max_num_seqs, dtype=np.int32)
            caps[: len(batch.draft_caps)] = batch.draft_caps
            self._cap_staging.upload(caps, self.body.speculation.caps)
            self._caps = batch.draft_caps
        shape = self._shapes.verify(len(batch.decodes), batch.drafts, self.body.sampler.mode, self._adapted)
        shape = self.body.wanted(shape, batch.decodes)
        return self._read_back(batch, shape, self.graphs.run(shape))

    def _mixed(self, batch: Batch) -> Launched:
        """Decodes and prefill chunks together, as a graph where the host would take longer than the GPU."""
        tokens = sum(len(chunk.token_ids) for chunk in batch.prefills)
        described = (len(batch.decodes), len(batch.prefills), tokens, self.body.sampler.mode_of(batch.row_slots))
        shape, graphed = self._shapes.ragged(*described, self._has_adapters(batch.row_slots))
        if batch.shows_images:
            shape, graphed = StepShape(*described, shape.adapters), False
        shape = self.body.wanted(shape, batch.sampled_slots)
        self._ragged_staging.upload(pack_ragged(batch, shape), self.body.ragged.packed)
        if graphed:
            return self._read_back(batch, shape, self.graphs.run(shape))
        longest = max(len(chunk.token_ids) for chunk in batch.prefills)
        showing = batch if batch.shows_images else None
        return self._read_back(batch, shape, self.body.mixed(shape, longest, showing=showing)[0])

    def _scored_prefill(self, batch: Batch) -> Launched:
        """A step with prompt log-probabilities: always eager, because its extra rows vary."""
        tokens = sum(len(chunk.token_ids) for chunk in batch.prefills)
        mode, adapted = self.body.sampler.mode_of(batch.row_slots), self._has_adapters(batch.row_slots)
        shape = StepShape(len(batch.decodes), len(batch.prefills), tokens, mode, adapted)
        shape = self.body.wanted(shape, batch.sampled_slots)
        self._ragged_staging.upload(pack_ragged(batch, shape), self.body.ragged.packed)
        targets, rows = prompt_targets(batch)
        longest, showing = max(len(chunk.token_ids) for chunk in batch.prefills), batch if batch.shows_images else None
        logits, hidden = self.body.mixed(shape, longest, upload(rows, self.device, torch.int64), showing)
        scored = self._prompt_logprobs(batch, hidden, targets)
        launched = self._read_back(batch, shape, logits)
        launched.prompt_logprobs = scored
        return launched

    def _has_adapters(self, slots: Sequence[int]) -> bool:
        return self.body.adapters is not None and self.body.adapters.any(slots)

    def _prompt_logprobs(self, batch: Batch, hidden: torch.Tensor, targets: list[int]) -> list[PendingPromptLogprobs]:
        """Log-probabilities of the prompt's own tokens, one entry per chunk; `hidden [len(targets), H]`."""
        tokens = upload(targets, self.device)
        pending, at = [], 0
        for chunk in batch.prefills:
            top = self.body.sampler.prompt_logprobs(chunk.slot)
            end = at + len(chunk.targets)
            parts = []
            for first in range(at, end, SCORED_ROWS):
                part = slice(first, min(first + SCORED_ROWS, end))
                step = self.body.adapters
                adapters = step.of_sequence(chunk.slot, part.stop - part.start) if step is not None else None
                logits = self.decoder.logits(hidden[part], self.body.logits_room(part.stop - first), adapters)
                parts.append(to_host(token_logprobs(logits, tokens[part], top)))
            pending.append(PendingPromptLogprobs(parts, top))
            at = end
        return pending

    def _read_back(self, batch: Batch, shape: StepShape, logits: torch.Tensor) -> Launched:
        """The launched step, on its way to the host; where its rows are constrained, waiting for their masks first."""
        host = self._host_tokens[batch.step % STAGES][: shape.rows]
        launched = Launched(batch, host, sampled_rows(batch, shape), shared=shape.shared)
        if shape.drafts and self.body.speculation is not None:
            source = self.body.speculation.results(shape.rows, shape.drafts)
            launched.drafts = shape.drafts
            launched.tokens = self._host_runs[batch.step % STAGES][: source.numel()].view(source.shape)
        if shape.mode == MASKED:
            launched.masks = MaskRows(self.body.sampler.masks.open(shape.rows), launched.rows)
            launched.choose = partial(self._choose, launched, shape, logits)
        else:
            self._start_copies(launched, shape, logits)
        return launched

    @torch.inference_mode()
    def _choose(self, launched: Launched, shape: StepShape, logits: torch.Tensor) -> None:
        """The second half of a constrained step."""
        self.body.sampler.masks.upload()
        self.body.choose(shape, logits)
        self._start_copies(launched, shape, logits)

    def _start_copies(self, launched: Launched, shape: StepShape, logits: torch.Tensor) -> None:
        """Start the copies to the host: the tokens, and log-probabilities of the rows whose slots ask for them."""
        body, batch, rows = self.body, launched.batch, launched.rows
        source, width = body.ring[: shape.rows], 1
        if shape.drafts and body.speculation is not None:
            source, width = body.speculation.results(shape.rows, shape.drafts), shape.drafts + 1
        launched.tokens.copy_(source, non_blocking=True)
        wanted = body.sampler.logprob_slots(batch.sampled_slots)
        if wanted:
            # Of drafts each row has `width` tokens, those of one place behind one another.
            tops = [body.sampler.logprobs(batch.sampled_slots[index]) for index in wanted for _ in range(width)]
            places = [at * shape.rows + rows[index] for index in wanted for at in range(width)]
            indices = [index * width + at for index in wanted for at in range(width)]
            picked = upload(places, self.device, torch.int64)
            if width > 1 and body.speculation is not None:
                # What was sampled for nobody has no log-probability, and nobody reads it.
                tokens = body.speculation.sampled[picked].clamp_min(0)
            else:
                tokens = body.ring[picked]
            packed = token_logprobs(logits[picked], tokens, max(tops))
            launched.logprobs = PendingLogprobs(to_host(packed), indices, tops)
        if self.device.type == "cuda":
            launched.event = torch.cuda.Event()
            launched.event.record()

    def describe(self) -> dict[str, str]:
        """What the start-up log and `/version` say of it."""
        return description(self)

    def kernels(self) -> dict[str, str]:
        """What runs each op that a step has used so far."""
        used = kernels_in_use(self.decoder.spec, self.device, self.arena.dtype)
        return used | {"shared_prefix_attention": str(self.body.sharing)}

    def rehearse(self) -> None:
        """Run every kind of step, and what happens between steps: for a rehearsal."""
        if self.body.images is not None:
            self.body.images.rehearse()
        rehearse_steps(self.body, self._shapes, self.max_num_batched_tokens, self._pages, self._updates)
        self._state_copies.rehearse()

    @torch.inference_mode()
    def load_kernels(self, sizes: tuple[int, ...]) -> None:
        """Run greedy decodes of these padded sizes, over padding, and copy a blank page: so kernels are loaded; and see
        a blank image.
        """
        if self.body.images is not None:
            self.body.images.rehearse()
        for pages in self._pages:
            copy_pages(pages, pages, upload([(0, 0)], self.device))
        for shape in self.graphs.missing(self._planned((GREEDY,))):
            if shape.prefills == 0 and shape.rows in sizes:
                self._quiesce(shape)
                self.graphs.warm(shape)

    @torch.inference_mode()
    def capture(self, sizes: tuple[int, ...] = ()) -> None:
        """Capture greedy decode graphs for these padded sizes; every planned greedy graph where none is named."""
        for shape in reversed(self.graphs.missing(self._planned((GREEDY,)))):
            if not sizes or (shape.prefills == 0 and shape.rows in sizes):
                self._prepare(shape)

    @torch.inference_mode()
    def idle(self) -> bool:
        """Use a moment without work: capture one more graph. False when there is nothing left to prepare."""
        missing = self.graphs.missing(self._planned(PREPARED_MODES))
        if missing:
            self._prepare(missing[0])
        return len(missing) > 1

    def _planned(self, modes: tuple[str, ...]) -> list[StepShape]:
        return self._shapes.planned(modes, adapters=self.adapters is not None)

    def _prepare(self, shape: StepShape) -> None:
        self._quiesce(shape)
        self.graphs.prepare(shape)

    def _quiesce(self, shape: StepShape) -> None:
        self.body.quiesce(shape)
        self._decodes = ()

    def forget_steps(self) -> None:
        """Drop what holds addresses of weights and pages: graphs, and tapes; and what is kept of images."""
        self.graphs.clear()
        self.body.tapes.clear()
        if self.body.images is not None:
            self.body.images.forget()

    def close(self) -> None:
        """Release graphs, device memory and the host pool."""
        self.forget_steps()
        self._state_copies.close()
        for swap in self._swaps:
            swap.close()
