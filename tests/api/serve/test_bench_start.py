"""`stoker bench start` against a real server of a checkpoint that it wrote itself."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stoker_runtime import LLM
from stoker_runtime.bench import start_mode
from stoker_runtime.bench.random_checkpoint import tensors, write_checkpoint
from stoker_runtime.bench.start_mode import Memory, Start, memory_of, model_of, table
from stoker_runtime.checkpoint.safetensors_index import read_checkpoint_index
from stoker_runtime.errors import ConfigError
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.shapes import SHAPES
from stoker_runtime.request import SamplingParams
from stoker_runtime.text.tokenizer import Tokenizer


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


def test_a_checkpoint_of_awq_is_one(tmp_path: Path) -> None:
    """It holds the weights of its shape in integers, and answers; what AWQ cannot hold is an error that names it."""
    config = SHAPES["tiny"] | {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8}
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps(config))
    write_checkpoint(str(tmp_path / "shape"), tmp_path / "model", "awq")
    index = read_checkpoint_index(tmp_path / "model")
    assert index["model.layers.0.mlp.up_proj.qweight"].shape == (256, 80)
    assert index["model.layers.1.mlp.down_proj.scales"].shape == (5, 256)
    assert "model.embed_tokens.weight" in index
    with LLM(str(tmp_path / "model"), device="cpu", max_model_len=64) as llm:
        assert llm.engine.executor.describe()["quantization"] == "awq"
        (found,) = llm.generate_tokens([[1, 2, 3]], [SamplingParams(max_tokens=5, ignore_eos=True)])
    assert len(found) == 5
    with pytest.raises(ConfigError, match=r"--checkpoint awq: .*× 64"), model_of(
        start_mode.flags().parse_args(["--shape", "tiny", "--checkpoint", "awq"]), tmp_path
    ):
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
