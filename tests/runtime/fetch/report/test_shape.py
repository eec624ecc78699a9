"""The fit check's numbers from config.json and from a GGUF header."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from stoker_runtime.fetch.report.shape import shape_of
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.shapes import SHAPES


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf(keys: dict[str, int], arrays: bytes = b"", count: int = 0) -> bytes:
    body = string("general.architecture") + struct.pack("<I", 8) + string("llama")
    body += b"".join(string(f"llama.{name}") + struct.pack("<II", 4, value) for name, value in keys.items())
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, len(keys) + 1 + count) + arrays + body


KEYS = {
    "block_count": 30,
    "attention.head_count": 9,
    "attention.head_count_kv": 3,
    "embedding_length": 576,
    "context_length": 8192,
}
SHAPE = {"layers": 30, "kvHeads": 3, "headDim": 64, "maxContext": 8192}


def test_gguf_header_with_arrays_before_the_numbers(tmp_path: Path) -> None:
    tokens = string("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + string("<s>") + string("é")
    scores = string("tokenizer.ggml.scores") + struct.pack("<IIQff", 9, 6, 2, 0.5, 1.5)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(KEYS, tokens + scores, 2))
    assert shape_of(path) == SHAPE


@pytest.mark.parametrize("data", [b"", b"GGML" + bytes(20), gguf(KEYS)[:60], gguf({"block_count": 2})])
def test_a_broken_or_silent_header_gives_nothing(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    assert shape_of(path) == {}


@pytest.mark.parametrize("nested", [False, True])
def test_config_json(tmp_path: Path, nested: bool) -> None:
    config = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    config["max_position_embeddings"] = 8192
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config} if nested else config))
    assert shape_of(tmp_path) == SHAPE


def test_a_cache_of_latents_counts_as_two_of_half_its_width(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["deepseek-v2-lite"]))
    found = shape_of(tmp_path)
    spec = build_spec(read_source(str(tmp_path)))
    assert 2 * found["layers"] * found["kvHeads"] * found["headDim"] * 2 == spec.kv_bytes_per_token("bfloat16")


def test_no_config_gives_nothing(tmp_path: Path) -> None:
    assert shape_of(tmp_path) == {}


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"], "n_layer": 7, "n_head": 5, "n_embd": 60, "n_positions": 333,
             "vocab_size": 99},
            (7, 5, 12, 333, 7 * (64 + 192 + 64 + 64 + 64 + 240 + 240 + 64)),
        ),
        (
            {"architectures": ["ExaoneForCausalLM"], "num_layers": 3, "num_attention_heads": 6, "hidden_size": 48,
             "num_key_value_heads": 2, "intermediate_size": 70, "vocab_size": 99, "max_position_embeddings": 444},
            (3, 2, 8, 444, 3 * (3 * 48 + 80 + 48 + 48 + 2 * 48 + 144 + 80 + 48)),
        ),
        (
            {"architectures": ["GemmaForCausalLM"], "num_hidden_layers": 3, "num_attention_heads": 6, "hidden_size": 48,
             "num_key_value_heads": 1, "intermediate_size": 70, "vocab_size": 99, "max_position_embeddings": 555},
            (3, 1, 256, 555, 3 * (3 * 48 + 8 * 256 + 6 * 256 + 48 + 2 * 48 + 144 + 80 + 48)),
        ),
    ],
)  # fmt: skip
def test_sizes_by_the_architectures_own_names(  # the last: rows of A and columns of B, each up to a multiple of 16
    config: dict[str, object], shape: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = shape_of(tmp_path)
    assert set(found.pop("weights")["kinds"]) == {"auto", "none", "fp8", "w4", "q8_0", "q4k"}
    assert tuple(found.values()) == shape


def test_layers_that_look_back_a_window_are_told_beside_those_that_see_everything() -> None:
    found = shape_of(Path("shape:gpt-oss-20b"))
    spec = build_spec(read_source("shape:gpt-oss-20b"))
    assert (found["windowLayers"], found["window"]) == (sum(map(bool, spec.windows)), 128)
    assert "window" not in shape_of(Path("shape:llama-3.1-8b"))


def test_states_of_a_sequence_are_told_where_layers_have_one() -> None:
    # 24 layers of Mamba-2, 128 heads of 64 × 128 in fp32, and 3 × 10,240 of a convolution in 16 bits.
    assert shape_of(Path("shape:nemotron-h-8b"))["stateBytes"] == 24 * (128 * 64 * 128 * 4 + 3 * 10240 * 2)
    assert "stateBytes" not in shape_of(Path("shape:llama-3.1-8b"))
