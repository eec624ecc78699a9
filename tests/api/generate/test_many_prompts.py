"""Thousands of long prompts in one body, with an engine of its own process behind: nobody else waits meanwhile."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from server_process import UNIFORM, ServerProcess
from waiting import judged_at

RANDOM = random.Random()
WATCHED = {"prompt": [7, 5], "stream": True, "max_tokens": 200, "ignore_eos": True}
SECONDS = 1.5
"""That a request may take: the engine would work on it for minutes."""


@pytest.fixture(scope="module")
def slow() -> Iterator[ServerProcess]:
    server = ServerProcess([sys.executable, str(UNIFORM), "slow"])
    yield server.wait_ready()
    server.close()


def texts(count: int, characters: int) -> list[str]:
    """Distinct ones, of characters that the model has tokens for."""
    lengths = [RANDOM.randint(characters // 2, characters) for _ in range(count)]
    return ["".join(RANDOM.choices("0123456789 -+", k=length)) for length in lengths]


@pytest.mark.parametrize("stream", [False, True])
def test_texts_keep_nobody_waiting(slow: ServerProcess, stream: bool) -> None:
    body: dict[str, Any] = {
        "prompt": texts(RANDOM.randint(1000, 1400), 4000), "max_tokens": 3, "timeout": SECONDS, "stream": stream,
    }  # fmt: skip
    judged_at(slow.url, "/v1/completions", body, {200, 408}, WATCHED)


def test_ids_keep_nobody_waiting(slow: ServerProcess) -> None:
    prompts = [[RANDOM.randrange(64) for _ in range(2500)] for _ in range(400)]
    judged_at(slow.url, "/v1/completions", {"prompt": prompts, "max_tokens": 3, "timeout": SECONDS}, {408}, WATCHED)
