"""Which models a server takes images for: found in a checkpoint's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stoker_runtime.config import EngineConfig, ServerConfig
from stoker_runtime.errors import ModelError
from stoker_runtime.images.rule import ImageKind
from stoker_runtime.serve.server import find_images
from stoker_runtime.text.tokenizer import Tokenizer

CONFIG = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "mm_tokens_per_image": 16,
    "image_token_index": 300,
    "boi_token_index": 301,
    "eoi_token_index": 302,
    "vision_config": {"image_size": 112, "patch_size": 14},
}


def write(folder: Path, **file: object) -> ServerConfig:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(file))
    save_file({"vision_tower.x": torch.zeros(1)}, folder / "model.safetensors")
    return ServerConfig(EngineConfig(str(folder)), allowed_media_domains=("a.example",), image_limit=2)


def test_a_model_that_sees(tmp_path: Path) -> None:
    found = find_images(write(tmp_path), Tokenizer.synthetic(310))
    assert found is not None
    assert (found.rule.kind, found.limit, found.placeholders.id) == (ImageKind.GEMMA3, 2, 300)


def test_one_that_need_not(tmp_path: Path) -> None:
    write(tmp_path, do_pan_and_scan=True)
    plain = ServerConfig(EngineConfig(str(tmp_path), language_model_only=True))
    assert find_images(plain, Tokenizer.synthetic(310)) is None
    with pytest.raises(ModelError, match="--language-model-only"):
        find_images(ServerConfig(EngineConfig(str(tmp_path))), Tokenizer.synthetic(310))


@pytest.mark.parametrize("model", ["shape:tiny", "/nowhere", "some/name"])
def test_what_is_no_folder(model: str) -> None:
    assert find_images(ServerConfig(EngineConfig(model)), Tokenizer.synthetic(310)) is None


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no token 301"):
        find_images(write(tmp_path), Tokenizer.synthetic(301))
