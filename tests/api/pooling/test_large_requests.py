"""Thousands of texts and long ones, of models that pool: answered soon, and nobody else waits."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from api_server import CLIENT, Running, serve
from fake_engine import FakeStream
from pooling_engine import PoolingEngine, make_pooling_state
from waiting import judged

from stoker_runtime.models.pooling import Pooling, PoolingSpec, Task
from stoker_runtime.request import FinishReason, Request, TokenOutput
from stoker_runtime.text.tokenizer import Tokenizer

RANDOM = random.Random()
WIDTH = RANDOM.randrange(900, 1100)
LONG = "All work and no play makes a text long.\n" * 200_000


class WideEngine(PoolingEngine):
    """Its vectors are as wide as those of real models, and come some at a time."""

    def submit(self, requests: Sequence[Request]) -> FakeStream:
        stream = FakeStream()
        self._streams |= dict.fromkeys((each.id for each in requests), stream)
        asyncio.get_running_loop().create_task(self._pool(requests, stream))
        return stream

    async def _pool(self, requests: Sequence[Request], stream: FakeStream) -> None:
        packed = array("f", [RANDOM.gauss(0, 0.05) for _ in range(1 if self.scores_pairs else WIDTH)]).tobytes()
        for at in range(0, len(requests), 64):
            await asyncio.sleep(0.002)
            for request in requests[at : at + 64]:
                if self._streams.pop(request.id, None) is not None:
                    stream.queue.put_nowait(TokenOutput(request.id, (), FinishReason.STOP, vector=packed))


def _serve(pooling: PoolingSpec) -> Iterator[Running]:
    engine = WideEngine()
    yield from serve(make_pooling_state(engine, pooling), engine)


@pytest.fixture(scope="module")
def embedder() -> Iterator[Running]:
    yield from _serve(PoolingSpec(Task.EMBED, Pooling.MEAN, normalize=True))


@pytest.fixture(scope="module")
def scorer() -> Iterator[Running]:
    yield from _serve(PoolingSpec(Task.SCORE, Pooling.CLS, normalize=False))


def texts(count: int) -> list[str]:
    return [f"text {at}" for at in range(count)]


EMBEDDED: dict[str, tuple[str, int, Callable[[], dict[str, Any]]]] = {
    "numbers": ("/v1/embeddings", 200, lambda: {"input": texts(RANDOM.randrange(700, 1500))}),
    "base64": ("/v1/embeddings", 200, lambda: {"input": texts(1900), "encoding_format": "base64"}),
    "ids": ("/pooling", 200, lambda: {"input": [[7, 5, RANDOM.randrange(300)]] * 1000}),
    "a long text": ("/v1/embeddings", 400, lambda: {"input": ["short", LONG]}),
    "cut": ("/v1/embeddings", 200, lambda: {"input": ["short", LONG, LONG[:60_000]], "truncate_prompt_tokens": 31}),
    "prompt_name": ("/v1/embeddings", 400, lambda: {"input": "a", "prompt_name": LONG}),
    "documents": ("/rerank", 200, lambda: {"query": "a", "documents": texts(1700)}),
    "long documents": ("/rerank", 400, lambda: {"query": "a", "documents": [LONG]}),
    "sides": ("/score", 200, lambda: {"text_1": texts(1300), "text_2": texts(1300)}),
}


@pytest.mark.parametrize("kind", EMBEDDED)
def test_embeddings_keep_nobody_waiting(embedder: Running, kind: str) -> None:
    path, status, body = EMBEDDED[kind]
    judged(embedder, path, body(), {status})


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, {"query": "a", "documents": ["b"] * 3900}),
        (200, {"query": "a", "documents": ["b", LONG], "truncate_prompt_tokens": 100}),
        (200, {"query": LONG[:3_000_000], "documents": texts(40), "truncate_prompt_tokens": 77}),
        (400, {"query": LONG, "documents": ["b"]}),
        (400, {"query": "a", "documents": ["b"], "instruction": LONG}),
    ],
    ids=["many", "a long document", "a long query", "too long a query", "an instruction"],
)
def test_pairs_keep_nobody_waiting(scorer: Running, status: int, body: dict[str, Any]) -> None:
    judged(scorer, "/rerank", dict(body), {status})


def test_an_answer_in_steps_is_whole(embedder: Running) -> None:
    count = RANDOM.randrange(300, 500)
    answer = CLIENT.post(f"{embedder.url}/v1/embeddings", json={"input": texts(count)}).json()
    assert [entry["index"] for entry in answer["data"]] == list(range(count))
    assert {len(entry["embedding"]) for entry in answer["data"]} == {WIDTH}


@pytest.mark.parametrize("pair", [False, True])
def test_what_is_cut_off_is_looked_at_once(pair: bool) -> None:
    """The end of the last text goes, and the time of a cut grows with the text and not with its square."""
    tokenizer = Tokenizer.synthetic(300)
    length, limit = RANDOM.randrange(150_000, 300_000), RANDOM.randrange(200, 9000)
    text = "".join(RANDOM.choices("abcd", k=length))
    parts = (text[:100], text[100:]) if pair else (text, None)
    found = tokenizer.encode_texts(*parts, True, limit)
    assert bytes(found.ids).decode() == text[:limit]
