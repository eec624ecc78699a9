"""An executor without a model: tokens are a hash of (seed, position), and every batch is verified as it runs.

The device is simulated as the real one behaves: batches run in order at their launch; slots hold the last token,
the position and a row of the page table; results come later. A KV entry is a fingerprint of the whole prefix up to
its position, so that any read of a page that was not written by this sequence, or by one with the same prefix, is
seen at once. Since tokens depend on (seed, position) alone, the whole true text of a sequence is known beforehand:
`truth` gives it, and preemption, chunking and caching must never change it. Under a constraint the token is the next
legal one, and a batch with constrained slots waits for its masks as on the real device.
Drafts are the true tokens, or not, as chance has it; those that are not leave foreign entries in the pages. With
`draft_costs` they come of a model, whose pages are verified as well (`draft_pages.py`).
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stoker_runtime.drafts.settings import DraftCosts, Drafting
from stoker_runtime.engine.executor_protocol import DeviceSleeper
from stoker_runtime.errors import ModelError
from stoker_runtime.kvcache.sight import Sight
from stoker_runtime.request import SamplingParams, TokenLogprobs
from stoker_runtime.step.batch import Batch, PrefillChunk, SlotAssign
from stoker_runtime.step.result import MaskRows, StepResult

if TYPE_CHECKING:
    from tests.runtime.engine.draft_pages import DraftPages
    from tests.runtime.engine.near_device import NearDevice
    from tests.runtime.engine.state_device import StateDevice


@dataclass
class Slot:
    """What the device holds of one slot."""

    assign: SlotAssign
    pages: dict[int, int] = field(default_factory=dict)
    last_token: int | None = None
    position: int = 0


READER = ThreadPoolExecutor(1)


@dataclass
class UniformAdapters:
    """Slots for adapters, and host copies: a folder is its path, and one called "bad…" cannot be read."""

    slots: int
    host_copies: int
    rank: int = 1
    copies: dict[int, str] = field(default_factory=dict)
    reads: int = 0

    def begin(self, number: int, path: str) -> Future[UniformAdapters]:
        self.reads += 1
        return READER.submit(self._read, path)

    def _read(self, path: str) -> UniformAdapters:
        if path.startswith("bad"):
            raise ModelError(f"{path}: it is bad")
        return self

    def poll(self) -> None:
        """Nobody else has to be asked."""

    def keep(self, number: int, adapter: object) -> None:
        assert number not in self.copies, "a copy is made twice"
        self.copies[number] = "kept"
        assert len(self.copies) <= self.host_copies, "too many copies on the host"

    def drop(self, number: int) -> None:
        self.copies.pop(number, None)


class UniformLaunched:
    """A batch whose tokens are known but not yet handed out, or wait for their masks."""

    def __init__(self, executor: UniformExecutor, batch: Batch, result: StepResult, ready_at: float) -> None:
        self.batch = batch
        self.masks: MaskRows | None = None
        self._executor = executor
        self._result = result
        self._ready_at = ready_at
        self._sampled = False
        rows = [*batch.decodes, *(chunk.slot for chunk in batch.prefills)]
        if any(executor.slots[slot].assign.params.masked for slot in rows):
            sampled = len(batch.sampled_slots)
            words = np.full((sampled, -(-executor.vocab_size // 32)), -1, dtype=np.int32)
            self.masks = MaskRows(words, list(range(sampled)))
        else:
            self.sample()

    def sample(self) -> None:
        """Choose the tokens, once."""
        assert not self._sampled, "sampled twice"
        self._sampled = True
        words = None if self.masks is None else self.masks.words
        self._executor.choose(self.batch, words, self._result)

    def result(self) -> StepResult:
        """The tokens, once, in launch order, not before the step's time has passed."""
        assert self._sampled, "read before it sampled"
        assert self._executor.unread.popleft() is self, "results are read out of order or twice"
        if (left := self._ready_at - time.monotonic()) > 0:
            time.sleep(left)
        return self._result


class UniformExecutor:
    """The verifying executor. `prompts` maps a request's seed to its prompt; unknown seeds are not verified.

    `adapter_of` maps a seed to the number of its adapter, 0 for none.
    """

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_num_seqs: int = 8,
        max_model_len: int = 256,
        max_num_batched_tokens: int = 64,
        vocab_size: int = 64,
        eos_token_ids: tuple[int, ...] = (0,),
        step_seconds: float = 0.0,
        host_pages: int = 0,
        host_page_tokens: float = 0.0,
        adapters: UniformAdapters | None = None,
        drafting: Drafting | None = None,
        sleeper: DeviceSleeper | None = None,
        draft_costs: DraftCosts | None = None,
        sight: Sight | None = None,
        snapshots: int | None = None,
        host_states: int = 0,
        host_state_tokens: float = 0.0,
    ) -> None:
        """`snapshots`: sequences have states, and so many of prefixes may be kept; None: they have none."""
        self.host_states, self.host_state_tokens = host_states, host_state_tokens
        self.sees = self.whole_images = False
        self.keeps_states, self.snapshots = snapshots is not None, snapshots or 0
        self.states: StateDevice | None = None
        if snapshots is not None:
            from tests.runtime.engine.state_device import StateDevice

            self.states = StateDevice(max_num_seqs, snapshots, host_states)
        self.num_pages = num_pages
        self.host_pages = host_pages
        self.host_page_tokens = host_page_tokens
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.step_seconds = step_seconds
        self.adapters = adapters
        self.drafting = drafting
        self.sleeper = sleeper
        self.draft_costs = draft_costs
        self.sight = sight
        self.near: NearDevice | None = None
        self.draft_pages: DraftPages | None = None
        if draft_costs is not None:
            # Here, since engine processes of other tests run this file where there is no package of tests.
            from tests.runtime.engine.draft_pages import DraftPages

            self.draft_pages = DraftPages(num_pages, page_size, host_pages)
        self.verify_tokens = drafting.verify_tokens(max_num_seqs, max_num_batched_tokens) if drafting else 0
        self.chance = random.Random(vocab_size)
        self.runs: dict[int, tuple[int, int]] = {}
        self.adapter_of: dict[int, int] = {}
        self.loaded: dict[int, int] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.slots: dict[int, Slot] = {}
        self.kv: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self.host: list[list[int | None] | None] = [None] * host_pages
        if sight is not None:
            from tests.runtime.engine.near_device import NearDevice

            self.near = NearDevice(sight, self.kv)
        self.unread: deque[UniformLaunched] = deque()
        self.batches = 0
        self.sampled = 0
        self.idles = 0
        self.closed = False

    def execute(self, batch: Batch) -> UniformLaunched:
        """Verify and run one batch."""
        assert batch.step == self.batches + 1, "a step was skipped"
        assert self.sleeper is None or not self.sleeper.asleep, "a step of a sleeper"
        assert self.sampled == self.batches, "the step before has not sampled"
        self.batches += 1
        self._verify_shape(batch)
        if self.states is not None:
            self.states.copy(batch)
        else:
            assert not batch.state_saves, "states are kept where there are none"
            assert not batch.state_loads, "states are brought back where there are none"
            assert not batch.state_outs + batch.state_ins, "states go to the host where there are none"
        for number, slot in batch.adapter_loads:
            assert self.adapters is not None
            assert number in self.adapters.copies, f"adapter {number} is not in host memory"
            assert 0 <= slot < self.adapters.slots, f"adapter slot {slot} does not exist"
            self.loaded[slot] = number
        for assign in batch.assigns:
            self._verify_history(assign)
            self.slots[assign.slot] = Slot(assign)
            if self.near is not None:
                self.near.assign(assign.slot)
        for update in batch.page_updates:
            assert update.pages, "an empty page update"
            for index, page in enumerate(update.pages, update.start):
                assert 0 <= page < self.num_pages, f"page {page} does not exist"
                if update.table:
                    assert self.near is not None, "a further table where no layer gives up pages"
                    self.near.map(update.slot, update.table, index, page)
                else:
                    self.slots[update.slot].pages[index] = page
        self._swap(batch)
        for source, destination in batch.copies:
            self.kv[destination] = list(self.kv[source])
        self.runs = {slot: self._draft(slot, cap) for slot, cap in zip(batch.decodes, batch.draft_caps, strict=False)}
        self._verify_writers(batch)
        self._run_drafter(batch)
        result = self._run(batch)
        launched = UniformLaunched(self, batch, result, time.monotonic() + self.step_seconds)
        self.unread.append(launched)
        assert len(self.unread) <= 2, "more than one step ahead"
        return launched

    def idle(self) -> bool:
        """Three moments of preparation."""
        assert self.sleeper is None or not self.sleeper.asleep, "a sleeper prepares something"
        self.idles += 1
        return self.idles < 3

    def describe(self) -> dict[str, str]:
        """Two lines for the log."""
        return {"device": "none", "model": "uniform"}

    def close(self) -> None:
        """Nothing to free."""
        self.closed = True

    def sample(self, assign: SlotAssign, position: int, words: NDArray[np.int32] | None = None) -> int:
        """The token at `position`: uniform over the vocabulary, stop ids masked until `min_tokens`."""
        digest = hashlib.blake2b(f"{assign.seed}/{position}".encode(), digest_size=8).digest()
        token = int.from_bytes(digest, "little") % self.vocab_size
        if words is not None and assign.params.masked:
            legal = np.unpackbits(words.view(np.uint8), bitorder="little")[: self.vocab_size].nonzero()[0]
            # Nothing is legal for a sequence that has just ended; its token is thrown away.
            return int(legal[int.from_bytes(digest, "big") % len(legal)]) if len(legal) else 0
        if position - assign.prompt_length < assign.params.min_tokens:
            while token in assign.stop_token_ids:
                token = (token + 1) % self.vocab_size
        return token

    def choose(self, batch: Batch, words: NDArray[np.int32] | None, result: StepResult) -> None:
        """Sample a token for each row that gets one."""
        self.sampled += 1
        logprobs: list[TokenLogprobs | None] = []
        for row, slot_id in enumerate(batch.sampled_slots):
            slot = self.slots[slot_id]
            end = slot.position
            for slot.position in range(end - self.runs.get(slot_id, (0, 0))[1], end + 1):
                result.tokens.append(self._sample_into(slot, None if words is None else words[row]))
                logprobs.append(self._logprobs(slot))
        result.logprobs = logprobs if any(each is not None for each in logprobs) else None
        if batch.drafts:
            result.offered = [self.runs[slot][0] for slot in batch.decodes]
            result.counts = [self.runs[slot][1] + 1 for slot in batch.decodes]

    def _verify_shape(self, batch: Batch) -> None:
        rows = [*batch.decodes, *(chunk.slot for chunk in batch.prefills)]
        assert rows, "an empty batch"
        assert len(batch.draft_caps) == (len(batch.decodes) if batch.drafts else 0), (
            "caps are given with drafts, a row each"
        )
        assert max(batch.draft_caps, default=0) <= batch.drafts, "a cap above the drafts of the step"
        if batch.drafts:
            assert not batch.prefills, "drafts beside a prefill"
            assert self.drafting is not None, "drafts where there are none"
            assert batch.drafts <= self.drafting.tokens, "more drafts than were asked for"
            assert batch.num_tokens <= self.verify_tokens, "a verification that is too wide"
        assert len(set(rows)) == len(rows), "a slot occurs twice"
        assert all(0 <= slot < self.max_num_seqs for slot in rows), "a slot does not exist"
        assert batch.num_tokens <= self.max_num_batched_tokens, "over the token budget"
        assert all(chunk.token_ids for chunk in batch.prefills), "an empty chunk"
        assigned = {assign.slot for assign in batch.assigns}
        assert len(assigned) == len(batch.assigns), "a slot is assigned twice"
        assert assigned <= {chunk.slot for chunk in batch.prefills}, "a slot is assigned without a prefill"
        destinations = {destination for _, destination in batch.copies}
        assert len(destinations) == len(batch.copies), "two copies to one page"
        assert destinations.isdisjoint(source for source, _ in batch.copies), "copies depend on their order"

    def _verify_history(self, assign: SlotAssign) -> None:
        params = assign.params
        penalized = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)
        wanted = penalized or self.verify_tokens > 0
        assert bool(assign.history) == wanted, "history is given exactly when penalties or drafts need it"
        if wanted and assign.seed in self.prompts:
            assert assign.history == self._true_tokens(assign, len(assign.history)), "wrong history"
            assert len(assign.history) >= assign.prompt_length, "history without the whole prompt"

    def _swap(self, batch: Batch) -> None:
        """Pages to the host, then back, each list in its own order."""
        mapped = {page for update in batch.page_updates for page in update.pages}
        for page, host in batch.swap_outs:
            self.host[host] = list(self.kv[page])
        targets = [page for _, page in batch.swap_ins]
        assert len(set(targets)) == len(targets), "a page is filled twice"
        assert mapped.issuperset(targets), "a page is filled that nobody asked for"
        for host, page in batch.swap_ins:
            kept = self.host[host]
            assert kept is not None, f"host page {host} was never written"
            self.kv[page] = list(kept)

    def _verify_writers(self, batch: Batch) -> None:
        written: dict[int, int] = {}
        for slot, start, stop in self._rows(batch):
            pages = self.slots[slot].pages
            for index in range(start // self.page_size, (stop - 1) // self.page_size + 1):
                assert index in pages, f"slot {slot} has no page for position {index * self.page_size}"
                assert pages[index] not in written, f"page {pages[index]} has two writers"
                written[pages[index]] = slot
        for slot, _, stop in self._rows(batch):
            for index in range((stop - 1) // self.page_size + 1):
                page = self.slots[slot].pages[index]
                assert written.get(page, slot) == slot, f"page {page} is read by {slot} and written by another"
        if self.near is not None:
            self.near.verify_writers(self._rows(batch), written)

    def _rows(self, batch: Batch) -> list[tuple[int, int, int]]:
        starts = [(slot, self.slots[slot].position) for slot in batch.decodes]
        decodes = [(slot, start, start + 1 + self.runs.get(slot, (0, 0))[0]) for slot, start in starts]
        chunks = [(chunk.slot, chunk.start, chunk.start + len(chunk.token_ids)) for chunk in batch.prefills]
        return decodes + chunks

    def _run_drafter(self, batch: Batch) -> None:
        """What a draft model does with its pages before the first model runs."""
        pages = self.draft_pages
        assert pages is not None or not batch.catch_ups, "chunks for a draft model that there is not"
        if pages is None:
            return
        assert not batch.catch_ups or not batch.prefills, "a prefill beside chunks of the draft model"
        assert sum(len(chunk.token_ids) for chunk in batch.catch_ups) <= self.max_num_batched_tokens, "too many tokens"
        pages.move(batch)
        for chunk in batch.catch_ups:
            slot = self.slots[chunk.slot]
            assert chunk.slot in batch.decodes, "a chunk of a row that does not decode"
            assert chunk.start + len(chunk.token_ids) < slot.position, "a chunk that runs the last token"
            if slot.assign.seed in self.prompts:
                pages.catch_up(chunk, slot.pages, self._true_tokens(slot.assign, slot.position))
        for slot_id, cap in zip(batch.decodes, batch.draft_caps, strict=False):
            slot = self.slots[slot_id]
            if cap and slot.assign.seed in self.prompts:
                true = self._true_tokens(slot.assign, slot.position + cap + 1)
                pages.draft(slot.position, cap, self.runs[slot_id][1], slot.pages, true)

    def _run(self, batch: Batch) -> StepResult:
        for slot_id in batch.decodes:
            slot = self.slots[slot_id]
            assert slot.last_token is not None, f"slot {slot_id} decodes before it sampled"
            start, (offered, accepted) = slot.position, self.runs.get(slot_id, (0, 0))
            right = tuple(self.sample(slot.assign, start + 1 + at) for at in range(accepted))
            self._forward(slot, start, (slot.last_token, *right))
            for position in range(start + 1 + accepted, start + 1 + offered):
                self.kv[slot.pages[position // self.page_size]][position % self.page_size] = -1
        prompt_logprobs: list[list[TokenLogprobs]] = []
        for chunk in batch.prefills:
            slot = self.slots[chunk.slot]
            self._forward(slot, chunk.start, chunk.token_ids)
            prompt_logprobs.append(self._score(slot, chunk))
        return StepResult([], None, prompt_logprobs if any(prompt_logprobs) else [])

    def _draft(self, slot_id: int, cap: int) -> tuple[int, int]:
        """How many drafts a row has, and how many of them are right."""
        assert not cap or not self.slots[slot_id].assign.params.masked, "drafts for a row under a mask"
        # A model always has something to say.
        offered = cap if self.draft_pages is not None else self.chance.randint(0, cap)
        return offered, self.chance.randint(0, offered)

    def _forward(self, slot: Slot, start: int, token_ids: tuple[int, ...]) -> None:
        stop = start + len(token_ids)
        if slot.assign.seed in self.prompts:
            true = self._true_tokens(slot.assign, stop)
            assert token_ids == true[start:], f"positions {start}…{stop} run the wrong tokens"
            fingerprint = self._origin(slot)
            for position in range(start):
                fingerprint = hash((fingerprint, true[position]))
                assert self._entry(slot, position) == fingerprint, f"position {position} reads foreign KV"
        if self.near is not None:
            self.near.read(slot.assign.slot, start, lambda position: self._entry(slot, position))
        before = fingerprint = self._entry(slot, start - 1) or 0 if start else self._origin(slot)
        for position, token in enumerate(token_ids, start):
            fingerprint = hash((fingerprint, token))
            self.kv[slot.pages[position // self.page_size]][position % self.page_size] = fingerprint
            if self.near is not None:
                self.near.write(slot.assign.slot, position, fingerprint)
        if self.states is not None:
            self.states.run(slot.assign.slot, start, before, stop, fingerprint)
        slot.position = stop
        slot.last_token = None

    def _origin(self, slot: Slot) -> int:
        """The fingerprint before the first position: keys and values of one adapter are no other's."""
        number = self.loaded.get(slot.assign.adapter, 0)
        if slot.assign.seed in self.prompts:
            assert number == self.adapter_of.get(slot.assign.seed, 0), "a row goes through another's adapter"
        return hash(("adapter", number)) if number else 0

    def _entry(self, slot: Slot, position: int) -> int | None:
        return self.kv[slot.pages[position // self.page_size]][position % self.page_size]

    def _sample_into(self, slot: Slot, words: NDArray[np.int32] | None) -> int:
        held = self.num_pages * self.page_size if self.sight is None else self.sight.tokens(self.num_pages)
        capacity = min(self.max_model_len, held)
        # Whether an accepted run ended a sequence is known a step later, which costs a token that nobody gets.
        capacity += self.drafting is not None
        most = slot.assign.params.max_tokens + (self.drafting is not None)
        assert slot.position < capacity, "a token beyond what a sequence can hold"
        assert slot.position - slot.assign.prompt_length < most, "a token beyond max_tokens"
        slot.last_token = self.sample(slot.assign, slot.position, words)
        return slot.last_token

    def _logprobs(self, slot: Slot) -> TokenLogprobs | None:
        if slot.assign.params.logprobs is None:
            return None
        return TokenLogprobs(logprob=-float(slot.position), rank=slot.last_token or 0)

    def _score(self, slot: Slot, chunk: PrefillChunk) -> list[TokenLogprobs]:
        assert not chunk.targets or slot.assign.params.prompt_logprobs is not None, "unwanted targets"
        scores = []
        for position, target in enumerate(chunk.targets, chunk.start + 1):
            assert position <= chunk.start + len(chunk.token_ids), "a target beyond the chunk"
            prompt = self.prompts.get(slot.assign.seed)
            assert prompt is None or prompt[position] == target, "a wrong target"
            scores.append(TokenLogprobs(logprob=-float(position), rank=target))
        return scores

    def _true_tokens(self, assign: SlotAssign, count: int) -> tuple[int, ...]:
        prompt = self.prompts[assign.seed]
        assert assign.prompt_length == len(prompt), "a wrong prompt length"
        return (prompt + tuple(self.sample(assign, position) for position in range(len(prompt), count)))[:count]

    def expected_output(self, prompt: tuple[int, ...], params: SamplingParams, capacity: int) -> list[int]:
        """What a request with this seed must give: up to a stop id, `max_tokens` or `capacity` tokens in all."""
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.eos_token_ids))
        assign = SlotAssign(0, params, params.seed or 0, tuple(stops), (), len(prompt))
        output: list[int] = []
        while len(output) < params.max_tokens and len(prompt) + len(output) < capacity:
            output.append(self.sample(assign, len(prompt) + len(output)))
            if output[-1] in stops and len(output) > params.min_tokens:
                break
        return output
