"""Which engine gets a request: the emptier one, the one that has its prefix, and of equals each in turn."""

from __future__ import annotations

import random

import pytest

from stoker_runtime.engine.placing import (
    RUNNING_TOKENS,
    WAITING_TOKENS,
    Load,
    SentPrefixes,
    chain_of,
    least_work,
)

BLOCK = random.choice([3, 16, 64])


def prompt(blocks: int, rest: int = 0) -> list[int]:
    return [random.randrange(1 << 17) for _ in range(blocks * BLOCK + rest)]


def test_a_prefix_counts_by_whole_blocks_and_under_its_salt() -> None:
    sent = SentPrefixes(BLOCK, 100)
    first = prompt(4, 2)
    assert sent.cached(chain_of(first, BLOCK, "")) == 0
    sent.note(chain_of(first, BLOCK, ""))
    assert sent.cached(chain_of(first, BLOCK, "")) == 4 * BLOCK
    longer = first[: 2 * BLOCK] + prompt(3)
    assert sent.cached(chain_of(longer, BLOCK, "")) == 2 * BLOCK
    assert sent.cached(chain_of(first, BLOCK, "tenant")) == 0
    # The same block behind another beginning is another prefix.
    assert sent.cached(chain_of(prompt(1) + first, BLOCK, "")) == 0


def test_what_is_remembered_is_bounded_and_the_oldest_ends_go_first() -> None:
    sent = SentPrefixes(BLOCK, 5)
    old, new = prompt(4), prompt(3)
    sent.note(chain_of(old, BLOCK, ""))
    sent.note(chain_of(new, BLOCK, ""))
    assert sent.cached(chain_of(new, BLOCK, "")) == 3 * BLOCK
    assert sent.cached(chain_of(old, BLOCK, "")) == 2 * BLOCK
    nothing = SentPrefixes(BLOCK, 0)
    nothing.note(chain_of(old, BLOCK, ""))
    assert nothing.cached(chain_of(old, BLOCK, "")) == 0


@pytest.mark.parametrize("first", range(3))
def test_equals_take_turns(first: int) -> None:
    assert least_work([7, 7, 7], [Load(0, 2)] * 3, first) == first


def test_a_prefix_draws_until_the_queue_is_longer_than_it_saves() -> None:
    saved = random.randrange(1000, 4000)
    waiting = saved // WAITING_TOKENS
    loads = [Load(waiting, 0), Load(0, 0)]
    assert least_work([5, 5 + saved], loads, 1) == 0
    assert least_work([5, 5 + saved], [Load(waiting + 1, 0), Load(0, 0)], 0) == 1
    running = saved // RUNNING_TOKENS
    assert least_work([5, 5 + saved], [Load(0, running + 1), Load(0, 0)], 0) == 1
