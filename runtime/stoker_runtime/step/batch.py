"""The immutable description of one step: what the scheduler decided and the executor runs.

Invariants: plain data, no torch. Rows are ordered decodes first, then prefill chunks; the sampled tokens come
back in that order (decodes, then the chunks whose `sample` is set). A slot occurs at most once in a batch.
Pages named by `page_updates` belong to their sequence until the scheduler frees them. `swap_outs`, `swap_ins` and
`copies` run in this order, each list in its own, before the forward writes anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_runtime.request import Image, SamplingParams


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens `[start, start + len(token_ids))` of the sequence in `slot`; the last chunk samples a token.

    `token_ids` are real ids (a resumed sequence's earlier output included), so the executor needs no history.
    `targets` are set when prompt log-probabilities are wanted: position `start + i` of this chunk predicts
    `targets[i]`; the last one may lie just outside the chunk. `images` are those that have tokens in it, `shift` is
    added to the places of its tokens before the first of them to get the positions that they are rotated by.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    sample: bool
    targets: tuple[int, ...] = ()
    images: tuple[Image, ...] = ()
    shift: int = 0


@dataclass(frozen=True, slots=True)
class SlotAssign:
    """A sequence takes a slot: everything the device must know of it besides tokens and pages.

    `history` is prompt plus output so far, given only when penalties or drafts need it; `prompt_length` splits it.
    `seed` is always set (drawn by the engine when the request has none); sampling is keyed by (seed, position).
    `adapter` is the adapter slot that its tokens go through, −1 for none.
    """

    slot: int
    params: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...]
    history: tuple[int, ...]
    prompt_length: int
    adapter: int = -1


@dataclass(frozen=True, slots=True)
class PageUpdate:
    """Entries `[start, start + len(pages))` of `slot` in the page table number `table` become `pages`.

    There is more than table 0 where layers with a window give up pages (`executor/windows/layout.py`).
    """

    slot: int
    start: int
    pages: tuple[int, ...]
    table: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. `decodes` are slots that run one token each: the last token sampled there, which the device holds.

    A step whose `assigns`, `page_updates`, moves and `prefills` are empty and whose `decodes` equal the
    previous step's uploads nothing. `copies` are (source, destination) pages, for copy-on-write. `swap_outs` are
    (device page, host page), `swap_ins` (host page, device page). `adapter_loads` are (adapter, slot): what the host
    holds of an adapter goes to that slot before the forward, and no row of this step used what was there. `state_saves`
    are (slot, row) and `state_loads` (row, slot), copies between the states of slots and those that are kept of
    prefixes, whose rows are behind the slots: before the forward, all saves before any load. `state_outs` are (row of
    these, host row) and run before the saves, `state_ins` are (host row, slot) and run after the loads.
    With `drafts` there are no prefills: each decode runs its last token and up to `draft_caps[row]` ≤ `drafts` tokens
    that the device drafts behind it, and gets a token for each that is accepted and one more. `catch_ups` are chunks
    of decoding slots that the draft model alone computes, before it drafts; a batch with prefills has none.
    """

    step: int
    decodes: tuple[int, ...]
    prefills: tuple[PrefillChunk, ...] = ()
    assigns: tuple[SlotAssign, ...] = ()
    page_updates: tuple[PageUpdate, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    swap_outs: tuple[tuple[int, int], ...] = ()
    swap_ins: tuple[tuple[int, int], ...] = ()
    adapter_loads: tuple[tuple[int, int], ...] = ()
    drafts: int = 0
    draft_caps: tuple[int, ...] = ()
    catch_ups: tuple[PrefillChunk, ...] = ()
    state_saves: tuple[tuple[int, int], ...] = ()
    state_loads: tuple[tuple[int, int], ...] = ()
    state_outs: tuple[tuple[int, int], ...] = ()
    state_ins: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens the forward pass runs, padding of rows not counted, but drafts that there may be.

        What a draft model runs is not among them.
        """
        return len(self.decodes) * (1 + self.drafts) + sum(len(chunk.token_ids) for chunk in self.prefills)

    @property
    def shows_images(self) -> bool:
        """Whether tokens of a chunk stand for images."""
        return any(chunk.images for chunk in self.prefills)

    @property
    def row_slots(self) -> tuple[int, ...]:
        """The slots of all rows, in their order."""
        return self.decodes + tuple(chunk.slot for chunk in self.prefills)

    @property
    def sampled_slots(self) -> tuple[int, ...]:
        """The slots that get a token from this step, in the order the executor returns them."""
        return self.decodes + tuple(chunk.slot for chunk in self.prefills if chunk.sample)
