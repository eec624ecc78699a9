"""The host pool's size by arithmetic, and what the machine has for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor import host_memory
from stoker_runtime.executor.build import log_host_pool
from stoker_runtime.executor.host_memory import LANE_BYTES, NO_HOST_POOL, HostPlan, free_host_memory, plan_host
from stoker_runtime.executor.resolve import GIB, resolve
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.terminal import info


def resolved(shape: str, device: str = "cuda", **fields: object) -> tuple[EngineConfig, ModelSpec]:
    spec = build_spec(read_source(f"shape:{shape}"))
    return resolve(EngineConfig(model="m", **fields), spec, device), spec  # type: ignore[arg-type]


def test_the_pool_holds_what_was_asked_for() -> None:
    config, spec = resolved("qwen2.5-7b", swap_space=4.0)
    plan = plan_host(config, spec, lambda: 100 * GIB)
    # 28 layers x 2 x 4 heads x 128 x 2 bytes a token, 64 tokens a page.
    assert plan.page_bytes == 57344 * 64
    assert 4 * GIB - plan.page_bytes < plan.nbytes <= 4 * GIB
    assert plan.lane_pages == LANE_BYTES // plan.page_bytes
    assert plan.device_bytes("cuda") == 4 * plan.lane_pages * plan.page_bytes <= 4 * LANE_BYTES
    assert plan.device_bytes("cpu") == 0
    config, spec = resolved("qwen2.5-7b", num_cpu_blocks=3, kv_cache_dtype="fp8")
    plan = plan_host(config, spec, lambda: 100 * GIB)
    assert (plan.pages, plan.page_bytes, plan.lane_pages) == (3, 28672 * 64, 3)


def test_without_a_flag_there_is_none() -> None:
    assert plan_host(*resolved("qwen2.5-7b"), free_memory=lambda: 0) == NO_HOST_POOL


@pytest.mark.parametrize(("shape", "least", "most"), [("qwen2.5-7b", 1.5, 3), ("qwen3-0.6b", 30, 64)])
def test_bringing_a_page_back_is_weighed_against_computing_it(shape: str, least: float, most: float) -> None:
    tokens = plan_host(*resolved(shape, swap_space=4.0), free_memory=lambda: 100 * GIB).page_tokens
    assert least < tokens < most, "of the 64 tokens of a page"
    halved = plan_host(*resolved(shape, swap_space=4.0, kv_cache_dtype="fp8"), free_memory=lambda: 100 * GIB)
    assert halved.page_tokens == pytest.approx(tokens / 2)


@pytest.mark.parametrize(
    ("fields", "named", "words"),
    [
        ({"swap_space": 5.0}, "swap_space", "lower --swap-space to 4.5 or less"),
        ({"num_cpu_blocks": 10**6}, "num_cpu_blocks", "lower --num-cpu-blocks to 1316 or less"),
        ({"swap_space": 0.001}, "swap_space", "one KV page is 0.0034 GiB; raise --swap-space"),
    ],
)
def test_what_does_not_fit_names_the_flag(fields: dict[str, object], named: str, words: str) -> None:
    config, spec = resolved("qwen2.5-7b", **fields)
    with pytest.raises(ConfigError, match=words) as caught:
        plan_host(config, spec, free_memory=lambda: int(4.5 * GIB) + 1)
    assert caught.value.param == named


def test_free_memory_is_the_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert 0 < free_host_memory() < 2**60
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path / "none")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal:       9000 kB\nMemAvailable:   8000 kB\n")
    assert free_host_memory() == 8000 * 1024
    (tmp_path / "meminfo").unlink()
    assert free_host_memory() > 8000 * 1024, "all of it, where nobody says what is free"


@pytest.mark.parametrize(
    ("limit", "free"), [("max", 8192000), ("5000000", 5000000 - 1000000 + 400000), ("500000", 0), ("90000000", 8192000)]
)
def test_a_control_groups_limit_counts_but_not_its_clean_files(
    limit: str, free: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemAvailable:   8000 kB\nHugePages_Total:       0\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 600000\ninactive_file 400000\n")
    assert free_host_memory() == free


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "none (--swap-space, --num-cpu-blocks): preempted sequences are computed again"),
        (("--num-cpu-blocks", "64"), "64 pages, 1,024 tokens; bringing a page back takes the time of 0.8 of its 16"),
    ],
)
def test_info_shows_the_pool(flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert info.main(["shape:tiny", "--device", "cpu", *flags]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "host pool" in line]
    assert says in line


def test_a_pool_that_does_not_pay_is_said_to(caplog: pytest.LogCaptureFixture) -> None:
    slow = HostPlan(10, 1 << 20, 70.0, 1)
    assert "not used" in info.describe_host(slow, 64)
    with caplog.at_level("INFO"):
        log_host_pool(slow, 64)
    assert "host pool 0.01 GiB (10 pages of 64 tokens)" in caplog.text
    assert "in the time in which this model computes 70" in caplog.text
