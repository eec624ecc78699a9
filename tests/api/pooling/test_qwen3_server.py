"""`stoker serve` with models as Qwen3-Embedding and Qwen3-Reranker are published, tiny and random: the cards' recipes
through the `openai` client and the routes that rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from server_process import ServerProcess
from tests.runtime.models.qwen3_pair import QUERY_PROMPT, embedded, embedding_model, judged, qwen3

DOCUMENTS = ["The capital of China is Beijing.", "Gravity attracts two bodies towards each other. Größe 🙂", "no"]
QUERY = "What is the capital of China?"


def served(folder: Path, tmp: Path, *flags: str) -> ServerProcess:
    program = [sys.executable, "-m", "stoker_cli", "serve", str(folder)]
    return ServerProcess(
        program, "--served-model-name", "tiny", "--device", "cpu", "--batch-dir", str(tmp), *flags
    ).wait_ready(120)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path, Any]]:
    folder = tmp_path_factory.mktemp("embedding")
    model = embedding_model(folder)
    process = served(folder, tmp_path_factory.mktemp("batches"))
    try:
        yield process, folder, model
    finally:
        process.close()


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path, Any]]:
    folder = tmp_path_factory.mktemp("reranker")
    model = qwen3(folder, tie_word_embeddings=True)
    answers = json.dumps({"classifier_from_token": ["no", "yes"]})
    batches = tmp_path_factory.mktemp("batches")
    process = served(folder, batches, "--runner", "pooling", "--pooler-config", answers)
    try:
        yield process, folder, model
    finally:
        process.close()


def test_embeddings_behind_a_prompt_and_cut(embedder: tuple[ServerProcess, Path, Any]) -> None:
    process, folder, model = embedder
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        plain = client.embeddings.create(model="tiny", input=DOCUMENTS)
        asked = client.embeddings.create(
            model="tiny", input=QUERY, dimensions=32, extra_body={"prompt_name": "query"}
        )
        with pytest.raises(openai.BadRequestError, match="this model's prompts are query, document") as wrong:
            client.embeddings.create(model="tiny", input=QUERY, extra_body={"prompt_name": "queries"})
    assert wrong.value.param == "prompt_name"
    for document, one in zip(DOCUMENTS, plain.data, strict=True):
        torch.testing.assert_close(torch.tensor(one.embedding), embedded(folder, model, document), atol=2e-5, rtol=1e-4)
    expected = embedded(folder, model, QUERY_PROMPT + QUERY)[:32]
    expected = expected / expected.norm()
    torch.testing.assert_close(torch.tensor(asked.data[0].embedding), expected, atol=2e-5, rtol=1e-4)


def test_documents_are_ranked_by_the_probability_of_yes(reranker: tuple[ServerProcess, Path, Any]) -> None:
    process, folder, model = reranker
    body = {"model": "tiny", "query": QUERY, "documents": DOCUMENTS}
    instruction = "Judge rivers only"
    with httpx.Client(base_url=process.url, timeout=60) as http:
        ranked = http.post("/v1/rerank", json=body).json()["results"]
        told = http.post("/v1/rerank", json=body | {"instruction": instruction, "top_n": 1}).json()["results"]
        scored = http.post("/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()["data"]
        refused = http.post("/v1/embeddings", json={"model": "tiny", "input": "x"})
    expected = [judged(folder, model, QUERY, document) for document in DOCUMENTS]
    assert [each["score"] for each in scored] == pytest.approx(expected, abs=2e-5)
    assert [each["index"] for each in ranked] == sorted(range(3), key=lambda at: -expected[at])
    assert [each["relevance_score"] for each in ranked] == pytest.approx(sorted(expected, reverse=True), abs=2e-5)
    best = max(judged(folder, model, QUERY, document, instruction) for document in DOCUMENTS)
    assert [each["relevance_score"] for each in told] == pytest.approx([best], abs=2e-5)
    assert refused.status_code == 400


def test_an_instruction_that_nothing_reads_is_refused(embedder: tuple[ServerProcess, Path, Any]) -> None:
    body = {"model": "tiny", "query": QUERY, "documents": DOCUMENTS, "instruction": "x"}
    answer = httpx.post(f"{embedder[0].url}/v1/rerank", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "instruction"
