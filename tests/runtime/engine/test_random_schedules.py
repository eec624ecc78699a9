"""Thousands of random schedules through the real step loop, each batch verified, integrity after every step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from tests.runtime.drafts.random_pace import decide_by_chance
from tests.runtime.engine.uniform_executor import UniformExecutor, UniformLaunched

from stoker_runtime.config import EngineConfig
from stoker_runtime.drafts.settings import DraftCosts, Drafting
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import CapacityError, EngineError, RequestError
from stoker_runtime.kvcache.sight import Sight
from stoker_runtime.request import EngineStats, FinishReason, Request, SamplingParams, TokenLogprobs
from stoker_runtime.scheduler.draft import StepOutput
from stoker_runtime.scheduler.sequence import Sequence
from stoker_runtime.step.batch import Batch

SCHEDULES_PER_CASE = 250
DRAFTED_SCHEDULES = 80


@dataclass
class Received:
    """What the outside saw of one request."""

    sequence: Sequence
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None


class StumblingExecutor(UniformExecutor):
    """Fails the next step when told to; what that step would have written is not to be trusted."""

    stumbles = False

    def execute(self, batch: Batch) -> UniformLaunched:
        """Run the batch, or fail and go on."""
        if not self.stumbles:
            return super().execute(batch)
        self.stumbles = False
        self.batches += 1
        self.sampled = self.batches
        self.unread.clear()
        raise EngineError("the device stumbled")


class Scenario:
    """One random world: sizes, arrivals, aborts, failures; runs to idle and verifies every request's whole output."""

    def __init__(
        self, seed: int, policy: str, *, swap: bool = False, drafts: int = 0, model: bool = False, near: bool = False,
        states: bool = False,
    ) -> None:  # fmt: skip
        self.random = rng = random.Random(seed)
        slots = rng.randint(1, 8)
        pages, page_size = rng.choice([3, 6, 12, 24, 48]), rng.choice([1, 2, 4, 8])
        sight = Sight(rng.choice([1, 3, 8, 20]), rng.randint(1, 4), page_size, rng.choice([1, 4, 16])) if near else None
        self.executor = StumblingExecutor(
            num_pages=pages if sight is None else pages + sight.parts * rng.randint(1, 24),
            page_size=page_size,
            max_num_seqs=slots,
            max_model_len=rng.choice([24, 64, 200]),
            max_num_batched_tokens=slots + rng.choice([0, 1, 7, 32]),
            vocab_size=rng.choice([8, 40]),
            host_pages=rng.choice([1, 3, 12, 100]) if swap else 0,
            host_page_tokens=rng.choice([0.0, 0.0, 1.5]) if swap else 0.0,
            drafting=Drafting("ngram", drafts, 1, 4) if drafts else None,
            draft_costs=DraftCosts(0.1, 0.001) if model else None,
            sight=sight,
            snapshots=rng.choice([0, 1, 2, 5, 20]) if states else None,
            host_states=rng.choice([1, 2, 5, 30]) if states and swap else 0,
            host_state_tokens=rng.choice([0.0, 0.0, 3.0]) if states and swap else 0.0,
        )
        config = EngineConfig(
            model="uniform",
            scheduling_policy=policy,
            enable_prefix_caching=rng.random() < 0.75,
            max_queued=rng.choice([4, 1000]),
        )
        self.loop = StepLoop(self.executor, config)
        decide_by_chance(self.loop, rng)
        self.capacity = self.loop.scheduler.config.max_tokens
        self.prefixes = [self.tokens(rng.randint(1, 30)) for _ in range(3)]
        self.received: dict[Sequence, Received] = {}
        self.refused = 0

    def tokens(self, count: int) -> tuple[int, ...]:
        """Random prompt ids."""
        return tuple(self.random.randrange(self.executor.vocab_size) for _ in range(count))

    def arrive(self) -> None:
        """One request, or a few with the same prompt."""
        rng = self.random
        prompt = (rng.choice(self.prefixes) if rng.random() < 0.7 else ()) + self.tokens(rng.choice([0, 1, 5, 20]))
        prompt = prompt or self.tokens(1)
        family = f"f{rng.getrandbits(40)}" if rng.random() < 0.7 else ""
        session = rng.choice(["", "", "s"])
        for _ in range(rng.choice([1, 1, 1, 3])):
            max_tokens = rng.choice([0, 1, 2, 8, 40])
            params = SamplingParams(
                max_tokens=max_tokens,
                min_tokens=rng.choice([0, 0, min(3, max_tokens)]),
                seed=rng.getrandbits(40),
                ignore_eos=rng.random() < 0.4,
                stop_token_ids=(3,) if rng.random() < 0.3 else (),
                logprobs=rng.choice([None, None, 0]),
                prompt_logprobs=rng.choice([None, None, None, 0]),
                presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            )
            arrival, priority = self.executor.batches, rng.randint(-1, 1)
            request = Request(f"r{params.seed}", prompt, params, arrival, priority, family=family, session=session)
            self.executor.prompts[params.seed or 0] = prompt
            try:
                sequence = self.loop.add(request)
            except RequestError:
                assert len(prompt) + min(1, max_tokens) > self.capacity
                self.refused += 1
            except CapacityError:
                assert self.loop.scheduler.stats().waiting >= self.loop.scheduler.config.max_queued
                self.refused += 1
            else:
                self.received[sequence] = Received(sequence)

    def step(self) -> None:
        """One step and the integrity check."""
        try:
            self.take(self.loop.step())
        except EngineError as error:
            for sequence in self.loop.fail(error):
                assert self.received[sequence].finish is None, "failed after its end"
                self.received[sequence].finish = FinishReason.ERROR
        self.loop.scheduler.check()

    def take(self, output: StepOutput) -> None:
        """Record a step's output as a client would see it."""
        assert len(output.sequences) == len(output.tokens)
        assert len(output.logprobs) in (0, len(output.tokens))
        for row, sequence in enumerate(output.sequences):
            mine = self.received[sequence]
            assert mine.finish is None, "a token after the end"
            mine.tokens.append(output.tokens[row])
            if output.logprobs and (logprobs := output.logprobs[row]) is not None:
                mine.logprobs.append(logprobs)
        for sequence, scores in output.prompt_logprobs:
            self.received[sequence].prompt_logprobs += scores
        for sequence in output.finished:
            assert self.received[sequence].finish is None, "ended twice"
            self.received[sequence].finish = sequence.finish

    def abort_some(self) -> None:
        """Abort a random request in whatever state it is."""
        alive = [each for each in self.received.values() if each.finish is None]
        if alive:
            victim = self.random.choice(alive)
            assert self.loop.abort(victim.sequence)
            assert not self.loop.abort(victim.sequence)
            victim.finish = FinishReason.ABORT
            self.loop.scheduler.check()

    def run(self) -> None:
        """Arrivals and aborts for a while, then to idle."""
        for _ in range(self.random.randint(1, 40)):
            while self.random.random() < 0.4:
                self.arrive()
            if self.random.random() < 0.1:
                self.abort_some()
            self.executor.stumbles = self.random.random() < 0.01
            self.step()
        bound = self.executor.batches + 200 * (len(self.received) + 1)
        while self.loop.has_work:
            self.step()
            assert self.executor.batches < bound, "no progress"
        self.loop.scheduler.check()
        assert not self.executor.unread
        for mine in self.received.values():
            self.verify(mine)

    def verify(self, mine: Received) -> None:
        """The output is the one that the seed alone decides, however it was scheduled."""
        request, params = mine.sequence.request, mine.sequence.params
        expected = self.executor.expected_output(request.prompt_token_ids, params, self.capacity)
        assert mine.finish is not None, "a request without an answer"
        if mine.finish in (FinishReason.ABORT, FinishReason.ERROR):
            assert mine.tokens == expected[: len(mine.tokens)]
            return
        assert mine.tokens == expected
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self.executor.eos_token_ids)}
        stopped = bool(expected) and expected[-1] in stops and len(expected) > params.min_tokens
        assert mine.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        if params.logprobs is not None:
            first = len(request.prompt_token_ids)
            assert [(each.logprob, each.rank) for each in mine.logprobs] == [
                (-float(position), token) for position, token in enumerate(expected, first)
            ]
        if params.prompt_logprobs is not None:
            ranks = tuple(each.rank for each in mine.prompt_logprobs)
            assert ranks == request.prompt_token_ids[1:], "prompt log-probabilities: each once and in order"


@pytest.mark.matrix("policy", "swap", take=2)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf"])
@pytest.mark.parametrize("block", range(4))
def test_random_schedules(policy: str, block: int, swap: bool) -> None:
    total = EngineStats()
    for seed in range(block * SCHEDULES_PER_CASE, (block + 1) * SCHEDULES_PER_CASE):
        scenario = Scenario(seed, policy, swap=swap)
        try:
            scenario.run()
        except AssertionError as error:
            raise AssertionError(f"schedule {policy}/{seed}, swap {swap}: {error}") from error
        stats = scenario.loop.stats()
        for name in ("preemptions", "prefix_hits", "host_hits", "pages_swapped_out", "pages_swapped_in"):
            setattr(total, name, getattr(total, name) + getattr(stats, name))
        assert stats.running == stats.waiting == stats.pages_used == stats.swapped == stats.host_pages_used == 0
    assert total.preemptions > 100, "the worlds are too roomy to test preemption"
    assert total.prefix_hits > 100, "the worlds share too little to test the prefix cache"
    if swap:
        assert total.pages_swapped_out > total.pages_swapped_in > 100, "too little goes to the host and back"
        assert total.host_hits > 100, "too few cached pages come back from the host"


@pytest.mark.parametrize(("policy", "model"), [("fcfs", False), ("priority", True), ("sjf", False), ("fcfs", True)])
def test_random_schedules_with_drafts(policy: str, model: bool) -> None:
    total, caught_up = EngineStats(), 0
    for seed in range(DRAFTED_SCHEDULES):
        scenario = Scenario(seed, policy, swap=seed % 2 == 0, drafts=1 + seed % 7, model=model)
        try:
            scenario.run()
        except AssertionError as error:
            raise AssertionError(f"schedule {policy}/{seed} with drafts, model {model}: {error}") from error
        stats = scenario.loop.stats()
        caught_up += scenario.executor.draft_pages.caught_up if scenario.executor.draft_pages else 0
        assert stats.accepted_tokens == sum(stats.accepted_by_position) <= stats.draft_tokens
        for name in ("preemptions", "prefix_hits", "host_hits", "draft_tokens", "accepted_tokens"):
            setattr(total, name, getattr(total, name) + getattr(stats, name))
        assert stats.running == stats.waiting == stats.pages_used == stats.swapped == stats.host_pages_used == 0
    assert total.draft_tokens > total.accepted_tokens > 100, "too little is drafted, or all of it is right"
    assert total.preemptions > 20, "the worlds are too roomy to test preemption"
    assert min(total.prefix_hits, total.host_hits) > 20, "too little is cached"
    assert (caught_up > 1000) == model, "the draft model has nothing to catch up with"
