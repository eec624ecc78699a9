"""`stoker bench accuracy`: its figures against transformers and against arithmetic by hand."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_runtime.bench import accuracy_mode
from stoker_runtime.bench.accuracy_mode import compare
from stoker_runtime.bench.checkpoints import write_checkpoint
from stoker_runtime.request import TokenLogprobs

TEXT = "The furnace is fed by hand, one shovel after the other, and nobody asks how warm the house was before. " * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accuracy") / "tiny"
    write_checkpoint("tiny", folder)
    return folder


def test_figures_by_hand() -> None:
    plain = [TokenLogprobs(-1.0, 1, ((3, -1.0), (4, -2.0))), TokenLogprobs(-3.0, 2, ((5, -0.5), (6, -3.0)))]
    changed = [TokenLogprobs(-1.5, 2, ((4, -1.0), (3, -1.5))), TokenLogprobs(-3.0, 2, ((5, -0.5), (7, -4.0)))]
    found = compare(plain, changed)
    assert (found.positions, found.agreement, found.worst_error, found.mean_shift) == (2, 0.5, 1.0, 0.25)
    assert found.rms_error == pytest.approx(math.sqrt((0.5**2 + 1.0**2 + 0) / 3))
    assert found.perplexity_plain == pytest.approx(math.exp(2.0))
    assert found.perplexity == pytest.approx(math.exp(2.25))
    with pytest.raises(ValueError, match="nothing to compare"):
        compare([], [])


def test_perplexity_is_that_of_transformers(checkpoint: Path, tmp_path: Path) -> None:
    import transformers

    loader: Any = transformers

    text, figures = tmp_path / "text", tmp_path / "figures.json"
    text.write_text(TEXT)
    flags = ["--text", str(text), "--device", "cpu", "--tokens", "100", "--window", "40", "--json", str(figures)]
    assert accuracy_mode.main([str(checkpoint), "--quantization", "fp8", *flags]) == 0
    found = json.loads(figures.read_text())

    tokenizer = loader.PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
    ids = tokenizer(TEXT)["input_ids"][:100]
    model = loader.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    losses: list[float] = []
    with torch.inference_mode():
        for window in (ids[:40], ids[40:80], ids[80:]):
            spread = model(torch.tensor([window])).logits[0, :-1].float().log_softmax(-1)
            losses += (-spread[range(len(window) - 1), window[1:]]).tolist()
    assert found["positions"] == len(losses) == 97
    assert found["perplexity_plain"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert found["perplexity"] != found["perplexity_plain"], "nothing was quantized"
    assert 0 < found["rms_error"] <= found["worst_error"]


def test_another_file_of_the_model_is_compared_both_ways(checkpoint: Path, tmp_path: Path) -> None:
    """A copy with one matrix rounded to FP8: each way its figures are the other's, changed places."""
    from safetensors.torch import load_file, save_file

    other, text = tmp_path / "other", tmp_path / "text"
    shutil.copytree(checkpoint, other)
    text.write_text(TEXT)
    tensors = load_file(other / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith("down_proj.weight"))
    tensors[name] = tensors[name].to(torch.float8_e4m3fn).to(tensors[name].dtype)
    save_file(tensors, other / "model.safetensors")
    found = []
    for one, two in ((checkpoint, other), (other, checkpoint)):
        flags = ["--text", str(text), "--device", "cpu", "--tokens", "60", "--window", "30", "--other", str(two)]
        assert accuracy_mode.main([str(one), *flags, "--json", str(tmp_path / "figures")]) == 0
        found.append(json.loads((tmp_path / "figures").read_text()))
    assert found[0]["perplexity"] == found[1]["perplexity_plain"] != found[0]["perplexity_plain"]
    assert found[0]["perplexity_plain"] == found[1]["perplexity"]
    assert found[0]["agreement"] == found[1]["agreement"]


def test_what_cannot_be_measured_is_said(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*flags: str, status: int = 2) -> str:
        assert accuracy_mode.main([str(checkpoint), "--device", "cpu", *flags]) == status
        return capsys.readouterr().err

    assert "--quantization, --isq, --quantize-head, --quantize-embedding, --kv-cache-dtype" in refused()
    assert "--window" in refused("--quantization", "fp8", "--window", "1")
    assert "--text" in refused("--quantization", "fp8", "--text", str(tmp_path / "absent"))
    (tmp_path / "short").write_text("")
    assert "fewer than two tokens" in refused("--quantization", "fp8", "--text", str(tmp_path / "short"))
    (tmp_path / "text").write_text(TEXT)
    flags = ("--quantization", "fp8", "--text", str(tmp_path / "text"), "--tokens", "40", "--least-agreement", "1.01")
    assert "below 101.00%" in refused(*flags, status=1)
