"""`stoker bench start` against a real server of a checkpoint that it wrote itself."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import gguf
import pytest
import torch

from stoker_runtime import LLM
from stoker_runtime.bench import start_mode
from stoker_runtime.bench.checkpoints import tensors, write_checkpoint
from stoker_runtime.bench.checkpoints.gguf_file import MIXES
from stoker_runtime.bench.checkpoints.layouts import LAYOUTS
from stoker_runtime.bench.reference.weights import values_of
from stoker_runtime.bench.start_mode import Memory, Start, memory_of, model_of, table
from stoker_runtime.checkpoint.safetensors_index import read_checkpoint_index
from stoker_runtime.errors import ConfigError
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.shapes import SHAPES
from stoker_runtime.request import SamplingParams
from stoker_runtime.text.tokenizer import Tokenizer
from stoker_runtime.weights.load import load_weights


def test_a_checkpoint_of_a_shape_is_complete(tmp_path: Path) -> None:
    size = write_checkpoint("tiny", tmp_path)
    source = read_source(str(tmp_path))
    spec = build_spec(source)
    assert spec.hidden == 64
    index = read_checkpoint_index(tmp_path)
    assert {name: entry.shape for name, entry in index.items()} == {name: shape for name, shape, _ in tensors(spec)}
    assert size == (tmp_path / "model.safetensors").stat().st_size
    norm = index["model.norm.weight"]
    with norm.file.open("rb") as file:
        file.seek(norm.offset)
        assert file.read(norm.num_bytes) == b"\x80\x3f" * 64
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode("Bären & 熊")) == "Bären & 熊"


# What the engine says of each layout.
QUANTIZED = {
    "awq": "awq", "gptq-8bit": "gptq", "w8a8": "compressed-tensors", "nvfp4": "compressed-tensors",
    "mxfp4": "compressed-tensors",
}  # fmt: skip


def wider(tmp_path: Path) -> str:
    """The tiny shape with rows that every layout holds."""
    config = SHAPES["tiny"] | {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8}
    (tmp_path / "shape").mkdir()
    config |= {"num_hidden_layers": 3, "tie_word_embeddings": random.random() < 0.5}
    (tmp_path / "shape" / "config.json").write_text(json.dumps(config))
    return str(tmp_path / "shape")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantized_checkpoint_is_one(layout: str, tmp_path: Path) -> None:
    """It holds the weights of its shape, spread as those of BF16, and answers."""
    shape = wider(tmp_path)
    for name in ("bf16", layout):
        write_checkpoint(shape, tmp_path / name, name)
    assert "model.embed_tokens.weight" in read_checkpoint_index(tmp_path / layout)
    found = {}
    for name in ("bf16", layout):
        spec = build_spec(read_source(str(tmp_path / name)))
        weights = load_weights(str(tmp_path / name), spec, torch.device("cpu"), torch.float32)
        found[name] = values_of(weights.layers[1].down).float().std().item()
    assert found[layout] == pytest.approx(found["bf16"], rel=0.2)
    with LLM(str(tmp_path / layout), device="cpu", max_model_len=64) as llm:
        assert llm.engine.executor.describe()["quantization"] == QUANTIZED[layout]
        (said,) = llm.generate_tokens([[1, 2, 3]], [SamplingParams(max_tokens=5, ignore_eos=True)])
    assert len(said) == 5


@pytest.mark.parametrize("mix", MIXES)
def test_a_gguf_file_is_one(mix: str, tmp_path: Path) -> None:
    size = write_checkpoint(wider(tmp_path), tmp_path / "model", mix)
    file = tmp_path / "model" / "model.gguf"
    assert size == file.stat().st_size
    kinds = {each.name: each.tensor_type.name for each in gguf.GGUFReader(file).tensors}
    most, better = MIXES[mix]
    assert kinds["blk.0.ffn_gate.weight"] == most
    assert [kinds[f"blk.{layer}.ffn_down.weight"] for layer in range(3)] == [most, most, better]
    untied = "output.weight" in kinds
    assert kinds["output.weight" if untied else "token_embd.weight"] == better
    assert kinds["token_embd.weight"] == (most if untied else better)
    with LLM(str(file), device="cpu", max_model_len=64) as llm:
        (said,) = llm.generate_tokens([[1, 2, 3]], [SamplingParams(max_tokens=5, ignore_eos=True)])
        assert llm.get_tokenizer().decode(llm.get_tokenizer().encode("Bären & 熊")) == "Bären & 熊"
    assert len(said) == 5


@pytest.mark.parametrize(("layout", "why"), [("awq", "× 64: .* scales 128"), ("q4_k_m", "rows of 64, not of .* 256")])
def test_what_a_layout_cannot_hold_is_an_error(layout: str, why: str, tmp_path: Path) -> None:
    arguments = start_mode.flags().parse_args(["--shape", "tiny", "--checkpoint", layout])
    with pytest.raises(ConfigError, match=rf"--checkpoint {layout}: .*{why}"), model_of(arguments, tmp_path):
        pass


def test_two_starts_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    flags = ["--shape", "tiny", "--folder", str(tmp_path / "tiny"), "--json", str(figures)]
    assert start_mode.main([*flags, "--serve", "--device", "cpu", "--max-model-len", "256"]) == 0
    starts = json.loads(figures.read_text())
    assert [start["name"] for start in starts] == ["first", "again"]
    for start in starts:
        assert 0.2 < start["seconds"] < 600
        assert 50 < start["memory"]["pss"] <= start["memory"]["rss"] < 20000
        assert start["device"] == "cpu"
        phases = [line for line in start["log"] if "ready in" in line]
        assert len(phases) == 1
        for phase in ("tokenizer", "engine", "import", "weights", "kernels", "graphs", "warm-up"):
            assert phase in phases[0]
    assert "vLLM" in capsys.readouterr().out


def test_a_server_that_ends_is_reported_with_its_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start_mode.main([str(tmp_path / "nothing")]) == 1
    told = capsys.readouterr().err
    assert "the server ended with status" in told
    assert "nothing" in told


def test_one_model_is_named(tmp_path: Path) -> None:
    for arguments in ([], ["folder", "--shape", "tiny"]):
        with (
            pytest.raises(ConfigError, match="exactly one"),
            model_of(start_mode.flags().parse_args(arguments), tmp_path),
        ):
            pass


def test_memory_counts_this_process() -> None:
    memory = memory_of(os.getpid())
    assert 0 < memory.pss <= memory.rss


def test_the_table_has_a_line_a_start() -> None:
    starts = [Start(name, 4.5, Memory(1300.0, 1000.0), (), "NVIDIA H200") for name in ("first", "again")]
    lines = table(starts)
    assert lines[1].split() == ["first", "4.50", "61", "5", "1300", "1000", "3700", "1200"]
    assert lines[2].split()[:4] == ["again", "4.50", "34", "4"]


def test_figures_of_another_device_are_not_shown() -> None:
    (_, line) = table([Start("first", 4.5, Memory(1300.0, 1000.0), (), "NVIDIA H200 NVL")])
    assert line.split() == ["first", "4.50", "-", "-", "1300", "1000", "-", "-"]
