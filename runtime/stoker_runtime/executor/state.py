"""The device-side state of every slot, and the few host buffers through which steps change it.

Invariants: allocated once, never grown. A host staging buffer is rewritten only after the step that used it has
been read back: at most two steps are in flight and the buffers rotate through `STAGES`.
Knows nothing of models or of scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stoker_kernels.attention import attention_workspace_bytes, plan_bytes
from stoker_kernels.ragged import RaggedOutputs, RaggedRows, SlotTensors
from stoker_kernels.sampling import SamplingState
from stoker_runtime.adapters.memory import adapter_bytes
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.drafts.speculation import SpeculationState
from stoker_runtime.executor.prefix.plan import prefix_bytes
from stoker_runtime.executor.resolve import (
    activation_bytes,
    graph_bytes,
    logits_bytes,
    sampled_rows,
    step_shapes,
    workspace_bytes,
)
from stoker_runtime.executor.states.plan import drafted_bytes
from stoker_runtime.executor.windows.layout import kv_layout
from stoker_runtime.models.layers.mixture import expert_scratch
from stoker_runtime.models.parameter import ITEM_BYTES
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel.collectives import ORDERED_ROWS
from stoker_runtime.sampling.masks import mask_words

STAGES = 4


@dataclass(frozen=True, slots=True)
class RaggedBuffers:
    """Device buffers of a ragged step at their largest; a step uses prefixes (`rows`, `outputs`)."""

    packed: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    logits_rows: torch.Tensor
    advance: torch.Tensor

    @staticmethod
    def allocate(max_rows: int, max_tokens: int, device: torch.device) -> RaggedBuffers:
        """Buffers for up to `max_rows` sequences and `max_tokens` tokens in one step."""

        def empty(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return RaggedBuffers(
            packed=empty(4 * max_rows + 1 + max_tokens, torch.int32),
            ids=empty(max_tokens, torch.int32),
            positions=empty(max_tokens, torch.int32),
            slot_mapping=empty(max_tokens, torch.int64),
            seq_lens=empty(max_rows, torch.int32),
            logits_rows=empty(max_rows, torch.int64),
            advance=empty(max_rows, torch.int32),
        )

    def rows(self, num_rows: int, num_tokens: int) -> RaggedRows:
        """Views of the packed upload: `[row_slots | query_start | starts | ids]` for these (padded) counts."""
        a, b, c = num_rows, 2 * num_rows + 1, 3 * num_rows + 1
        return RaggedRows(self.packed[:a], self.packed[a:b], self.packed[b:c], self.packed[c : c + num_tokens])

    def sampled_slots(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """View of the last part of the upload: a row's slot if its token counts, else −1."""
        at = 3 * num_rows + 1 + num_tokens
        return self.packed[at : at + num_rows]

    def outputs(self, num_rows: int, num_tokens: int) -> RaggedOutputs:
        """Views that `prepare_ragged` fills."""
        return RaggedOutputs(
            self.ids[:num_tokens], self.positions[:num_tokens], self.slot_mapping[:num_tokens],
            self.seq_lens[:num_rows], self.logits_rows[:num_rows], self.advance[:num_rows],
        )  # fmt: skip


class Staging:
    """Pinned host memory that rotates, so that an upload in flight is never overwritten."""

    def __init__(self, size: int, device: torch.device) -> None:
        pin = device.type == "cuda"
        self._buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=pin) for _ in range(STAGES)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._next = 0

    def upload(self, values: np.ndarray, target: torch.Tensor) -> None:
        """Copy `values` (int32, flat) to the first elements of `target` without waiting.

        Raises:
            ValueError: more values than the staging buffer or the target holds.
        """
        count = values.size
        if count > self._arrays[0].size or count > target.numel():
            raise ValueError(f"{count} values do not fit a staging buffer of {self._arrays[0].size}")
        index = self._next
        self._next = (index + 1) % STAGES
        self._arrays[index][:count] = values
        target[:count].copy_(self._buffers[index][:count], non_blocking=True)


def state_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes that rest on the device beside weights, KV and activations.

    Slots, sampling parameters, token masks, attention scratch, what steps with a shared prefix keep, rotary tables, the
    logits of a step, adapters, drafts, states, what sums over ranks in one order gather, and experts that become bf16.
    """
    slots, pages = config.max_num_seqs, -(-config.max_model_len // config.page_size)
    ragged = 28 * config.max_num_batched_tokens + 64 * slots
    tables = kv_layout(config, spec).tables
    return (
        slots * (4 * tables * pages + 64)
        + ragged
        + (tables - 1) * 8 * config.max_num_batched_tokens
        + (plan_bytes(sampled_rows(config)) if tables > 1 else 0)
        + SamplingState.nbytes(slots, spec.vocab)
        + 4 * slots * mask_words(spec.vocab)
        + prefix_bytes(config, spec)
        + attention_workspace_bytes(sampled_rows(config), spec.heads, spec.attended_dim)
        + spec.rope_table_bytes(config.max_model_len)
        + logits_bytes(config, spec)
        + adapter_bytes(config, spec)
        + SpeculationState.nbytes(config)
        + ordered_sum_bytes(config, spec)
        + sequence_state_bytes(config, spec) * (slots + config.num_state_snapshots)
        + drafted_bytes(config, spec)
        + unpacked_bytes(config, spec)
    )


def unpacked_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes in which experts in four bits become bf16 for steps of many tokens, beyond what such a step leaves of the
    workspace: of graphs, and of those beside them.
    """
    if config.batch_invariant:  # whose products are of one kind for any number of tokens
        return 0
    steps = [(config.max_num_batched_tokens, workspace_bytes(config, spec))]
    if not config.enforce_eager:
        steps.append((step_shapes(config, spec).most_graphed, graph_bytes(config, spec)))
    found = 0
    for tokens, room in steps:
        scratch = expert_scratch(spec, config.quantization, tokens, config.device)
        found += max(0, activation_bytes(config, spec, tokens) + scratch - room) if scratch else 0
    return found


def ordered_sum_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes of what is gathered at a time where sums over ranks have one order, and of its sum in fp32."""
    if not config.batch_invariant or spec.part is None or spec.part.tensors == 1:
        return 0
    rows = min(ORDERED_ROWS, config.max_num_batched_tokens)
    return rows * spec.hidden * (spec.part.tensors * ITEM_BYTES[config.dtype] + ITEM_BYTES["float32"])


def sequence_state_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes of what one sequence keeps in layers with a state, of a resolved `config`."""
    return spec.recurrent.bytes_of_sequence(ITEM_BYTES[config.dtype]) if spec.recurrent else 0


def refuse_beside_states(config: EngineConfig, spec: ModelSpec) -> None:
    """Raises ConfigError for settings that a model with states does not go with: what cuts or tells of them."""
    if spec.recurrent is None:
        return
    clashes = (
        (config.enable_lora and config.ranks > 1, "enable_lora",
         "adapters of layers with a state are not cut into ranks"),
        (config.publishes_kv_events, "kv_events_config", "a cached page is of use where its states are kept, too"),
    )  # fmt: skip
    for given, name, why in clashes:
        if given:
            raise ConfigError(
                f"{name} cannot go with {spec.architecture}, whose layers keep a state for each sequence: {why}; "
                f"leave --{name.replace('_', '-')} out.",
                param=name,
            )


def allocate_tables(tables: int, slots: int, max_pages: int, device: torch.device) -> torch.Tensor:
    """Page tables `[tables, slots, pages]` for sequences of up to `max_pages` pages each."""
    # Where there are several each begins at 16 bytes, as kernels that were compiled ahead expect.
    pages = max_pages if tables == 1 else -(-max_pages // 4) * 4
    return torch.zeros((tables, slots, pages), dtype=torch.int32, device=device)


def allocate_slots(slots: int, page_table: torch.Tensor) -> SlotTensors:
    """Slot state for `slots` sequences, whose pages stand in `page_table [slots, pages]`."""
    return SlotTensors(
        last_token=torch.zeros(slots, dtype=torch.int32, device=page_table.device),
        position=torch.zeros(slots, dtype=torch.int32, device=page_table.device),
        page_table=page_table,
    )
