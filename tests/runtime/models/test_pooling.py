"""What decides that a model pools, and how: sentence-transformers' files, config.json, flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError, RequestError
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.pooling import Pooling, PoolingSpec, Task, check_dimensions, read_pooling
from stoker_runtime.models.pooling_spec import pooling_spec

TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}


def folder(
    path: Path, architecture: str, modules: list[Any] | None = None, pooling: object = None, **config: object
) -> Path:
    (path / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    if modules is not None:
        (path / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def read(path: Path, **options: Any) -> PoolingSpec | None:
    return read_pooling(read_source(str(path)), EngineConfig(str(path), **options))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, Pooling.MEAN),
        ({"pooling_mode_cls_token": True}, Pooling.CLS),
        ({"pooling_mode_max_tokens": True}, Pooling.MAX),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, Pooling.LAST),
        ({"pooling_mode": "lasttoken"}, Pooling.LAST),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
    ],
)
def test_sentence_transformers_files_decide(settings: dict[str, object], expected: Pooling, tmp_path: Path) -> None:
    path = folder(tmp_path, "BertModel", [TRANSFORMER, POOLING, NORMALIZE], settings)
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 256, "do_lower_case": true}')
    assert read(path) == PoolingSpec(Task.EMBED, expected, normalize=True, lower_case=True, max_tokens=256)


def test_a_decoder_whose_name_ends_as_one_without_a_head_does_generates(tmp_path: Path) -> None:
    assert read(folder(tmp_path, "GPT2LMHeadModel")) is None
    found = read(tmp_path, runner="pooling")
    assert found is not None
    assert found.pooling is Pooling.LAST
    sizes = {"n_layer": 2, "n_head": 3, "n_embd": 24, "n_positions": 50, "vocab_size": 31}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], **sizes}))
    assert pooling_spec(read_source(str(tmp_path))).hidden == 24


def test_without_a_normalize_module_vectors_stay_as_they_are(tmp_path: Path) -> None:
    found = read(folder(tmp_path, "BertModel", [TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": True}))
    assert found is not None
    assert not found.normalize


def test_an_encoder_alone_takes_its_first_token(tmp_path: Path) -> None:
    assert read(folder(tmp_path, "XLMRobertaModel")) == PoolingSpec(Task.EMBED, Pooling.CLS, normalize=True)


def test_a_decoder_generates_unless_something_says_otherwise(tmp_path: Path) -> None:
    path = folder(tmp_path, "Qwen3ForCausalLM")
    assert read(path) is None
    assert read(path, runner="generate") is None
    assert read(path, runner="pooling") == PoolingSpec(Task.EMBED, Pooling.LAST, normalize=True)


def test_a_decoder_with_modules_or_without_a_head_embeds(tmp_path: Path) -> None:
    bare, whole = tmp_path / "bare", tmp_path / "whole"
    bare.mkdir()
    whole.mkdir()
    assert read(folder(bare, "Qwen3Model")) is not None
    path = folder(whole, "Qwen3ForCausalLM", [TRANSFORMER, POOLING, NORMALIZE], {"pooling_mode_lasttoken": True})
    # Qwen3-Embedding, whose vectors may be cut, though its files do not say so.
    assert read(path) == PoolingSpec(Task.EMBED, Pooling.LAST, normalize=True, matryoshka=())
    assert read(path, runner="generate") is None


@pytest.mark.parametrize(
    ("settings", "sigmoid"),
    [
        ({}, True),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, True),
    ],
)
def test_cross_encoders_score(settings: dict[str, object], sigmoid: bool, tmp_path: Path) -> None:
    found = read(folder(tmp_path, "BertForSequenceClassification", num_labels=1, **settings))
    assert found == PoolingSpec(Task.SCORE, Pooling.CLS, normalize=False, sigmoid=sigmoid)


def test_a_flag_wins(tmp_path: Path) -> None:
    path = folder(tmp_path, "BertModel", is_matryoshka=True)
    given = '{"pooling_type": "MEAN", "normalize": false, "matryoshka_dimensions": [64, 32]}'
    assert read(path) == PoolingSpec(Task.EMBED, Pooling.CLS, normalize=True, matryoshka=())
    assert read(path, pooler_config=given) == PoolingSpec(
        Task.EMBED, Pooling.MEAN, normalize=False, matryoshka=(64, 32)
    )


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        ([TRANSFORMER, POOLING, {"type": "sentence_transformers.models.Dense"}], {"pooling_mode": "cls"}, "Dense"),
        ([TRANSFORMER, {}], None, "without a type"),
        ({"a": 1}, None, "must be a list"),
        ([POOLING], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "cls_token and .*mean_tokens"),
        ([POOLING], {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        ([POOLING], {}, "by nothing"),
        ([POOLING], {"pooling_mode": "cls", "include_prompt": False}, "include_prompt"),
        ([POOLING], None, "cannot be read"),
    ],
)
def test_modules_that_are_not_understood(modules: Any, pooling: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read(folder(tmp_path, "BertModel", modules, pooling))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooler_config": "mean"}, "not valid JSON"),
        ({"pooler_config": '{"pooling": "mean"}'}, "must be an object of pooling_type, normalize"),
        ({"pooler_config": '{"pooling_type": "ALL"}'}, "'all'; it must be one of cls, last, mean, max"),
        ({"pooler_config": '{"normalize": 1}'}, "true or false"),
        ({"pooler_config": '{"matryoshka_dimensions": [0]}'}, "a list of sizes"),
        ({"runner": "generate"}, "a BertModel does not generate"),
    ],
)
def test_flags_that_cannot_work(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(folder(tmp_path, "BertModel"), **options)


def test_a_pooler_of_a_model_that_generates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs --runner pooling"):
        read(folder(tmp_path, "LlamaForCausalLM"), pooler_config='{"normalize": true}')


def test_dimensions() -> None:
    plain = PoolingSpec(Task.EMBED, Pooling.MEAN, normalize=True)
    nested = PoolingSpec(Task.EMBED, Pooling.MEAN, normalize=True, matryoshka=(64, 32))
    check_dimensions(plain, None)
    check_dimensions(nested, 32)
    check_dimensions(PoolingSpec(Task.EMBED, Pooling.MEAN, normalize=True, matryoshka=()), 7)
    with pytest.raises(RequestError, match="Matryoshka"):
        check_dimensions(plain, 32)
    with pytest.raises(RequestError, match="one of 64, 32; got 48"):
        check_dimensions(nested, 48)
