"""Pairs of texts as a model that scores them reads them: joined by the tokenizer, or within a prompt.

Invariants: of a pair that is too long the end of the document is cut, never the prompt around it.
Knows nothing of requests.
"""

from __future__ import annotations

from stoker_runtime.errors import RequestError
from stoker_runtime.models.pair_prompt import PairPrompt
from stoker_runtime.text.tokenizer import Encoded, Tokenizer


def encode_pair(
    tokenizer: Tokenizer,
    prompt: PairPrompt | None,
    query: str,
    document: str,
    instruction: str | None = None,
    *,
    special: bool = True,
    limit: int | None = None,
) -> Encoded:
    """The ids of a pair, at most `limit` of them. Raises RequestError where the prompt alone takes as many."""
    if prompt is None:
        return tokenizer.encode_texts(query, document, special, limit)
    before, after = tokenizer.encode_many((prompt.before, prompt.after), add_special_tokens=False)
    around = len(before) + len(after)
    if limit is not None and limit <= around:
        raise RequestError(
            f"truncate_prompt_tokens is {limit}, but the model's prompt around a pair alone has {around} tokens.",
            param="truncate_prompt_tokens",
        )
    text = prompt.between(query, document, instruction)
    ids = tokenizer.encode_texts(text, None, special, None if limit is None else limit - around).ids
    return Encoded([*before, *ids, *after])
