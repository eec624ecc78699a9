"""Encoders read from GGUF, against transformers on the checkpoint that the file was made of."""

from __future__ import annotations

import json
import logging
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tests import real_models
from tests.runtime.models.test_encoder import (
    CHECKPOINTS,
    inputs_of,
    load,
    random_texts,
    reference,
    save_random,
    typed,
)
from tests.runtime.models.test_zoo import SEED
from tests.runtime.text.test_gguf_encoder_tokenizer import ROBERTA_SPECIAL, unigram, word_pieces
from tests.runtime.weights import gguf_encoders

from stoker_runtime import LLM, PoolingParams
from stoker_runtime.checkpoint.gguf_header import read_gguf_header
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.pooling import pool_states
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.gguf import GGUF_ENCODERS, config_from_gguf
from stoker_runtime.models.pooling import Pooling, Task, read_pooling
from stoker_runtime.terminal import info

Kind, PoolingType = gguf.GGMLQuantizationType, gguf.PoolingType
NAMES = ("bert", "bert-relu", "roberta", "xlm-roberta", "modernbert", "modernbert-biased", "nomic")
SCORERS = {"xlm-roberta-score": None, "modernbert-mean-score": PoolingType.RANK}
# Sizes of whole blocks.
EVEN = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}


def embedded(file: Path, texts: list[list[int]], **params: Any) -> list[torch.Tensor]:
    """The vectors of an LLM of the file, and of nothing beside it."""
    with LLM(str(file), device="cpu") as llm:
        found = llm.embed(texts, pooling_params=PoolingParams(**params))
    return [torch.tensor(each.outputs.embedding) for each in found]


@pytest.mark.parametrize("pooling", [PoolingType.MEAN, PoolingType.CLS, PoolingType.LAST])
@pytest.mark.parametrize("name", NAMES)
def test_vectors_of_a_file_equal_transformers(name: str, pooling: PoolingType, tmp_path: Path) -> None:
    folder = save_random(name, tmp_path)
    file = gguf_encoders.write(folder, tmp_path / "m.gguf", pooling)
    plain, unit = embedded(file, random_texts(), normalize=False), embedded(file, random_texts())
    model, spec = reference(folder, name), load(folder)
    for text, vector, direction in zip(random_texts(), plain, unit, strict=True):
        with torch.no_grad():
            states = model(**typed(spec, text, 0), output_hidden_states=True).hidden_states[-1][0]
        expected = {"MEAN": states.mean(0), "CLS": states[0], "LAST": states[-1]}[pooling.name]
        torch.testing.assert_close(vector, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(direction, expected / expected.norm(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_states_of_both_kinds_of_tokens_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    folder = save_random(name, tmp_path)
    theirs, ours = load(folder), load(gguf_encoders.write(folder, tmp_path / "m.gguf"))
    assert (ours.spec.max_position, ours.spec.types) == (theirs.spec.max_position, theirs.spec.types)
    for second in (0, 3):
        inputs = inputs_of(theirs, random_texts(), second)
        torch.testing.assert_close(ours.forward(inputs), theirs.forward(inputs), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", SCORERS)
def test_scores_of_a_file_equal_transformers(name: str, tmp_path: Path) -> None:
    """Files of rerankers may say so, or show it by their head alone."""
    folder = save_random(name, tmp_path)
    file = gguf_encoders.write(folder, tmp_path / "m.gguf", SCORERS[name])
    encoder, model = load(file), reference(folder, name)
    pooling = read_pooling(read_source(str(file)), EngineConfig(str(file)))
    assert pooling is not None
    assert (pooling.task, pooling.sigmoid) == (Task.SCORE, True)
    inputs = inputs_of(encoder, random_texts())
    scores = encoder.scores(pool_states(encoder.forward(inputs), inputs.starts, pooling.pooling))
    for text, score in zip(random_texts(), scores, strict=True):
        with torch.no_grad():
            expected = model(**typed(encoder, text, 0)).logits[0]
        torch.testing.assert_close(score, expected, atol=1e-4, rtol=1e-4)


def test_pairs_of_texts_are_scored_by_a_file_alone(tmp_path: Path) -> None:
    import transformers

    pieces = [(name, 0.0) for name in ROBERTA_SPECIAL]
    pieces += [(mark + letter, -9.0) for letter in "abcdefghijklmnopqrstuvwxyz" for mark in ("", "\u2581")]
    pieces += [(f"<extra_{at}>", -99.0) for at in range(len(pieces), 96)]
    folder = save_random("xlm-roberta-score", tmp_path)
    file = gguf_encoders.write(folder, tmp_path / "m.gguf", PoolingType.RANK, tokenizer=unigram(pieces))
    tokenizer, model = transformers.XLMRobertaTokenizer(vocab=pieces), reference(folder, "xlm-roberta-score")
    query, documents = "what is it", ["a dog", "the stars", "it is"]
    with LLM(str(file), device="cpu") as llm:
        scores = [each.outputs.score for each in llm.score(query, documents)]
    for document, score in zip(documents, scores, strict=True):
        with torch.no_grad():
            expected = model(**tokenizer(query, document, return_tensors="pt")).logits[0, 0].sigmoid()
        assert score == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q5_1, Kind.F16, Kind.BF16])
@pytest.mark.parametrize("name", ["bert", "modernbert", "nomic"])
def test_blocks_of_a_file_stand_for_their_numbers(
    name: str, kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_random(name, tmp_path, **EVEN)

    def blocks(tensor: str) -> Kind:
        small = tensor.startswith(("position_embd", "token_types"))
        return Kind.F32 if small else Kind.Q8_0 if "attn_v" in tensor else kind

    file = gguf_encoders.write(folder, tmp_path / "blocks.gguf", PoolingType.MEAN, blocks)
    plain = gguf_encoders.write(folder, tmp_path / "plain.gguf", PoolingType.MEAN, rounded=blocks)
    caplog.set_level(logging.INFO)
    for vector, expected in zip(embedded(file, random_texts()), embedded(plain, random_texts()), strict=True):
        torch.testing.assert_close(vector, expected, atol=1e-6, rtol=0)
    said = re.search(r"keeps no blocks; decoded to float32: (.*)", caplog.text)
    assert bool(said) == (kind not in (Kind.F16, Kind.BF16) or name == "bert")
    with pytest.raises(ConfigError, match="keeps blocks for models that generate"):
        LLM(str(file), device="cpu", quantization="gguf")


def test_a_single_row_may_be_a_vector(tmp_path: Path) -> None:
    """As tools leave it that write a file again."""
    folder = save_random("xlm-roberta-score", tmp_path)

    def flattened(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor[0] if tensor.shape[0] == 1 and tensor.dim() == 2 else tensor
                for name, tensor in tensors.items()}  # fmt: skip

    whole = load(gguf_encoders.write(folder, tmp_path / "whole.gguf"))
    flat = load(gguf_encoders.write(folder, tmp_path / "flat.gguf", change=flattened))
    inputs = inputs_of(whole, random_texts())
    states = flat.forward(inputs)
    torch.testing.assert_close(states, whole.forward(inputs), atol=0, rtol=0)
    torch.testing.assert_close(flat.scores(states), whole.scores(states), atol=0, rtol=0)


def test_what_a_file_does_not_say_is_an_encoders_default(tmp_path: Path) -> None:
    folder = save_random("modernbert", tmp_path)
    file = gguf_encoders.write(folder, tmp_path / "m.gguf")
    pooling = read_pooling(read_source(str(file)), EngineConfig(str(file)))
    assert pooling is not None
    assert (pooling.task, pooling.pooling, pooling.normalize) == (Task.EMBED, Pooling.CLS, True)
    given = json.dumps({"pooling_type": "mean"})
    for each in (None, PoolingType.CLS, PoolingType.NONE):
        file = gguf_encoders.write(folder, tmp_path / "m.gguf", each)
        pooling = read_pooling(read_source(str(file)), EngineConfig(str(file), pooler_config=given))
        assert pooling is not None
        assert pooling.pooling is Pooling.MEAN
    with pytest.raises(ConfigError, match="pooling_type is none, a vector for each token"):
        read_pooling(read_source(str(file)), EngineConfig(str(file)))


def test_every_encoder_has_its_test() -> None:
    tested = {CHECKPOINTS[name][0].removesuffix("Model") for name in NAMES}
    known = {family for row in GGUF_ENCODERS.values() for family in (row.family, *row.kin)}
    # CamemBERT is RoBERTa.
    assert known - tested == {"Camembert"}


def test_minilm_as_a_file_is_minilm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole of it: text to vectors, and what `stoker info` says."""
    import transformers

    folder = real_models.minilm()
    vocabulary = transformers.AutoTokenizer.from_pretrained(folder).get_vocab()
    file = tmp_path / "minilm.gguf"
    gguf_encoders.write(folder, file, PoolingType.MEAN, lambda _: Kind.F16, tokenizer=word_pieces(vocabulary))
    words = random.Random(SEED).sample(sorted(vocabulary), 90)
    texts = ["The quick brown fox", "Größe, naïveté 日本語!", " ".join(words)]
    with LLM(str(folder), device="cpu") as llm:
        expected = [torch.tensor(each.outputs.embedding) for each in llm.embed(texts)]
    with LLM(str(file), device="cpu") as llm:
        vectors = [torch.tensor(each.outputs.embedding) for each in llm.embed(texts)]
    for vector, wanted in zip(vectors, expected, strict=True):
        assert torch.dot(vector, wanted) > 0.99999
    assert info.main([str(file), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "BertModel, 6 layers, hidden 384" in shown
    assert "embed: mean, normalized, texts of up to 512 tokens" in shown


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("bert", {"architecture": "nomic-bert-moe"}, "'nomic-bert-moe' is not supported. The nearest is nomic-bert"),
        ("bert", {"keys": lambda writer: writer.add_uint32("bert.pooling_type", 9)}, "pooling_type is 9; known are 0"),
        ("nomic", {"keys": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)},
         "nomic-bert.rope.scaling.type is 'yarn'; encoders know none"),
        ("bert-score", {}, "it scores pairs, but lacks tensor cls.weight: converters leave out"),
        ("bert", {"pooling": PoolingType.RANK}, "it scores pairs, but lacks tensor cls.weight"),
        ("bert", {"change": lambda tensors: tensors | {"blk.1.attn_q_norm.weight": torch.ones(48)}},
         "tensor blk.1.attn_q_norm.weight has no place in a BertModel"),
        ("nomic", {"change": lambda tensors: tensors | {"blk.1.attn_qkv.bias": torch.ones(144)}},
         "tensor blk.1.attn_qkv.bias has no place in a NomicBertModel"),
        ("bert", {"change": lambda tensors: {key: each for key, each in tensors.items() if "blk.2.ffn_up" not in key}},
         "lacks tensor blk.2.ffn_up.weight"),
        ("bert", {"architecture": "modern-bert"}, "lacks tensor blk.0.attn_qkv.weight"),
    ],
)  # fmt: skip
def test_what_would_change_the_result_is_refused(name: str, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    file = gguf_encoders.write(save_random(name, tmp_path), tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelError, match=says):
        load(file)


@pytest.mark.parametrize("name", ["attention.layer_norm_rms_epsilon", "context_length", "rope.freq_base_swa"])
def test_a_key_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    header = read_gguf_header(gguf_encoders.write(save_random("modernbert", tmp_path), tmp_path / "m.gguf"))
    assert config_from_gguf(header)["local_attention"] == 20
    lacking = {key: value for key, value in header.metadata.items() if key != f"modern-bert.{name}"}
    said = name.replace("_rms", "")
    with pytest.raises(ModelError, match=rf"m\.gguf: the metadata lacks modern-bert\.{said}\."):
        config_from_gguf(replace(header, metadata=lacking))


def test_causal_attention_is_refused(tmp_path: Path) -> None:
    header = read_gguf_header(gguf_encoders.write(save_random("bert", tmp_path), tmp_path / "m.gguf"))
    with pytest.raises(ModelError, match=r"bert\.attention\.causal is true; encoders see both ways"):
        config_from_gguf(replace(header, metadata=header.metadata | {"bert.attention.causal": True}))
