"""What a context takes where layers give up pages: as the engine counts it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stoker_operator.plan.fit import assess, gives_up, layer_tokens
from stoker_operator.spec.service import FetchedModel, InferenceService
from stoker_operator.spec.weights import told_weights
from stoker_runtime.executor.windows.layout import kv_layout
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.settings.parse import parse as parse_serve

Build = Callable[..., InferenceService]
SEED = random.SystemRandom().randrange(1 << 30)
# Gemma 3's 27B shape: of 62 layers 52 look back 1,024 tokens; 16 KV heads of 128.
GEMMA = FetchedModel(
    "r", "sha256:a", 54_000_000_000, "p", "p", 62, 16, 128, 131072, 0, 52, 1024,
    weights=told_weights(54_000_000_000, ["auto"]),
)  # fmt: skip


def test_as_the_engine_lays_layers_out() -> None:
    print(f"seed {SEED}")
    rng, counted = random.Random(SEED), 0
    plain = replace(build_spec(read_source("shape:gpt-oss-20b")), moe=None)
    for _ in range(300):
        windows = tuple(rng.choice([0, 700, 700, 700]) for _ in range(rng.randint(1, 30)))
        page, context = rng.choice([16, 32, 64, 128]), rng.randint(100, 5000)
        flags = ["m", "--block-size", str(page), "--max-model-len", str(context), "--kv-cache-dtype", "bfloat16"]
        config = parse_serve(flags, {}).engine
        spec = replace(plain, num_layers=len(windows), windows=windows)
        layout = kv_layout(config, spec)
        near = sum(map(bool, windows))
        model = replace(GEMMA, layers=len(windows), window_layers=near % len(windows), window=700)
        assert gives_up(model, {}, context, 1) == (layout.sight is not None)
        if layout.sight is not None:
            counted += 1
            assert layer_tokens(model, context, page) == layout.pages(context, page) * page * layout.depth
    assert counted > 40


@pytest.mark.parametrize(
    ("runtime", "whole"),
    [
        ({}, False),
        ({"args": ["--disable-hybrid-kv-cache-manager"]}, True),
        ({"args": ["--no-disable-hybrid-kv-cache-manager"]}, False),
        ({"env": [{"name": "STOKER_DISABLE_HYBRID_KV_CACHE_MANAGER", "value": "true"}]}, True),
        ({"args": ["--swap-space", "4"]}, True),
        ({"args": ["--swap-space=0"]}, False),
        ({"args": ["--speculative-config", '{"method": "ngram"}']}, True),
    ],
    ids=str,
)
def test_flags_that_keep_all_pages_count_all_layers(service: Build, runtime: dict[str, Any], whole: bool) -> None:
    asked = service(resources={"gpus": 1, "gpuProducts": ["NVIDIA-H200"]}, runtime=runtime)
    fit = assess(asked, GEMMA)
    assert fit is not None
    # Whole sequences of all layers take 62 GiB; ten layers of them, and windows of 52, take ten and a half.
    assert fit.kv_gib == pytest.approx(62.0 if whole else 10.5, abs=0.1)
    assert fit.verdict == "Fits"


def test_pods_that_publish_keep_all_pages(service: Build) -> None:
    pool = {"inferencePool": {"endpointPickerRef": {"name": "epp"}, "kvEvents": {}}}
    fit = assess(service(resources={"gpus": 1, "gpuProducts": ["NVIDIA-H200"]}, endpoint=pool), GEMMA)
    assert fit is not None
    assert fit.kv_gib == pytest.approx(62.0, abs=0.1)


def test_a_long_context_fits_where_its_whole_pages_would_not(service: Build) -> None:
    def verdict(**runtime: Any) -> str:
        fit = assess(service(resources={"gpus": 1, "gpuProducts": ["NVIDIA-H100-80GB-HBM3"]}, runtime=runtime), GEMMA)
        assert fit is not None
        return fit.verdict

    assert verdict() == "Fits"
    assert verdict(args=["--disable-hybrid-kv-cache-manager"]) == "TooLarge"


def test_pages_that_are_counted_have_fewer_layers(service: Build) -> None:
    fit = assess(service(resources={"gpus": 1, "gpuProducts": ["NVIDIA-H200"]},
                         runtime={"args": ["--num-gpu-blocks", "3000"]}), GEMMA)  # fmt: skip
    assert fit is not None
    assert fit.kv_gib == pytest.approx(3000 * 64 * 10 * 2 * 16 * 128 * 2 / 2**30, abs=0.06)
