"""Decides what every step runs: continuous batching with chunked prefill, preemption, admission.

One step ahead: `schedule` for step N + 1 runs before `commit` of step N. What depends on token ids (stop ids) is
found at commit and costs one discarded token; what depends on counts (length, pages) is known when scheduling.

Invariants: every method runs between two launches, so all that was scheduled was launched. A slot and its pages
are free the moment their sequence ended, even with a step in flight: the device runs batches in order, so that
step is over before the next one reuses them. Results are matched to sequence objects, never to slots. Every
admitted sequence can finish alone on this device, and the best-ordered one is never preempted for another:
some sequence always advances.
Knows nothing of text, processes, devices or torch.
"""

from __future__ import annotations

import random
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import attrgetter

from stoker_runtime.errors import EngineError
from stoker_runtime.request import EngineStats, FinishReason, Request
from stoker_runtime.scheduler.arrival import new_sequence
from stoker_runtime.scheduler.draft import Draft, Flight, StepOutput
from stoker_runtime.scheduler.family import Families
from stoker_runtime.scheduler.integrity import check_lists
from stoker_runtime.scheduler.limits import SchedulerConfig, refuse_impossible
from stoker_runtime.scheduler.placement import Placement
from stoker_runtime.scheduler.policy import DISPLACING, POLICIES, WaitingQueue
from stoker_runtime.scheduler.rate import AdmissionRate
from stoker_runtime.scheduler.sequence import Sequence
from stoker_runtime.scheduler.shown import refuse_images, shown_chunk, whole_stop
from stoker_runtime.scheduler.speculation import Speculation, keep_alive
from stoker_runtime.scheduler.urgency import Clearance
from stoker_runtime.step.batch import Batch, PrefillChunk
from stoker_runtime.step.result import StepResult

_order = attrgetter("order")
MAX_DEFERRED = 256
"""Waiting sequences looked past in one step, for want of a prefix that this step computes."""


class Scheduler:
    """The state of all sequences. `add`, `abort`, `schedule`, `commit` and `fail` are called by one thread."""

    def __init__(self, config: SchedulerConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.on_end: Callable[[Sequence], None] = lambda sequence: None  # called with each that ends
        self._clock = clock
        self._placement = Placement.of(config)
        self.adapters = self._placement.adapters
        self._order = POLICIES[config.policy]
        self._displacing = config.policy in DISPLACING
        self.speculation = Speculation.of(config, self._placement)
        self._families = Families(shared=config.shares_prompts and config.sight is None)
        self._waiting = WaitingQueue()
        self._decoding: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._ending: list[Sequence] = []
        self._launched_prefills: tuple[Sequence, ...] = ()
        self._flights: deque[Flight] = deque()
        self._decode_rows: tuple[tuple[int, ...], tuple[Sequence, ...]] | None = None
        self._departed = False
        self._random, self._admissions = random.Random(config.seed), AdmissionRate()
        self._serial = self._step = self._preemptions = self._prompt_tokens = self._generation_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits, runs or has a result to come."""
        return bool(self._waiting or self._flights or self._decoding or self._prefilling)

    def add(self, request: Request, *, client: int = 0, handle: int = 0) -> Sequence:
        """Queue a request. Raises RequestError when it can never run, CapacityError when the queue is full."""
        config, eos = self.config, self.config.eos_token_ids
        refuse_impossible(request, max_tokens=config.max_tokens, vocab_size=config.vocab_size, eos_ids=len(eos))
        refuse_images(request, config)
        self._admissions.require_room(len(self._waiting), config.max_queued, self._clock())
        seed = self._random.getrandbits(63) if request.params.seed is None else request.params.seed
        sequence = new_sequence(request, config, seed)
        sequence.client, sequence.handle = client, handle
        sequence.order = self._order(request, self._serial)
        self._families.join(sequence)
        self._serial += 1
        self._waiting.push(sequence)
        self._placement.adapters.queue(request.adapter, 1)
        return sequence

    def abort(self, sequence: Sequence) -> bool:
        """End a sequence now and free what it holds; False when it had ended already."""
        if sequence.finish is not None:
            return False
        self._end(sequence, FinishReason.ABORT)
        return True

    def end(self, sequence: Sequence, reason: FinishReason, output: StepOutput) -> None:
        """End a sequence for a reason that lies outside of tokens and counts, as part of a step's output."""
        if len(sequence.tokens) == sequence.prompt_length:
            output.started.append(sequence)
        self._finish(sequence, reason, output)

    @property
    def sampled(self) -> tuple[Sequence, ...]:
        """The sequences of the newest launched batch that get a token from it, as `Batch.sampled_slots` orders them."""
        return self._flights[-1].sampled

    def schedule(self) -> Batch | None:
        """Decide the next step; None when no sequence can run. The caller launches it before any other call."""
        self._settle()
        draft = Draft(budget=self.config.max_num_batched_tokens)
        if self._displacing:
            self._make_way(draft)
        self._schedule_decodes(draft)
        self._continue_prefills(draft)
        self._admit(draft)
        if not draft.decodes and not draft.chunks:
            return None
        if self.speculation is not None and not draft.chunks:
            self.speculation.extend(draft, self._step + 1)
        self._step += 1
        batch = draft.batch(self._step, self._placement.take_moves())
        self._launched_prefills = tuple(draft.prefilling)
        self._flights.append(Flight(batch, draft.sampled, self._launched_prefills))
        return batch

    def commit(self, batch: Batch, result: StepResult) -> StepOutput:
        """Take in the tokens of the oldest launched batch: append, find who ended, publish full pages.

        Raises EngineError when the result does not fit the batch; `fail` is the answer to it.
        """
        self._placement.settle_copies()
        flight = self._flights[0]
        assert flight.batch is batch, "results are committed in the order of their launches"
        if result.rows != len(flight.sampled):
            # The flight stays in the books, so that `fail` ends its sequences too.
            raise EngineError(f"Step {batch.step} gave {result.rows} tokens, not {len(flight.sampled)}.")
        self._flights.popleft()
        output = flight.output(result)
        if self.speculation is not None and result.counts is not None:
            self.speculation.settle(flight, result)
            self._take_runs(flight, output)
            return output
        for sequence, token in zip(output.sequences, output.tokens, strict=True):
            tokens = sequence.tokens
            tokens.append(token)
            if token in sequence.stops or len(tokens) >= sequence.milestone:
                self._reach(sequence, token, output)
        self._generation_tokens += len(output.tokens)
        for chunk, sequence in zip(batch.prefills, flight.prefilling, strict=True):
            self._commit_chunk(chunk, sequence, output)
        return output

    def _take_runs(self, flight: Flight, output: StepOutput) -> None:
        """Append what a step with drafts gave; a sequence may end in the middle of its run."""
        kept: list[int] = []
        for row, (sequence, token) in enumerate(zip(output.sequences, output.tokens, strict=True)):
            if sequence.finish is not None:
                continue
            kept.append(row)
            sequence.tokens.append(token)
            if token in sequence.stops or len(sequence.tokens) >= sequence.milestone:
                self._reach(sequence, token, output)
        keep_alive(output, kept)
        self._generation_tokens += len(kept)
        for sequence in flight.sampled:
            # The step that runs gives the last token, which was not certain when it was scheduled.
            if sequence.slot >= 0 and sequence.computed >= sequence.limit - 1:
                self._leave(sequence)

    def fail(self, message: str) -> list[Sequence]:
        """End every sequence that a failed step may have touched, but none that waits, and distrust what it cached."""
        flying = [sequence for flight in self._flights for sequence in (*flight.sampled, *flight.prefilling)]
        touched = dict.fromkeys((*self._decoding, *self._prefilling, *self._ending, *flying))
        failed = [sequence for sequence in touched if sequence.finish is None]
        for sequence in failed:
            sequence.error = message
            self._end(sequence, FinishReason.ERROR)
        for sequence in self._waiting.members():
            self._placement.forget(sequence)
        self._flights.clear()
        self._launched_prefills = ()
        self.forget_caches()
        return failed

    def forget_caches(self) -> None:
        """Forget prefixes, sessions and what adapters' slots hold. Nothing is placed."""
        self._settle()
        self._placement.clear_caches()

    def stats(self) -> EngineStats:
        """Gauges of now and counters since start; the step's own figures and adapters' names are the step loop's."""
        stats = EngineStats(
            steps=self._step,
            waiting=len(self._waiting),
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
        )
        self._placement.count(stats)
        if self.speculation is not None:
            self.speculation.count(stats)
        return stats

    def check(self) -> None:
        """Raise AssertionError unless slots, pages, lists and queue agree; when idle, that nothing is held."""
        lists = self._decoding, self._prefilling, self._ending
        check_lists(*lists, self._waiting, self._placement, idle=not self.has_work)

    def _settle(self) -> None:
        # The last batch was launched by now: what it fills can be shared, what it finished can be reused.
        self._placement.settle_copies()
        for sequence in self._launched_prefills:
            if sequence.slot >= 0:
                self._placement.settle(sequence)
        self._launched_prefills = ()
        for sequence in self._ending:
            if sequence.slot >= 0:
                self._leave(sequence)
        self._ending.clear()
        if self._departed:
            self._departed = False
            self._decode_rows = None
            self._decoding = [sequence for sequence in self._decoding if sequence.slot >= 0]
            self._prefilling = [sequence for sequence in self._prefilling if sequence.slot >= 0]

    def _schedule_decodes(self, draft: Draft) -> None:
        for sequence in [each for each in self._decoding if each.computed >= each.event]:
            if sequence.slot >= 0:
                self._cross(sequence, draft)
        if self._decode_rows is None:
            slots = tuple(sequence.slot for sequence in self._decoding)
            self._decode_rows = slots, tuple(self._decoding)
        for sequence in self._decoding:
            sequence.computed += 1
        draft.decodes, draft.decoding = self._decode_rows
        draft.budget -= len(draft.decodes)

    def _cross(self, sequence: Sequence, draft: Draft) -> None:
        # Victims come from the end of the order: never sequences that this step has decided on.
        if sequence.computed + sequence.ahead >= self._placement.capacity(sequence):
            while not self._placement.cross(sequence, draft):
                members = max((m for m in (self._decoding, self._prefilling) if m), key=lambda m: m[-1].order)
                victim = members[-1]
                self._preempt(victim, draft)
                if victim is sequence:
                    return
        if sequence.computed == sequence.limit - 2:
            self._ending.append(sequence)

    def _make_way(self, draft: Draft) -> None:
        """Preempt sequences of lower priority for more urgent ones that wait, as far as those can then run."""
        running, best = [members for members in (self._decoding, self._prefilling) if members], self._waiting.best()
        if best is None or all(best.request.priority >= members[-1].request.priority for members in running):
            return
        crossing = sum(each.computed + each.ahead >= self._placement.capacity(each) for each in self._decoding)
        # Whose last token runs in this step is out of the way after it.
        staying = [each for each in (*self._decoding, *self._prefilling) if each.computed < each.limit - 2]
        room = Clearance(self._placement, staying, crossing)
        room.make(self._waiting, self.config.max_num_batched_tokens - len(self._decoding), partial(self._wants, draft))
        for victim in room.victims:
            self._preempt(victim, draft)

    def _wants(self, draft: Draft, sequence: Sequence) -> tuple[int, int] | None:
        """Pages that `sequence` needs to run now and tokens that it would compute; None when it has to wait anyway."""
        if not sequence.is_ready or not self._placement.adapters.has_room(sequence.request.adapter):
            return None
        found = self._placement.lookup(sequence)
        if self._families.origin(sequence, found.covered, draft) is sequence:
            return None
        return self._placement.pages_wanted(sequence, found), len(sequence.tokens) - found.covered

    def _preempt(self, victim: Sequence, draft: Draft) -> None:
        if victim in self._decoding:
            self._decoding.remove(victim)
            victim.awaited = victim.computed + 1
        else:
            self._prefilling.remove(victim)
            victim.awaited = len(victim.tokens)
        self._placement.preempt(victim)
        self._waiting.push(victim)
        draft.preempted.add(victim)
        self._decode_rows = None
        self._preemptions += 1

    def _continue_prefills(self, draft: Draft) -> None:
        unfinished, self._prefilling = self._prefilling, []
        for sequence in unfinished:
            if self._displacing:
                self._admit(draft, sequence.request.priority)
            if draft.budget:
                self._add_chunk(sequence, draft)
            else:
                self._prefilling.append(sequence)
        while not draft.decodes and not draft.chunks and len(self._prefilling) > 1:
            # No page is left for any chunk: the last one leaves its own to the first.
            self._preempt(self._prefilling[-1], draft)
            self._add_chunk(self._prefilling.pop(0), draft)

    def _admit(self, draft: Draft, before: int | None = None) -> None:
        """Admit those who wait, in order; with `before`, only those of a lower `priority`."""
        placement, waiting = self._placement, self._waiting
        deferred: list[Sequence] = []
        closed: set[int] = set()
        while draft.budget and placement.free_slots and len(deferred) < MAX_DEFERRED:
            best = waiting.best()
            # Who has just left for want of pages comes back before anyone behind, but not in the same step.
            if best is None or best in draft.preempted or (before is not None and best.request.priority >= before):
                break
            sequence = waiting.pop()
            assert sequence is best
            if not sequence.is_ready or placement.adapters.defers(sequence.request.adapter, closed):
                deferred.append(sequence)
                continue
            found = placement.lookup(sequence)
            source = self._families.origin(sequence, found.covered, draft)
            if source is sequence or placement.is_being_computed(sequence, found, draft):
                deferred.append(sequence)
            elif placement.place(sequence, found, source, draft):
                self._note_admission(sequence)
                self._add_chunk(sequence, draft)
            else:
                deferred.append(sequence)
                break
        for sequence in deferred:
            waiting.push(sequence)

    def _note_admission(self, sequence: Sequence) -> None:
        if sequence.admitted is None:
            sequence.admitted = self._clock()
            self._admissions.note(sequence.admitted)
            self._prompt_tokens += sequence.prompt_length

    def _add_chunk(self, sequence: Sequence, draft: Draft) -> None:
        """Run as many of the known tokens as fit, perhaps none; then it goes on prefilling, decodes, or ends."""
        start, known = sequence.computed, len(sequence.tokens)
        stop = min(known, start + draft.budget)
        last_scored, scored = sequence.prompt_length - 1, sequence.scored
        stop = min(stop, scored) if start < scored < last_scored else stop
        uncut = sequence.request.images if self.config.whole_images else ()
        stop = self._placement.reach(sequence, whole_stop(uncut, start, stop), draft)
        stop = whole_stop(uncut, start, stop)
        if stop <= start:
            insort(self._prefilling, sequence, key=_order)
            return
        scores_to = min(stop, last_scored)
        targets = tuple(sequence.tokens[start + 1 : scores_to + 1]) if start >= scored else ()
        sequence.scored = max(scored, scores_to)
        draft.chunks.append(shown_chunk(sequence, stop, sample=stop == known < sequence.limit, targets=targets))
        draft.prefilling.append(sequence)
        draft.budget -= stop - start
        draft.computing.update(sequence.keys[start // self.config.page_size : stop // self.config.page_size])
        sequence.computed = stop
        if stop < known:
            insort(self._prefilling, sequence, key=_order)
        elif stop + 1 >= sequence.limit:
            self._ending.append(sequence)
        else:
            insort(self._decoding, sequence, key=_order)
            self._decode_rows = None

    def _commit_chunk(self, chunk: PrefillChunk, sequence: Sequence, output: StepOutput) -> None:
        if chunk.sample:
            # A chunk that runs output again, after a preemption, starts nothing.
            first = chunk.start + len(chunk.token_ids) == sequence.prompt_length < len(sequence.tokens)
            if first and sequence.finish is not FinishReason.ABORT:
                output.started.append(sequence)
        elif chunk.start + len(chunk.token_ids) == sequence.limit and sequence.finish is None:
            output.started.append(sequence)
            self._finish(sequence, FinishReason.LENGTH, output)

    def _reach(self, sequence: Sequence, token: int, output: StepOutput) -> None:
        known, params = len(sequence.tokens), sequence.params
        if token in sequence.stops and known - sequence.prompt_length > params.min_tokens:
            if token not in self.config.eos_token_ids or params.ignore_eos:
                sequence.stop_token = token
            self._finish(sequence, FinishReason.STOP, output)
        elif known >= sequence.limit:
            self._finish(sequence, FinishReason.LENGTH, output)
        elif sequence.slot >= 0:
            self._placement.publish(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason, output: StepOutput) -> None:
        self._end(sequence, reason)
        output.finished.append(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish = reason
        self._families.leave(sequence)
        if sequence.slot >= 0:
            self._leave(sequence)
        else:
            self._placement.dismiss(sequence)
            self._waiting.discard(sequence)
        self.on_end(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._placement.release(sequence)
        self._departed = True
