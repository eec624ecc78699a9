"""Log-probabilities in the shapes of the two OpenAI routes, and vLLM's shape for those of a prompt.

Invariants: JSON has no infinity, so log-probabilities are cut at FLOOR; a token's text is its own bytes, which may
be less than a character.
Knows nothing of streams or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker_runtime.api.generate.generation import Answers
from stoker_runtime.request import TokenLogprobs
from stoker_runtime.text.tokenizer import Tokenizer

FLOOR = -9999.0
TOKEN_BYTES = 8
"""Of the text of a token, and of the lists that hold it until an answer is whole."""
LOGPROB_BYTES = 64


def answer_size(generation: Answers, top: int | None, prompt_top: int | None) -> int:
    """About how many bytes an answer has whose tokens come with `top` alternatives each, and its prompts' with others.

    None: without log-probabilities.
    """
    own = TOKEN_BYTES + logprob_bytes(top)
    return generation.completion_tokens * own + generation.prompt_tokens * logprob_bytes(prompt_top)


def logprob_bytes(top: int | None) -> int:
    """About how many bytes the log-probabilities of one token have, with `top` alternatives; None: without any."""
    return 0 if top is None else LOGPROB_BYTES * (top + 1)


class LogprobFormat:
    """Formats for one client request. With `as_ids` tokens read "token_id:7", so that none is ambiguous."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token: int) -> str:
        """How a list of tokens spells this one."""
        if self._as_ids:
            return f"token_id:{token}"
        return self._tokenizer.spell(token)

    def completion(
        self, tokens: Sequence[int], found: Sequence[TokenLogprobs | None], offset: int
    ) -> dict[str, list[Any]]:
        """The object of /v1/completions; `offset` is where the first token's text starts. None: no log-probability."""
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += len(self._tokenizer.spell(token))
        return {
            "text_offset": offsets,
            "tokens": [self.text(token) for token in tokens],
            "token_logprobs": [None if entry is None else max(entry.logprob, FLOOR) for entry in found],
            "top_logprobs": [
                None if entry is None else self._top(token, entry) for token, entry in zip(tokens, found, strict=True)
            ],
        }

    def chat(self, tokens: Sequence[int], found: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The object of /v1/chat/completions."""
        content = [
            {
                **self._entry(token, entry.logprob),
                "top_logprobs": [self._entry(other, logprob) for other, logprob in entry.top],
            }
            for token, entry in zip(tokens, found, strict=True)
        ]
        return {"content": content, "refusal": None}

    def prompt(self, tokens: Sequence[int], found: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: the first token has none; each other one maps ids to their log-probabilities."""
        listed: list[dict[str, Any] | None] = [None]
        for token, entry in zip(tokens[1:], found, strict=True):
            ranked = {other: (logprob, rank) for rank, (other, logprob) in enumerate(entry.top, start=1)}
            ranked[token] = (entry.logprob, entry.rank)
            listed.append(
                {
                    str(other): {"logprob": max(logprob, FLOOR), "rank": rank, "decoded_token": self.text(other)}
                    for other, (logprob, rank) in ranked.items()
                }
            )
        return listed

    def _top(self, token: int, entry: TokenLogprobs) -> dict[str, float]:
        found = {self.text(token): max(entry.logprob, FLOOR)}
        for other, logprob in entry.top:
            found.setdefault(self.text(other), max(logprob, FLOOR))
        return found

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = self._tokenizer.token_bytes(token)
        return {"token": self.text(token), "logprob": max(logprob, FLOOR), "bytes": list(spelled)}
