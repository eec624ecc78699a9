"""Which of several engines gets a request: the one with the least to do before its first token.

That is the prompt's tokens that its prefix cache lacks, and what waits and runs there already, in tokens, too. What an
engine has cached is not asked but remembered: blocks of the prompts that were sent there, newest first, as many as its
cache has pages for.

Invariants: pure and torch-free; one process's memory: what other API processes sent shows as load alone. A wrong guess
costs a prefill and nothing else.
Knows nothing of processes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WAITING_TOKENS = 512
"""What a request that waits stands for: about a prompt."""
RUNNING_TOKENS = 32
"""What a sequence that runs stands for: it makes every step somewhat longer."""

CHAINED_TOKENS = 64 * 1024
"""Of the prompts of one submission, that are looked for in what was sent before; the rest counts as new everywhere."""


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences of one engine that wait, and that run."""

    waiting: int
    running: int

    @property
    def tokens(self) -> int:
        """Both as tokens of a prompt."""
        return self.waiting * WAITING_TOKENS + self.running * RUNNING_TOKENS


class SentPrefixes:
    """The prefixes of what one engine was sent, by blocks of `block` tokens, the newest `blocks` of them."""

    def __init__(self, block: int, blocks: int) -> None:
        self._block = block
        self._most = blocks
        self._seen: OrderedDict[int, None] = OrderedDict()

    def cached(self, chain: Sequence[int]) -> int:
        """Tokens of a prompt that the engine has probably cached."""
        count = 0
        for key in chain:
            if key not in self._seen:
                break
            count += 1
        return count * self._block

    def note(self, chain: Sequence[int]) -> None:
        """The engine gets this prompt."""
        # The end of a prefix is forgotten before its beginning.
        for key in reversed(chain):
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)


def chain_of(tokens: Sequence[int], block: int, salt: str) -> tuple[int, ...]:
    """A number for each prefix of whole blocks: equal prefixes under equal salts have equal numbers."""
    found, key = [], hash(salt)
    for start in range(0, len(tokens) - block + 1, block):
        key = hash((key, tuple(tokens[start : start + block])))
        found.append(key)
    return tuple(found)


def chains_of(prompts: Iterable[tuple[Sequence[int], str]], block: int) -> list[tuple[int, ...]]:
    """`chain_of` prompts with their salts, from the first one on, of CHAINED_TOKENS tokens in all."""
    found, left = [], CHAINED_TOKENS
    for tokens, salt in prompts:
        if left < block:
            break
        found.append(chain_of(tokens[:left], block, salt))
        left -= len(tokens)
    return found


def least_work(uncached: Sequence[int], loads: Sequence[Load], first: int) -> int:
    """The engine with the least work; of equals the first from `first` on, so that they take turns."""
    count = len(loads)
    order = ((first + at) % count for at in range(count))
    return min(order, key=lambda at: uncached[at] + loads[at].tokens)
