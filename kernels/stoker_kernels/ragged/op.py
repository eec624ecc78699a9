"""Expand one packed description of a ragged step into per-token inputs, on the device.

Rows `[0, num_decodes)` run one token each, which the device already holds; the rest are prefill chunks whose ids
come from the host. The host uploads a few integers a row plus the chunks' ids; positions, slot mapping and
KV lengths are derived here from the slot state, so nothing of that size crosses the bus.

Invariants: padded rows have `row_slots` −1 (a padded decode row still has its one token, a padded chunk none);
padded tokens, those of padded rows and from `query_start[S]` on, get slot mapping −1, so nothing is written for them.
Knows nothing of models.
"""

from __future__ import annotations

import torch

from stoker_kernels.launch.dispatch import reference_supports, register, select, triton_supports
from stoker_kernels.ragged.types import RaggedOutputs, RaggedRows, SlotTensors

register(
    "prepare_ragged",
    "triton",
    "stoker_kernels.ragged.triton_ragged:prepare_ragged",
    triton_supports(torch.int32),
    invariant=True,
)
register(
    "prepare_ragged", "reference", "stoker_kernels.ragged.reference:prepare_ragged", reference_supports, invariant=True
)


def prepare_ragged(rows: RaggedRows, state: SlotTensors, page_size: int, num_decodes: int, out: RaggedOutputs) -> None:
    """Fill `out` from `rows` and `state`, and set each chunk's slot position to its start. One launch.

    `commit_tokens` with `out.advance` then moves the positions past the step.

    Raises:
        KernelUnavailable: no implementation for the device.
    """
    select("prepare_ragged", rows.ids.device, torch.int32)(rows, state, page_size, num_decodes, out)
