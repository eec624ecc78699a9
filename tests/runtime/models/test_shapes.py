"""The shapes that need no files are those of the published models: their parameters, and parts that fit eight GPUs."""

from __future__ import annotations

import math

import pytest

from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.parallel.place import places
from stoker_runtime.parallel.split import split_spec

H200 = 141e9 * 0.9
# Billions of parameters as their makers' files hold them, without layers that only draft.
PUBLISHED = {
    "qwen2.5-7b": 7.616, "llama-3.1-8b": 8.030, "llama-3.3-70b": 70.554, "qwen3-30b-a3b": 30.532,
    "qwen3-235b-a22b": 235.094, "deepseek-v2-lite": 15.706, "deepseek-v3": 671.026,
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
