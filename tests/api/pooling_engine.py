"""A fake engine that pools: a text's vector is made of its ids, so that a test can tell whose it is."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace

from api_server import make_state
from fake_engine import FakeEngine, FakeStream

from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.models.pooling import PoolingSpec, Task
from stoker_runtime.request import FinishReason, Request, TokenOutput


def vector_of(request: Request) -> list[float]:
    """(first id, last id, how many, where the second text begins); of a score the number of ids."""
    ids, pooling = request.prompt_token_ids, request.pooling
    assert pooling is not None
    return [float(ids[0]), float(ids[-1]), float(len(ids)), float(pooling.second_segment)]


class PoolingEngine(FakeEngine):
    """Answers every text after `delay`; `fails` names the first id of a text on which it fails."""

    scores_pairs = False

    def reset(self) -> None:
        super().reset()
        self.fails: int | None = None

    async def _speak(self, request: Request, stream: FakeStream) -> None:
        await asyncio.sleep(self.delay)
        if self._streams.pop(request.id, None) is None:
            return
        first = request.prompt_token_ids[0]
        if first == self.fails:
            stream.queue.put_nowait(TokenOutput(request.id, (), FinishReason.ERROR, error="The step failed."))
        else:
            vector = vector_of(request)
            packed = array("f", vector[2:3] if self.scores_pairs else vector).tobytes()
            stream.queue.put_nowait(TokenOutput(request.id, (), FinishReason.STOP, vector=packed))


def make_pooling_state(engine: PoolingEngine, pooling: PoolingSpec, **settings: object) -> ServerState:
    """A server that is ready and pools."""
    engine.scores_pairs = pooling.task is Task.SCORE
    state = make_state(engine, template=None, **settings)
    assert state.service is not None
    state.service = replace(state.service, pooling=pooling)
    return state
