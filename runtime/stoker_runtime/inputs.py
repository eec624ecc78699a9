"""What `LLM` takes for a prompt, under vLLM's names.

Invariants: a mapping has the keys of TextPrompt or TokensPrompt, and no others.
Knows nothing of tokenizers and models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

from stoker_runtime.errors import RequestError


class TextPrompt(TypedDict):
    """A prompt as text. `cache_salt` keeps its prefix cache from other salts'."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is its text where it is known."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
"""A text, token ids, or a mapping."""
KEYS = ("prompt", "prompt_token_ids", "cache_salt")


def as_prompts(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """A list of prompts, also when one was given: a text, a mapping, or a sequence of ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[PromptType]", prompts))


def plain_prompt(prompt: PromptType) -> str | Sequence[int]:
    """The ids or else the text of a prompt. Raises RequestError for a mapping with neither, or with anything else."""
    if not isinstance(prompt, Mapping):
        return prompt
    for key in prompt:
        if key not in KEYS:
            raise RequestError(f"A prompt has no key {key!r}; it has prompt, or prompt_token_ids.", param=str(key))
    given: Mapping[str, Any] = prompt
    found = given.get("prompt_token_ids", given.get("prompt"))
    if found is None:
        raise RequestError("A prompt needs prompt or prompt_token_ids.", param="prompt")
    return cast("str | Sequence[int]", found)


def text_of(prompt: PromptType) -> str | None:
    """The text of a prompt where it was given."""
    if isinstance(prompt, Mapping):
        return prompt.get("prompt")
    return prompt if isinstance(prompt, str) else None


def salt_of(prompt: PromptType) -> str:
    """What keeps the prompt's prefix cache apart; "" for nothing."""
    return prompt.get("cache_salt") or "" if isinstance(prompt, Mapping) else ""
