"""The sizes that bound every schedule, and the requests that they rule out.

Invariants: all values are decided (no zeros); a request that passes `refuse_impossible` can finish when it runs
alone and says nothing that a step could stumble over, so no sequence waits for ever and none ends the engine.
Knows nothing of the state of the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from stoker_runtime.drafts.settings import DraftCosts
from stoker_runtime.errors import ConfigError, RequestError
from stoker_runtime.kvcache.journal import CacheJournal
from stoker_runtime.kvcache.sight import Sight
from stoker_runtime.request import MAX_ADJUSTED, Request, SamplingParams

MAX_PRIORITY = 1 << 53
MAX_ARRIVAL = 1e15
"""Seconds. Orders are compared as fp64."""
_checked: tuple[tuple[int, ...], int] = ((), 0)
"""The prompt that was good last, and for how many tokens."""
_checked_params: tuple[SamplingParams | None, int, int] = (None, 0, 0)
"""The parameters that were good last, and for which sizes."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The sizes of the device and the rules of the queue; all decided, no zeros but for `host_pages`: no host pool.

    `host_page_tokens`: bringing a page back from the host takes as long as computing so many tokens. Where sequences
    have states, `host_states` of them lie beside the pages, each of which takes `host_state_tokens`. A step has rows of
    at most `adapter_slots` adapters. `journal`, unless None, is told what the prefix cache gains and loses.
    A step verifies up to `drafts` drafts a sequence and `verify_tokens` tokens in
    all, of fewer than `draft_batch_limit` sequences (0: of any number). `draft_costs`: a model drafts, at these costs.
    `shares_prompts`: pages are all that a sequence has of its prompt, so that others of its family may take them.
    `sight`, unless None: layers with a window give up pages that it does not reach, which are pages of their own.
    `snapshots`: of prefixes so many have their states kept, without which their pages are no hit; 0: pages are enough.
    A chunk is cut for states of `snapshot_tokens` tokens and more: fewer are computed in the step that the cut costs.
    `sees`: prompts may have images; with `whole_images` no chunk ends within one, whose tokens see each other.
    """

    num_pages: int
    page_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    policy: str = "fcfs"
    max_queued: int = 4096
    prefix_caching: bool = True
    seed: int = 0
    host_pages: int = 0
    host_page_tokens: float = 0.0
    host_states: int = 0
    host_state_tokens: float = 0.0
    adapter_slots: int = 0
    journal: CacheJournal | None = None
    drafts: int = 0
    verify_tokens: int = 0
    draft_batch_limit: int = 0
    draft_costs: DraftCosts | None = None
    shares_prompts: bool = True
    sight: Sight | None = None
    snapshots: int = 0
    snapshot_tokens: int = 0
    sees: bool = False
    whole_images: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes with which decodes would not fit into a step."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every sequence can decode in each step.",
                param="max_num_batched_tokens",
            )

    @property
    def max_tokens(self) -> int:
        """Tokens that one sequence can have: by the model, and by all pages when it runs alone."""
        held = self.num_pages * self.page_size if self.sight is None else self.sight.tokens(self.num_pages)
        return min(self.max_model_len, held)

    @property
    def longest_image(self) -> int:
        """Tokens of an image that fit into any step beside all decodes; 0: any number, as it may be cut."""
        return self.max_num_batched_tokens - self.max_num_seqs if self.whole_images else 0


def refuse_impossible(request: Request, *, max_tokens: int, vocab_size: int, eos_ids: int = 0) -> None:
    """Raise RequestError for a request that no waiting can help, whatever it holds: the door of every engine.

    It would not fit even if it ran alone, or names what this model does not have. `eos_ids` end the model's texts.
    """
    _check_names(request)
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError("The prompt is empty; it needs at least one token.", param="prompt")
    _check_prompt(prompt, vocab_size)
    _check_shared_params(request.params, vocab_size, eos_ids)
    if len(prompt) + min(1, request.params.max_tokens) > max_tokens:
        raise RequestError(
            f"The prompt has {len(prompt)} tokens; this server holds at most {max_tokens} per sequence, "
            "those to generate included.",
            param="prompt",
            code="context_length_exceeded",
        )


def _check_prompt(prompt: tuple[int, ...], vocab_size: int) -> None:
    """As `_check_ids`, but once for the prompt that the choices of one request have."""
    global _checked
    if prompt is not _checked[0] or vocab_size != _checked[1]:
        _check_ids("prompt", prompt, vocab_size)
        _checked = (prompt, vocab_size)


def _check_shared_params(params: SamplingParams, vocab_size: int, eos_ids: int) -> None:
    """As `validate` and `_check_params`, but once for the parameters that the prompts of one request have."""
    global _checked_params
    known, *sizes = _checked_params
    if params is not known or sizes != [vocab_size, eos_ids]:
        params.validate()
        _check_params(params, vocab_size, eos_ids)
        _checked_params = (params, vocab_size, eos_ids)


def _check_names(request: Request) -> None:
    for name in ("id", "cache_salt", "family", "session"):
        value = getattr(request, name)
        if not isinstance(value, str) or not _is_unicode(value):
            raise RequestError(f"{name} must be text; got {value!a:.100}.", param=name)
    priority: object = request.priority
    if not isinstance(priority, Integral) or not -MAX_PRIORITY <= int(priority) <= MAX_PRIORITY:
        raise RequestError(f"priority must be an integer of at most 2^53; got {priority!r:.100}.", param="priority")
    arrival: object = request.arrival
    if not isinstance(arrival, Real) or not -MAX_ARRIVAL <= float(arrival) <= MAX_ARRIVAL:
        raise RequestError(f"arrival must be in seconds of the clock; got {arrival!r:.100}.", param="arrival")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_params(params: SamplingParams, vocab_size: int, eos_ids: int) -> None:
    """What these parameters name is in the vocabulary, and fits into a slot together."""
    _check_ids("logit_bias", [token for token, _ in params.logit_bias], vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    for word in params.bad_words:
        _check_ids("bad_words", word, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab_size:
            raise RequestError(f"{name} must be at most {vocab_size}, the model's tokens.", param=name)
    bad = 0 if params.masked else len(params.bad_tokens)
    late = 0 if params.masked or not params.min_tokens else len(params.stop_token_ids) + eos_ids
    if len(params.logit_bias) + bad + late > MAX_ADJUSTED:
        raise RequestError(
            f"logit_bias, bad_words and the {late} ids that min_tokens puts off are more than {MAX_ADJUSTED} tokens.",
            param="logit_bias",
        )


def _check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError unless every id is one of the model's."""
    # By kinds of numbers, which is fast: a prompt may have a hundred thousand.
    if not all(issubclass(kind, Integral) and not issubclass(kind, bool) for kind in set(map(type, ids))):
        raise RequestError(f"{field} must hold token ids, which are integers.", param=field)
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise RequestError(
            f"{field} holds the token id {wrong}, outside 0…{vocab_size - 1}, the model's vocabulary.", param=field
        )
