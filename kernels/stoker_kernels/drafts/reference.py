"""The ops of speculation row by row: the oracle of the tests and the CPU backend.

Invariants: signatures and effects are those of `op.py`; products are of fp32 as in the kernels; tensors lie in the
host's memory.
Knows nothing of dispatch or of any GPU.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker_kernels.drafts.types import Matching, VerifyOutputs

Ids = npt.NDArray[np.int32]


def match_drafts(
    row_slots: Tensor, caps: Tensor, position: Tensor, history: Tensor, rules: Matching, *, out: Tensor
) -> None:
    """Drafts from each row's own tokens."""
    out.fill_(-1)
    for row, (slot, cap) in enumerate(zip(row_slots.tolist(), caps.tolist(), strict=True)):
        if slot >= 0 and cap > 0:
            known = min(int(position[slot]) + 1, history.shape[1])
            tokens = history[slot, :known].numpy()
            drafts = draft_of(tokens, min(cap, len(out)), rules)
            out[: len(drafts), row] = torch.from_numpy(drafts)


def draft_of(tokens: Ids, most: int, rules: Matching) -> Ids:
    """Up to `most` tokens that may follow `tokens`."""
    ends, length = _longest_match(tokens, rules.most)
    if length < rules.least or not len(ends):
        return tokens[:0]
    if rules.factor:
        most = min(most, int(np.float32(rules.factor) * np.float32(length)))
    last, known = int(ends[-1]), len(tokens)
    # Behind the end the match goes on with what it has drafted: with the tokens from `last` on, again and again.
    extended = np.concatenate((tokens, np.resize(tokens[last + 1 :], most)))
    agreeing, least = ends, np.float32(rules.share) * np.float32(len(ends))
    for count in range(most):
        agreeing = agreeing[extended[agreeing + 1 + count] == extended[known + count]]
        if len(agreeing) < least:
            return extended[known : known + count]
    return extended[known:]


def _longest_match(tokens: Ids, most: int) -> tuple[npt.NDArray[np.int64], int]:
    """Where the longest tail of at most `most` tokens ends earlier, ascending, and its length."""
    known = len(tokens)
    ends, length = np.flatnonzero(tokens[:-1] == tokens[-1]) if known else np.empty(0, np.int64), 1
    while length < most:
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[known - 1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return ends, length


def describe_draft(
    row_slots: Tensor,
    caps: Tensor,
    drafts: Tensor,
    at: int,
    position: Tensor,
    history: Tensor,
    page_table: Tensor,
    page_size: int,
    *,
    out: VerifyOutputs,
) -> None:
    """The last two tokens of each row, or one draft."""
    slots = row_slots.clamp_min(0).long()
    index = position[slots].long() + at
    if at:
        tokens = drafts[at - 1]
    else:
        index = torch.stack((index, index - 1))
        tokens = history[slots, index.clamp(0, history.shape[1] - 1)]
    there = (row_slots >= 0) & (caps > at) & (index >= 0) & (index < history.shape[1])
    index = torch.where(there, index, 0)
    pages = page_table[slots, index // page_size].long()
    out.slots.copy_(torch.where(there, row_slots, -1).view(-1))
    out.ids.copy_(torch.where(there, tokens, 0).view(-1))
    out.positions.copy_(index.view(-1))
    out.seq_lens.copy_(torch.where(there, index + 1, 0).view(-1))
    out.slot_mapping.copy_(torch.where(there, pages * page_size + index % page_size, -1).view(-1))


def expand_drafts(
    row_slots: Tensor,
    drafts: Tensor,
    last_token: Tensor,
    position: Tensor,
    page_table: Tensor,
    page_size: int,
    *,
    out: VerifyOutputs,
) -> None:
    """One row for each last token, then one for each draft."""
    width = len(drafts) + 1
    real = row_slots >= 0
    slots = row_slots.clamp_min(0).long()
    tokens = torch.cat((last_token[slots][None], drafts))
    there = torch.cat((real[None], (drafts >= 0) & real))
    index = position[slots].long() + torch.arange(width, device=row_slots.device)[:, None]
    index = torch.where(there, index, 0)
    pages = page_table[slots.expand(width, -1), index // page_size].long()
    out.slots.copy_(torch.where(there, row_slots, -1).view(-1))
    out.ids.copy_(torch.where(there, tokens, 0).view(-1))
    out.positions.copy_(index.view(-1))
    out.seq_lens.copy_(torch.where(there, index + 1, 0).view(-1))
    out.slot_mapping.copy_(torch.where(there, pages * page_size + index % page_size, -1).view(-1))


def follow_drafts(slots: Tensor, sampled: Tensor, drafts: Tensor, *, out: Tensor) -> None:
    """The slots of rows that go on."""
    out.copy_(torch.where((slots >= 0) & (sampled == drafts), slots, -1))


def accept_drafts(
    row_slots: Tensor,
    sampled: Tensor,
    drafts: Tensor,
    position: Tensor,
    last_token: Tensor,
    history: Tensor,
    *,
    out: Tensor,
) -> None:
    """Count, scatter and record each row's tokens."""
    out.fill_(-1)
    out[:, :2] = 0
    for row, slot in enumerate(row_slots.tolist()):
        if slot < 0:
            continue
        tokens, guesses = sampled[:, row].tolist(), drafts[:, row].tolist()
        count = 1
        while count <= len(guesses) and guesses[count - 1] >= 0 and tokens[count - 1] == guesses[count - 1]:
            count += 1
        first = int(position[slot]) + 1
        room = max(0, min(count, history.shape[1] - first))
        history[slot, first : first + room] = sampled[:room, row]
        position[slot] += count
        last_token[slot] = tokens[count - 1]
        out[row, 0], out[row, 1] = count, sum(guess >= 0 for guess in guesses)
        out[row, 2 : 2 + count] = sampled[:count, row]


def record_tokens(row_slots: Tensor, position: Tensor, last_token: Tensor, history: Tensor) -> None:
    """history[slot, position] = last_token."""
    slots = row_slots[row_slots >= 0].long()
    index = position[slots].long()
    slots, index = slots[index < history.shape[1]], index[index < history.shape[1]]
    history[slots, index] = last_token[slots]
