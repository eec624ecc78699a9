"""One stream of tokens inside the scheduler: what is known of it, what was launched for it, what it holds.

Two counts tell its state. `len(tokens)` is what is known on the host: the prompt and the committed output.
`computed` is the number of positions whose forward pass was launched. While it decodes, the newest token may be
known to the device alone: it has `computed + 1` tokens then, `computed + 1 - len(tokens)` of them in flight. Where
drafts are in flight these are least numbers, and up to `ahead` more.

Invariants: `slot >= 0` exactly while it holds a slot and pages, and `stored` is None then; `finish` is set once;
`tokens` only grows.
Knows nothing of other sequences.
"""

from __future__ import annotations

from array import array
from itertools import chain

from stoker_runtime.drafts.pace import RowPace
from stoker_runtime.kvcache.host_pool import Stored
from stoker_runtime.request import FinishReason, Request
from stoker_runtime.scheduler.adapter_slots import NO_ADAPTER
from stoker_runtime.step.batch import SlotAssign

NO_SLOT = -1
SEED_MASK = (1 << 63) - 1
Place = tuple[int, ...]
"""The pages that hold a page's tokens in layers with a window."""


class Sequence:
    """Mutable state of one request. Plain attributes: the per-step loops touch three of them per sequence."""

    __slots__ = (
        "adapter_slot",
        "admitted",
        "ahead",
        "awaited",
        "cached_tokens",
        "caught_up",
        "client",
        "complete",
        "computed",
        "drafted",
        "error",
        "event",
        "finish",
        "handle",
        "held",
        "held_for_adapter",
        "keys",
        "limit",
        "marks",
        "milestone",
        "near",
        "near_from",
        "order",
        "pace",
        "pages",
        "params",
        "prompt_length",
        "published",
        "queued",
        "recorded",
        "request",
        "root",
        "saved",
        "scored",
        "seed",
        "slot",
        "stop_token",
        "stops",
        "stored",
        "tokens",
    )

    def __init__(self, request: Request, *, limit: int, stops: frozenset[int], seed: int, root: bytes) -> None:
        """`limit` is the number of tokens, prompt included, at which it ends; `stops` end it at once."""
        params = request.params
        self.request = request
        self.params = params
        self.tokens = array("i", request.prompt_token_ids)
        self.prompt_length = len(self.tokens)
        self.limit = limit
        self.stops = stops
        self.seed = seed & SEED_MASK
        self.order: tuple[float, ...] = ()
        """Rank under the policy: lower runs first, highest is preempted first."""
        self.client = 0
        self.handle = 0
        """Who asked, and what they call it; the scheduler only carries these."""

        self.slot = NO_SLOT
        self.adapter_slot = NO_ADAPTER
        self.pages: list[int] = []
        self.near: list[Place] = []
        self.near_from = 0
        """Where layers with a window give up pages: those that they keep, from this place on (`near.py`)."""
        self.marks: tuple[int, ...] = ()
        """Where layers keep a state: positions at which a chunk ends so that its states are kept."""
        self.saved: bytes | None = None
        """The prefix of which states were kept last, unless at one of `marks`."""
        self.stored: Stored | None = None
        """What it computed before it was preempted, if that rests in host memory."""
        self.queued = False
        self.held_for_adapter = False
        """Its adapter is not in host memory yet."""
        self.held = False
        """Not to be admitted yet: its constraint is being compiled."""
        self.computed = 0
        self.ahead = 0
        """Positions beyond `computed` that drafts in flight may turn out to have added to it."""
        self.pace: RowPace | None = None
        self.caught_up: int | None = None
        """Step before which its draft model had all its tokens, if it had decoded plainly since; None: to be seen."""
        self.drafted = 0
        """Leading pages that are known to be the draft model's, too."""
        self.recorded = False
        """The device keeps its tokens, to draft from them."""
        self.event = 0
        """A decode from `computed >= event` on needs a page, or is the last one."""
        self.milestone = 0
        """A commit that makes `len(tokens) >= milestone` fills a page or ends the sequence."""
        self.awaited = 0
        """Tokens that must be known before it is admitted: what was in flight when it was preempted."""

        self.root = root
        self.keys: list[bytes] = []
        self.published = 0
        """Leading pages that were offered to the prefix cache."""
        self.scored = 0 if params.prompt_logprobs is not None else self.prompt_length
        """Leading positions whose prompt log-probabilities need no computing any more."""

        self.finish: FinishReason | None = None
        self.stop_token: int | None = None
        self.error: str | None = None
        self.complete = False
        """It ended because its constraint allows nothing more."""
        self.cached_tokens = 0
        self.admitted: float | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it may be admitted: its constraint is compiled, its adapter there, what was in flight known."""
        return not self.held and not self.held_for_adapter and len(self.tokens) >= self.awaited

    @property
    def penalized(self) -> bool:
        """Whether sampling depends on the tokens so far."""
        params = self.params
        return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0

    @property
    def all_pages(self) -> list[int]:
        """All pages that it holds."""
        return [*self.pages, *chain.from_iterable(self.near)] if self.near else self.pages

    def assign(self) -> SlotAssign:
        """What the device must know when this sequence takes its slot."""
        return SlotAssign(
            slot=self.slot,
            params=self.params,
            seed=self.seed,
            stop_token_ids=tuple(sorted(self.stops)),
            history=tuple(self.tokens) if self.penalized or self.recorded else (),
            prompt_length=self.prompt_length,
            adapter=self.adapter_slot,
        )
