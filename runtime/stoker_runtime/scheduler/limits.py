"""The sizes that bound every schedule, and the requests that they rule out.

Invariants: all values are decided (no zeros); a request that passes `refuse_impossible` can finish when it runs
alone, so no sequence waits for ever.
Knows nothing of the state of the queue.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_runtime.errors import ConfigError, RequestError
from stoker_runtime.request import Request


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The sizes of the device and the rules of the queue; all decided, no zeros but for `host_pages`: no host pool.

    `host_page_tokens`: bringing a page back from the host takes as long as computing so many tokens.
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
        return min(self.max_model_len, self.num_pages * self.page_size)


def refuse_impossible(request: Request, *, max_tokens: int, vocab_size: int) -> None:
    """Raise RequestError for a request that no waiting can help: it would not fit even if it ran alone."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError("The prompt is empty; it needs at least one token.", param="prompt")
    if max(prompt) >= vocab_size or min(prompt) < 0:
        raise RequestError(
            f"The prompt holds token ids outside 0…{vocab_size - 1}, the model's vocabulary.", param="prompt"
        )
    if len(prompt) + min(1, request.params.max_tokens) > max_tokens:
        raise RequestError(
            f"The prompt has {len(prompt)} tokens; this server holds at most {max_tokens} per sequence, "
            "those to generate included.",
            param="prompt",
            code="context_length_exceeded",
        )
