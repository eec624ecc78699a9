"""plugin/presets.py and crds/presets: each preset is a valid service that fits, by facts that are the models' own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker_operator.plugin.errors import PluginError
from stoker_operator.plugin.facts import facts_of
from stoker_operator.plugin.fit import on
from stoker_operator.plugin.presets import Preset, catalog, named
from stoker_operator.spec.quantity import quantity
from stoker_runtime.bench.checkpoints import tensors
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[3]
PRESETS = catalog()
# Models of which the runtime knows the shape, tensor by tensor.
KNOWN = {
    "hf://Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "hf://Qwen/Qwen2.5-1.5B-Instruct": "qwen2.5-1.5b",
    "hf://Qwen/Qwen3-0.6B": "qwen3-0.6b",
    "hf://meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
}


def test_every_file_is_found_under_its_name() -> None:
    assert [preset.name for preset in PRESETS] == [
        file.stem for file in sorted((ROOT / "crds" / "presets").glob("*.yaml"))
    ]
    assert len(PRESETS) >= 8


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_a_preset_fits_each_gpu_that_it_names(preset: Preset) -> None:
    service = preset.service
    model = facts_of(service, [preset], "", "")
    for product in service.resources.gpu_products:
        assert on(service, model, (product,)).verdict == "Fits"
    assert quantity(service.cache.size) > 1.05 * preset.facts["bytes"] or service.cache.size == "1Gi"
    assert not service.resources.gpus or service.resources.gpu_products


@pytest.mark.parametrize(
    "preset", [preset for preset in PRESETS if preset.service.model.uri in KNOWN], ids=lambda preset: preset.name
)
def test_the_facts_are_the_models_own(preset: Preset) -> None:
    shape = KNOWN[preset.service.model.uri]
    assert preset.facts["bytes"] == 2 * sum(
        count_of(sizes) for _, sizes, _ in tensors(build_spec(read_source(f"shape:{shape}")))
    )
    made = {"Auto": "none", "FP8": "fp8"}[preset.service.model.quantization]
    held = build_spec(read_source(f"shape:{shape}")).parameter_bytes("bfloat16", made)
    assert preset.taken == pytest.approx(held, rel=1e-3)
    config = SHAPES[shape]
    heads = config["num_attention_heads"]
    assert preset.facts["layers"] == config["num_hidden_layers"]
    assert preset.facts["kv_heads"] == config.get("num_key_value_heads", heads)
    assert preset.facts["head_dim"] == config.get("head_dim", config["hidden_size"] // heads)
    assert preset.facts["max_context"] == config["max_position_embeddings"]


def count_of(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def test_what_was_measured_stands_in_the_benchmark() -> None:
    page = (ROOT / "docs" / "benchmark.md").read_text()
    measured = [preset.measured for preset in PRESETS if preset.measured]
    assert measured
    for text in measured:
        figure, clients = re.findall(r"^([\d,]+) tok/s with (\d+) requests", text)[0]
        assert f"\n| {clients} | {figure} | " in page


def test_an_unknown_preset_names_those_there_are() -> None:
    with pytest.raises(PluginError, match=f"there is no preset 'x'.*{PRESETS[0].name}"):
        named("x", PRESETS)


@pytest.mark.apiserver
def test_the_presets_are_taken_by_the_api_server(kubectl: Callable[..., str]) -> None:
    folder = str(ROOT / "crds" / "presets")
    assert kubectl("create", "--validate=strict", "-f", folder).count("created") == len(PRESETS)
