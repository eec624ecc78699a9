"""stoker_runtime/terminal/info.py in a process of its own: what it says does not hang on what else was imported."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.operator.plan.checkpoints import SEEING

from stoker_kernels.launch.aot_index import INDEX
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.layer_specs.state_spec import Mixer
from stoker_runtime.parallel.place import places
from stoker_runtime.terminal.info import describe_model, kernels_ahead


def test_ops_are_listed_without_a_model() -> None:
    command = [sys.executable, "-m", "stoker_cli", "info"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    kernels = done.stdout.partition("\nKernels\n")[2].split()
    assert {"linear", "paged_attention", "rms_norm"} <= set(kernels)


def test_the_kinds_of_gpu_with_kernels_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_AOT_DIR", str(tmp_path))
    assert "none came compiled" in kernels_ahead()
    for sm, count in ((120, 2), (86, 3)):
        (tmp_path / f"sm_{sm}").mkdir()
        (tmp_path / f"sm_{sm}" / INDEX).write_text("[]")
        for at in range(count):
            (tmp_path / f"sm_{sm}" / f"{at}.cubin").touch()
    assert kernels_ahead() == "compiled for sm_86 (3), sm_120 (2)"
    assert kernels_ahead(86) == "3 came compiled"
    assert "for sm_89: a first start compiles" in kernels_ahead(89)
    assert "stoker_kernels.launch.aot --sm 89" in kernels_ahead(89)


def test_a_draft_model_is_counted() -> None:
    config = EngineConfig("shape:llama-3.1-8b", device="cpu", dtype="bfloat16", max_model_len=1024)
    drafted = replace(config, speculative_config='{"model": "shape:llama-3.1-8b", "num_speculative_tokens": 2}')
    alone, said = (dict(describe_model(each, torch.device("cpu"))[0]) for each in (config, drafted))
    assert "draft model" not in alone
    assert said["draft model"].startswith("shape:llama-3.1-8b")
    for line in ("weights", "KV of a token"):
        parts = [float(each[line].split()[0]) for each in (alone, said)]
        assert parts[1] == pytest.approx(2 * parts[0], rel=0.01)


def test_a_head_that_drafts_is_counted_by_its_description(tmp_path: Path) -> None:
    """Its own keys and values, 8 heads of 128, and a state of 4,096, in 16 bits: 12 KiB a token beside 128."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    own = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **own, "vocab_size": 128256}))
    speculation = json.dumps({"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 2})
    config = EngineConfig("shape:llama-3.1-8b", device="cpu", dtype="bfloat16", max_model_len=1024)
    said, _ = describe_model(replace(config, speculative_config=speculation), torch.device("cpu"))
    assert "EAGLE-3, hidden 4096, states before layers 2, 16, 29, 32000 tokens" in dict(said)["draft model"]
    assert dict(said)["KV of a token"] == "140.0 KiB"


def test_a_model_over_ranks_is_said_per_rank() -> None:
    """In this process: the arithmetic of stages and heads alone."""
    config = EngineConfig("shape:llama-3.1-8b", device="cpu", dtype="bfloat16", max_model_len=1024)
    whole, _ = describe_model(config, torch.device("cpu"))
    cut, _ = describe_model(replace(config, tensor_parallel_size=4, pipeline_parallel_size=3), torch.device("cpu"))
    said, alone = dict(cut), dict(whole)
    assert said["ranks"] == "12: 4 share each of the stages of 11, 11, 10 layers"
    assert float(said["weights of all"].split()[0]) >= float(alone["weights"].split()[0])
    # 11 of 32 layers of a quarter of the heads.
    parts = [float(each["KV of a token"].split()[0]) for each in (alone, said)]
    assert parts[1] / parts[0] == pytest.approx(11 / 32 / 4)
    with pytest.raises(ConfigError, match="sizes that work for this model: 1, 2, 4, 8"):
        describe_model(replace(config, tensor_parallel_size=3), torch.device("cpu"))


def test_states_over_ranks_are_those_of_the_rank_with_the_least_room() -> None:
    config = EngineConfig("shape:nemotron-h-8b", device="cpu", dtype="bfloat16", max_model_len=1024, max_num_seqs=7)
    spec = build_spec(read_source(config.model))
    alone = dict(describe_model(config, torch.device("cpu"))[0])
    halved = dict(describe_model(replace(config, tensor_parallel_size=2), torch.device("cpu"))[0])
    whole, half = (float(each["states"].split()[0]) for each in (alone, halved))
    assert half == pytest.approx(whole / 2, abs=0.06)
    assert "24 layers" in halved["states"]
    assert spec.recurrent is not None
    stages = dict(describe_model(replace(config, pipeline_parallel_size=4), torch.device("cpu"))[0])
    layers, attending = (
        {len([layer for layer in kind if layer in stage.layers(52)]) for stage in places(1, 4)}
        for kind in ([at for at, each in enumerate(spec.recurrent.mixers) if each is Mixer.MAMBA2], spec.attending)
    )
    said = stages["states"]
    assert int(said.split(" layers")[0].split()[-1]) in layers
    # The one with most layers that attend has the fewest pages in the same room.
    assert int(said.split("; ")[1].split()[0]) == max(attending)
    with pytest.raises(ConfigError, match="num_attention_heads is 32"):
        describe_model(replace(config, tensor_parallel_size=3), torch.device("cpu"))


def test_a_model_over_nodes_is_said_per_node() -> None:
    config = EngineConfig("shape:llama-3.1-8b", device="cpu", dtype="bfloat16", max_model_len=1024)
    spread = replace(config, tensor_parallel_size=2, pipeline_parallel_size=3, nnodes=3)
    said = dict(describe_model(spread, torch.device("cpu"))[0])
    assert [said[f"node {number}"].partition(",")[0] for number in range(3)] == [
        "ranks 0 to 1",
        "ranks 2 to 3",
        "ranks 4 to 5",
    ]
    weights = [float(said[f"node {number}"].split()[-2]) for number in range(3)]
    assert sum(weights) == pytest.approx(float(said["weights of all"].split()[0]), abs=0.03)
    # The first stage has the embedding beside its layers, the last the head.
    assert weights[2] > weights[1]
    alone = dict(describe_model(replace(spread, tensor_parallel_size=1), torch.device("cpu"))[0])
    assert alone["node 1"].startswith("rank 1, weights ")


def test_what_sees_is_counted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEEING["gemma-3-4b"]))
    config = EngineConfig(model=str(tmp_path), device="cpu", dtype="bfloat16", max_model_len=4096)
    lines, _ = describe_model(config, torch.device("cpu"))
    blind, _ = describe_model(replace(config, language_model_only=True), torch.device("cpu"))
    assert "a tower of 27 layers" in dict(lines)["images"]
    assert "images" not in dict(blind)
    sizes = [float(dict(each)["weights"].split()[0]) for each in (lines, blind)]
    assert sizes[0] - sizes[1] == pytest.approx(0.79, abs=0.02)  # 0.42 billion in 16 bits
