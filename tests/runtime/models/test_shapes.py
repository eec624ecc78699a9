"""The shapes that need no files are those of the published models: their parameters, and parts that fit eight GPUs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.shapes import SHAPES
from stoker_runtime.parallel.place import places
from stoker_runtime.parallel.split import split_spec

H200 = 141e9 * 0.9
# Billions of parameters as their makers' files hold them, without layers that only draft.
PUBLISHED = {
    "qwen2.5-7b": 7.616, "llama-3.1-8b": 8.030, "llama-3.3-70b": 70.554, "qwen3-30b-a3b": 30.532,
    "qwen3-235b-a22b": 235.094, "deepseek-v2-lite": 15.706, "deepseek-v3": 671.026,
    "nemotron-h-8b": 8.101, "qwen3-next-80b-a3b": 79.674, "qwen3-next-80b-a3b-fp8": 79.674,
}  # fmt: skip


@pytest.mark.parametrize("shape", sorted(PUBLISHED))
def test_as_many_parameters_as_the_published_model(shape: str) -> None:
    spec = build_spec(read_source(f"shape:{shape}"))
    count = sum(math.prod(each.shape) for each in spec.parameters())
    tied = spec.vocab * spec.hidden if spec.tie_embeddings else 0
    assert (count - tied) / 1e9 == pytest.approx(PUBLISHED[shape], abs=6e-3)


@pytest.mark.parametrize(
    ("shape", "tensors", "quantization", "fits"),
    [
        ("llama-3.3-70b", 4, "none", True),
        ("llama-3.3-70b", 8, "fp8", True),
        ("qwen3-235b-a22b", 8, "fp8", True),
        ("qwen3-235b-a22b", 2, "none", False),
        ("deepseek-v3", 8, "none", True),
        ("deepseek-v3", 4, "none", False),
    ],
)
@pytest.mark.parametrize("whole_experts", [False, True])
def test_what_a_rank_holds_of_the_large_ones(
    shape: str, tensors: int, quantization: str, fits: bool, whole_experts: bool
) -> None:
    spec = build_spec(read_source(f"shape:{shape}"))
    whole = spec.parameter_bytes("bfloat16", quantization)
    ranks = places(tensors, 1, whole_experts=whole_experts and spec.moe is not None)
    held = [split_spec(spec, place).parameter_bytes("bfloat16", quantization) for place in ranks]
    assert max(held) < whole / tensors * 1.12, "what each rank holds whole (norms, routers, latents) is little"
    assert sum(held) >= whole * 0.999
    assert (max(held) < H200) == fits


@pytest.mark.parametrize(
    ("shape", "layers", "attending"),
    [("qwen3-next-80b-a3b", 23, 5), ("qwen3-next-80b-a3b-fp8", 4, 1), ("nemotron-h-8b", 31, 3), ("gpt-oss-20b", 5, 5)],
)
def test_first_layers_are_those_of_the_whole_shape(shape: str, layers: int, attending: int) -> None:
    whole, cut = (build_spec(read_source(f"shape:{name}")) for name in (shape, f"{shape}@{layers}"))
    assert cut == whole.of_layers(range(layers)) or cut.checkpoint is not None
    assert [(each.name, each.shape, each.kind) for each in cut.layer_parameters(layers - 1)] == [
        (each.name, each.shape, each.kind) for each in whole.layer_parameters(layers - 1)
    ]
    assert len(cut.attending) == attending


@pytest.mark.parametrize("layers", [0, 53])
def test_layers_that_a_shape_has_not_are_refused(layers: int) -> None:
    with pytest.raises(ModelError, match="it has 1 to 52"):
        read_source(f"shape:nemotron-h-8b@{layers}")


def test_a_folder_s_name_may_end_in_anything(tmp_path: Path) -> None:
    folder = tmp_path / "model@v2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))
    assert build_spec(read_source(f"shape:{folder}")).num_layers == 28
    assert build_spec(read_source(f"shape:{folder}@3")).num_layers == 3
