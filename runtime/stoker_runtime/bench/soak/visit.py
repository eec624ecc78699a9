"""What every kind of request is given: a connection, dice, the server's sizes, and where to count.

Invariants: an answer that is not what was asked for raises Wrong, in words; a full queue raises Full, which is an
answer too. Nothing here waits for ever: the load puts a bound around each request.
Knows nothing of the kinds themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stoker_runtime.bench.soak.tally import Tally
from stoker_runtime.bench.soak.wire import Answer, Wire


class Wrong(Exception):
    """An answer that is not what was asked for."""


class Failed(Wrong):
    """The server says that it failed: a status from 500 on, or an error in the middle of a stream."""


class Full(Exception):
    """The queue is full: 429, with the seconds after which to try again."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The served model as a client sees it, which `holds` so many tokens a text; good requests stay within `longest`.

    `ids` are token ids that its own tokenizer makes.
    """

    model: str
    longest: int
    ids: tuple[int, ...]
    most_output: int
    holds: int


@dataclass(frozen=True, slots=True)
class Visit:
    """One request to be: `gap` counts a time between two of its events, in seconds."""

    wire: Wire
    draw: random.Random
    facts: Facts
    tally: Tally
    gap: Callable[[float], None]

    def length(self, most: int) -> int:
        """A length from 1 to `most` tokens, short ones as often as long ones by their logarithm."""
        return min(most, int(2 ** self.draw.uniform(0, most.bit_length())))

    def prompt(self) -> list[int]:
        """Token ids, of any length that leaves room for an answer."""
        return self.draw.choices(self.facts.ids, k=self.length(max(1, self.facts.longest - self.facts.most_output - 1)))

    def words(self, most: int = 12) -> str:
        """A text for routes that take texts alone."""
        return " ".join(str(self.draw.randrange(10_000)) for _ in range(self.draw.randint(1, most)))

    def sampling(self) -> dict[str, Any]:
        """Greedy, or any mix of settings, always with a seed."""
        if self.draw.random() < 0.3:
            return {"temperature": 0}
        mixes: tuple[dict[str, Any], ...] = (
            {},
            {"top_p": 0.9},
            {"top_k": 20},
            {"min_p": 0.05},
            {"top_p": 0.8, "top_k": 50, "presence_penalty": 0.5},
            {"repetition_penalty": 1.1},
        )
        return {"temperature": 0.8, "seed": self.draw.randrange(2**31), **self.draw.choice(mixes)}

    def body(self, **more: Any) -> dict[str, Any]:
        """A body of this model with a mixed length and mixed sampling."""
        return {
            "model": self.facts.model,
            "max_tokens": self.length(self.facts.most_output),
            **self.sampling(),
            **more,
        }


def expect(answer: Answer, status: int = 200) -> Any:
    """The content of an answer that must have this status. Raises Full for a 429, Wrong for any other."""
    if answer.status == 429:
        if "retry-after" not in answer.headers:
            raise Wrong("a 429 without Retry-After")
        raise Full
    if answer.status >= 500:
        raise Failed(f"status {answer.status}: {answer.said}")
    if answer.status != status:
        raise Wrong(f"status {answer.status} instead of {status}: {answer.said}")
    try:
        return answer.content
    except ValueError:
        raise Wrong(f"an answer of status {status} that is no JSON: {answer.said}") from None


def check_count(usage: dict[str, Any], asked: int, finish: str | None) -> None:
    """Raises Wrong where the number of tokens and the reason of the end contradict what was asked."""
    made = usage["completion_tokens"]
    if finish not in ("stop", "length", "tool_calls"):
        raise Wrong(f"finished with {finish!r}")
    if made > asked or (finish == "length" and made != asked):
        raise Wrong(f"{made} tokens of {asked} asked for, finished with {finish!r}")
