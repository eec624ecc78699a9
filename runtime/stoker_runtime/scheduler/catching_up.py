"""How far a draft model is behind each sequence, and what it computes before it drafts for one again.

Steps without drafts run the first model alone: prompts, plain decodes, those of a row that has no drafts. A step with
drafts runs the last two tokens of a row, so a sequence whose draft model lacks no more than the token before the last
one is up to date. One that it is further behind has the rest computed first, as chunks of known tokens.

Each step that a sequence decodes in without drafts puts its draft model one token further behind, and each one with
drafts leaves it at most one behind. So a step's number is all that is kept: `behind = step - caught_up`.

Invariants: what is said to be computed is; it may be more. Positions of a sequence that is behind are exact: no drafts
of it are in flight. Knows nothing of costs.
"""

from __future__ import annotations

from stoker_runtime.kvcache.drafted_pages import DraftedPages
from stoker_runtime.scheduler.draft import Draft
from stoker_runtime.scheduler.sequence import Sequence
from stoker_runtime.step.batch import PrefillChunk

UP_TO_DATE = 1
"""Tokens before the last one that a draft model may lack: a step with drafts begins with so many."""


class CatchingUp:
    """The books of one draft model."""

    def __init__(self, pages: DraftedPages, page_size: int, chunk_tokens: int) -> None:
        """A step computes at most `chunk_tokens` tokens of what it is behind."""
        self._pages = pages
        self._page_size = page_size
        self._chunk_tokens = chunk_tokens

    def enter(self, sequence: Sequence, step: int) -> None:
        """A sequence decodes in `step`, which counts it already; after it has got a slot, its pages say what is there.

        Idempotent.
        """
        if sequence.caught_up is None:
            drafted = self._pages.leading(sequence.pages) * self._page_size
            sequence.caught_up = step - max(0, sequence.computed - 1 - drafted)

    def lacks(self, sequence: Sequence, step: int) -> int:
        """Tokens that have to be computed before it may have drafts in `step`."""
        assert sequence.caught_up is not None, "it was never seen to decode"
        return max(0, step - sequence.caught_up - UP_TO_DATE)

    def catch_up(self, sequence: Sequence, step: int, draft: Draft) -> bool:
        """Compute what it lacks in `step`, or a part of that; False where some is left."""
        lacking = self.lacks(sequence, step)
        room = self._chunk_tokens - sum(len(chunk.token_ids) for chunk in draft.catch_ups)
        count = min(lacking, room)
        if count > 0:
            assert sequence.caught_up is not None, "it lacks something"
            assert not sequence.ahead, "where it stands is not certain"
            start = max(0, sequence.computed - 1 - (step - sequence.caught_up))
            tokens = tuple(sequence.tokens[start : start + count])
            assert len(tokens) == count, "what it lacks is not known yet"
            draft.catch_ups.append(PrefillChunk(sequence.slot, start, tokens, sample=False))
            sequence.caught_up += count
            self._mark(sequence, start + count)
        return count == lacking

    def drafts(self, sequence: Sequence, step: int) -> None:
        """It has drafts in `step`: all its tokens are computed then, but those that turn out to be drafts."""
        sequence.caught_up = step
        self._mark(sequence, sequence.computed)

    def _mark(self, sequence: Sequence, computed: int) -> None:
        full = computed // self._page_size
        if full > sequence.drafted:
            self._pages.mark(sequence.pages[sequence.drafted : full])
            sequence.drafted = full
