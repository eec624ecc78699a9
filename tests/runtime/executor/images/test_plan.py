"""Models whose images are read in no way that is known: of text they are served all the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.operator.plan.checkpoints import SEEING

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ModelError
from stoker_runtime.executor.images.plan import plan_images
from stoker_runtime.fetch.report.shape import shape_of
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source


def test_the_flag_that_an_error_names_helps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEEING["gemma-3-4b"]))
    known = shape_of(tmp_path)["weights"]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"do_pan_and_scan": True}))
    source = read_source(str(tmp_path))
    sizes = {"dtype": "bfloat16", "max_model_len": 4096, "max_num_batched_tokens": 512}
    with pytest.raises(ModelError, match="--language-model-only"):
        plan_images(EngineConfig(model=str(tmp_path), **sizes), source, build_spec(source))
    blind = EngineConfig(model=str(tmp_path), language_model_only=True, **sizes)
    assert plan_images(blind, source, build_spec(source)) is None
    told = shape_of(tmp_path)["weights"]
    assert known.pop("vision") > 0
    assert told == known
