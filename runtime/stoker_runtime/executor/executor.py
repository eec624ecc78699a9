"""One rank: runs batches on one device. The only place where a scheduler's decision meets tensors.

Invariants: everything is allocated in `__init__`, nothing grows afterwards. `execute` launches and returns; the
tokens are on the host when `Launched.result()` returns. At most two steps are in flight, read in order. A decode step
whose membership did not change uploads nothing.
Knows nothing of requests, text or why a batch is what it is.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from stoker_kernels import dispatch
from stoker_kernels.attention import AttentionMeta, attention_workspace, plan_attention
from stoker_kernels.ragged import prepare_ragged
from stoker_kernels.slots import apply_updates, commit_tokens, pack_updates, prepare_decode
from stoker_runtime.config import EngineConfig
from stoker_runtime.executor.cuda_graphs import DecodeGraphs
from stoker_runtime.executor.inputs import ForwardInputs
from stoker_runtime.executor.launched import Launched
from stoker_runtime.executor.resolve import MemoryPlan
from stoker_runtime.executor.state import STAGES, RaggedBuffers, Staging, allocate_slots
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.sampling.logprobs import (
    ROWS_AT_ONCE,
    PendingLogprobs,
    PendingPromptLogprobs,
    packed_logprobs,
    to_host,
)
from stoker_runtime.sampling.sampler import GREEDY, SAMPLE, Sampler
from stoker_runtime.scheduler.batch import Batch

# Page-table entries one upload carries; a step that maps more (long cached prefixes) takes several.
MAX_UPDATES = 16384
KV_TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}


class Executor:
    """Implements the engine's `Executor` protocol for one device."""

    def __init__(self, config: EngineConfig, decoder: Decoder, plan: MemoryPlan, device: torch.device) -> None:
        spec = decoder.spec
        self.config = config
        self.decoder = decoder
        self.plan = plan
        self.device = device
        self.num_pages = plan.pages
        self.page_size = config.page_size
        self.max_num_seqs = config.max_num_seqs
        self.max_model_len = config.max_model_len
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.eos_token_ids = spec.eos_token_ids
        self.vocab_size = spec.vocab
        rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
        max_pages = -(-config.max_model_len // config.page_size)
        shape = (spec.num_layers, 2, plan.pages, spec.kv_heads, config.page_size, spec.head_dim)
        # Zeros, not garbage: masked lanes of attention multiply V's unwritten rows by 0, and 0 x NaN is NaN.
        self.arena = zeroed(shape, KV_TORCH_DTYPES[config.kv_cache_dtype], device)
        self.kv = [(layer[0], layer[1]) for layer in self.arena]
        self.slots = allocate_slots(rows, max_pages, device)
        self.ragged = RaggedBuffers.allocate(rows, tokens, device)
        self.sampler = Sampler(rows, spec.vocab, device)
        self.workspace = attention_workspace(rows, spec.heads, spec.head_dim, device)
        self._row_slots = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self._arange = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._ones = torch.ones(rows, dtype=torch.int32, device=device)
        self._ring = torch.zeros(rows, dtype=torch.int32, device=device)
        self._decodes: tuple[int, ...] = ()
        self._updates = torch.zeros((MAX_UPDATES, 3), dtype=torch.int32, device=device)
        self._update_staging = Staging(self._updates.numel(), device)
        self._row_staging = Staging(rows, device)
        self._ragged_staging = Staging(self.ragged.packed.numel(), device)
        pin = device.type == "cuda"
        self._host_tokens = [torch.zeros(rows, dtype=torch.int32, pin_memory=pin) for _ in range(STAGES)]
        self.start_seconds: dict[str, float] = {}
        self._graphs = DecodeGraphs(
            self._decode_step, self._quiesce, self.max_num_seqs, device, enabled=not config.enforce_eager
        )

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Launched:
        """Launch one step: upload what changed, run the forward pass, sample, start the read-back."""
        self._apply(batch)
        if batch.prefills:
            return self._ragged_step(batch)
        return self._launch_decodes(batch)

    def _apply(self, batch: Batch) -> None:
        """Page copies, new slots, page-table diffs and chunk positions: one upload and one kernel."""
        if batch.copies:
            source, target = torch.tensor(batch.copies, device=self.device).unbind(1)
            self.arena[:, :, target] = self.arena[:, :, source]
        if batch.assigns:
            self.sampler.assign(batch.assigns)
        if batch.page_updates:
            packed = pack_updates((update.slot, update.start, update.pages) for update in batch.page_updates)
            for at in range(0, len(packed), MAX_UPDATES):
                part = packed[at : at + MAX_UPDATES]
                self._update_staging.upload(part.reshape(-1), self._updates.view(-1))
                apply_updates(
                    self._updates[: len(part)], self.slots.page_table, self.slots.position, self.slots.last_token
                )

    def _launch_decodes(self, batch: Batch) -> Launched:
        """Run a pure decode step, as a graph where one is captured for its padded size."""
        count = len(batch.decodes)
        if batch.decodes != self._decodes:
            rows = np.full(self.max_num_seqs, -1, dtype=np.int32)
            rows[:count] = batch.decodes
            self._row_staging.upload(rows, self._row_slots)
            self._decodes = batch.decodes
            self.sampler.select(batch.decodes)
        logits = self._graphs.run(count, self.sampler.mode)
        return self._read_back(batch, list(batch.decodes), None, logits)

    def _decode_step(self, rows: int, mode: str) -> torch.Tensor:
        """The body of a decode graph for `rows` padded rows: gather by slot → forward → sample → scatter."""
        row_slots, out = self._row_slots[:rows], self.ragged.outputs(rows, rows)
        prepare_decode(
            row_slots, self.slots.last_token, self.slots.position, self.slots.page_table, self.page_size,
            ids_out=out.ids, positions_out=out.positions, slot_mapping_out=out.slot_mapping, seq_lens_out=out.seq_lens,
        )  # fmt: skip
        meta = AttentionMeta(
            page_table=self.slots.page_table, seq_slots=row_slots, query_start=self._arange[: rows + 1],
            seq_lens=out.seq_lens, num_decodes=rows, max_query_len=1, max_seq_len=self.max_model_len,
            workspace=self.workspace,
        )  # fmt: skip
        inputs = ForwardInputs(out.ids, out.positions, out.slot_mapping, self._plan(meta), None)
        logits = self.decoder.logits(self.decoder.forward(inputs, self.kv))
        sampled = self.sampler(logits, row_slots, out.positions, mode)
        commit_tokens(
            row_slots, sampled, self.slots.position, self.slots.last_token, self._ring[:rows], self._ones[:rows]
        )
        return logits

    def _plan(self, meta: AttentionMeta) -> AttentionMeta:
        """Plan the KV splits of the decode rows once for all layers."""
        spec = self.decoder.spec
        widest = 0 if 0 in spec.windows else max(spec.windows)
        return plan_attention(
            meta, num_kv_heads=spec.kv_heads, head_dim=spec.head_dim, kv_dtype=self.arena.dtype, window=widest
        )

    def _ragged_step(self, batch: Batch) -> Launched:
        """Run decodes and prefill chunks together."""
        count, num_rows = len(batch.decodes), len(batch.decodes) + len(batch.prefills)
        num_tokens = batch.num_tokens
        self._ragged_staging.upload(pack_ragged(batch), self.ragged.packed)
        rows, out = self.ragged.rows(num_rows, num_tokens), self.ragged.outputs(num_rows, num_tokens)
        prepare_ragged(rows, self.slots, self.page_size, count, out)
        meta = AttentionMeta(
            page_table=self.slots.page_table, seq_slots=rows.row_slots, query_start=rows.query_start,
            seq_lens=out.seq_lens, num_decodes=count,
            max_query_len=max(len(chunk.token_ids) for chunk in batch.prefills),
            max_seq_len=max(chunk.start + len(chunk.token_ids) for chunk in batch.prefills),
            workspace=self.workspace,
        )  # fmt: skip
        targets, target_rows = prompt_targets(batch)
        wanted = out.logits_rows
        if target_rows:
            wanted = torch.cat((wanted, torch.tensor(target_rows, device=self.device)))
        hidden = self.decoder.forward(
            ForwardInputs(out.ids, out.positions, out.slot_mapping, self._plan(meta), wanted), self.kv
        )
        logits = self.decoder.logits(hidden[:num_rows])
        slots = [*batch.decodes, *(chunk.slot for chunk in batch.prefills)]
        mode = self.sampler.mode_of(slots)
        sampled = self.sampler(logits, rows.row_slots, out.positions[out.logits_rows], mode)
        commit_tokens(
            rows.row_slots, sampled, self.slots.position, self.slots.last_token, self._ring[:num_rows], out.advance
        )
        launched = self._read_back(batch, slots, sampled_rows(batch), logits, record=not targets)
        if targets:
            launched.prompt_logprobs = self._prompt_logprobs(batch, hidden[num_rows:], targets)
            launched.event = self._record()
        return launched

    def _prompt_logprobs(self, batch: Batch, hidden: torch.Tensor, targets: list[int]) -> list[PendingPromptLogprobs]:
        """Log-probabilities of the prompt's own tokens, one entry per chunk; `hidden [len(targets), H]`."""
        tokens = torch.tensor(targets, device=self.device)
        pending, at = [], 0
        for chunk in batch.prefills:
            top = self.sampler.prompt_logprobs(chunk.slot)
            end = at + len(chunk.targets)
            parts = []
            for first in range(at, end, ROWS_AT_ONCE):
                part = slice(first, min(first + ROWS_AT_ONCE, end))
                parts.append(to_host(packed_logprobs(self.decoder.logits(hidden[part]), tokens[part], top)))
            pending.append(PendingPromptLogprobs(parts, top))
            at = end
        return pending

    def _read_back(
        self, batch: Batch, slots: list[int], picks: list[int] | None, logits: torch.Tensor, *, record: bool = True
    ) -> Launched:
        """Start the copies to the host: the tokens, and log-probabilities of the rows whose slots ask for them."""
        ring = self._ring[: len(slots)]
        host = self._host_tokens[batch.step % STAGES][: len(slots)]
        host.copy_(ring, non_blocking=True)
        logprobs = None
        wanted = self.sampler.logprob_rows(slots)
        if wanted:
            tops = [self.sampler.logprobs(slots[row]) for row in wanted]
            index = torch.tensor(wanted, device=self.device)
            packed = packed_logprobs(logits[index], ring[index], max(tops))
            logprobs = PendingLogprobs(to_host(packed), wanted, tops)
        return Launched(batch, host, picks, self._record() if record else None, logprobs)

    def _record(self) -> torch.cuda.Event | None:
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def describe(self) -> dict[str, str]:
        """What the start-up log and `/version` say of this rank."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return {
            "model": self.config.model,
            "architecture": self.decoder.spec.architecture,
            "device": name,
            "dtype": self.config.dtype,
            "kv_cache_dtype": self.config.kv_cache_dtype,
            "quantization": self.config.quantization,
            "pages": str(self.num_pages),
            "page_size": str(self.page_size),
            **{f"kernel.{op}": kernel for op, kernel in dispatch.chosen().items()},
            **{f"seconds.{phase}": f"{seconds:.2f}" for phase, seconds in self.start_seconds.items()},
        }

    def _quiesce(self) -> None:
        """Pad every decode row, so that a step run for its kernels alone changes no sequence."""
        self._row_slots.fill_(-1)
        self._decodes = ()

    @torch.inference_mode()
    def capture(self, sizes: tuple[int, ...] = ()) -> None:
        """Capture greedy decode graphs for these padded sizes (all where none is named)."""
        for key in self._graphs.missing((GREEDY,)):
            if not sizes or key[0] in sizes:
                self._graphs.capture(key)

    @torch.inference_mode()
    def idle(self) -> bool:
        """Use a moment without work: capture one more decode graph. False when there is nothing left to prepare."""
        missing = self._graphs.missing((GREEDY, SAMPLE))
        if missing:
            self._graphs.capture(missing[-1])
        return len(missing) > 1

    def close(self) -> None:
        """Release graphs and device memory."""
        self._graphs.clear()


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On the CPU untouched pages stay unbacked, so an arena costs memory only as sequences fill it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def prompt_targets(batch: Batch) -> tuple[list[int], list[int]]:
    """Ids whose prompt log-probabilities are wanted, and the token of the step that predicts each."""
    targets: list[int] = []
    rows: list[int] = []
    at = len(batch.decodes)
    for chunk in batch.prefills:
        targets += chunk.targets
        rows += range(at, at + len(chunk.targets))
        at += len(chunk.token_ids)
    return targets, rows


def sampled_rows(batch: Batch) -> list[int]:
    """Rows of a ragged step whose token counts: every decode, and the chunks that end their prompt."""
    count = len(batch.decodes)
    return [*range(count), *(count + i for i, chunk in enumerate(batch.prefills) if chunk.sample)]


def pack_ragged(batch: Batch) -> np.ndarray:
    """The upload of a ragged step, int32: `[row_slots | query_start | starts | ids]`, cut by `RaggedBuffers.rows`."""
    count, num_rows = len(batch.decodes), len(batch.decodes) + len(batch.prefills)
    packed = np.zeros(3 * num_rows + 1 + batch.num_tokens, dtype=np.int32)
    packed[:count] = batch.decodes
    query_start = packed[num_rows : 2 * num_rows + 1]
    query_start[: count + 1] = np.arange(count + 1)
    starts, ids = packed[2 * num_rows + 1 : 3 * num_rows + 1], packed[3 * num_rows + 1 :]
    at = count
    for row, chunk in enumerate(batch.prefills, start=count):
        packed[row] = chunk.slot
        starts[row] = chunk.start
        ids[at : at + len(chunk.token_ids)] = chunk.token_ids
        at += len(chunk.token_ids)
        query_start[row + 1] = at
    return packed
