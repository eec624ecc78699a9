"""Thousands of long prompts at once: packed in pieces between which the loop turns, and all or none of them run."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import pytest_asyncio
from tests.runtime.engine.test_engine_process import CONFIG, command, read, tokens, until
from tests.runtime.engine.uniform_executor import UniformExecutor

from stoker_runtime.engine import engine as front
from stoker_runtime.engine import placing
from stoker_runtime.engine.engine import AsyncEngine
from stoker_runtime.engine.group import EngineGroup
from stoker_runtime.engine.messages import Add, Message
from stoker_runtime.errors import CapacityError, EngineDeadError, EngineError, RequestError
from stoker_runtime.request import FinishReason, Request, SamplingParams

VOCAB, LONGEST = 64, 4096
SEED = random.randrange(1 << 32)
MOST_TOKENS = 40_000
"""Of what one turn of the loop packs: some milliseconds."""


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    config = replace(CONFIG, max_queued=6000)
    async with await AsyncEngine.start(config, command=command("slow"), log_level="error") as found:
        yield found


def prompts(count: int, least: int, most: int) -> list[Request]:
    print(f"seed {SEED}")
    pick, params = random.Random(SEED), SamplingParams(max_tokens=1, ignore_eos=True, seed=SEED & 0xFFFF)
    return [
        Request(f"r{at}", tuple(pick.choices(range(VOCAB), k=pick.randint(least, most))), params) for at in range(count)
    ]


class Turns:
    """How often the loop turned, and the tokens that each turn packed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.packed: dict[int, int] = {}
        self.sent: list[str] = []
        self._turn = 0
        self._running = True
        encode: Callable[[Message], bytes] = front.encode

        def counted(message: Message) -> bytes:
            if isinstance(message, Add):
                self.sent.append(message.request.id)
                tokens = len(message.request.prompt_token_ids)
                self.packed[self._turn] = self.packed.get(self._turn, 0) + tokens
            return encode(message)

        monkeypatch.setattr(front, "encode", counted)
        self._task = asyncio.create_task(self._count())

    async def _count(self) -> None:
        while self._running:
            self._turn += 1
            await asyncio.sleep(0)

    async def stop(self) -> None:
        self._running = False
        await self._task


async def test_no_turn_of_the_loop_packs_more_than_a_little(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(monkeypatch)
    asked = prompts(700, 1500, LONGEST - 1)
    stream = engine.submit(asked)
    assert engine.load.waiting == 700, "what is not sent yet is known to wait"
    await until(lambda: len(turns.sent) == 700, 60)
    await turns.stop()
    assert turns.sent == [each.id for each in asked]
    assert max(turns.packed.values()) <= MOST_TOKENS
    assert sum(turns.packed.values()) == sum(len(each.prompt_token_ids) for each in asked)
    engine.abort([each.id for each in asked])
    ended = await read(stream, *(each.id for each in asked))
    assert {outputs[-1].finish for outputs in ended.values()} <= {FinishReason.ABORT, FinishReason.LENGTH}
    await until(lambda: engine.load == front.EngineLoad(0, 0), 30)


async def test_all_are_answered_and_others_meanwhile(engine: AsyncEngine) -> None:
    asked = prompts(300, 100, 250)
    small = replace(asked[0], id="small", prompt_token_ids=(5, 3))
    streams = engine.submit(asked), engine.submit([small])
    found = await read(streams[1], "small") | await read(streams[0], *(each.id for each in asked))
    model = UniformExecutor()
    for each in [small, *asked]:
        assert tokens(found[each.id]) == model.expected_output(each.prompt_token_ids, each.params, LONGEST)
    await until(lambda: engine.load == front.EngineLoad(0, 0))


async def test_one_that_cannot_run_ends_all(engine: AsyncEngine) -> None:
    asked = prompts(200, 1000, 2000)
    at = random.randrange(50, 200)
    asked[at] = replace(asked[at], prompt_token_ids=(*asked[at].prompt_token_ids, VOCAB + 3))
    with pytest.raises(RequestError, match=f"token id {VOCAB + 3}"):
        await read(engine.submit(asked), *(each.id for each in asked))
    assert engine.open_requests == 0
    await until(lambda: engine.load == front.EngineLoad(0, 0) and engine.stats().pages_used == 0, 30)


async def test_what_cannot_be_sent_leaves_no_stream_without_an_end(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(200, 1000, 2000)
    encode: Callable[[Message], bytes] = front.encode

    def broken(message: Message) -> bytes:
        if isinstance(message, Add) and message.request.id == "r150":
            raise OverflowError("no such number")
        return encode(message)

    monkeypatch.setattr(front, "encode", broken)
    with pytest.raises(EngineError, match="no such number"):
        await read(engine.submit(asked), *(each.id for each in asked))
    await until(lambda: engine.load == front.EngineLoad(0, 0), 30)


async def test_what_is_aborted_before_it_is_sent_never_is(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(monkeypatch)
    asked = prompts(400, 2000, 3000)
    stream = engine.submit(asked)
    while not turns.sent:
        await asyncio.sleep(0)  # turn by turn: by the clock, a busy machine may have sent the last as well
    gone = [each.id for each in asked[200:]]
    engine.abort(gone)
    await until(lambda: len(turns.sent) == 200, 30)
    engine.abort([each.id for each in asked])
    ended = await read(stream, *(each.id for each in asked))
    await turns.stop()
    assert set(turns.sent).isdisjoint(gone)
    assert all(ended[name][-1].finish is FinishReason.ABORT for name in gone)
    await until(lambda: engine.load == front.EngineLoad(0, 0), 30)


async def test_a_dead_engine_ends_those_that_were_not_sent(engine: AsyncEngine) -> None:
    asked = prompts(400, 2000, 3000)
    stream = engine.submit(asked)
    await asyncio.sleep(0)
    os.kill(engine.ready.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await read(stream, *(each.id for each in asked))
    assert engine.open_requests == 0


async def test_those_not_sent_yet_count_for_the_queue(engine: AsyncEngine) -> None:
    asked = prompts(engine.ready.max_queued, 30, 60)
    engine.submit(asked)
    with pytest.raises(CapacityError):
        engine.submit([replace(asked[0], id="one more")])
    engine.abort([each.id for each in asked])


async def test_several_engines_are_chosen_from_by_a_part(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look for every block of megabytes in what was sent before would take as long as packing them."""
    looked: list[int] = []
    chain_of = placing.chain_of

    def counted(ids: tuple[int, ...], block: int, salt: str) -> tuple[int, ...]:
        looked.append(len(ids))
        return chain_of(ids, block, salt)

    monkeypatch.setattr(placing, "chain_of", counted)
    group = EngineGroup([engine])
    asked = prompts(100, 2000, 3000)
    stream = group.submit(asked)
    assert 0 < sum(looked) < 100_000
    group.abort([each.id for each in asked])
    await read(stream, *(each.id for each in asked))
