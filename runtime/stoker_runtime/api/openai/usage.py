"""Token counts as the OpenAI routes report them, whole and in streams.

Invariants: a prompt counts once however many choices it has.
Knows nothing of routes.
"""

from __future__ import annotations

import json
from typing import Any

from stoker_runtime.api.generate.generation import Answers
from stoker_runtime.api.http.fields import StreamOptions


def usage(generation: Answers, silent: bool = False) -> dict[str, Any]:
    """The usage object of now. `silent`: tokens were generated only to get at the prompt, and count for nothing."""
    return _usage(generation, 0 if silent else generation.completion_tokens)


def _usage(generation: Answers, completion: int) -> dict[str, Any]:
    prompt = generation.prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


class StreamUsage:
    """The usage part of each event of a stream."""

    def __init__(self, options: StreamOptions | None, generation: Answers, silent: bool = False) -> None:
        self._generation = generation
        self._silent = silent
        self._said = 0
        self.last = bool(options and options.include_usage)
        self.each = self.last and bool(options and options.continuous_usage_stats)

    def part(self, tokens: int) -> str:
        """What stands in an event after its choices; it says `tokens` more than the events before it."""
        if self.each:
            self._said += 0 if self._silent else tokens
            return f',"usage":{json.dumps(_usage(self._generation, self._said))}'
        return ',"usage":null' if self.last else ""

    def now(self) -> dict[str, Any]:
        """The usage object at the end."""
        return usage(self._generation, self._silent)
