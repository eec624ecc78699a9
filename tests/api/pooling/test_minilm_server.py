"""`stoker serve` with a real encoder and the `openai` client: the vectors of transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
import torch
from api_server import wait_until
from numpy.typing import NDArray
from server_process import ServerProcess
from tests.real_models import minilm

SENTENCES = (
    "What is the capital of France?",
    "Paris is the capital of France.",
    "Trains are late.",
    "x",
    "Größe und naïveté, 日本語 🙂",
    "The quick brown fox jumps over the lazy dog. " * 20,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    program = [sys.executable, "-m", "stoker_cli", "serve", str(minilm())]
    batches = str(tmp_path_factory.mktemp("batches"))
    process = ServerProcess(program, "--served-model-name", "minilm", "--device", "cpu", "--batch-dir", batches)
    try:
        yield process.wait_ready(120)
    finally:
        process.close()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120) as found:
        yield found


@pytest.fixture(scope="module")
def expected() -> NDArray[np.float32]:
    """The sentences as transformers and sentence-transformers' recipe embed them: mean of all tokens, unit length."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm())
    model = transformers.AutoModel.from_pretrained(minilm()).eval()
    rows = []
    for sentence in SENTENCES:
        with torch.no_grad():
            states = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0]
        rows.append(torch.nn.functional.normalize(states.mean(0), dim=0))
    found: NDArray[np.float32] = torch.stack(rows).numpy()
    return found


def embed(client: openai.OpenAI, given: list[str] | list[list[int]], **options: str) -> NDArray[np.float64]:
    answer = client.embeddings.create(model="minilm", input=given, **options)  # type: ignore[arg-type]
    return np.array([entry.embedding for entry in answer.data])


def test_vectors_are_those_of_transformers(client: openai.OpenAI, expected: NDArray[np.float32]) -> None:
    for options in ({}, {"encoding_format": "float"}):
        found = embed(client, list(SENTENCES), **options)
        assert found.shape == expected.shape
        assert (found * expected).sum(1).min() > 0.99999


def test_token_ids_give_the_vector_of_their_text(server: ServerProcess, client: openai.OpenAI) -> None:
    tokens = [
        httpx.post(f"{server.url}/tokenize", json={"prompt": sentence}).json()["tokens"] for sentence in SENTENCES[:3]
    ]
    np.testing.assert_allclose(embed(client, tokens), embed(client, list(SENTENCES[:3])), atol=1e-6)


def test_clients_at_once_do_not_see_each_other(client: openai.OpenAI, expected: NDArray[np.float32]) -> None:
    def ask(at: int) -> NDArray[np.float64]:
        return embed(client, [SENTENCES[(at + offset) % len(SENTENCES)] for offset in range(4)])

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(24)))
    for at, found in enumerate(answers):
        wanted = expected[[(at + offset) % len(SENTENCES) for offset in range(4)]]
        assert (found * wanted).sum(1).min() > 0.99999


def test_the_question_finds_its_answer(server: ServerProcess) -> None:
    body = {"model": "minilm", "query": SENTENCES[0], "documents": list(SENTENCES[1:4])}
    results = httpx.post(f"{server.url}/v1/rerank", json=body).json()["results"]
    assert results[0]["index"] == 0
    assert results[0]["relevance_score"] > 0.8 > 0.4 > results[1]["relevance_score"]


def test_texts_longer_than_the_model_was_made_for(server: ServerProcess, client: openai.OpenAI) -> None:
    assert client.models.retrieve("minilm").model_extra is not None
    assert client.models.retrieve("minilm").model_extra["max_model_len"] == 256  # type: ignore[index]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256"):
        embed(client, ["word " * 300])
    cut = client.embeddings.create(
        model="minilm", input="word " * 300, extra_body={"truncate_prompt_tokens": -1}, encoding_format="float"
    )
    assert cut.usage.prompt_tokens == 256
    # What is cut keeps the tokens around it: it is the vector of the shorter text.
    shorter = embed(client, ["word " * 254])
    assert float(shorter[0] @ np.array(cut.data[0].embedding)) == pytest.approx(1.0, abs=1e-6)


def test_a_client_that_goes_away_frees_the_queue(server: ServerProcess) -> None:
    slow = {"model": "minilm", "input": ["word " * 250] * 400}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/embeddings", json=slow, timeout=0.5)

    def idle() -> bool:
        load = httpx.get(f"{server.url}/load").json()
        return bool(load["server_load"] == load["running"] == load["waiting"] == 0)

    assert wait_until(idle, 30), httpx.get(f"{server.url}/load").text
    metrics = httpx.get(f"{server.url}/metrics").text
    aborted = next(line for line in metrics.splitlines() if 'finished_reason="abort"' in line)
    assert float(aborted.split()[-1]) > 100
    waited = next(line for line in metrics.splitlines() if line.startswith("vllm:request_queue_time_seconds_count"))
    assert float(waited.split()[-1]) > 0


def test_a_batch_of_files(client: openai.OpenAI, expected: NDArray[np.float32]) -> None:
    common = {"method": "POST", "url": "/v1/embeddings"}
    lines = [
        {"custom_id": str(at), **common, "body": {"model": "minilm", "input": sentence}}
        for at, sentence in enumerate(SENTENCES)
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    assert wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 30)
    output = client.batches.retrieve(batch.id).output_file_id
    assert output is not None
    for line in client.files.content(output).text.splitlines():
        answer = json.loads(line)
        vector = np.array(answer["response"]["body"]["data"][0]["embedding"])
        assert float(vector @ expected[int(answer["custom_id"])]) > 0.99999


def test_it_says_what_it_is(server: ServerProcess) -> None:
    info = httpx.get(f"{server.url}/version").json()
    assert "version" in info
    assert "pooling: embed, mean, normalized" in server.log
    assert httpx.get(f"{server.url}/ready").status_code == 200
    refused = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert refused.json()["error"]["code"] == "model_does_not_generate"
