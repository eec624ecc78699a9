"""Every kind of step that an engine can be asked for, run in a rehearsal: what any of them launches is found, loaded.

Invariants: run inside `stoker_kernels.launch.rehearsal.rehearse`, before the first real step; which kernels a step
launches depends on its padded sizes, its mode and the model alone, and each choice that they make is made here.
Knows nothing of what is done about a kernel that is missing (`kernel_supply`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from stoker_kernels.pages import copy_pages
from stoker_kernels.sampling import token_logprobs
from stoker_kernels.slots import apply_updates
from stoker_runtime.executor.graphs.step_shape import ShapeTable, StepShape
from stoker_runtime.executor.step import StepBody
from stoker_runtime.sampling.modes import GREEDY, SAMPLE

# Tokens of one long chunk, alone: beyond what any graph has, and long enough for the tiles of long chunks.
LONG_CHUNKS = (2049, 4096, 8192)
TOPS = (0, 5)  # alternatives that log-probabilities are asked with


def rehearsed_shapes(
    shapes: ShapeTable, max_rows: int, max_tokens: int, *, shared: bool = False
) -> Iterator[StepShape]:
    """The steps that between them launch all there is: each graph's, eager ones by size, and mixed ones.

    `shared`: steps may share a prefix.
    """
    for shape in shapes.planned((GREEDY,)):
        yield shape
        if shared and shape.prefills == shape.drafts == 0 and shape.rows > 1:
            yield replace(shape, shared=True)
    if shapes.verifies:
        yield shapes.verify(1, 1, SAMPLE)
    eager = [(0, 1, tokens) for tokens in (1, *LONG_CHUNKS, max_tokens)]
    eager += [(1, 1, 16), (max_rows - 1, 1, 64), (1, 1, max_tokens - 1)]
    eager += [(min(16, max_rows - 1), 1, tokens) for tokens in (256, 2048)]
    for decodes, prefills, tokens in eager:
        if decodes >= 0 and tokens > 0 and decodes + prefills <= max_rows and decodes + tokens <= max_tokens:
            yield StepShape(decodes, prefills, tokens, GREEDY)


def rehearse_steps(
    body: StepBody, shapes: ShapeTable, max_tokens: int, pages: Sequence[torch.Tensor], updates: torch.Tensor
) -> None:
    """Run them, and what happens between steps: sampling, log-probabilities, copies of `pages`, `updates` of slots.

    `pages` are those of each arena.
    """
    rows = len(body.row_slots)
    with body.few_layers():
        for shape in rehearsed_shapes(shapes, rows, max_tokens, shared=body.sharing.space is not None):
            body(shape)
            if body.adapters is not None:
                body(replace(shape, adapters=True))
            if shape.prefills and body.speculation is not None and body.speculation.drafter is not None:
                body.catch_up(replace(shape, decodes=0), shape.tokens)
    few = min(2, rows)
    logits = body.logits_room(few)
    body.sampler.rehearse(logits, body.row_slots[:few], body.ragged.positions[:few])
    for top in TOPS:
        token_logprobs(logits, body.ring[:few], min(top, logits.shape[1]))
    for each in pages:
        copy_pages(each, each, updates.view(-1)[:2].view(1, 2))
    apply_updates(updates[:1], body.slots.page_table, body.slots.position, body.slots.last_token)
