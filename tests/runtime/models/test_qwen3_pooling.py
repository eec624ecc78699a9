"""Qwen3-Embedding and Qwen3-Reranker by their published recipes, on tiny random models, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.models.qwen3_pair import (
    PREFIX,
    QUERY_PROMPT,
    SUFFIX,
    TASK,
    embedded,
    embedding_model,
    ids_of,
    judged,
    qwen3,
)

from stoker_runtime import LLM, PoolingParams
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError, RequestError
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.pair_prompt import QWEN3_RERANKER
from stoker_runtime.models.pooling import PoolingSpec, Task, check_dimensions, read_pooling
from stoker_runtime.text.pairs import encode_pair
from stoker_runtime.text.tokenizer import Tokenizer

ANSWERS = json.dumps({"classifier_from_token": ["no", "yes"]})
PAIRS = [
    ("What is the capital of China?", "The capital of China is Beijing."),
    ("gravity", "Größe: a force that attracts two bodies towards each other. 🙂"),
    ("x", "yes"),
]


def pooling_of(folder: Path, **settings: Any) -> PoolingSpec:
    found = read_pooling(read_source(str(folder)), EngineConfig(model=str(folder), **settings))
    assert found is not None
    return found


def test_texts_are_embedded_as_the_card_says(tmp_path: Path) -> None:
    model = embedding_model(tmp_path)
    texts = ["The capital of China is Beijing.", f"{QUERY_PROMPT}What is gravity?", "yes no"]
    with LLM(str(tmp_path), device="cpu") as llm:
        whole = llm.embed(texts)
        cut = llm.embed(texts, pooling_params=PoolingParams(dimensions=33))
    for text, got, short in zip(texts, whole, cut, strict=True):
        expected = embedded(tmp_path, model, text)
        assert got.prompt_token_ids == ids_of(tmp_path, text)
        assert got.prompt_token_ids[-1] == ids_of(tmp_path, "<|endoftext|>")[0]
        torch.testing.assert_close(torch.tensor(got.outputs.embedding), expected, atol=2e-5, rtol=1e-4)
        part = torch.nn.functional.normalize(expected[:33], dim=0)
        torch.testing.assert_close(torch.tensor(short.outputs.embedding), part, atol=2e-5, rtol=1e-4)


def test_prompts_are_those_of_the_model_s_files(tmp_path: Path) -> None:
    embedding_model(tmp_path)
    found = pooling_of(tmp_path)
    assert [found.prompt(name) for name in ("query", "document", None)] == [QUERY_PROMPT, "", ""]
    with pytest.raises(RequestError, match="prompt_name is 'title'; this model's prompts are query, document"):
        found.prompt("title")
    settings = json.loads((tmp_path / "config_sentence_transformers.json").read_text())
    for name, prompt in (("query", QUERY_PROMPT), ("document", "")):
        (tmp_path / "config_sentence_transformers.json").write_text(
            json.dumps(settings | {"default_prompt_name": name})
        )
        assert pooling_of(tmp_path).prompt(None) == prompt
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings | {"default_prompt_name": "web"}))
    with pytest.raises(ModelError, match="default_prompt_name is 'web', which prompts do not have"):
        pooling_of(tmp_path)


def test_a_decoder_that_generates_is_cut_to_no_size(tmp_path: Path) -> None:
    qwen3(tmp_path)
    with pytest.raises(RequestError, match="dimensions is not supported by this model"):
        check_dimensions(pooling_of(tmp_path, runner="pooling"), 32)


@pytest.mark.parametrize("tied", [True, False])
def test_pairs_are_judged_as_the_card_says(tied: bool, tmp_path: Path) -> None:
    model = qwen3(tmp_path, tie_word_embeddings=tied)
    with LLM(str(tmp_path), device="cpu", runner="pooling", pooler_config=ANSWERS) as llm:
        scores = [llm.score(query, document)[0].outputs.score for query, document in PAIRS]
        again = llm.score([query for query, _ in PAIRS], [document for _, document in PAIRS])
    expected = [judged(tmp_path, model, *pair) for pair in PAIRS]
    assert scores == pytest.approx(expected, abs=2e-5)
    assert [each.outputs.score for each in again] == pytest.approx(expected, abs=2e-5)
    assert max(expected) - min(expected) > 1e-3


def test_a_classifier_of_one_label_scores_pairs_that_follow_each_other(tmp_path: Path) -> None:
    model = qwen3(tmp_path, kind="Qwen3ForSequenceClassification", num_labels=1)
    given = json.dumps({"template": "qwen3-reranker"})
    query, document = PAIRS[1]
    with LLM(str(tmp_path), device="cpu") as llm:
        plain = llm.score(query, document)[0]
    with LLM(str(tmp_path), device="cpu", pooler_config=given) as llm:
        asked = llm.score(query, document)[0]
    wrapped = f"{PREFIX}<Instruct>: {TASK}\n<Query>: {query}\n<Document>: {document}{SUFFIX}"
    for got, ids in ((plain, ids_of(tmp_path, query + document)), (asked, ids_of(tmp_path, wrapped))):
        with torch.no_grad():
            expected = torch.sigmoid(model(torch.tensor([ids])).logits[0, 0])
        assert got.prompt_token_ids == ids
        assert got.outputs.score == pytest.approx(float(expected), abs=2e-5)


def test_what_is_cut_of_a_pair_is_its_document(tmp_path: Path) -> None:
    qwen3(tmp_path)
    tokenizer = Tokenizer.load(str(tmp_path))
    whole = encode_pair(tokenizer, QWEN3_RERANKER, "query", "document " * 40).ids
    around = [len(ids_of(tmp_path, text)) for text in (PREFIX, SUFFIX)]
    limit = sum(around) + 130
    cut = encode_pair(tokenizer, QWEN3_RERANKER, "query", "document " * 40, limit=limit).ids
    assert len(cut) == limit < len(whole)
    assert cut == [*whole[: limit - around[1]], *whole[-around[1] :]]
    with pytest.raises(RequestError, match=f"truncate_prompt_tokens is {sum(around)}, but the model's prompt"):
        encode_pair(tokenizer, QWEN3_RERANKER, "query", "document", limit=sum(around))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"classifier_from_token": ["no"]}, "classifier_from_token must be two tokens"),
        ({"classifier_from_token": ["no", "yes"], "template": "jina"}, "template is 'jina'; it must be one of qwen3-"),
        ({"template": "none"}, "of a model that scores pairs"),
        ({"classifier": 1}, "must be an object of .*classifier_from_token, template"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    qwen3(tmp_path)
    with pytest.raises(ConfigError, match=message):
        pooling_of(tmp_path, runner="pooling", pooler_config=json.dumps(given))


def test_what_cannot_score_is_refused_by_name(tmp_path: Path) -> None:
    qwen3(tmp_path / "three", kind="Qwen3ForSequenceClassification", num_labels=3)
    with pytest.raises(ModelError, match="3 labels are not supported"):
        pooling_of(tmp_path / "three")
    qwen3(tmp_path / "one", kind="Qwen3ForSequenceClassification", num_labels=1)
    assert pooling_of(tmp_path / "one").task is Task.SCORE
    with pytest.raises(ConfigError, match="a Qwen3ForCausalLM that scores does not generate"):
        pooling_of(tmp_path / "one", runner="generate")
    given = json.dumps({"classifier_from_token": ["no", "surely"]})
    with pytest.raises(ConfigError, match=r"names 'surely', which is no token of .*tokenizer\.json"):
        LLM(str(qwen_of(tmp_path / "whole")), device="cpu", runner="pooling", pooler_config=given)


def qwen_of(folder: Path) -> Path:
    qwen3(folder)
    return folder
