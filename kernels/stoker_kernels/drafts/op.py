"""A step that verifies drafts: match → expand → (forward, logits, sample) → follow → accept.

Where a model drafts, `describe_draft` stands in the place of `match_drafts`, once for each of its forward passes.

Drafts are tokens `[k, R]` int32, −1 from the first one on that there is not. Verification is a decode of k + 1 rows a
sequence, whose keys are in the cache before attention reads them. A token is sampled for each by the sequence's own
parameters, seed and position; a draft is accepted if it is that token. For a draft that is certain of itself this is
rejection sampling: it is accepted with the model's probability of it, and what stands in its place otherwise has the
distribution of the rest. And since a token depends on its prefix, seed and position alone, the text is the one that
plain decoding gives.

Invariants: fixed shapes, slots are read on the device, padding rows (slot < 0) change no state, nothing is read back.
`history [slots, length]` int32 holds the known tokens: `history[slot, : position + 1]`, the last of which is
`last_token[slot]`; what lies beyond its length is not kept.
Knows nothing of sampling parameters, and nothing of who decides about `caps`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.drafts.types import Matching, VerifyOutputs
from stoker_kernels.launch.dispatch import reference_supports, register, select, triton_supports

HEADER = 2
"""Columns of `accept_drafts`'s output before the tokens: how many tokens, how many drafts there were."""

_TRITON = {
    "match_drafts": "triton_match",
    **dict.fromkeys(("expand_drafts", "follow_drafts", "accept_drafts", "record_tokens"), "triton_verify"),
    "describe_draft": "triton_describe",
}
for _op, _module in _TRITON.items():
    register(_op, "triton", f"stoker_kernels.drafts.{_module}:{_op}", triton_supports(torch.int32), invariant=True)
    register(_op, "reference", f"stoker_kernels.drafts.reference:{_op}", reference_supports, invariant=True)


def match_drafts(
    row_slots: Tensor, caps: Tensor, position: Tensor, history: Tensor, rules: Matching, *, out: Tensor
) -> None:
    """Fill `out [k, R]` with drafts from each row's own tokens; `caps [R]` int32 bounds a row's.

    A match that overlaps the end goes on with itself, so a text that repeats itself is drafted as far as `k` goes.
    """
    select("match_drafts", row_slots.device, row_slots.dtype)(row_slots, caps, position, history, rules, out=out)


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
    """Describe the pass of a draft model that ends with the tokens whose successors are draft number `at`.

    Pass 0 runs 2 · R rows of one token: each row's last token, and behind all of these the ones before them, which may
    have been drafts that nothing came after. Pass `at` runs R: draft `at - 1` of `drafts [k, R]` at its position.
    A row whose `caps [R]` int32 allow no draft `at` is padding.
    """
    select("describe_draft", row_slots.device, row_slots.dtype)(
        row_slots, caps, drafts, at, position, history, page_table, page_size, out=out
    )


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
    """Describe the step that runs each row's last token and its drafts `[k, R]`, as `prepare_decode` describes one."""
    select("expand_drafts", row_slots.device, row_slots.dtype)(
        row_slots, drafts, last_token, position, page_table, page_size, out=out
    )


def follow_drafts(slots: Tensor, sampled: Tensor, drafts: Tensor, *, out: Tensor) -> None:
    """`out [R]`: the slots of rows whose sampled token is their draft, so that the next one counts; −1 for the others.

    `slots`, `sampled`, `drafts` `[R]` int32, the drafts those that stand in the place of the sampled tokens.
    """
    select("follow_drafts", slots.device, slots.dtype)(slots, sampled, drafts, out=out)


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
    """Take over each row's tokens: those of `sampled [k+1, R]` up to the first that differs from its draft `[k, R]`.

    Moves position and last token, writes the history, and fills `out [R, HEADER + k + 1]` int32: how many tokens, how
    many drafts there were, and the tokens, −1 behind them. A padding row gets 0 of each.
    """
    select("accept_drafts", row_slots.device, row_slots.dtype)(
        row_slots, sampled, drafts, position, last_token, history, out=out
    )


def record_tokens(row_slots: Tensor, position: Tensor, last_token: Tensor, history: Tensor) -> None:
    """Write each row's last token into its history, after a step of one token a row."""
    select("record_tokens", row_slots.device, row_slots.dtype)(row_slots, position, last_token, history)
