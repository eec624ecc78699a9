"""Embeddings, scores and reranking over HTTP, with a fake engine: fields, shapes, errors, cancellation."""

from __future__ import annotations

import base64
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace

import httpx
import openai
import pytest
from api_server import Running, make_state, serve, wait_until
from fake_engine import FakeEngine
from pooling_engine import PoolingEngine, make_pooling_state

from stoker_runtime.models.pooling import Pooling, PoolingSpec, Task

EMBED = PoolingSpec(Task.EMBED, Pooling.MEAN, normalize=True, matryoshka=(2, 4))
SCORE = PoolingSpec(Task.SCORE, Pooling.CLS, normalize=False)


def _serve(pooling: PoolingSpec) -> Iterator[Running]:
    engine = PoolingEngine()
    yield from serve(make_pooling_state(engine, pooling), engine)


@pytest.fixture(scope="module")
def embedder() -> Iterator[Running]:
    yield from _serve(EMBED)


@pytest.fixture(scope="module")
def scorer() -> Iterator[Running]:
    yield from _serve(SCORE)


@pytest.fixture
def http(embedder: Running) -> Iterator[httpx.Client]:
    embedder.engine.reset()
    with httpx.Client(base_url=embedder.url, timeout=10) as client:
        yield client
    embedder.engine.reset()


@pytest.fixture
def client(embedder: Running) -> Iterator[openai.OpenAI]:
    embedder.engine.reset()
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def engine_of(running: Running) -> PoolingEngine:
    assert isinstance(running.engine, PoolingEngine)
    return running.engine


def test_the_openai_client_gets_the_same_in_both_encodings(client: openai.OpenAI) -> None:
    # The client sends base64 where nothing is said.
    packed = client.embeddings.create(model="byte-model", input=["abc", "z"])
    plain = client.embeddings.create(model="byte-model", input=["abc", "z"], encoding_format="float")
    assert [entry.embedding for entry in packed.data] == [[97.0, 99.0, 3.0, 0.0], [122.0, 122.0, 1.0, 0.0]]
    assert [entry.embedding for entry in plain.data] == [entry.embedding for entry in packed.data]
    assert [entry.index for entry in plain.data] == [0, 1]
    assert (plain.usage.prompt_tokens, plain.usage.total_tokens) == (4, 4)
    assert (plain.model, plain.object) == ("byte-model", "list")


def test_token_ids_as_langchain_sends_them(client: openai.OpenAI) -> None:
    one = client.embeddings.create(model="byte-model", input=[5, 6, 7])
    many = client.embeddings.create(model="byte-model", input=[[5, 6, 7], [9]])
    assert one.data[0].embedding == many.data[0].embedding == [5.0, 7.0, 3.0, 0.0]
    assert many.data[1].embedding == [9.0, 9.0, 1.0, 0.0]


def test_base64_is_little_endian_fp32(http: httpx.Client) -> None:
    body = {"input": "ab", "encoding_format": "base64"}
    text = http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert struct.unpack("<4f", base64.b64decode(text)) == (97.0, 98.0, 2.0, 0.0)


def test_fields_reach_the_engine(embedder: Running, http: httpx.Client) -> None:
    body = {"input": "abcdef", "dimensions": 2, "normalize": False, "truncate_prompt_tokens": 4, "request_id": "mine"}
    answer = http.post("/v1/embeddings", json=body).json()
    assert answer["id"] == "embd-mine"
    assert answer["usage"]["prompt_tokens"] == 4
    request = embedder.engine.requests[0]
    assert bytes(request.prompt_token_ids) == b"abcd"
    assert request.pooling is not None
    assert (request.pooling.dimensions, request.pooling.normalize, request.params.max_tokens) == (2, False, 0)
    assert request.id.startswith("embd-mine-")
    http.post("/v1/embeddings", json={"input": [[1] * 300], "truncate_prompt_tokens": -1})
    assert len(embedder.engine.requests[1].prompt_token_ids) == 256


def test_long_texts_are_encoded_off_the_loop(http: httpx.Client) -> None:
    body = {"input": ["ab" * 5000, "c"], "truncate_prompt_tokens": 7}
    data = http.post("/v1/embeddings", json=body).json()["data"]
    assert [entry["embedding"][2] for entry in data] == [7.0, 1.0]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "is required"),
        ({"input": []}, "input", "not empty"),
        ({"input": [["a"]]}, "input", "must be a string"),
        ({"input": ""}, "input", "empty text"),
        ({"input": [[1, 512]]}, "input", "0 to 511"),
        ({"input": "a" * 257}, "input", "maximum context length is 256 tokens"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "must be 'float' or 'base64'"),
        ({"input": "a", "dimensions": 3}, "dimensions", "one of 2, 4"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "between 1 and 256"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "between 1 and 256"),
        ({"input": "a", "priority": 1}, "priority", "--scheduling-policy"),
        ({"input": "a", "messages": []}, "messages", "not supported"),
        ({"input": "a", "embed_dtype": "int8"}, "embed_dtype", "not supported"),
        ({"input": "a", "imput": "b"}, "imput", "did you mean input?"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, object], param: str, words: str, http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


def test_other_models_are_not_found(http: httpx.Client) -> None:
    assert http.post("/v1/embeddings", json={"input": "a", "model": "x"}).status_code == 404


def test_pooling_gives_the_same_vectors(http: httpx.Client) -> None:
    answer = http.post("/pooling", json={"input": ["abc"], "task": "embed"}).json()
    assert answer["data"] == [{"index": 0, "object": "pooling", "data": [97.0, 99.0, 3.0, 0.0]}]
    assert http.post("/pooling", json={"input": "a", "task": "classify"}).json()["error"]["param"] == "task"


def cosine(one: list[float], two: list[float]) -> float:
    return sum(a * b for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_of_an_embedding_model_are_inner_products(path: str, embedder: Running, http: httpx.Client) -> None:
    answer = http.post(path, json={"text_1": "ab", "text_2": ["ab", "c"]}).json()
    ab, c = [97.0, 98.0, 2.0, 0.0], [99.0, 99.0, 1.0, 0.0]
    assert [entry["score"] for entry in answer["data"]] == [cosine(ab, ab), cosine(ab, c)]
    assert {entry["object"] for entry in answer["data"]} == {"score"}
    assert answer["usage"]["prompt_tokens"] == 3, "an equal text is embedded once"
    assert all(request.pooling is not None and request.pooling.normalize for request in embedder.engine.requests)


def test_pairs_of_a_cross_encoder(scorer: Running) -> None:
    engine_of(scorer).reset()
    with httpx.Client(base_url=scorer.url) as http:
        many = http.post("/v1/score", json={"queries": ["a", "bb"], "documents": ["ccc", "d"]}).json()
        cut = http.post("/v1/score", json={"text_1": "aa", "text_2": "bbbb", "truncate_prompt_tokens": 3}).json()
        refused = http.post("/v1/embeddings", json={"input": "a"})
        pooled = http.post("/pooling", json={"input": "abc"}).json()
    assert [entry["score"] for entry in many["data"]] == [4.0, 3.0]
    assert cut["usage"]["prompt_tokens"] == 3
    assert [bytes(request.prompt_token_ids) for request in scorer.engine.requests[:3]] == [b"accc", b"bbd", b"aab"]
    assert refused.status_code == 400
    assert "no embeddings" in refused.json()["error"]["message"]
    assert pooled["data"][0]["data"] == [3.0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"text_1": "a"}, "Give text_1 and text_2"),
        ({"text_1": "a", "text_2": "b", "items": "c"}, "Give text_1 and text_2"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1 has 2 texts and text_2 3"),
        ({"data_1": "a", "data_2": []}, "data_2 must be a text"),
        ({"text_1": "a", "text_2": None}, "text_2 must be a text"),
        ({"text_1": "a", "text_2": ""}, "holds an empty text"),
        ({"text_1": "a", "text_2": "b", "softmax": True}, "softmax is not supported"),
    ],
)
def test_pairs_that_do_not_fit(body: dict[str, object], words: str, http: httpx.Client) -> None:
    answer = http.post("/v1/score", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_reranking_gives_the_best_first(path: str, scorer: Running) -> None:
    engine_of(scorer).reset()
    documents = ["x", "yyy", {"text": "zz"}, "www"]
    with httpx.Client(base_url=scorer.url) as http:
        answer = http.post(path, json={"query": "q", "documents": documents}).json()
        two = http.post(path, json={"query": "q", "documents": documents, "top_n": 2, "return_documents": False}).json()
        none = http.post(path, json={"query": "q", "documents": []})
    assert [(entry["index"], entry["relevance_score"]) for entry in answer["results"]] == [
        (1, 4.0),
        (3, 4.0),
        (2, 3.0),
        (0, 2.0),
    ]
    assert answer["results"][2]["document"] == {"text": "zz"}
    assert answer["usage"] == {"prompt_tokens": 13, "total_tokens": 13}
    assert two["results"] == [{"index": 1, "relevance_score": 4.0}, {"index": 3, "relevance_score": 4.0}]
    assert none.status_code == 400


def test_each_kind_of_model_says_what_it_is_for(embedder: Running, http: httpx.Client) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        error = http.post(path, json=body)
        assert error.status_code == 400
        assert error.json()["error"]["code"] == "model_does_not_generate"
        assert "embeds texts" in error.json()["error"]["message"]
    engine = FakeEngine()
    for running in serve(make_state(engine), engine):
        with httpx.Client(base_url=running.url) as client:
            for path, body in (
                ("/v1/embeddings", {"input": "a"}),
                ("/pooling", {"input": "a"}),
                ("/v1/score", {"text_1": "a", "text_2": "b"}),
                ("/v1/rerank", {"query": "a", "documents": ["b"]}),
            ):
                error = client.post(path, json=body)
                assert error.status_code == 400, path
                assert "--runner pooling" in error.json()["error"]["message"]


def test_probes_and_models(http: httpx.Client) -> None:
    assert http.get("/ready").status_code == http.get("/health").status_code == 200
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 256
    assert http.post("/tokenize", json={"prompt": "ab"}).json()["tokens"] == [97, 98]
    assert 'request_success_total{finished_reason="stop"' in http.get("/metrics").text


def test_a_full_queue_is_429(embedder: Running, http: httpx.Client) -> None:
    embedder.engine.full = True
    answer = http.post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert 'stoker:requests_rejected_total{model_name="byte-model"} 0.0' not in http.get("/metrics").text


def test_more_texts_than_the_queue_ever_holds(
    embedder: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = embedder.state.config
    monkeypatch.setattr(embedder.state, "config", replace(config, engine=replace(config.engine, max_queued=3)))
    answer = http.post("/v1/embeddings", json={"input": [[1]] * 4})
    assert answer.status_code == 400
    assert "holds 4 texts; this server's queue holds 3 (--max-queued)" in answer.json()["error"]["message"]


def test_a_failure_ends_the_rest(embedder: Running, http: httpx.Client) -> None:
    engine = engine_of(embedder)
    engine.fails = ord("b")
    answer = http.post("/v1/embeddings", json={"input": ["b", "a"]})
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "The step failed.")
    assert wait_until(lambda: not embedder.state.active)
    assert engine.stats().running == 0
    engine.dead = True
    assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 503


def test_a_client_that_goes_away_takes_its_texts_along(embedder: Running) -> None:
    engine = engine_of(embedder)
    engine.reset()
    engine.delay = 20.0
    with httpx.Client(base_url=embedder.url) as impatient, pytest.raises(httpx.ReadTimeout):
        impatient.post("/v1/embeddings", json={"input": ["a", "b", "c"]}, timeout=0.3)
    assert wait_until(lambda: len(engine.aborted) == 3)
    assert wait_until(lambda: not embedder.state.active)
    engine.reset()


def test_a_drain_ends_what_is_left(embedder: Running) -> None:
    engine = engine_of(embedder)
    engine.reset()
    engine.delay = 20.0

    def cut_short() -> None:
        for running in list(embedder.state.active):
            running.abort("The server is shutting down.")

    with httpx.Client(base_url=embedder.url, timeout=10) as http:
        timer = threading.Timer(0.3, lambda: embedder.call(cut_short))
        timer.start()
        answer = http.post("/v1/embeddings", json={"input": ["a", "b"]})
        timer.join()
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "The server is shutting down.")
    engine.reset()
