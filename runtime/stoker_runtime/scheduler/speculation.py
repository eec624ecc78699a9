"""Lets decode steps verify drafts, and takes in how many of them were right.

A step is scheduled before the one before it is read, so where a sequence stands is known within bounds then:
`computed` counts the positions that were run in any case, `ahead` what drafts in flight may add to it. Pages are there
for the upper bound, everything else goes by the lower one; the device knows the position itself.

Invariants: drafts never cost another sequence its pages, and no sequence grows beyond its limit. Rows whose next token
the host has a say in have no drafts. Knows nothing of where drafts come from.
"""

from __future__ import annotations

from stoker_runtime.drafts.pace import Pace, RowPace
from stoker_runtime.request import EngineStats
from stoker_runtime.scheduler.catching_up import CatchingUp
from stoker_runtime.scheduler.draft import Draft, Flight, StepOutput
from stoker_runtime.scheduler.limits import SchedulerConfig
from stoker_runtime.scheduler.placement import Placement
from stoker_runtime.scheduler.sequence import Sequence
from stoker_runtime.step.batch import Batch
from stoker_runtime.step.result import StepResult


class Speculation:
    """The decisions about drafts, and counts of what came of them."""

    def __init__(self, config: SchedulerConfig, placement: Placement) -> None:
        self.pace = Pace(config.drafts, config.verify_tokens, config.draft_batch_limit, config.draft_costs)
        self._placement = placement
        self._model: CatchingUp | None = None
        if (drafted := placement.pages.drafted) is not None:
            self._model = CatchingUp(drafted, config.page_size, config.max_num_batched_tokens)
        self._rows: tuple[Sequence, ...] = ()
        self._paces: list[RowPace | None] = []
        self._drafts = 0
        self._draft_tokens = 0
        self._accepted = [0] * config.drafts
        self._cost_tokens = 0.0

    @classmethod
    def of(cls, config: SchedulerConfig, placement: Placement) -> Speculation | None:
        """None where nothing is drafted."""
        return cls(config, placement) if config.verify_tokens else None

    def extend(self, draft: Draft, step: int) -> None:
        """Give the rows of `step`, which only decodes, as many drafts as are worth it and have room."""
        changed = draft.decoding is not self._rows
        if changed:
            self._rows = draft.decoding
            self._paces = [self._pace_of(sequence, step) for sequence in draft.decoding]
        k, wanted = self.pace.choose(self._paces, changed=changed)
        if not k:
            return
        if self._model is not None:
            wanted = self._caught_up(self._model, draft, step, wanted)
        caps = tuple(self._cap(*row, draft) for row in zip(draft.decoding, wanted, strict=True))
        if not any(caps):
            return
        draft.drafts, draft.draft_caps = k, caps
        for sequence, cap in zip(draft.decoding, caps, strict=True):
            sequence.ahead += cap
            self._placement.set_event(sequence)
            if cap and self._model is not None:
                self._model.drafts(sequence, step)

    def settle(self, flight: Flight, result: StepResult) -> None:
        """The step of `flight` gave `result`: its sequences stand where they stand."""
        assert result.counts is not None, "a step with drafts counts its tokens"
        batch = flight.batch
        self._cost(len(batch.decodes), self.pace.cost(len(batch.decodes), batch.drafts) - 1)
        rows = zip(flight.sampled, batch.draft_caps, result.counts, result.offered, strict=True)
        for sequence, cap, count, offered in rows:
            if not cap:
                continue
            if offered:
                self._drafts += 1
                self._draft_tokens += offered
                for at in range(count - 1):
                    self._accepted[at] += 1
            if sequence.pace is not None:
                self.pace.learn(sequence.pace, offered, count - 1)
            # Who lost its slot meanwhile begins anew, with all its tokens known.
            if sequence.slot >= 0:
                sequence.ahead -= cap
                sequence.computed += count - 1
                self._placement.set_event(sequence)

    def spent(self, launched: Batch, finished: Batch, seconds: float) -> None:
        """Learn what a step costs, where it stands among its like: then it does not matter whose time was measured."""
        rows = len(finished.decodes)
        alike = (len(launched.decodes), launched.drafts) == (rows, finished.drafts)
        chunks = launched.prefills or finished.prefills or launched.catch_ups or finished.catch_ups
        if alike and rows and not chunks:
            self.pace.spent(rows, finished.drafts, seconds)

    def count(self, stats: EngineStats) -> None:
        """Fill in what `stats` say of drafts."""
        stats.drafts, stats.draft_tokens = self._drafts, self._draft_tokens
        stats.accepted_tokens, stats.accepted_by_position = sum(self._accepted), tuple(self._accepted)
        stats.draft_cost_tokens = self._cost_tokens
        stats.draft_costs, stats.draft_gains = self.pace.figures()

    def _cost(self, rows: int, plain_steps: float) -> None:
        """Count what `rows` sequences would have got in so many plain steps, which went into drafts."""
        self._cost_tokens += rows * max(0.0, plain_steps)

    def _caught_up(
        self, model: CatchingUp, draft: Draft, step: int, wanted: tuple[int, ...]
    ) -> tuple[int, ...]:
        """What is `wanted` by those alone whose draft model has all their tokens, or gets them before it drafts."""
        ready = list(wanted)
        for at, sequence in enumerate(draft.decoding):
            lacking = model.lacks(sequence, step) if wanted[at] else 0
            if lacking:
                left, row = sequence.limit - sequence.computed, self._paces[at]
                pays = row is not None and self.pace.catches_up(row, lacking, left, len(wanted))
                joins = pays and model.catch_up(sequence, step, draft)
                ready[at] = wanted[at] if joins else 0
                if joins:
                    self._cost(len(wanted), self.pace.catching_up(lacking))
        return tuple(ready)

    def _pace_of(self, sequence: Sequence, step: int) -> RowPace | None:
        if self._model is not None:
            self._model.enter(sequence, step)
        if sequence.params.masked:
            return None
        if sequence.pace is None:
            sequence.pace = self.pace.new_row()
        return sequence.pace

    def _cap(self, sequence: Sequence, wanted: int, draft: Draft) -> int:
        """How many of the drafts that are `wanted` fit below the sequence's limit, and into pages that nobody needs."""
        placement, after = self._placement, sequence.computed + sequence.ahead
        cap = min(wanted, sequence.limit - 1 - after)
        capacity = placement.capacity(sequence)
        while cap > 0 and after + cap > capacity:
            if placement.room < 1 or not placement.grow(sequence, draft):
                return max(0, capacity - after)
            capacity = placement.capacity(sequence)
        return max(0, cap)


def keep_alive(output: StepOutput, kept: list[int]) -> None:
    """Drop what sequences got behind their end: only the rows `kept` of `output` are left."""
    if len(kept) < len(output.tokens):
        output.sequences = [output.sequences[row] for row in kept]
        output.tokens = [output.tokens[row] for row in kept]
        output.logprobs = [output.logprobs[row] for row in kept] if output.logprobs else []
