"""The step being decided: what `schedule` fills in, what becomes the `Batch`, and what `commit` needs of it later.

Invariants: a `Flight` names sequence objects, not slots. A slot may pass to another sequence while its last token
is in flight; that token still reaches the sequence that it belongs to, or is dropped with it.
Knows nothing of pages or policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker_runtime.kvcache.host_pool import Moves
from stoker_runtime.request import TokenLogprobs
from stoker_runtime.scheduler.sequence import Sequence
from stoker_runtime.step.batch import Batch, PageUpdate, PrefillChunk, SlotAssign
from stoker_runtime.step.result import StepResult


@dataclass(slots=True)
class Draft:
    """One step under construction. `budget` is the number of tokens that still fit.

    `computing` are the prefix keys whose pages this step fills: a waiting sequence that wants one of them is
    better off one step later, when it finds the page in the cache.
    """

    budget: int
    decodes: tuple[int, ...] = ()
    decoding: tuple[Sequence, ...] = ()
    chunks: list[PrefillChunk] = field(default_factory=list)
    prefilling: list[Sequence] = field(default_factory=list)
    assigns: list[SlotAssign] = field(default_factory=list)
    page_updates: list[PageUpdate] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    state_loads: list[tuple[int, int]] = field(default_factory=list)
    computing: set[bytes] = field(default_factory=set)
    preempted: set[Sequence] = field(default_factory=set)
    """Who leaves in this step; they do not come back in it."""
    drafts: int = 0
    draft_caps: tuple[int, ...] = ()
    catch_ups: list[PrefillChunk] = field(default_factory=list)

    @property
    def sampled(self) -> tuple[Sequence, ...]:
        """Who gets a token: who decodes, then those whose chunk is the last one."""
        chunks = zip(self.chunks, self.prefilling, strict=True)
        return self.decoding + tuple(sequence for chunk, sequence in chunks if chunk.sample)

    def batch(self, step: int, moves: Mapping[str, Moves]) -> Batch:
        """The immutable description of this step; `moves` by the fields that they are."""
        return Batch(
            step=step,
            decodes=self.decodes,
            prefills=tuple(self.chunks),
            assigns=tuple(self.assigns),
            page_updates=tuple(self.page_updates),
            copies=tuple(self.copies),
            state_loads=tuple(self.state_loads),
            drafts=self.drafts,
            draft_caps=self.draft_caps,
            catch_ups=tuple(self.catch_ups),
            **moves,
        )


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched batch and the sequences of its rows: `sampled` in `sampled_slots` order, `prefilling` by chunk."""

    batch: Batch
    sampled: tuple[Sequence, ...]
    prefilling: tuple[Sequence, ...]

    def output(self, result: StepResult) -> StepOutput:
        """What `result` gives, without the tokens of sequences that ended while it was in flight."""
        sampled, logprobs = self.sampled, result.logprobs
        if result.counts is not None:
            sampled = tuple(each for each, count in zip(sampled, result.counts, strict=True) for _ in range(count))
        output = StepOutput(sequences=list(sampled), tokens=result.tokens)
        if logprobs is not None:
            output.logprobs = list(logprobs)
        if any(sequence.finish is not None for sequence in sampled):
            alive = [row for row, sequence in enumerate(sampled) if sequence.finish is None]
            output.sequences = [sampled[row] for row in alive]
            output.tokens = [result.tokens[row] for row in alive]
            output.logprobs = [logprobs[row] for row in alive] if logprobs is not None else []
        scores = zip(self.prefilling, result.prompt_logprobs, strict=False)
        output.prompt_logprobs = [(sequence, each) for sequence, each in scores if each and sequence.finish is None]
        return output


@dataclass(slots=True)
class StepOutput:
    """What a committed step gave: parallel lists of sequences and their tokens, and who ended with it.

    A sequence stands there once for each token that it got: of accepted drafts several times, one after the other.
    `logprobs` is empty or parallel too. `started` got their first token, or ended without one. A sequence in
    `finished` has `finish` set, and may have got no token. `vectors` are of pooled sequences, as fp32.
    """

    sequences: list[Sequence] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[tuple[Sequence, list[TokenLogprobs]]] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    vectors: list[tuple[Sequence, bytes]] = field(default_factory=list)
