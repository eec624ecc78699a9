"""The description of a head's passes, made of that of the tokens: a token stands where the state beside it was made.

A head reads the token at position p beside the model's state at p − 1, at the place and position of the latter. So
what it keeps of a page depends on the first token of the next page, too; where two texts that share a page differ in
that very token, who ran last is right, and the other one's drafts see one key that is not theirs.

Invariants: fixed shapes, nothing waits for the device. The first token of a text has no state before it: padding.
Knows nothing of what a head computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stoker_kernels.drafts import VerifyOutputs
from stoker_runtime.step.batch import PrefillChunk


def step_back(tokens: VerifyOutputs, page_table: Tensor, page_size: int, *, out: VerifyOutputs) -> None:
    """Fill `out` but for its ids with rows of one token, each one position before that of `tokens`."""
    there = tokens.seq_lens > 1
    position = (tokens.positions - 1).clamp_min(0)
    page = page_table[tokens.slots.clamp_min(0).long(), (position // page_size).long()].long()
    out.slots.copy_(torch.where(there, tokens.slots, -1))
    out.positions.copy_(torch.where(there, position, 0))
    out.seq_lens.copy_(torch.where(there, position + 1, 0))
    out.slot_mapping.copy_(torch.where(there, page * page_size + position % page_size, -1))


def chunks_back(chunks: Sequence[PrefillChunk]) -> tuple[PrefillChunk, ...]:
    """The same of chunks, those that have nothing left out."""
    moved = (
        replace(chunk, start=chunk.start - 1)
        if chunk.start
        else replace(chunk, token_ids=chunk.token_ids[1:])
        for chunk in chunks
    )
    return tuple(chunk for chunk in moved if chunk.token_ids)
