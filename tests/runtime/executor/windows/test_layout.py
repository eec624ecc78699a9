"""Which pages layers lie in, how many a sequence takes, and where windows give nothing up."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.resolve import GIB, DeviceMemory, page_bytes, plan_memory, resolve
from stoker_runtime.executor.windows.layout import kv_layout
from stoker_runtime.kv_events_settings import KvEventsConfig
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.spec import ModelSpec

SEED = random.SystemRandom().randrange(1 << 30)
H200 = DeviceMemory(141 * GIB, GIB)


@pytest.fixture(scope="module")
def gpt_oss() -> ModelSpec:
    return build_spec(read_source("shape:gpt-oss-20b"))


def resolved(spec: ModelSpec, **given: Any) -> EngineConfig:
    return resolve(EngineConfig("m", **given), spec, "cuda", H200.total)


def windowed(spec: ModelSpec, windows: tuple[int, ...]) -> ModelSpec:
    return replace(spec, moe=None, num_layers=len(windows), windows=windows)


def test_every_layer_has_a_place_of_its_own(gpt_oss: ModelSpec) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    dealt = 0
    for _ in range(200):
        windows = tuple(rng.choice([0, 300, 300, 300, 517]) for _ in range(rng.randint(1, 40)))
        spec = windowed(gpt_oss, windows)
        config = resolved(spec)
        layout = kv_layout(config, spec)
        assert len(set(layout.places)) == spec.num_layers
        assert all(table < layout.tables and place < layout.depth for table, place in layout.places)
        # One that sees everything is never in a page that is given up.
        assert all(bool(table) <= bool(window) for window, (table, _) in zip(windows, layout.places, strict=True))
        if layout.sight is None:
            assert bool(layout.kept) == any(windows)
            assert page_bytes(config, spec) == spec.kv_bytes_per_token(config.kv_cache_dtype) * config.page_size
        else:
            dealt += 1
            assert layout.sight.window == max(windows)
            assert all(bool(table) == bool(window) for window, (table, _) in zip(windows, layout.places, strict=True))
            room = layout.depth * layout.tables
            assert spec.num_layers <= room <= 1.25 * spec.num_layers
            assert page_bytes(config, spec) * spec.num_layers == (
                spec.kv_bytes_per_token(config.kv_cache_dtype) * config.page_size * layout.depth
            )
    assert dealt > 40


def test_twice_the_tokens_fit_where_half_of_the_layers_look_back_a_little(gpt_oss: ModelSpec) -> None:
    def sequences(**given: Any) -> float:
        config = resolved(gpt_oss, max_model_len=100_000, **given)
        plan = plan_memory(config, gpt_oss, H200, weights=14 * GIB, state=GIB)
        return plan.pages / kv_layout(config, gpt_oss).pages(config.max_model_len, config.page_size)

    assert 1.98 < sequences() / sequences(disable_hybrid_kv_cache_manager=True) < 2.0


def test_too_long_a_context_says_what_would_fit(gpt_oss: ModelSpec) -> None:
    config = resolved(gpt_oss, max_model_len=131072)
    small = DeviceMemory(20 * GIB, GIB)
    with pytest.raises(ConfigError, match="set --max-model-len to") as refused:
        plan_memory(config, gpt_oss, small, weights=13 * GIB, state=0)
    fits = int(str(refused.value).split("--max-model-len to ")[1].split()[0])
    config = resolved(gpt_oss, max_model_len=fits)
    plan_memory(config, gpt_oss, small, weights=13 * GIB, state=0)
    with pytest.raises(ConfigError, match="set --max-model-len"):
        plan_memory(replace(config, max_model_len=fits + 1), gpt_oss, small, weights=13 * GIB, state=0)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"disable_hybrid_kv_cache_manager": True}, "disable_hybrid_kv_cache_manager"),
        ({"swap_space": 3.0}, "host pool"),
        ({"num_cpu_blocks": 7}, "host pool"),
        ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'}, "speculative_config"),
        ({"kv_events_config": KvEventsConfig(enable_kv_cache_events=True)}, "kv_events_config"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"max_model_len": 128}, "max_model_len"),
    ],
    ids=str,
)
def test_what_keeps_all_pages_is_named(gpt_oss: ModelSpec, given: dict[str, Any], word: str) -> None:
    config = resolved(gpt_oss, **given)
    layout = kv_layout(config, gpt_oss)
    assert layout.sight is None
    assert word in layout.kept


@pytest.mark.parametrize(
    ("windows", "word"), [((99,) * 7, "every layer has a window"), ((0, 0, 0, 0, 99), "too few layers")], ids=str
)
def test_models_that_keep_all_pages_are_told_why(gpt_oss: ModelSpec, windows: tuple[int, ...], word: str) -> None:
    spec = windowed(gpt_oss, windows)
    assert word in kv_layout(resolved(spec), spec).kept
